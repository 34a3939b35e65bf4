"""check_optimizer: whether an optimizer, or a part of one, keeps the contract of `fmp.optim.GradientTransformation`."""

import copy
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fmp import _compat, tree
from fmp.dtypes import full_precision, is_castable, short_name
from fmp.optim import GradientTransformation, apply_updates
from fmp.policy import Policy
from fmp.scaling import DynamicLossScale
from fmp.step import train_step
from fmp.testing import strategies
from fmp.testing.bits import (
    assert_apart,
    assert_apart_from,
    assert_close,
    assert_same_bits,
    assert_same_kind,
    assert_same_values,
    pickled,
    snapshot,
    tensors,
    with_tensors,
)
from fmp.testing.invariants import Broken, check_counts, for_all, run_laws
from fmp.testing.optimizer_case import Case, default_params
from fmp.testing.pure import assert_function

Tree = Any

_EMPTY: tuple[Tree, ...] = ({}, (), (None,), {"a": {}, "b": None})


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
            vector `layer/bias`, a 0-dim `scale`, an `empty` matrix, integers and None.
        dtypes: The dtypes of the parameters to try.
        examples: How many drawn gradients to try, with non-finite ones among them, where an invariant draws them.
        decays: Whether parameters change although their gradients are zero, as with weight decay.
        differentiable: Whether gradients flow through an update.
        vmap: Whether it works under `torch.func.vmap`.
        compile: Whether `torch.compile` takes it.
        invariants: Names of the invariants to check, as `INVARIANTS["check_optimizer"]` has them; None for all.

    Raises:
        AssertionError: If an invariant is broken; the message names it, the leaf and the values.
        KeyError: If `invariants` has an unknown name.
        TypeError: If `tx` is not a `GradientTransformation`.
        ValueError: If `params` has no floating-point tensor, or `examples` is not a whole number of at least 1.

    Example:
        >>> check_optimizer(fmp.optim.sgd(0.1, momentum=0.9), compile=False, examples=5)
    """
    check_counts(examples=examples)
    if not isinstance(tx, GradientTransformation):
        raise TypeError(f"tx must be a fmp.optim.GradientTransformation, got {tx!r}")
    like = default_params() if params is None else params
    if not any(is_castable(leaf) for leaf in tree.leaves(like)):
        raise ValueError(f"params has no floating-point tensor: {tree.describe(like)}")
    off = [
        *[zero_gradients_change_nothing] * decays,
        *[update_is_differentiable, derivative_at_zero_is_finite] * (not differentiable),
        *[members_under_vmap_equal_a_loop] * (not vmap),
        *[compiled_equals_eager] * (not compile),
    ]
    run_laws("check_optimizer", LAWS, Case(tx, like, dtypes, examples), only=invariants, off=off)


def state_keeps_structure_and_dtypes(case: Case) -> None:
    """The state, and the parameters, have the same structure, shapes and dtypes after every update."""
    for dtype in case.dtypes:
        for grad_dtype in (torch.float32, dtype):
            params = case.params(dtype)
            first, state = case.tx.init(params), case.tx.init(params)
            for _ in range(3):
                updates, state = case.tx.update(case.grads(params, grad_dtype), state, params)
                assert_same_kind(state, first, f"the state for {short_name(dtype)} parameters")
                new = apply_updates(params, updates)
                assert_same_kind(new, params, "the parameter after the update")
                params = new


def updates_are_wide(case: Case) -> None:
    """Updates have the structure and shapes of the parameters, in float32 or wider; None for what has no gradient."""
    for dtype in case.dtypes:
        params = case.params(dtype)
        state = case.tx.init(params)
        for grad_dtype in (torch.float32, dtype):
            updates, _ = case.tx.update(case.grads(params, grad_dtype), state, params)
            if tree.structure(updates) != tree.structure(params):
                raise Broken(f"the updates are {tree.describe(updates)} for {tree.describe(params)}")
            for (path, update), param in zip(tree.items(updates), tree.leaves(params), strict=True):
                if update is None:
                    continue
                if not is_castable(param):
                    raise Broken(
                        f"the update of {tree.describe(param)} is {tree.describe(update)}, expected None", path
                    )
                if update.dtype not in (torch.float32, full_precision(dtype)) or update.shape != param.shape:
                    raise Broken(f"the update of {tree.describe(param)} is {tree.describe(update)}", path)


def moments_are_wide(case: Case) -> None:
    """Floating-point state is float32 or wider; what has the shape of a parameter is float64 for float64 ones."""
    for dtype in case.dtypes:
        params = case.params(dtype)
        shapes = {leaf.shape for leaf in tensors(params) if is_castable(leaf) and leaf.ndim}
        for path, leaf in tree.items(case.tx.init(params)):
            if not is_castable(leaf):
                continue
            narrow = leaf.dtype not in (torch.float32, torch.float64)
            if narrow or (leaf.shape in shapes and leaf.dtype != full_precision(dtype)):
                raise Broken(f"the state is {tree.describe(leaf)} for parameters in {short_name(dtype)}", path)


def zero_gradients_change_nothing(case: Case) -> None:
    """Zero gradients leave the parameters as they are and the state finite (not with decays=True)."""
    for dtype in case.dtypes:
        params = case.params(dtype)
        state = case.tx.init(params)
        zeros = tree.map(lambda leaf: torch.zeros_like(leaf) if is_castable(leaf) else None, params)
        for _ in range(3):
            updates, state = case.tx.update(zeros, state, params)
            for path, update in tree.items(updates):
                if update is not None and not (update == 0).all():
                    raise Broken(f"the update is {update.tolist()} for a gradient of zeros", path)
            assert_same_values(apply_updates(params, updates), params, "the parameter")
        for path, leaf in tree.items(state):
            if is_castable(leaf) and not leaf.isfinite().all():
                raise Broken(f"the state is {leaf.tolist()} after gradients of zeros", path)


def leaves_without_gradient_are_left_alone(case: Case) -> None:
    """A leaf whose gradient is None has the update None and keeps its state; so do integers and None."""
    params = case.params()
    state = case.advanced(params)
    paths = tree.paths(params)
    for path, leaf in tree.items(params):
        if not is_castable(leaf):
            continue
        grads = tree.map_with_path(lambda at, grad, path=path: None if at == path else grad, case.grads(params))
        updates, new_state = case.tx.update(grads, state, params)
        for (at, update), param in zip(tree.items(updates), tree.leaves(params), strict=True):
            if update is not None and (at == path or not is_castable(param)):
                raise Broken(f"the update is {tree.describe(update)} though the gradient is None", at)
        for (at, new), old in zip(tree.items(new_state), tree.leaves(state), strict=True):
            if _parameter_of(at, paths) == path:
                assert_same_bits({at: new}, {at: old}, "the state of a leaf whose gradient is None")


def _parameter_of(place: str, paths: list[str]) -> str | None:
    """Finds the parameter that a place in a state belongs to: the longest path that it ends in."""
    return max((path for path in paths if place.endswith("/" + path)), key=len, default=None)


def empty_trees_work(case: Case) -> None:
    """Trees without tensors are initialised and updated like others."""
    for empty in _EMPTY:
        state = case.tx.init(empty)
        updates, new_state = case.tx.update(empty, state, empty)
        assert_same_bits(updates, empty, f"the update for {empty!r}")
        assert_same_kind(new_state, state, f"the state for {empty!r}")


def update_is_pure(case: Case) -> None:
    """Init and update change neither arguments nor global state, and repeat bit for bit, for any gradients."""
    params = case.params()
    state = case.advanced(params)
    assert_function(case.tx.init, params)
    drawn = strategies.gradients(params, nonfinite=None)
    for_all(drawn, lambda grads: assert_function(case.tx.update, grads, state, params), examples=case.examples)


def nothing_is_aliased(case: Case) -> None:
    """Two states, or two results of an update, share no memory; a result shares an argument's only if it is that."""
    params = case.params()
    assert_apart((case.tx.init(params), case.tx.init(params), params), "the state")
    args = (case.grads(params), case.advanced(params), params)
    results = case.tx.update(*args)
    assert_apart(results, "a result")
    assert_apart_from(results, args, "a result", passed_through=True)


def members_under_vmap_equal_a_loop(case: Case) -> None:
    """Under torch.func.vmap each member gets what it gets alone, whichever of the arguments are mapped."""
    members = []
    for index in range(3):
        params = tree.map(lambda leaf, by=index: leaf + 0.5 * by if is_castable(leaf) else leaf, case.params())
        members.append((case.grads(params), case.advanced(params), params))
    for together in ((0, 1, 2), (0,), (1, 2)):
        rows = [tuple(member[i] if i in together else members[0][i] for i in range(3)) for member in members]
        dims = tuple(0 if i in together else None for i in range(3) for _ in tensors(rows[0][i]))
        columns = zip(dims, zip(*[tensors(row) for row in rows], strict=True), strict=True)
        stacked = [torch.stack(column) if dim == 0 else column[0] for dim, column in columns]
        found = torch.func.vmap(
            lambda *flat, like=rows[0]: tensors(case.tx.update(*with_tensors(like, flat))), in_dims=dims
        )(*stacked)
        for index, row in enumerate(rows):
            expected = case.tx.update(*row)
            assert_close(with_tensors(expected, [leaf[index] for leaf in found]), expected, f"what member {index} gets")


def compiled_equals_eager(case: Case) -> None:
    """torch.compile takes update as one graph, with the same results, and does not compile again in later steps."""
    params = case.params()
    state = expected_state = case.tx.init(params)
    compiled = torch.compile(_compat.compiled_on_its_own(_call), backend="aot_eager", fullgraph=True)
    for index in range(4):
        grads = case.grads(params)
        with torch.compiler.set_stance("fail_on_recompile" if index else "default"):
            updates, state = compiled(case.tx.update, grads, state, params)
        expected, expected_state = case.tx.update(grads, expected_state, params)
        assert_close((updates, state), (expected, expected_state), f"the compiled update {index}")
        params = apply_updates(params, expected)


def update_is_differentiable(case: Case) -> None:
    """New parameters and state can be differentiated by gradients and parameters, by autograd and torch.func alike."""
    params = case.params(torch.float64)
    state, grads = case.advanced(params, steps=2), case.grads(params)
    given = (grads, params)
    variables = [leaf for leaf in tensors(given) if is_castable(leaf)]

    def results(*flat: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(flat)
        grads, params = tree.map(lambda leaf: next(rest) if is_castable(leaf) else leaf, given)
        updates, new_state = case.tx.update(grads, state, params)
        return [leaf for leaf in tensors(apply_updates(params, updates), new_state) if leaf.dtype == torch.float64]

    def total(*flat: torch.Tensor) -> torch.Tensor:
        return torch.stack([(leaf**2).sum() for leaf in results(*flat)]).sum()

    required = [leaf.clone().requires_grad_() for leaf in variables]
    torch.autograd.gradcheck(results, required)
    by_func = torch.func.grad(total, argnums=tuple(range(len(variables))))(*variables)
    by_autograd = torch.autograd.grad(total(*required), required, materialize_grads=True)
    assert_close(by_func, by_autograd, "the gradient by torch.func")


def derivative_at_zero_is_finite(case: Case) -> None:
    """Where gradients are zero, what flows back through the first update is finite."""
    params = case.params(torch.float64)
    zeros = tree.map(lambda leaf: torch.zeros_like(leaf).requires_grad_() if is_castable(leaf) else None, params)
    updates, state = case.tx.update(zeros, case.tx.init(params), params)
    outputs = [leaf.sum() for leaf in tensors(apply_updates(params, updates), state) if leaf.requires_grad]
    if not outputs:  # nothing depends on a gradient
        return
    found = with_tensors(zeros, torch.autograd.grad(outputs, tensors(zeros), materialize_grads=True))
    for path, grad in tree.items(found):
        if grad is not None and not grad.isfinite().all():
            raise Broken(f"the derivative by a gradient of zeros is {grad.tolist()}", path)


def state_travels(case: Case) -> None:
    """Flattened, pickled or deep-copied, the state has the same bits and gives the same update."""
    params = case.params()
    state, grads = case.advanced(params), case.grads(params)
    expected = case.tx.update(grads, state, params)
    for way, moved in {
        "rebuilt from its leaves": tree.unflatten(tree.structure(state), tree.leaves(state)),
        "pickled": pickled(state),
        "deep-copied": copy.deepcopy(state),
    }.items():
        if type(moved) is not type(state):
            raise Broken(f"the state, {way}, is a {type(moved).__name__}, expected a {type(state).__name__}")
        assert_same_bits(moved, state, f"the state, {way},")
        assert_same_bits(case.tx.update(grads, moved, params), expected, f"the update with the state {way}")


def skipped_step_leaves_the_state(case: Case) -> None:
    """A step that fmp.train_step skips leaves parameters, masters and state bit-identical, in f32 and f16."""

    def loss_fn(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        wide = [leaf.to(torch.float32) for leaf in tensors(params) if is_castable(leaf)]
        return torch.stack([(leaf * batch.to(torch.float32)).sum() for leaf in wide]).sum()

    for policy in (None, Policy.parse("params=f16,compute=f16,output=f32")):
        step = train_step(loss_fn, case.tx, policy=policy, loss_scale=DynamicLossScale(8.0))
        state, _ = step(step.init(case.params()), torch.tensor(0.5))
        for bad in (math.inf, math.nan):
            before = snapshot(state)
            skipped, _ = step(state, torch.tensor(bad))
            same = tree.replace(skipped, loss_scale=before.loss_scale, skip_count=before.skip_count)
            assert_same_bits(same, before, f"the state after a skipped step, its gradients {bad},")


LAWS: tuple[Callable[[Case], None], ...] = (
    state_keeps_structure_and_dtypes,
    updates_are_wide,
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
)


def _call(update: Callable[..., Any], *args: Any) -> Any:
    return update(*args)
