"""What a function ran in: one row per kind of call, and warnings, as data and as a table."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch

from fmp.dtypes import short_name

Dtypes = tuple[torch.dtype, ...]

NO_RULE: Final = "no rule"
ENTERED: Final = "entered"
NO_POLICY: Final = "no policy"

_WIDTH = 120
_HEADINGS = ("op", "rule", "why", "in", "ran", "out", "where", "calls")
# What is cut, in this order, when a table is too wide, and how far; of a place the end is kept.
_CUT = {"why": 14, "where": 24, "op": 16, "in": 8, "ran": 8, "out": 8}
_COUNTED = {"low": "low", "full": "full", "promote": "promoted", "banned": "banned"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Calls of an op that were alike.

    Attributes:
        op: The op's canonical name.
        rule: `"low"`, `"full"`, `"promote"` or `"banned"`; `"-"` without a rule.
        why: Where the rule comes from. Without a rule: `"no rule"`, `"entered"` for a function of torch whose parts
            have rows of their own, `"inside fmp.full_precision"` and the like, or `"no policy"` outside of any.
        dtypes_in: The floating-point dtypes of the arguments, before they were cast.
        dtypes_ran: Those after.
        dtypes_out: The dtypes of the tensors that came out; empty if the call raised.
        where: The path of an argument of the explained function that the op takes, else the path of the module in
            which it ran, else the line.
        count: How many such calls there were.
    """

    op: str
    rule: str
    why: str
    dtypes_in: Dtypes
    dtypes_ran: Dtypes
    dtypes_out: Dtypes
    where: str
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


def distinct(dtypes: Sequence[torch.dtype]) -> str:
    """Names dtypes, each once: `"bf16,f32"`."""
    return ",".join(dict.fromkeys(short_name(dtype) for dtype in dtypes)) or "-"


def _table(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [_HEADINGS, *[_cells(row) for row in rows]]
    widths = {name: max(len(line[index]) for line in lines) for index, name in enumerate(_HEADINGS)}
    excess = sum(widths.values()) + 2 * (len(widths) - 1) - _WIDTH
    for name, least in _CUT.items():
        cut = max(0, min(excess, widths[name] - least))
        widths[name] -= cut
        excess -= cut
    return ["  ".join(_fitted(cell, *item) for cell, item in zip(line, widths.items(), strict=True)) for line in lines]


def _cells(row: Row) -> tuple[str, ...]:
    dtypes = [distinct(dtypes) for dtypes in (row.dtypes_in, row.dtypes_ran, row.dtypes_out)]
    return (row.op, row.rule, row.why, *dtypes, row.where, str(row.count))


def _fitted(cell: str, name: str, width: int) -> str:
    if name == "calls":
        return cell.rjust(width)
    if len(cell) > width:
        cell = "…" + cell[1 - width :] if name == "where" else cell[: width - 1] + "…"
    return cell.ljust(width)


def _summary(rows: Sequence[Row]) -> str:
    counts: Counter[str] = Counter()
    for row in rows:
        if row.why != ENTERED:
            counts[_COUNTED.get(row.rule) or ("without a rule" if row.why == NO_RULE else "uncast")] += row.count
    kinds = [f"{counts[kind]} {kind}" for kind in (*_COUNTED.values(), "without a rule", "uncast") if counts[kind]]
    total = counts.total()
    return f"{total} call{'s' * (total > 1)}: {', '.join(kinds)}" if kinds else "no calls on floating-point tensors"


def _warnings(warnings: Sequence[str]) -> list[str]:
    return [f"warning: {warning}" for warning in warnings]
