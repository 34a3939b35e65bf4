"""accumulate: one update for several gradients."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.dtypes import is_castable
from fmp.optim import checks
from fmp.optim.base import GradientTransformation, check_transformation, update_leaves, zero_count, zeros

Tree = Any


@tree.dataclass
class AccumulateState:
    """The state of `accumulate`.

    Attributes:
        count: i32[], the number of gradients in the window so far; 0 after an update.
        accumulated: The sum of the window's gradients of each parameter, in float32 or wider.
        inner: The state of the optimizer itself.
    """

    count: torch.Tensor
    accumulated: Tree
    inner: Tree


def accumulate(transformation: GradientTransformation, every: int) -> GradientTransformation:
    """Wraps an optimizer so that it makes one update for several gradients, with their mean.

        s = s + g
        on the last of `every` calls: update with s / every, then s = 0
        on the others: the update is zero, and the optimizer's state keeps every bit

    So `every` batches train like one that is `every` times as large. (`fmp.train_step(accumulate=...)` does it within
    a step, by splitting its batch; here the batches come one a step.)

    The optimizer's update is computed in each call, and thrown away in all but the last: nothing waits for the device
    to say which one it is. What stands outside of the wrapper, such as clipping in front of it, sees each gradient,
    what stands inside sees their mean. A gradient that is not finite spoils its window. It spoils the state of what
    stands inside for good, so let the train step skip it.

    A leaf whose gradient is None stays out of the call, and keeps what it has accumulated: it counts as zero in a
    window that it is missing from, and if it is missing from the last call, its sum goes into the next window.

    Args:
        transformation: The optimizer. Its counts, and the schedules that go by them, count windows.
        every: The number of gradients for one update, at least 1.

    Returns:
        The optimizer; its state is an `AccumulateState`.

    Raises:
        TypeError: If `transformation` is not a `GradientTransformation`, or `every` not an int.
        ValueError: If `every` is below 1.

    Example:
        >>> import fmp.optim as optim
        >>> tx = accumulate(optim.sgd(0.5), every=2)
        >>> params = {"w": torch.zeros(2)}
        >>> first, state = tx.update({"w": torch.tensor([1.0, 2.0])}, tx.init(params), params)
        >>> second, state = tx.update({"w": torch.tensor([3.0, 4.0])}, state, params)
        >>> first, second
        ({'w': tensor([0., 0.])}, {'w': tensor([-1.0000, -1.5000])})
    """
    check_transformation("transformation", transformation)
    checks.steps("every", every, low=1)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> AccumulateState:
        return AccumulateState(zero_count(params), accumulated=zeros(params), inner=transformation.init(params))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: AccumulateState, params: Tree) -> tuple[Tree, AccumulateState]:
        count = state.count + 1
        is_last = count >= every

        def add(grad: torch.Tensor, param: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total = total + grad
            return total / every, torch.where(is_last, 0.0, total)

        means, accumulated = update_leaves(add, grads, params, state.accumulated)
        updates, inner = transformation.update(means, state.inner, params)
        updates = tree.map(lambda each: torch.where(is_last, each, 0.0) if is_castable(each) else each, updates)
        inner = tree.select(is_last, inner, state.inner)
        return updates, AccumulateState(torch.where(is_last, 0, count), accumulated, inner)

    return GradientTransformation(init, update)
