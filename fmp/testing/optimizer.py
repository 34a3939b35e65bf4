"""check_optimizer: whether an optimizer, or a part of one, keeps the contract of `fmp.optim.GradientTransformation`."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fmp import tree
from fmp.dtypes import is_castable, short_name
from fmp.optim import GradientTransformation
from fmp.testing import strategies
from fmp.testing.invariants import check_counts, run_laws
from fmp.testing.optimizer_case import Case, default_params
from fmp.testing.update_function import (
    compiled_equals_eager,
    derivative_at_zero_is_finite,
    members_under_vmap_equal_a_loop,
    nothing_is_aliased,
    skipped_step_leaves_the_state,
    state_travels,
    update_is_differentiable,
    update_is_pure,
)
from fmp.testing.update_fused import fused_means_update, observe_means_update
from fmp.testing.update_values import (
    empty_trees_work,
    half_precision_changes_no_update,
    leaves_without_gradient_are_left_alone,
    moments_are_wide,
    state_keeps_structure_and_dtypes,
    updates_are_wide,
    zero_gradients_change_nothing,
)

Tree = Any


def check_optimizer(
    tx: GradientTransformation,
    *,
    params: Tree = None,
    dtypes: Sequence[torch.dtype] = strategies.DTYPES,
    examples: int = 25,
    decays: bool = False,
    differentiable: bool = True,
    vmap: bool = True,
    compile: bool = True,
    invariants: Collection[str] | None = None,
) -> None:
    """Checks that an optimizer keeps the laws that a train step, and the other optimizers, rely on.

    Args:
        tx: The optimizer.
        params: The parameters to try it on, cast to each dtype; by default a small tree with a matrix `layer/weight`, a
            vector `layer/bias`, a 0-dim `scale`, an `empty` matrix, integers and None. Masks and labels that are trees
            need parameters of their structure.
        dtypes: The dtypes of the parameters to try: some of f16, bf16, f32 and f64.
        examples: How many drawn gradients to try for each dtype, with non-finite ones among them, where an invariant
            draws them.
        decays: Whether parameters change although their gradients are zero, as with weight decay.
        differentiable: Whether gradients flow through an update.
        vmap: Whether it works under `torch.func.vmap`.
        compile: Whether `torch.compile` takes it.
        invariants: Names of the invariants to check, as `INVARIANTS["check_optimizer"]` has them; None for all.

    Raises:
        AssertionError: If an invariant is broken; the message names it, the leaf and the values.
        TypeError: If `tx` is not a `GradientTransformation`.
        ValueError: If `invariants` has an unknown name, `params` has no floating-point tensor, `dtypes` is empty or has
            another one, or `examples` is not a whole number of at least 1.

    Example:
        >>> check_optimizer(fmp.optim.sgd(0.1, momentum=0.9), compile=False, examples=5)
    """
    check_counts(examples=examples)
    if not isinstance(tx, GradientTransformation):
        raise TypeError(f"tx must be a fmp.optim.GradientTransformation, got {tx!r}")
    if isinstance(dtypes, torch.dtype) or not dtypes or not set(dtypes) <= set(strategies.DTYPES):
        names = [short_name(dtype) for dtype in strategies.DTYPES]
        raise ValueError(f"dtypes must be a list of some of {names}, got {dtypes!r}")
    like = default_params() if params is None else params
    if not any(is_castable(leaf) for leaf in tree.leaves(like)):
        raise ValueError(f"params has no floating-point tensor: {tree.describe(like)}")
    off = [
        *[zero_gradients_change_nothing] * decays,
        *[update_is_differentiable, derivative_at_zero_is_finite] * (not differentiable),
        *[members_under_vmap_equal_a_loop] * (not vmap),
        *[compiled_equals_eager] * (not compile),
    ]
    run_laws("check_optimizer", LAWS, Case(tx, like, tuple(dtypes), examples), only=invariants, off=off)


LAWS: tuple[Callable[[Case], None], ...] = (
    state_keeps_structure_and_dtypes,
    updates_are_wide,
    half_precision_changes_no_update,
    moments_are_wide,
    zero_gradients_change_nothing,
    leaves_without_gradient_are_left_alone,
    empty_trees_work,
    update_is_pure,
    nothing_is_aliased,
    members_under_vmap_equal_a_loop,
    compiled_equals_eager,
    update_is_differentiable,
    derivative_at_zero_is_finite,
    state_travels,
    skipped_step_leaves_the_state,
    fused_means_update,
    observe_means_update,
)
