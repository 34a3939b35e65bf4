"""The laws of an optimizer's update as a function: pure, mapped, compiled, differentiated, and in a train step."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from fmp import _compat, tree
from fmp.dtypes import is_castable
from fmp.optim import apply_updates
from fmp.policy import Policy
from fmp.scaling import DynamicLossScale
from fmp.step import train_step
from fmp.testing import strategies
from fmp.testing.bits import (
    assert_apart,
    assert_apart_from,
    assert_close,
    assert_same_bits,
    pickled,
    snapshot,
    tensors,
    with_tensors,
)
from fmp.testing.global_state import recorded
from fmp.testing.invariants import Broken, for_all
from fmp.testing.optimizer_case import Case
from fmp.testing.pure import assert_function

Tree = Any


def update_is_pure(case: Case) -> None:
    """Init and update change neither arguments nor global state, and repeat bit for bit, for any gradients."""
    for dtype in case.dtypes:
        params = case.params(dtype)
        state = case.advanced(params)
        assert_function(case.tx.init, params)
        assert_function(case.tx.update, case.grads(params, torch.float32), state, params)
        for_all(
            strategies.gradients(params, nonfinite=None),
            lambda grads, state=state, params=params: assert_function(case.tx.update, grads, state, params),
            examples=case.examples,
        )


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
    with recorded():
        _check_derivatives(case)


def _check_derivatives(case: Case) -> None:
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
    with recorded():
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

    # A train step trains every tensor of floats, and takes no numbers; what it cannot take has no gradient here either.
    params = tree.map(lambda leaf: leaf if _is_for_a_step(leaf) else None, case.params())
    if not any(is_castable(leaf) and leaf.numel() for leaf in tree.leaves(params)):
        return  # no gradient can be inf, so no step is skipped
    for policy in (None, Policy.parse("params=f16,compute=f16,output=f32")):
        step = train_step(loss_fn, case.tx, policy=policy, loss_scale=DynamicLossScale(8.0))
        state, _ = step(step.init(params), torch.tensor(0.5))
        for bad in (math.inf, math.nan):
            before = snapshot(state)
            skipped, _ = step(state, torch.tensor(bad))
            same = tree.replace(skipped, loss_scale=before.loss_scale, skip_count=before.skip_count)
            assert_same_bits(same, before, f"the state after a skipped step, its gradients {bad},")


def _is_for_a_step(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.dtype.is_complex


def _call(update: Callable[..., Any], *args: Any) -> Any:
    return update(*args)
