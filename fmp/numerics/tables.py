"""Tables in plain text, for what prints itself."""

from collections.abc import Sequence
from typing import Any

import torch

from fmp import _compat

_ROWS = 20  # of the leaves, how many a table shows


def percent(fraction: float) -> str:
    """Writes a fraction in percent, such that only nothing is 0 and only everything 100.

    Example:
        >>> [percent(fraction) for fraction in (0.0, 1e-6, 0.37, 0.99999, 1.0)]
        ['0', '<0.01', '37', '>99.9', '100']
    """
    number = 100.0 * fraction
    if 0.0 < number < 0.01:
        return "<0.01"
    if 99.9 < number < 100.0:
        return ">99.9"
    return f"{number:.3g}" if number >= 1.0 or not number else f"{number:.2g}"


def in_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Writes rows as lines, in columns with two spaces between them.

    Args:
        rows: The cells; the first row is the heading.
        left: The columns whose cells stand at their left end.

    Example:
        >>> in_columns([("leaf", "zero %"), ("w", "3.2"), ("bias", "100")])
        ['leaf  zero %', 'w        3.2', 'bias     100']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def together(counts: torch.Tensor, ndim: int = 1) -> torch.Tensor | None:
    """Adds up the counts of what vmap or microbatches added, on the host; None if there are no values to look at.

    Args:
        counts: i64[..., leaves], or with more dimensions at the end.
        ndim: How many dimensions those of one member have.
    """
    is_plain = type(counts) is torch.Tensor and not counts.is_meta and not _compat.wrapped_by_transform(counts)
    if not is_plain or torch.compiler.is_compiling():
        return None
    added = tuple(range(counts.ndim - ndim))
    return (counts.sum(added) if added else counts).cpu()


def by_leaf(heading: Sequence[str], rows: Sequence[Sequence[str]], order: Sequence[Any] | None = None) -> list[str]:
    """Writes a table with a row for each leaf, and at its end one for all of them.

    Args:
        heading: The names of the columns.
        rows: The cells, with the row for all at the end.
        order: How much each leaf loses: a number, or several, the weightiest first. The rows are sorted by it, the
            largest first; None leaves them as they are.
    """
    *leaves, total = rows
    if order is not None:
        numbers = sorted(range(len(leaves)), key=order.__getitem__, reverse=True)
        leaves = [leaves[number] for number in numbers]
    rest = [f"and {len(leaves) - _ROWS} more leaves" + (", which lose no more" if order is not None else "")]
    lines = in_columns([heading, *leaves[:_ROWS], total])
    return lines if len(leaves) <= _ROWS else [*lines[:-1], *rest, lines[-1]]
