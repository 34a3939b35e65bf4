"""What `fmp.numerics.find_nonfinite` reports, as data and as text."""

import math
from dataclasses import dataclass

from fmp.dtypes import short_name
from fmp.numerics.magnitudes import Magnitude
from fmp.numerics.op_watch import COLLECTIVES


@dataclass(frozen=True)
class OpInput:
    """A tensor that an op took.

    Attributes:
        name: The path of the leaf that it is, has been cast from, or is a view of; else the op that computed it and
            the line of that op; empty if it is not known.
        magnitude: What it held.
    """

    name: str
    magnitude: Magnitude


@dataclass(frozen=True)
class OpRecord:
    """An op that ran.

    Attributes:
        op: Its name, such as `mm`.
        phase: `"forward"`, `"backward"`, or `"forward, recomputed"` where `fmp.remat` or `torch.utils.checkpoint` run
            it again for a backward pass.
        line: The line of the user's code, as `file.py:12 in function`; in a backward pass, that of the forward op whose
            gradient is computed. Where fmp called the op by itself, the line of fmp.
        result: What came out.
    """

    op: str
    phase: str
    line: str
    result: Magnitude


@dataclass(frozen=True)
class NonfiniteReport:
    """Where the first inf or NaN came from; `str` makes a page of it.

    Attributes:
        level: `"error"`; or `"warning"` if other ops left the inf or NaN out, or if there was none and an op came
            within 2 % of the largest number of its format.
        kind: `"nan"`, `"inf"` or `"near max"`.
        op: The name of the op, such as `div`; empty if the inf or NaN was there before the call.
        leaf: The path of the tensor that held it, if it was there before the call; else empty.
        phase: `"forward"`, `"backward"`, or `"forward, recomputed"`.
        node: In a backward pass, the node of autograd, such as `SqrtBackward0`.
        line: The line of the user's code, as `file.py:12 in function`; in a backward pass, that of the forward op whose
            gradient is computed. Where fmp called the op by itself, the line of fmp.
        source: What that line says, if the file can be read.
        backward_line: In a backward pass, the line of a `torch.autograd.Function` or hook that called the op.
        backward_source: What that line says, if the file can be read.
        module: The dotted path of the module, below the outermost one; empty without one.
        result: What came out; for a leaf, what was in it.
        inputs: What the op took.
        begun_with: The leaves that were not finite to begin with, each with what it held.
        left_out: Where there was an inf or NaN earlier, which other ops left out, as `torch.where` and `tanh` do, and
            which op did so last.
        left_out_by: The op that left this one out last, with its line, if it did not reach the result.
        ops_before: The ops that ran last before this one, the latest last.
        reached_result: Whether the inf or NaN reached what the function returned, a `.grad` that it wrote, or a value
            that no other op took, such as the loss of a function that returns gradients.
        was_compiled: Whether the function is a compiled one, which was run eagerly instead.
        error: What the function raised afterwards, if it did.
    """

    level: str
    kind: str
    op: str
    leaf: str
    phase: str
    node: str
    line: str
    source: str
    backward_line: str
    backward_source: str
    module: str
    result: Magnitude
    inputs: tuple[OpInput, ...]
    begun_with: tuple[OpInput, ...]
    left_out: tuple[str, ...]
    left_out_by: str
    ops_before: tuple[OpRecord, ...]
    reached_result: bool
    was_compiled: bool = False
    error: str = ""

    def __str__(self) -> str:
        return "\n".join([self._title(), *_pairs(self._facts()), *self._frames()])

    def _title(self) -> str:
        found = {"nan": "NaN", "inf": "inf"}.get(self.kind, f"within 2 % of {short_name(self.result.dtype)}'s max")
        before = f"{self.leaf}, before the call: to find the op, give what it was called with earlier"
        where = f"{self.op} ({self.phase})" if self.op else before
        return f"{self.level}: {found} first in {where}"

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("node", self.node), ("line", self.line), ("", self.source)]
        facts += [
            ("called in", self.backward_line),
            ("", self.backward_source),
            ("module", self.module),
            ("result", _described(self.result)),
        ]
        facts += [("input", f"{_described(item.magnitude)}   {item.name}".rstrip()) for item in self.inputs]
        facts += [("begun with", f"{item.name}: {_described(item.magnitude)}") for item in self.begun_with]
        facts += [("left out", where) for where in self.left_out]
        if not self.reached_result and self.kind != "near max":
            by = f": {self.left_out_by}" if self.left_out_by else ""
            facts.append(("note", f"the result is finite, as other ops left it out{by}"))
        if self.op.startswith(f"{COLLECTIVES}."):
            facts.append(
                ("note", "it came from another rank, whose own report names the op, or out of the sum over all")
            )
        if self.was_compiled:
            facts.append(("note", "the function is compiled; it was run eagerly"))
        return [*facts, ("raised", self.error)]

    def _frames(self) -> list[str]:
        if not self.ops_before:
            return []
        lines = [f"the last {len(self.ops_before)} ops before:", "  abs min    abs max  % of max  result"]
        for record in self.ops_before:
            held = record.result
            of_max = f"{100 * held.of_max:8.3g}%" if math.isfinite(held.largest) else "         "
            phase = "" if record.phase == "forward" else f" ({record.phase})"
            described = f"{held.described}  {record.op}{phase}  {record.line}"
            lines.append(f"{held.smallest:9.3e}  {held.largest:9.3e} {of_max}  {described}".rstrip())
        return lines


def _described(magnitude: Magnitude) -> str:
    text = magnitude.described
    if not math.isnan(magnitude.largest):
        text += f"  abs max {magnitude.largest:.4g} ({100 * magnitude.of_max:.3g} % of max)"
    return f"{text}  {magnitude.nonfinite}".rstrip()


def _pairs(facts: list[tuple[str, str]]) -> list[str]:
    return [f"  {name:<11}{text}" for name, text in facts if text]
