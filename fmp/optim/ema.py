"""ema: the exponential moving average of gradients or updates."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.optim import checks
from fmp.optim.base import (
    GradientTransformation,
    Scalar,
    bias_correction,
    blend,
    update_leaves,
    zero_ages,
    zeros,
)

Tree = Any


@tree.dataclass
class EmaState:
    """The state of `ema`.

    Attributes:
        average: The running mean of each parameter's gradient, from zero on, in float32 or wider.
        ages: i32[] a parameter, the number of gradients in it; None without bias correction.
    """

    average: Tree
    ages: Tree = None


def ema(decay: Scalar, debias: bool = True) -> GradientTransformation:
    """Makes a transformation that puts the exponential moving average of the gradients in place of each.

        m = decay * m + (1 - decay) * g
        g = m / (1 - decay**t) if debias else m

    It averages whatever reaches it: gradients in front of an optimizer, updates behind one. The average of the
    parameters themselves is not its matter.

    Args:
        decay: How much of the old average stays; a number in [0, 1), or a 0-dim tensor.
        debias: Whether to divide out what is still the initial zero, so that the first average is the first gradient.

    Returns:
        The transformation; its state is an `EmaState`. Averages have dtype float32 or wider.

    Raises:
        TypeError: If `decay` is neither a number nor a tensor, or `debias` not a bool.
        ValueError: If `decay` is outside [0, 1).

    Example:
        >>> tx = ema(0.75)
        >>> params = {"w": torch.zeros(2)}
        >>> averages, state = tx.update({"w": torch.tensor([1.0, 2.0])}, tx.init(params), params)
        >>> averages, state.average
        ({'w': tensor([1., 2.])}, {'w': tensor([0.2500, 0.5000])})
    """
    checks.number("decay", decay, below=1.0)
    checks.flag("debias", debias)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> EmaState:
        return EmaState(zeros(params), zero_ages(params) if debias else None)

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: EmaState, params: Tree) -> tuple[Tree, EmaState]:
        def plain(grad: torch.Tensor, param: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean = blend(decay, mean, grad)
            # A copy: what becomes of the update must not reach the state.
            return mean.clone(), mean

        def debiased(
            grad: torch.Tensor, param: torch.Tensor, mean: torch.Tensor, age: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, age = blend(decay, mean, grad), age + 1
            return mean / bias_correction(decay, age.to(mean.dtype)), mean, age

        if not debias:
            updates, average = update_leaves(plain, grads, params, state.average)
            return updates, EmaState(average)
        updates, average, ages = update_leaves(debiased, grads, params, state.average, state.ages)
        return updates, EmaState(average, ages)

    return GradientTransformation(init, update)
