"""`fmp.numerics.lost_updates`: the updates that are too small for their weight's format to show."""

from typing import Any

import torch

from fmp import tree
from fmp.dtypes import full_precision, is_castable
from fmp.numerics.counting import fraction, stacked
from fmp.numerics.parts import summed
from fmp.numerics.tables import by_leaf, percent, together
from fmp.tree.wholes import check_whole, is_dtensor

Tree = Any


@tree.dataclass
class LostUpdates:
    """How many updates changed nothing, a row for each leaf; `str` makes a table of it.

    The fields are counts, so they may be summed over steps or over processes. What vmap adds stands before the other
    dimensions.

    Attributes:
        total: i64[leaves], the updates that are nonzero and finite, of finite weights.
        lost: i64[leaves], those that leave the weight as it is.
        names: The paths of the leaves.
    """

    total: torch.Tensor
    lost: torch.Tensor
    names: tuple[str, ...] = tree.static()

    @property
    def overall(self) -> torch.Tensor:
        """f32[], the fraction of all updates that are lost."""
        return fraction(self.lost.sum(-1), self.total.sum(-1))

    @property
    def by_leaf(self) -> torch.Tensor:
        """f32[leaves], the fraction of each leaf's updates that are lost."""
        return fraction(self.lost, self.total)

    def __str__(self) -> str:
        counts = together(torch.stack([self.total, self.lost], -1), ndim=2)
        if counts is None:
            return repr(self)
        leaves = counts.tolist()
        rows = [
            (name, f"{total:,}", f"{lost:,}", percent(lost / max(total, 1)))
            for name, (total, lost) in zip((*self.names, "all"), [*leaves, counts.sum(0).tolist()], strict=True)
        ]
        order = [lost / max(total, 1) for total, lost in leaves]
        return "\n".join(by_leaf(("leaf", "updates", "lost", "lost %"), rows, order))


def lost_updates(params: Tree, updates: Tree) -> LostUpdates:
    """Counts the updates that change nothing when they are added in the weight's own dtype.

    An update is lost if it is nonzero and

        (param.to(float32) + update.to(float32)).to(param.dtype) == param

    which is how `fmp.optim.apply_updates` adds. That happens below half a unit in the weight's last place: in bfloat16
    below 1/512 to 1/256 of the weight, a usual size late in training. It is the case for float32 masters, Kahan
    summation or stochastic rounding (`fmp.master`), which lose none. There is no host sync; it works under vmap and in
    a compiled step.

    Args:
        params: The weights, in the dtype to be judged. `fmp.cast(masters, torch.bfloat16)` asks what masters save.
        updates: A tree of the same structure, as an optimizer returns it: None where there is none.

    Returns:
        The counts, and fractions of them, for each leaf and overall. Leaves that are not floating-point tensors, and
        those whose update is None, have no row.

    Raises:
        ValueError: If the trees differ in structure, or an update has not the shape of its weight.
        TypeError: If a tree holds a `LocalShard`, of which other ranks have other rows, or only one of two leaves is a
            DTensor.

    Example:
        >>> params = {"w": torch.ones(4, dtype=torch.bfloat16), "ids": torch.arange(2)}
        >>> lost = lost_updates(params, {"w": torch.tensor([1e-2, -1e-3, 1e-3, 0.0]), "ids": None})
        >>> lost.overall, lost.names, lost.total
        (tensor(0.6667), ('w',), tensor([3]))
        >>> print(lost)
        leaf  updates  lost  lost %
        w           3     2    66.7
        all         3     2    66.7
    """
    check_whole(params, "what is lost")
    check_whole(updates, "what is lost")
    param_leaves, spec = tree.flatten(params)
    update_leaves, update_spec = tree.flatten(updates)
    if spec != update_spec:
        raise ValueError(f"params and updates differ in structure: {spec} against {update_spec}")
    pairs = [
        (path, param, update)
        for path, param, update in zip(tree.paths(params), param_leaves, update_leaves, strict=True)
        if is_castable(param) and is_castable(update)
    ]
    for path, param, update in pairs:
        if param.shape != update.shape:
            raise ValueError(f"{path}: the update is {tree.describe(update)}, the parameter {tree.describe(param)}")
        if is_dtensor(param) != is_dtensor(update):
            raise TypeError(
                f"{path}: of the update and the parameter only one is a DTensor; distribute the other one, or "
                "gather this one with full_tensor()"
            )
    rows = stacked([summed(_count, param.detach(), update.detach()) for _, param, update in pairs], (2,), params)
    return LostUpdates(rows[:, 0], rows[:, 1], tuple(path for path, _, _ in pairs))


def _count(param: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Counts one leaf, i64[2]: updates, and those that are lost."""
    wide = full_precision(param.dtype)
    before = param.to(wide)
    added = (before + update.to(wide)).to(param.dtype).to(wide)
    update = update.to(full_precision(update.dtype))  # no operator takes the 8-bit formats
    counted = (update != 0) & update.isfinite() & before.isfinite()
    return torch.stack([counted.sum(), (counted & (added == before)).sum()])
