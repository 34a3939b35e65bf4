"""What a function ran in: one row per kind of call, and warnings, as data and as a table."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from fmp.dtypes import short_name
from fmp.policy.grouping import common, family, grouped

Dtypes = tuple[torch.dtype, ...]

NO_RULE: Final = "no rule"
BY_HAND: Final = "cast by hand"
ENTERED: Final = "entered"
NO_POLICY: Final = "no op rules"
INSIDE: Final = "inside "

_WIDTH = 120
_HEADINGS = ("op", "rule", "why", "in", "ran", "out", "where", "operand", "calls")
# In a table that is too wide, longer reasons become notes below it.
_LONGEST_REASON = len("inside fmp.full_precision")
# What is cut next, in this order, and how far; of a path the end is kept.
_CUT = {"operand": 16, "where": 20, "op": 16, "why": 14, "in": 7, "ran": 7, "out": 7}
_PATHS = ("where", "operand")
_COUNTED = {"low": "low", "full": "full", "promote": "promoted", "banned": "banned"}
_COUNTED_WITHOUT_RULE = {NO_RULE: "without a rule", BY_HAND: BY_HAND, NO_POLICY: "without op rules"}

_Columns = Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Row:
    """Calls of an op that were alike.

    Attributes:
        op: The op's canonical name; `"to"` for any cast that was written by hand; the name of a function decorated with
            `fmp.low_precision` and the like.
        rule: `"low"`, `"full"`, `"promote"` or `"banned"`; `"-"` without a rule.
        why: Where the rule comes from; for a decorated function, the decorator. Without a rule: `"no rule"`,
            `"cast by hand"`, `"entered"` for a function of torch whose parts have rows of their own,
            `"inside fmp.full_precision"` and the like for what runs in a decorated function, `"inside another policy"`
            for what runs under a policy without op rules in one with them, or `"no op rules"` outside of any
            policy that has some: one like O2 casts parameters and batch, and no ops.
        dtypes_in: The floating-point dtypes of the arguments, before they were cast. Of calls that differ only in how
            many arguments have a dtype, those of the first.
        dtypes_ran: The same arguments after they were cast. An op may compute wider inside, as attention with dropout
            from a seed does, in float32.
        dtypes_out: The dtypes of the tensors that came out; empty if the call raised.
        where: The path of the module in which it ran, below the outermost one, else the line; `"-"` if there is
            neither. `*` stands for a number in which the calls differ.
        operand: The path, among the arguments of the explained function, of a floating-point tensor that the op takes,
            a weight rather than what it multiplies. Empty if there is none, if the calls took different ones, or if a
            decorated function took several.
        count: How many such calls there were.
    """

    op: str
    rule: str
    why: str
    dtypes_in: Dtypes
    dtypes_ran: Dtypes
    dtypes_out: Dtypes
    where: str
    operand: str = ""
    count: int = 1


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """What `fmp.explain` found; printed as a table.

    Attributes:
        title: The function and the policy.
        rows: What ran, in the order of its first use.
        warnings: What looks like a mistake, and what to do about it.
        output: What the function returned; None if it raised.
    """

    title: str
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]
    output: Any = None

    def __str__(self) -> str:
        return "\n".join([self.title, *_table(self.rows), _summary(self.rows), *_warnings(self.warnings)])

    def __repr__(self) -> str:
        return f"Explanation({len(self.rows)} rows, {len(self.warnings)} warnings)"


def merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Makes one row of those that look the same but for their operand and the numbers in where they ran."""
    return tuple(
        dataclasses.replace(
            alike[0],
            where=common([row.where for row in alike]),
            operand=common([row.operand for row in alike]),
            count=sum(row.count for row in alike),
        )
        for alike in grouped(rows, _kind)
    )


def _kind(row: Row) -> tuple[object, ...]:
    dtypes = [distinct(dtypes) for dtypes in (row.dtypes_in, row.dtypes_ran, row.dtypes_out)]
    return (row.op, row.rule, row.why, *dtypes, family(row.where))


def distinct(dtypes: Sequence[torch.dtype], separator: str = ",") -> str:
    """Names dtypes, each once: `"bf16,f32"`."""
    return separator.join(dict.fromkeys(short_name(dtype) for dtype in dtypes)) or "-"


def _table(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    columns, notes = _noted(_columns(rows))
    widths = _widths(columns)
    for name in [name for name in _CUT if name in widths]:
        widths[name] -= max(0, min(_excess(widths), widths[name] - _CUT[name]))
    fitted = [[_fitted(cell, name, widths[name]) for cell in cells] for name, cells in columns.items()]
    return ["  ".join(line) for line in zip(*fitted, strict=True)] + notes


def _columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    lines = [_HEADINGS, *[_cells(row) for row in rows]]
    columns = {name: [line[index] for line in lines] for index, name in enumerate(_HEADINGS)}
    if not any(columns["operand"][1:]):
        del columns["operand"]
    return columns


def _cells(row: Row) -> tuple[str, ...]:
    dtypes = [distinct(dtypes) for dtypes in (row.dtypes_in, row.dtypes_ran, row.dtypes_out)]
    return (row.op, row.rule, row.why, *dtypes, row.where, row.operand, str(row.count))


def _noted(columns: _Columns) -> tuple[_Columns, list[str]]:
    """Moves long reasons below a table that is too wide."""
    if _excess(_widths(columns)) <= 0:
        return columns, []
    long = [why for why in dict.fromkeys(columns["why"]) if len(why) > _LONGEST_REASON]
    notes = {why: f"note {number}" for number, why in enumerate(long, 1)}
    return (
        {**columns, "why": [notes.get(why, why) for why in columns["why"]]},
        [f"{note}: {why}" for why, note in notes.items()],
    )


def _widths(columns: _Columns) -> dict[str, int]:
    return {name: max(map(len, cells)) for name, cells in columns.items()}


def _excess(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1) - _WIDTH


def _fitted(cell: str, name: str, width: int) -> str:
    if name == "calls":
        return cell.rjust(width)
    if len(cell) > width:
        cell = "…" + cell[1 - width :] if name in _PATHS else cell[: width - 1] + "…"
    return cell.ljust(width)


def _summary(rows: Sequence[Row]) -> str:
    counts: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for row in rows:
        if row.why.startswith(INSIDE):
            inside[row.why.removeprefix(INSIDE)] += row.count
        elif row.why != ENTERED:
            counts[_COUNTED.get(row.rule) or _COUNTED_WITHOUT_RULE[row.why]] += row.count
    if not counts and not inside:
        return "no calls on floating-point tensors"
    kinds = (*_COUNTED.values(), *_COUNTED_WITHOUT_RULE.values())
    total = counts.total()
    found = f"{total} call{'s' * (total != 1)}"
    if counts:
        found += f": {', '.join(f'{counts[kind]} {kind}' for kind in kinds if counts[kind])}"
    if inside:
        found += f"; {INSIDE}{', '.join(f'{by}: {count}' for by, count in inside.items())}"
    return found


def _warnings(warnings: Sequence[str]) -> list[str]:
    return [f"warning: {warning}" for warning in warnings]
