"""What one op did: which inf and NaN in its result it made itself, and which it was given.

place by place, for what computes each number out of those in the same place:
    NaN, and no NaN went in                 made
    inf, and all that went in was finite    made
    inf, and all of that was -inf           turned
    else                                    handed on
for what only moves numbers: all is handed on, to where it was moved
for any other op, such as a sum:
    NaN, and no NaN went in                 made
    inf or NaN, also if all that is not finite in what it took were 1 instead     made
    inf, and no inf went in, but -inf       turned
    else                                    handed on, all of it to each place
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmp.numerics.magnitudes import Magnitude, entries, is_measurable
from fmp.numerics.op_watch import Op

_aten: Any = torch.ops.aten
_BY_PLACE = ("_to_copy", "clone", "copy_", "lift_fresh", "masked_fill", "masked_fill_", "masked_fill_copy")
_MOVES = ("cat", "index", "gather", "index_select", "flip", "roll", "repeat", "slice_scatter", "select_scatter")
_MOVES += ("_unsafe_view", "view_copy", "_reshape_copy", "alias_copy", "stack")
_PUTS = ("index_put", "index_put_", "_index_put_impl_")


@dataclass(frozen=True, eq=False)
class Taken:
    """A tensor that an op took.

    Attributes:
        tensor: The tensor.
        held: How large what it held was.
        values: What it held, as real numbers.
        labels: Where its inf and NaN came from, i32 of the same shape; None if it has none.
        shown: Where it can come through, such as the condition of `torch.where`; None for everywhere.
    """

    tensor: Tensor
    held: Magnitude
    values: Tensor
    labels: Tensor | None
    shown: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Doing:
    """What an op did, by place of its result.

    Attributes:
        made_nan: Where it made NaN.
        made_inf: Where it made inf.
        turned: Where it made inf out of -inf.
        handed: Labels of what it handed on; at what it made, of what that was made from.
    """

    made_nan: Tensor
    made_inf: Tensor
    turned: Tensor
    handed: Tensor


class Labels:
    """Whole numbers that stand for sets of sources; 0 stands for none."""

    def __init__(self) -> None:
        self._sets: list[frozenset[int]] = [frozenset()]
        self._numbers: dict[frozenset[int], int] = {frozenset(): 0}

    def of(self, sources: Iterable[int]) -> int:
        """Returns the label of a set."""
        found = frozenset(sources)
        number = self._numbers.setdefault(found, len(self._sets))
        if number == len(self._sets):
            self._sets.append(found)
        return number

    def sources(self, labels: Tensor | None) -> frozenset[int]:
        """Returns all sources that some labels stand for."""
        if labels is None:
            return frozenset()
        return frozenset[int]().union(*[self._sets[number] for number in labels.unique().tolist()])

    def union(self, a: Tensor, b: Tensor) -> Tensor:
        """Unites the sets that two tensors of labels, i32 of one shape, stand for, place by place."""
        differ = (a != b) & (a != 0) & (b != 0)
        united = torch.where(a == 0, b, a)
        if differ.any():
            pairs, places = torch.unique(torch.stack([a[differ], b[differ]]), dim=1, return_inverse=True)
            numbers = [self.of(self._sets[one] | self._sets[other]) for one, other in pairs.t().tolist()]
            united[differ] = torch.tensor(numbers, dtype=united.dtype, device=united.device)[places]
        return united


def doing(op: Op, result: Tensor, taken: list[Taken], labels: Labels) -> Doing:
    """Finds what an op did.

    Args:
        op: The op.
        result: One of its results, which is not finite.
        taken: What it took that has entries.
        labels: What the labels stand for.
    """
    out = entries(result)
    if op.name.startswith("_foreach") and len(taken) % len(op.outputs) == 0:
        index = next(place for place, tensor in enumerate(op.outputs) if tensor is result)
        taken = taken[index :: len(op.outputs)]
    if all(item.held.is_finite for item in taken):
        return _made(out, out.isnan(), ~out.isfinite())
    if (moved := _moved(op, taken, out)) is not None:
        none = torch.zeros_like(out, dtype=torch.bool)
        return Doing(none, none, none, torch.where(out.isfinite(), 0, moved))
    if _is_by_place(op, result, taken):
        return _by_place(out, _shown(op, taken), labels)
    return _as_a_whole(op, result, out, taken, labels)


def _made(out: Tensor, nan: Tensor, bad: Tensor) -> Doing:
    none = torch.zeros_like(bad)
    return Doing(nan, bad & ~nan, none, torch.zeros_like(out, dtype=torch.int32))


def _is_by_place(op: Op, result: Tensor, taken: list[Taken]) -> bool:
    is_pointwise = torch.Tag.pointwise in getattr(op.func, "tags", ())
    if not (is_pointwise or op.name in _BY_PLACE or op.name.startswith("_foreach")):
        return False
    tensors = [result, *[item.tensor for item in taken]]
    if any(tensor.is_complex() or tensor.layout != torch.strided for tensor in tensors):
        return False
    try:
        return torch.broadcast_shapes(*[tensor.shape for tensor in tensors]) == result.shape
    except RuntimeError:
        return False


def _shown(op: Op, taken: list[Taken]) -> list[Taken]:
    """Says of what is chosen from where it can come through."""
    condition = next((tensor for tensor in op.inputs if tensor.dtype == torch.bool), None)
    if condition is None:
        return taken
    if op.name == "where" and len(taken) == 2:
        return [replace(taken[0], shown=condition), replace(taken[1], shown=~condition)]
    if op.name.startswith("masked_fill"):
        return [replace(taken[0], shown=~condition), *[replace(item, shown=condition) for item in taken[1:]]]
    return taken


def _by_place(out: Tensor, taken: list[Taken], labels: Labels) -> Doing:
    handed = torch.zeros_like(out, dtype=torch.int32)
    nan_in, inf_in, minus_in = [torch.zeros_like(out, dtype=torch.bool) for _ in range(3)]
    for item in taken:
        if item.labels is None:
            continue
        shown = torch.ones((), dtype=torch.bool, device=out.device) if item.shown is None else item.shown
        handed = labels.union(handed, torch.where(shown, item.labels, 0).broadcast_to(out.shape))
        nan_in = nan_in | (item.values.isnan() & shown)
        inf_in = inf_in | ((item.values == torch.inf) & shown)
        minus_in = minus_in | ((item.values == -torch.inf) & shown)
    return _sorted(out, nan_in, inf_in, minus_in, handed)


def _sorted(out: Tensor, nan_in: Tensor, inf_in: Tensor, minus_in: Tensor, handed: Tensor) -> Doing:
    nan, bad = out.isnan(), ~out.isfinite()
    some_in = nan_in | inf_in | minus_in
    turned = (out == torch.inf) & minus_in & ~nan_in & ~inf_in
    return Doing(nan & ~nan_in, bad & ~nan & ~some_in, turned, torch.where(bad, handed, 0))


def _moved(op: Op, taken: list[Taken], out: Tensor) -> Tensor | None:
    """Moves labels as an op moves numbers; None for an op that does something else."""
    is_put = op.name in _PUTS and len(op.args) >= 3 and not (op.args[3:4] and op.args[3]) and not op.kwargs
    if not (is_put or op.name in _MOVES) or any(item.tensor.is_complex() for item in taken):
        return None
    known = [(item.tensor, item) for item in taken]

    def label(tensor: Tensor) -> Tensor:
        item = next((item for other, item in known if other is tensor), None)
        nothing = torch.zeros(tensor.shape, dtype=torch.int32, device=tensor.device)
        return nothing if item is None or item.labels is None else item.labels

    try:
        if not is_put:
            return op.called_with(label)
        target, places, values = list(op.args)[:3]
        return _aten.index_put.default(label(target), places, label(values))
    except RuntimeError:  # a format that labels cannot be moved in, such as a sparse one
        return None


def _as_a_whole(op: Op, result: Tensor, out: Tensor, taken: list[Taken], labels: Labels) -> Doing:
    number = labels.of(frozenset[int]().union(*[labels.sources(item.labels) for item in taken]))
    handed = torch.full_like(out, number, dtype=torch.int32)
    some = [any(map(operator.attrgetter(name), [item.held for item in taken])) for name in _COUNTS]
    nan_in, inf_in, minus_in = [torch.full_like(out, flag, dtype=torch.bool) for flag in some]
    done = _sorted(out, nan_in, inf_in, minus_in, handed)
    again = _without(op, result, taken)
    if again is None or again.shape != out.shape:
        return done
    made = ~again.isfinite() & ~out.isfinite()
    made_inf = done.made_inf | (made & ~out.isnan())
    return Doing(done.made_nan | (made & out.isnan()), made_inf, done.turned & ~made_inf, done.handed)


_COUNTS = ("nans", "plus_infs", "minus_infs")


def _without(op: Op, result: Tensor, taken: list[Taken]) -> Tensor | None:
    """Computes what an op would return if all that it took were finite; None if it can be called only once.

    In place of what is not finite stands 1, which neither a quotient nor a logarithm makes infinite.
    """
    is_once = op.writes or torch.Tag.nondeterministic_seeded in getattr(op.func, "tags", ())
    namespace = getattr(op.func, "namespace", "")
    if is_once or namespace != "aten" or any(item.tensor.layout != torch.strided for item in taken):
        return None
    index = next(place for place, tensor in enumerate(op.outputs) if tensor is result)
    replaced = _finite({id(item.tensor) for item in taken if not item.held.is_finite})
    try:
        again = op.called_with(replaced)
    except (RuntimeError, NotImplementedError):  # such as for a matrix that has no inverse
        return None
    outputs = [tensor for tensor in (again if isinstance(again, tuple | list) else (again,)) if is_measurable(tensor)]
    return entries(outputs[index]) if index < len(outputs) else None


def _finite(which: set[int]) -> Callable[[Tensor], Tensor]:
    def finite(tensor: Tensor) -> Tensor:
        return torch.where(tensor.isfinite(), tensor, torch.ones_like(tensor)) if id(tensor) in which else tensor

    return finite
