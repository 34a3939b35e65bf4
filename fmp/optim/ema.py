"""ema: the exponential moving average of gradients or updates."""

from typing import Any

import torch

from fmp import tree
from fmp.optim import checks
from fmp.optim.base import (
    GradientTransformation,
    Scalar,
    bias_correction,
    in_dtype,
    update_leaves,
    zero_count,
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
        ValueError: If `decay` is outside [0, 1).

    Example:
        >>> tx = ema(0.75)
        >>> params = {"w": torch.zeros(2)}
        >>> averages, state = tx.update({"w": torch.tensor([1.0, 2.0])}, tx.init(params), params)
        >>> averages, state.average
        ({'w': tensor([1., 2.])}, {'w': tensor([0.2500, 0.5000])})
    """
    checks.number("decay", decay, below=1.0)

    def init(params: Tree) -> EmaState:
        average = zeros(params)
        ages = tree.map(lambda mean: None if mean is None else zero_count(mean), average) if debias else None
        return EmaState(average, ages)

    def update(grads: Tree, state: EmaState, params: Tree) -> tuple[Tree, EmaState]:
        def averaged(grad: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
            return torch.lerp(mean, grad, 1.0 - in_dtype(decay, grad.dtype))

        def plain(grad: torch.Tensor, param: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean = averaged(grad, mean)
            # A copy: what becomes of the update must not reach the state.
            return mean.clone(), mean

        def debiased(
            grad: torch.Tensor, param: torch.Tensor, mean: torch.Tensor, age: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, age = averaged(grad, mean), age + 1
            return mean / bias_correction(decay, age.to(mean.dtype)), mean, age

        if not debias:
            updates, average = update_leaves(plain, grads, params, state.average)
            return updates, EmaState(average)
        updates, average, ages = update_leaves(debiased, grads, params, state.average, state.ages)
        return updates, EmaState(average, ages)

    return GradientTransformation(init, update)
