"""The sequence of ops that a call ran, with what came out, and the op at which two sequences part."""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

import torch
from torch import Tensor

from fmp import tree
from fmp.numerics.differences import relative_difference
from fmp.numerics.op_watch import COPIES, Op, OpWatch
from fmp.numerics.places import AGAIN, Place
from fmp.step.advance import loss_gradients

# How many entries of a result are kept to be compared.
SAMPLE = 2**14
_EPS_ALLOWED = 16
# How many ops may be left out until two sequences are alike again.
_REACH = 512
_SHOWN = 8

_GRADIENTS = loss_gradients.__code__
# What makes numbers out of nothing. Policies differ in these, and in copies.
_CREATES = ("empty", "zeros", "ones", "full", "new_", "scalar_tensor", "arange", "fill_", "zero_")


@dataclass(frozen=True)
class RanOp:
    """An op, with what came out.

    Attributes:
        name: Its name.
        place: Where it was called.
        described: The dtypes and shapes of its results.
        shapes: The shapes of what it took and of what it returned.
        samples: Entries of its results, evenly spaced: all, or 16,384.
        eps: The distance from 1 to the next number in the coarsest format of any result so far.
    """

    name: str
    place: Place
    described: str
    shapes: tuple[torch.Size, ...]
    samples: tuple[Tensor, ...]
    eps: float

    @property
    def key(self) -> tuple[object, ...]:
        """What it has in common with the same op in another format."""
        return self.name, self.shapes, self.place.phase

    @property
    def where(self) -> str:
        """Its name, pass and line."""
        phase = "" if self.place.phase == "forward" else f" ({self.place.phase})"
        return f"{self.name}{phase}" + (f", {self.place.line}" if self.place.line else "")


@dataclass(frozen=True)
class Parting:
    """The first op whose results differ by more than the tolerance.

    Attributes:
        op: Its name, such as `mm`; `"sin against cos"` where the second ran another op in its place.
        phase: `"forward"` or `"backward"`.
        lines: The line of the user's code in each of the two, as `file.py:12 in function`; of a backward op, that of
            the forward op whose gradient is computed.
        module: The dotted path of the module, in the first.
        described: What came out of each.
        relative_error: How far the results are apart, relative to the first.
        tolerance: How far they were allowed to be.
        only_in_a: What the first alone ran since the last op that agreed, casts left out.
        only_in_b: What the second alone ran since.
    """

    op: str
    phase: str
    lines: tuple[str, str]
    module: str
    described: tuple[str, str]
    relative_error: float
    tolerance: float
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]

    def __str__(self) -> str:
        lines = " against ".join(dict.fromkeys(line or "-" for line in self.lines))
        text = [
            f"the ops part at {self.op} ({self.phase}), {lines}" + (f", in {self.module}" if self.module else ""),
            f"  {self.described[0]} against {self.described[1]}: "
            f"relative error {self.relative_error:.3g}, allowed {self.tolerance:.3g}",
        ]
        for name, only in (("a", self.only_in_a), ("b", self.only_in_b)):
            if only:
                shown = ("...", *only[-_SHOWN:]) if len(only) > _SHOWN else only
                text.append(f"  before it, only in {name}: {'; '.join(shown)}")
        return "\n".join(text)


class OpSequence(OpWatch):
    """Records the ops that run.

    What fmp only measures is left out, and what it chooses between, to skip a step: a step does so for each leaf of the
    state, masters among them, of which another one may have none.

    Args:
        outermost: The code of the function that calls what is watched.
        with_losses: Whether to record what a train step computes up to its gradients, too.

    Attributes:
        ops: What was recorded, without casts and copies, and without what is recomputed.
    """

    def __init__(self, outermost: CodeType, *, with_losses: bool = True):
        super().__init__(outermost)
        self.ops: list[RanOp] = []
        self._with_losses = with_losses
        self._eps = 0.0

    def saw(self, op: Op) -> None:
        """Records an op."""
        if not op.outputs or op.place.is_measuring:
            return
        self._eps = max([self._eps, *[torch.finfo(tensor.dtype).eps for tensor in op.outputs]])
        if op.name in COPIES or op.name.startswith(_CREATES) or op.place.phase == AGAIN:
            return
        if op.place.is_selecting or not (self._with_losses or _is_after_gradients()):
            return
        described = ", ".join(tree.describe(tensor) for tensor in op.outputs)
        shapes = tuple(tensor.shape for tensor in (*op.inputs, *op.outputs))
        samples = tuple(map(_sample, op.outputs))
        self.ops.append(RanOp(op.name, op.place, described, shapes, samples, self._eps))


def parting(
    ops_a: Sequence[RanOp], ops_b: Sequence[RanOp], *, tolerance: float | None, factors: Iterable[float]
) -> Parting | None:
    """Finds the first op, run by both in the same order, whose results differ.

    Args:
        ops_a: The ops of one call.
        ops_b: The ops of the other one.
        tolerance: The relative difference that is allowed; None for 16 times the distance from 1 to the next number, in
            the coarsest format that either has computed in so far.
        factors: By what the second may be short of the first, such as their loss scales: 1 among them.
    """
    factors = list(factors)
    only_a: list[str] = []
    only_b: list[str] = []
    for a, b in _aligned(ops_a, ops_b):
        if a is None or b is None:
            (only_a if b is None else only_b).extend(op.where for op in (a, b) if op is not None)
            continue
        allowed = _EPS_ALLOWED * max(a.eps, b.eps) if tolerance is None else tolerance
        apart = _apart(a, b, factors)
        if not apart <= allowed:
            lines = (str(a.place.line or ""), str(b.place.line or ""))
            module = a.place.line.module if a.place.line else ""
            described = (a.described, b.described)
            only = tuple(only_a), tuple(only_b)
            name = a.name if a.name == b.name else f"{a.name} against {b.name}"
            return Parting(name, a.place.phase, lines, module, described, apart, allowed, *only)
        only_a.clear()
        only_b.clear()
    return None


def _aligned(ops_a: Sequence[RanOp], ops_b: Sequence[RanOp]) -> Iterator[tuple[RanOp | None, RanOp | None]]:
    """Pairs the ops of two calls in their order; None where only one has an op.

    From where the two differ, it goes on where they are alike again soonest. That takes a time in proportion to their
    lengths, unlike the longest common sequence.
    """
    numbers: dict[object, int] = {}
    keys_a, keys_b = [[numbers.setdefault(op.key, len(numbers)) for op in ops] for ops in (ops_a, ops_b)]
    at_a = at_b = 0
    while at_a < len(ops_a) and at_b < len(ops_b):
        skip_a, skip_b = _skips(keys_a, keys_b, at_a, at_b)
        only_a, only_b = ops_a[at_a : at_a + skip_a], ops_b[at_b : at_b + skip_b]
        if [op.key[1:] for op in only_a] == [op.key[1:] for op in only_b]:
            yield from zip(only_a, only_b, strict=True)  # other ops in the same places
        else:
            yield from itertools.chain(((op, None) for op in only_a), ((None, op) for op in only_b))
        at_a, at_b = at_a + skip_a, at_b + skip_b
        if at_a < len(ops_a) and at_b < len(ops_b):
            yield ops_a[at_a], ops_b[at_b]
            at_a, at_b = at_a + 1, at_b + 1


def _skips(keys_a: list[int], keys_b: list[int], at_a: int, at_b: int) -> tuple[int, int]:
    """Finds how many ops of each to leave out until they are alike: few, else until two in a row are, else one."""
    for alike, reach in ((1, 3), (2, 32), (1, _REACH)):
        for both in range(reach):
            for skip_a in range(both + 1):
                a, b = at_a + skip_a, at_b + both - skip_a
                found = keys_a[a : a + alike]
                if found and found == keys_b[b : b + alike]:
                    return skip_a, both - skip_a
    return len(keys_a) - at_a, len(keys_b) - at_b


def _apart(a: RanOp, b: RanOp, factors: Iterable[float]) -> float:
    pairs = list(zip(a.samples, b.samples, strict=True))
    return min((max(relative_difference(*pair, factor) for pair in pairs) for factor in factors), default=math.inf)


def _is_after_gradients() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _GRADIENTS:
            return False
        frame = frame.f_back
    return True


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().to_dense().reshape(-1) if tensor.layout != torch.strided else tensor.detach().reshape(-1)
    # An odd stride meets every column of a matrix whose rows have an even length.
    return flat.clone() if flat.numel() <= SAMPLE else flat[:: -(-flat.numel() // SAMPLE) | 1].clone()
