import copy
import pickle

import pytest
import torch

from fmp import tree
from fmp.dtypes import full_precision, is_castable
from fmp.optim import apply_updates
from tests.optim.battery import ROWS, grads, params

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_row = pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.mixed_dtypes] if row.mixes else []) for row in ROWS]
)


@pytest.fixture(autouse=True)
def declared_exceptions(request):
    """Expects the failures that a row declares; one that fails no longer is an error, so that the list shrinks."""
    row = request.node.callspec.params.get("row") if hasattr(request.node, "callspec") else None
    if row is not None and (reason := row.cannot.get(request.node.originalname)):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


def test_declared_exceptions_name_laws():
    assert all(law in globals() and reason for row in ROWS for law, reason in row.cannot.items())


def tensors(*trees):
    return [leaf for leaf in tree.leaves(trees) if isinstance(leaf, torch.Tensor)]


def dtypes(of):
    return {path: leaf.dtype for path, leaf in tree.items(of) if isinstance(leaf, torch.Tensor)}


def with_tensors(like, replacements):
    """Puts other tensors into a tree, for the transforms that take tensors only."""
    leaves, spec = tree.flatten(like)
    rest = iter(replacements)
    return tree.unflatten(spec, [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def same_bits(a, b):
    return tree.structure(a) == tree.structure(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y or x == y
        for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)
    )


def assert_close(a, b, **tolerance):
    assert tree.structure(a) == tree.structure(b)
    torch.testing.assert_close(tensors(a), tensors(b), **tolerance)


def advanced(tx, values, steps=1):
    """Returns the state after some updates, so that moments are not zero."""
    state = tx.init(values)
    for _ in range(steps):
        _, state = tx.update(grads(values), state, values)
    return state


@every_row
@pytest.mark.parametrize("low_grads", [False, True], ids=["f32 grads", "own grads"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_stable(row, dtype, low_grads):
    tx, values = row.make(), params(dtype)
    state = tx.init(values)
    expected_state, expected_params = dtypes(state), dtypes(values)
    assert all(leaf.dtype in (torch.int32, torch.float32, torch.float64) for leaf in tensors(state))
    for _ in range(2):
        updates, state = tx.update(grads(values, None if low_grads else torch.float32), state, values)
        assert all(update.dtype in (torch.float32, full_precision(dtype)) for update in tensors(updates))
        values = apply_updates(values, updates)
    assert dtypes(state) == expected_state
    assert dtypes(values) == expected_params


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_are_wide(row, dtype):
    values = params(dtype)
    shapes = {leaf.shape for leaf in tensors(values) if leaf.ndim and leaf.is_floating_point()}
    moments = [leaf for leaf in tensors(row.make().init(values)) if leaf.shape in shapes]
    assert all(moment.dtype == full_precision(dtype) for moment in moments)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.decays], ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_gradients_change_nothing(row, dtype):
    tx, values = row.make(), params(dtype)
    state = tx.init(values)
    zeros = tree.map(lambda leaf: torch.zeros_like(leaf) if is_castable(leaf) else None, values)
    for _ in range(3):
        updates, state = tx.update(zeros, state, values)
        assert all(not update.any() for update in tensors(updates))
        assert same_bits(apply_updates(values, updates), values)
    assert all(leaf.isfinite().all() for leaf in tensors(state))


@every_row
@pytest.mark.parametrize("empty", [{}, (), (None,), {"a": {}, "b": None}], ids=str)
def test_empty_trees(row, empty):
    tx = row.make()
    state = tx.init(empty)
    updates, new_state = tx.update(empty, state, empty)
    assert updates == empty
    assert tree.structure(new_state) == tree.structure(state)


@every_row
def test_a_leaf_without_gradient_is_left_alone(row):
    tx, values = row.make(), params()
    state = advanced(tx, values)
    some = grads(values)
    some["layer"]["weight"] = None
    updates, new_state = tx.update(some, state, values)
    assert updates["layer"]["weight"] is None
    assert updates["ids"] is None
    assert updates["hole"] is None
    new_values = apply_updates(values, updates)
    assert new_values["layer"]["weight"] is values["layer"]["weight"]
    assert new_values["ids"] is values["ids"]
    at_weight = [
        (old, new)
        for (path, old), (_, new) in zip(tree.items(state), tree.items(new_state), strict=True)
        if path.endswith("layer/weight")
    ]
    assert all(new is old for old, new in at_weight)


@every_row
@pytest.mark.parametrize("batched", ["all", "grads", "state and params"])
def test_vmap_is_a_loop(row, batched):
    tx = row.make()
    members = []
    for _ in range(3):
        values = params()
        members.append((grads(values), advanced(tx, values), values))
    together = {"all": (0, 1, 2), "grads": (0,), "state and params": (1, 2)}[batched]
    members = [tuple(m[i] if i in together else members[0][i] for i in range(3)) for m in members]

    like = members[0]
    dims = [0 if i in together else None for i in range(3) for _ in tensors(like[i])]
    stacked = [
        torch.stack(each) if dim == 0 else each[0]
        for dim, each in zip(dims, zip(*[tensors(member) for member in members], strict=True), strict=True)
    ]
    update = lambda *flat: tensors(tx.update(*with_tensors(like, flat)))
    found = torch.func.vmap(update, in_dims=tuple(dims))(*stacked)

    for index, member in enumerate(members):
        torch.testing.assert_close([leaf[index] for leaf in found], tensors(tx.update(*member)))


@every_row
def test_update_is_pure(row):
    tx, values = row.make(), params()
    args = (grads(values), advanced(tx, values), values)
    before = copy.deepcopy(args)
    first = tx.update(*args)
    second = tx.update(*args)
    assert same_bits(first, second)
    assert same_bits(args, before)


@every_row
@pytest.mark.parametrize(
    "travel",
    [
        lambda state: tree.unflatten(tree.structure(state), tree.leaves(state)),
        lambda state: pickle.loads(pickle.dumps(state)),
        copy.deepcopy,
    ],
    ids=["flatten", "pickle", "deepcopy"],
)
def test_state_travels(row, travel):
    tx, values = row.make(), params()
    state, next_grads = advanced(tx, values), grads(values)
    moved = travel(state)
    assert type(moved) is type(state)
    assert same_bits(moved, state)
    assert same_bits(tx.update(next_grads, moved, values), tx.update(next_grads, state, values))


@every_row
def test_inits_share_no_memory(row):
    tx, values = row.make(), params()
    leaves = tensors(tx.init(values), tx.init(values), row.make().init(values), values)
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == len(leaves)


@every_row
def test_compiled_is_eager_and_compiles_once(row):
    tx, values = row.make(), params()
    state, expected_state = tx.init(values), tx.init(values)
    compiled = torch.compile(tx.update, backend="aot_eager", fullgraph=True)
    for step in range(5):
        given = grads(values)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            updates, state = compiled(given, state, values)
        expected, expected_state = tx.update(given, expected_state, values)
        assert_close(updates, expected)
        assert_close(state, expected_state)
        values = apply_updates(values, updates)


@every_row
def test_update_is_differentiable(row):
    tx, values = row.make(), params(torch.float64)
    state, given = advanced(tx, values, steps=2), grads(values)
    variables = [leaf for leaf in tensors(given, values) if leaf.is_floating_point()]

    def new_params(*variables):
        rest = iter(variables)
        filled = tree.map(lambda leaf: next(rest) if is_castable(leaf) else leaf, (given, values))
        updates, new_state = tx.update(filled[0], state, filled[1])
        return [leaf for leaf in tensors(apply_updates(filled[1], updates), new_state) if leaf.dtype == torch.float64]

    total = lambda *variables: torch.stack([(leaf**2).sum() for leaf in new_params(*variables)]).sum()
    required = [leaf.clone().requires_grad_() for leaf in variables]
    assert torch.autograd.gradcheck(new_params, required)
    by_func = torch.func.grad(total, argnums=tuple(range(len(variables))))(*variables)
    by_autograd = torch.autograd.grad(total(*required), required, materialize_grads=True)
    torch.testing.assert_close(by_func, by_autograd)


@every_row
def test_the_gradient_through_a_zero_gradient_is_finite(row):
    tx, values = row.make(), params(torch.float64)
    state = tx.init(values)
    given = tree.map(lambda leaf: torch.zeros_like(leaf).requires_grad_() if is_castable(leaf) else None, values)
    updates, new_state = tx.update(given, state, values)
    outputs = [leaf for leaf in tensors(updates, new_state) if leaf.requires_grad]
    found = torch.autograd.grad([leaf.sum() for leaf in outputs], tensors(given), allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in found)
