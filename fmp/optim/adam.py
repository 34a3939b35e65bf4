"""Adam and AdamW: two treatments of weight decay around one core."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.optim import checks
from fmp.optim.adam_coefficients import Coefficients, Hyperparams, coefficients_of
from fmp.optim.adam_fused import one_pass_form
from fmp.optim.base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    add_scaled,
    is_off,
    mean_of_squares,
    reusable,
    scheduled,
    square_root,
    update_leaves,
    zero_ages,
    zero_count,
    zeros,
)
from fmp.optim.masks import Mask, selector

Tree = Any


@tree.dataclass
class AdamState:
    """The state of `adam` and `adamw`.

    Attributes:
        count: i32[], the number of updates made; what a schedule is asked at.
        ages: i32[] a parameter, the number of updates that it has had; fewer for one that came later, or that had no
            gradient for a while. Bias correction goes by these.
        first_moment: The running mean of each parameter's gradient, in float32 or wider.
        second_moment: The running mean of its square.
    """

    count: torch.Tensor
    ages: Tree
    first_moment: Tree
    second_moment: Tree


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    fused: bool = False,
) -> GradientTransformation:
    """Makes Adam (Kingma and Ba 2015), as `torch.optim.Adam` defines it.

        g = g + weight_decay * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        p = p - learning_rate * (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps)

    Args:
        learning_rate: A number, a 0-dim tensor, or a schedule, which is asked at 0 for the first update.
        b1: The decay rate of the first moment.
        b2: The decay rate of the second moment.
        eps: What is added to the denominator.
        weight_decay: The factor of the parameter that is added to its gradient (L2 regularization, which the moments
            see; `adamw` has the other kind).
        fused: Whether a train step runs torch's one-pass kernel on plain tensors: faster, and equal to `update` up to
            rounding. On a GPU it runs fmp's kernel either way where that can run; see `fmp.kernels`.

    Returns:
        The optimizer; its state is an `AdamState`.

    Raises:
        ValueError: If `b1` or `b2` is outside [0, 1), or another number is negative or not finite.
        TypeError: If `fused` is not a bool, or another argument neither a number nor a tensor; or if `fused` is set and
            a number other than `learning_rate` is a tensor.

    Example:
        >>> tx = adam(0.1)
        >>> params = {"w": torch.zeros(2)}
        >>> updates, state = tx.update({"w": torch.tensor([5.0, -1e-3])}, tx.init(params), params)
        >>> updates, state.count
        ({'w': tensor([-0.1000,  0.1000])}, tensor(1, dtype=torch.int32))
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, decoupled=False, mask=None, fused=fused)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    mask: Mask | None = None,
    *,
    fused: bool = False,
) -> GradientTransformation:
    """Makes AdamW (Loshchilov and Hutter 2019), as `torch.optim.AdamW` defines it.

    Like `adam`, but the decay goes past the moments straight into the update:

        p = p - learning_rate * (m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * p)

    Args:
        learning_rate: A number, a 0-dim tensor, or a schedule, which is asked at 0 for the first update.
        b1: The decay rate of the first moment.
        b2: The decay rate of the second moment.
        eps: What is added to the denominator.
        weight_decay: The factor of the parameter in the update.
        mask: Which leaves decay: a tree of bools, name patterns, or a function of a leaf's path, or of its path and the
            leaf: `lambda path, leaf: leaf.ndim >= 2` for matrices only. None for all.
        fused: Whether a train step runs torch's one-pass kernel on plain tensors: faster, and equal to `update` up to
            rounding. On a GPU it runs fmp's kernel either way where that can run; see `fmp.kernels`.

    Returns:
        The optimizer; its state is an `AdamState`.

    Raises:
        ValueError: If `b1` or `b2` is outside [0, 1), or another number is negative or not finite; or if the mask does
            not fit the parameters, or none of its patterns matches any of them (when `init` or `update` is called).
        TypeError: If `fused` is not a bool, a hyper-parameter neither a number nor a tensor, or the mask says anything
            but True or False; or if `fused` is set and a number other than `learning_rate` is a tensor.

    Example:
        >>> tx = adamw(0.1, weight_decay=0.5, mask=["*.weight"])
        >>> params = {"layer.weight": torch.ones(1), "layer.bias": torch.ones(1)}
        >>> grads = {"layer.weight": torch.zeros(1), "layer.bias": torch.zeros(1)}
        >>> tx.update(grads, tx.init(params), params)[0]["layer.weight"]
        tensor([-0.0500])
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, decoupled=True, mask=mask, fused=fused)


def _adam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    weight_decay: Scalar,
    *,
    decoupled: bool,
    mask: Mask | None,
    fused: bool,
) -> GradientTransformation:
    checks.number_or_schedule("learning_rate", learning_rate)
    checks.number("b1", b1, below=1.0)
    checks.number("b2", b2, below=1.0)
    checks.number("eps", eps)
    checks.number("weight_decay", weight_decay)
    checks.flag("fused", fused)
    coupled_decay = 0.0 if decoupled else weight_decay
    decoupled_decay = weight_decay if decoupled else 0.0
    select = selector(True if mask is None else mask, "mask")

    @_compat.compiled_on_its_own
    def init(params: Tree) -> AdamState:
        select(params)
        return AdamState(zero_count(params), zero_ages(params), zeros(params), zeros(params))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        checks.params_match(grads, params)
        rate = scheduled(learning_rate, state.count)
        coefficients = coefficients_of(tree.leaves(params), tree.leaves(state.ages), rate, b1, b2, eps, decoupled_decay)
        shrinks = not is_off(decoupled_decay) and not is_off(rate)

        def update_leaf(
            grad: torch.Tensor,
            param: torch.Tensor,
            age: torch.Tensor,
            first: torch.Tensor,
            second: torch.Tensor,
            use: Coefficients,
            decays: bool,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            if not is_off(coupled_decay):
                grad = add_scaled(grad, coupled_decay, param)
            first = torch.lerp(first, grad, use.first_weight)
            second = mean_of_squares(second, grad, use.second_weight)

            step = square_root(second)
            out = reusable(step, param, first, second, *use)
            step = torch.add(step, use.eps, out=out)
            step = torch.div(first, step, out=out)
            step = torch.mul(step, use.step_size, out=out)
            if decays and shrinks:
                step = add_scaled(step, use.shrink, param, out=out)
            return step, age + 1, first, second

        updates, ages, first_moment, second_moment = update_leaves(
            update_leaf,
            grads,
            params,
            state.ages,
            state.first_moment,
            state.second_moment,
            given=(coefficients, select(params)),
        )
        return updates, AdamState(state.count + 1, ages, first_moment, second_moment)

    hyper = Hyperparams(learning_rate, b1, b2, eps, weight_decay, decoupled, select, has_mask=mask is not None)
    return GradientTransformation(init, update, one_pass_form(update, hyper, on_torchs=fused))
