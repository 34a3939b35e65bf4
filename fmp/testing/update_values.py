"""The laws of what an optimizer's updates and state hold: dtypes, zeros, and leaves without gradients."""

from typing import Any

import torch

from fmp import tree
from fmp.dtypes import full_precision, is_castable, short_name
from fmp.optim import apply_updates
from fmp.testing.bits import assert_close, assert_same_bits, assert_same_kind, assert_same_values, tensors
from fmp.testing.invariants import Broken
from fmp.testing.optimizer_case import Case

Tree = Any

_EMPTY: tuple[Tree, ...] = ({}, (), (None,), {"a": {}, "b": None})
_AS_INIT_MADE_IT = (
    ", as init made it; the state keeps one dtype, the parameter's or float32, whichever is wider: make it so in init, "
    "and cast to it in update"
)
_EPS = torch.finfo(torch.float32).eps


def state_keeps_structure_and_dtypes(case: Case) -> None:
    """The state, and the parameters, have the same structure, shapes and dtypes after every update."""
    for dtype in case.dtypes:
        for grad_dtype in (torch.float32, dtype):
            params = case.params(dtype)
            first, state = case.tx.init(params), case.tx.init(params)
            for _ in range(3):
                updates, state = case.tx.update(case.grads(params, grad_dtype), state, params)
                what = f"the state of {short_name(dtype)} parameters after gradients in {short_name(grad_dtype)}"
                assert_same_kind(state, first, what, reason=_AS_INIT_MADE_IT)
                new = apply_updates(params, updates)
                assert_same_kind(new, params, "the parameter after the update")
                params = new


def updates_are_wide(case: Case) -> None:
    """Updates have the structure and shapes of the parameters, in float32 or wider; None for what has no gradient."""
    for dtype in case.dtypes:
        params = case.params(dtype)
        state = case.tx.init(params)
        for grad_dtype in (torch.float32, dtype):
            grads = case.grads(params, grad_dtype)
            updates, _ = case.tx.update(grads, state, params)
            if tree.structure(updates) != tree.structure(params):
                raise Broken(f"the updates are {tree.describe(updates)} for {tree.describe(params)}")
            rows = zip(tree.items(updates), tree.leaves(grads), tree.leaves(params), strict=True)
            for (path, update), grad, param in rows:
                if update is None:
                    continue
                if update is grad and update.shape == param.shape:
                    continue  # passed through, for a later part of a chain
                if not is_castable(param):
                    raise Broken(
                        f"the update of {tree.describe(param)} is {tree.describe(update)}, expected None", path
                    )
                if update.dtype not in (torch.float32, full_precision(dtype)) or update.shape != param.shape:
                    raise Broken(f"the update of {tree.describe(param)} is {tree.describe(update)}", path)


def half_precision_changes_no_update(case: Case) -> None:
    """Parameters and gradients in 16 bits have the updates of the same values in float32, up to float32's rounding."""
    for dtype in case.dtypes:
        if full_precision(dtype) == dtype:
            continue
        params = case.params(dtype)
        wide_params = tree.cast(params, torch.float32)
        for grad_dtype in (dtype, torch.float32):
            state, wide_state = case.tx.init(params), case.tx.init(wide_params)
            for _ in range(3):
                grads = case.grads(params, grad_dtype)
                updates, state = case.tx.update(grads, state, params)
                expected, wide_state = case.tx.update(tree.cast(grads, torch.float32), wide_state, wide_params)
                rows = zip(tree.items(updates), tree.leaves(expected), tree.leaves(wide_params), strict=True)
                for (path, update), wide, param in rows:
                    if is_castable(update) and is_castable(wide) and wide.numel():
                        what = f"the update of {short_name(dtype)} by a gradient in {short_name(grad_dtype)}"
                        rounding = 2e-5 * float(wide.abs().max()) + _EPS * float(param.abs().max())
                        assert_close({path: update.to(wide.dtype)}, {path: wide}, what, absolute=rounding)


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
    _assert_others_do_as_before(case, state, params)


def _parameter_of(place: str, paths: list[str]) -> str | None:
    """Finds the parameter that a place in a state belongs to: the longest path that it ends in."""
    return max((path for path in paths if place.endswith("/" + path)), key=len, default=None)


def _assert_others_do_as_before(case: Case, state: Tree, params: Tree) -> None:
    """Finds the state of leaves without gradients by what it does, since not all state is named after its parameter.

    One leaf alone gets a gradient. State that changes then may be this leaf's, or that of all, such as a count. It is
    another leaf's if putting its old value back changes the later updates of that leaf only. A 0-dim count can be that
    of a group with a single leaf, so it is not looked at.
    """
    coming = [case.grads(params) for _ in range(4)]

    def later_updates(state: Tree) -> list[Tree]:
        found = []
        for grads in coming:
            updates, state = case.tx.update(grads, state, params)
            found.append(updates)
        return found

    moving = {path for updates in later_updates(state) for path, leaf in tree.items(updates) if _moves(leaf)}
    for moved in sorted(moving)[:2]:  # each is without a gradient while the other has one
        grads = tree.map_with_path(lambda at, grad, moved=moved: grad if at == moved else None, case.grads(params))
        new_state = case.tx.update(grads, state, params)[1]
        leaves, spec = tree.flatten(new_state)
        expected = later_updates(new_state)
        for index, (place, old) in enumerate(tree.items(state)):
            if not is_castable(old) or not old.ndim or torch.equal(old, leaves[index]):
                continue
            restored = later_updates(tree.unflatten(spec, [*leaves[:index], old, *leaves[index + 1 :]]))
            changed = {path for pair in zip(restored, expected, strict=True) for path in _differing(*pair)}
            if len(changed) == 1 and moved not in changed:
                raise Broken(
                    f"it is the state of {changed.pop()}, which had no gradient, and was {old.tolist()}, now "
                    f"{leaves[index].tolist()}",
                    place,
                )


def _moves(update: Any) -> bool:
    return is_castable(update) and bool(update.any())


def _differing(updates: Tree, others: Tree) -> set[str]:
    rows = zip(tree.items(updates), tree.leaves(others), strict=True)
    return {path for (path, update), other in rows if is_castable(update) and not torch.equal(update, other)}


def empty_trees_work(case: Case) -> None:
    """Trees without tensors are initialized and updated like others, unless the optimizer is for one structure only."""

    def law(empty: Tree) -> None:
        state = case.tx.init(empty)
        updates, new_state = case.tx.update(empty, state, empty)
        assert_same_bits(updates, empty, f"the update for {empty!r}")
        assert_same_kind(new_state, state, f"the state for {empty!r}")

    law(tree.map(lambda leaf: None, case.like))
    for empty in _EMPTY:
        try:
            law(empty)
        except (ValueError, LookupError):
            # A mask that is a tree refuses all other structures, with and without tensors.
            if not _is_for_one_structure(case):
                raise


def _is_for_one_structure(case: Case) -> bool:
    other = {"some other tree": case.params()}
    try:
        case.tx.update(case.grads(other), case.tx.init(other), other)
    except (ValueError, LookupError):
        return True
    return False
