"""The one-pass form: what `update` and `apply_updates` give, up to rounding, and nothing else touched."""

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fmp import _compat, optim, tree
from fmp.dtypes import is_castable
from fmp.optim import schedules
from fmp.optim.fused import stacked
from fmp.testing import strategies
from tests.bits import same_bits
from tests.optim.battery import grads, params

MAKE: dict[str, Any] = {
    "sgd": lambda **fused: optim.sgd(0.1, **fused),
    "sgd momentum": lambda **fused: optim.sgd(0.1, momentum=0.9, weight_decay=0.1, **fused),
    "sgd nesterov": lambda **fused: optim.sgd(torch.tensor(0.1), momentum=0.9, nesterov=True, **fused),
    "adam": lambda **fused: optim.adam(0.1, weight_decay=0.1, **fused),
    "adamw": lambda **fused: optim.adamw(schedules.linear(0.2, 0.1, transition_steps=5), **fused),
    "adamw mask": lambda **fused: optim.adamw(0.1, weight_decay=0.5, mask=["*.weight"], **fused),
}
every = pytest.mark.parametrize("name", MAKE)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make(name) -> Any:
    return MAKE[name](fused=True)


def by_update(tx, g, state, p):
    updates, state = tx.update(g, state, p)
    return optim.apply_updates(p, updates), state


def close(found, expected):
    assert tree.structure(found) == tree.structure(expected)
    pairs = zip(tree.leaves(found), tree.leaves(expected), strict=True)
    for a, b in ((a, b) for a, b in pairs if b is not None):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, equal_nan=True)


@every
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_gives_what_update_gives(name, dtype, donate):
    tx, values = MAKE[name](fused=True), params(dtype)
    state, found_state, found = tx.init(values), tx.init(values), copy.deepcopy(values)
    for index in range(4):
        g = grads(values, None if index % 2 else torch.float32)
        if index == 2:
            g["layer"]["bias"] = None
        values, state = by_update(tx, g, state, values)
        found, low, found_state = tx.fused(g, found_state, found, donate=donate)
        assert low is None
        close((found, found_state), (values, state))


@pytest.mark.parametrize(
    ("tx", "cls", "options"),
    [
        (optim.sgd(0.1, fused=True), torch.optim.SGD, {}),
        (
            optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ),
        (optim.adam(0.1, weight_decay=0.1, fused=True), torch.optim.Adam, {"weight_decay": 0.1}),
        (optim.adamw(0.1, fused=True), torch.optim.AdamW, {}),
    ],
    ids=["sgd", "nesterov", "adam", "adamw"],
)
def test_it_is_what_torch_computes(tx: Any, cls, options):
    values = {"w": torch.randn(40, 7), "b": torch.randn(5)}
    leaves = [torch.nn.Parameter(leaf.clone()) for leaf in values.values()]
    rival: Any = cls(leaves, lr=0.1, fused=True, **options)
    state = tx.init(values)
    for _ in range(4):
        g = {key: torch.randn_like(leaf) for key, leaf in values.items()}
        values, _, state = tx.fused(g, state, values)
        for leaf, grad in zip(leaves, g.values(), strict=True):
            leaf.grad = grad.clone()
        rival.step()
        assert all(torch.equal(leaf, new) for leaf, new in zip(leaves, values.values(), strict=True))


@every
def test_without_donation_nothing_is_changed_or_shared(name):
    tx, values = MAKE[name](fused=True), params()
    state, g = tx.init(values), grads(values)
    before = copy.deepcopy((values, state, g))
    found = tx.fused(g, state, values)
    assert same_bits((values, state, g), before)
    addresses = [leaf.data_ptr() for leaf in tree.leaves((found, g, state, values)) if is_castable(leaf)]
    assert len(set(addresses)) == len(addresses)


@every
def test_with_donation_parameters_and_moments_are_overwritten(name):
    tx, values = MAKE[name](fused=True), params()
    state = tx.init(values)
    found, _, found_state = tx.fused(grads(values), state, values, donate=True)
    for old, new in zip(tree.leaves((values, state)), tree.leaves((found, found_state)), strict=True):
        assert new is old or not is_castable(old)


@every
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_changes_nothing(name, dtype, donate):
    tx, values = MAKE[name](fused=True), params(dtype)
    values, _, state = tx.fused(grads(values), tx.init(values), values)
    before = copy.deepcopy((values, state))
    bad = tree.map(lambda grad: None if grad is None else torch.full_like(grad, float("nan")), grads(values))
    found, low, found_state = tx.fused(
        bad, state, values, finite=torch.tensor(False), cast_dtype=torch.bfloat16, donate=donate
    )
    assert same_bits((found, found_state), before)
    assert same_bits(low, tree.cast(before[0], torch.bfloat16))
    good = grads(values)
    taken = tx.fused(good, *before[::-1], finite=torch.tensor(True))
    assert same_bits(taken, tx.fused(good, *before[::-1]))


@every
@pytest.mark.parametrize("donate", [False, True])
def test_gradients_are_unscaled_and_clipped_first(name, donate):
    tx, values = MAKE[name](fused=True), params()
    state, g = tx.init(values), grads(values, torch.float16)
    wide = tree.map(lambda grad: None if grad is None else grad.float() * 0.25 * 0.5, g)
    expected, expected_state = by_update(tx, wide, state, values)
    found, low, found_state = tx.fused(
        g, state, values, inv_scale=torch.tensor(0.25), clip=torch.tensor(0.5), cast_dtype=torch.float16, donate=donate
    )
    close((found, found_state), (expected, expected_state))
    assert same_bits(low, tree.cast(found, torch.float16))


def test_layouts_may_differ():
    tx = make("adam")
    p = torch.randn(6, 4)
    for given_p in (
        p.t(),
        p[:, ::2].t(),
        p[:, :1].expand(6, 4).t(),
        p.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ):
        state = tx.init(given_p)
        g = torch.randn_like(given_p, memory_format=torch.contiguous_format)
        expected = by_update(tx, g, state, given_p)
        for donate in (False, True):
            found, _, found_state = tx.fused(
                g, copy.deepcopy(state), given_p.clone() if donate else given_p, donate=donate
            )
            close((found, found_state), expected)


def test_memory_that_is_shared_is_not_overwritten():
    tx = make("sgd momentum")
    whole = torch.randn(8)
    for values, g in (
        ({"a": whole, "b": whole}, {"a": torch.ones(8), "b": torch.zeros(8)}),
        ({"a": whole[:4], "b": whole[2:6]}, {"a": torch.ones(4), "b": torch.zeros(4)}),
        ({"a": whole[::2], "b": whole[1::2]}, {"a": torch.ones(4), "b": torch.zeros(4)}),
        ({"a": whole[:4]}, {"a": whole[3:7]}),
    ):
        state = tx.init(values)
        before = whole.clone()
        expected = by_update(tx, g, state, values)
        found, _, found_state = tx.fused(g, state, values, donate=True)
        assert torch.equal(whole, before)
        close((found, found_state), expected)


def test_parts_of_one_buffer_are_overwritten_in_their_places():
    tx = make("sgd momentum")
    whole = torch.randn(12)
    values, g = {"a": whole[:4], "b": whole[4:8]}, {"a": whole[8:].clone(), "b": None}
    state, rest = tx.init(values), whole[4:].clone()
    expected = by_update(tx, g, state, values)
    found = tx.fused(g, state, values, donate=True)
    close(found[::2], expected)
    assert torch.equal(whole[:4], expected[0]["a"])
    assert torch.equal(whole[4:], rest)


def test_memory_from_elsewhere_that_overlaps_is_not_overwritten():
    tx = make("sgd")
    whole = np.ones(8, dtype=np.float32)
    values = {"a": torch.from_numpy(whole[:5]), "b": torch.from_numpy(whole[3:])}
    g = {"a": torch.ones(5), "b": torch.ones(5)}
    found, _, _ = tx.fused(g, tx.init(values), values, donate=True)
    assert (whole == 1).all()
    close(found, by_update(tx, g, tx.init(values), values)[0])


def test_a_learning_rate_that_autograd_follows_gets_update():
    rate = torch.tensor(0.1, requires_grad=True)
    for tx in (optim.sgd(rate, fused=True), optim.adamw(rate, fused=True)):
        values = {"w": torch.ones(3)}
        assert tx.fused is not None
        found, _, _ = tx.fused({"w": torch.ones(3)}, tx.init(values), values)
        (slope,) = torch.autograd.grad(found["w"].sum(), rate)
        assert slope < 0


def test_factors_may_be_numbers_and_have_no_dimensions():
    tx, values = make("sgd"), {"w": torch.ones(3)}
    state, g = tx.init(values), {"w": torch.ones(3)}
    found = tx.fused(g, state, values, inv_scale=0.5, clip=0.5)
    assert same_bits(found, tx.fused(g, state, values, inv_scale=torch.tensor(0.5), clip=torch.tensor(0.5)))
    for name in ("inv_scale", "clip"):
        with pytest.raises(ValueError, match=rf"{name} must be a number or a 0-dim tensor, got f32\[3\]"):
            tx.fused(g, state, values, **{name: torch.ones(3)})
        with pytest.raises(TypeError, match=f"{name} must be real"):
            tx.fused(g, state, values, **{name: torch.tensor(1j)})


@every
@pytest.mark.parametrize("empty", [{}, (), (None,), {"w": torch.zeros(0, 3)}, {"ids": torch.arange(2)}], ids=str)
def test_trees_with_nothing_in_them(name, empty):
    tx = make(name if name != "adamw mask" else "adamw")
    g = tree.map(lambda leaf: leaf if is_castable(leaf) else None, empty)
    found, _, state = tx.fused(g, tx.init(empty), empty)
    close(found, empty)
    assert int(state.count) == 1


@every
def test_a_transform_a_compiler_and_autograd_get_update(name, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a kernel ran")

    for kernel in ("fused_adam_", "fused_adamw_", "fused_sgd_"):
        monkeypatch.setattr(_compat, kernel, refuse)
    tx = make(name)
    values = {"layer": {"weight": torch.randn(3, 2)}}
    state, g = tx.init(values), grads(values)
    expected, expected_state = by_update(tx, g, state, values)
    with pytest.raises(AssertionError, match="a kernel ran"):
        tx.fused(g, state, values)

    batched = tree.map(lambda leaf: None if leaf is None else leaf.expand(2, *leaf.shape), (g, state, values))
    found, _, found_state = torch.func.vmap(lambda *args: tx.fused(*args, cast_dtype=torch.float64))(*batched)
    close(tree.map(lambda leaf: None if leaf is None else leaf[1], (found, found_state)), (expected, expected_state))

    def total(p):
        return tx.fused(g, state, p, finite=torch.tensor(True))[0]["layer"]["weight"].sum()

    def expected_total(p):
        return by_update(tx, g, state, p)[0]["layer"]["weight"].sum()

    torch.testing.assert_close(torch.func.grad(total)(values), torch.func.grad(expected_total)(values))
    required = {"layer": {"weight": values["layer"]["weight"].clone().requires_grad_()}}
    (by_autograd,) = torch.autograd.grad(total(required), [required["layer"]["weight"]])
    torch.testing.assert_close(by_autograd, torch.func.grad(total)(values)["layer"]["weight"])

    compiled = torch.compile(tx.fused, backend="aot_eager", fullgraph=True)
    close(compiled(g, state, values)[::2], (expected, expected_state))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_tree(data):
    values = data.draw(strategies.params((torch.float32, torch.float64, torch.bfloat16)))
    g = data.draw(strategies.gradients(values, nonfinite=None))
    name = data.draw(st.sampled_from([name for name in MAKE if name != "adamw mask"]))
    tx = make(name)
    state = tx.init(values)
    expected = by_update(tx, g, state, values)
    before = copy.deepcopy((values, state, g))
    found, _, found_state = tx.fused(g, state, values)
    assert same_bits((values, state, g), before)
    assert tree.describe((found, found_state)) == tree.describe(expected)
    skipped, _, kept = tx.fused(g, state, values, finite=torch.tensor(False), donate=True)
    assert same_bits((skipped, kept), before[:2])


def test_errors_name_what_a_kernel_does_not_take():
    with pytest.raises(TypeError, match=r"fused=True takes b1 as a number, got f32\[\]; use fused=False"):
        optim.adam(0.1, b1=torch.tensor(0.9), fused=True)
    with pytest.raises(TypeError, match=r"fused=True takes momentum as a number, got f32\[\]"):
        optim.sgd(0.1, momentum=torch.tensor(0.9), fused=True)
    with pytest.raises(ValueError, match=r"fused=True has no dampening, got dampening=0\.5"):
        optim.sgd(0.1, momentum=0.9, dampening=0.5, fused=True)
    with pytest.raises(TypeError, match="finite must be a boolean tensor"):
        make("sgd").fused({}, (), {}, finite=True)
    values = {"ids": torch.arange(3)}
    tx = make("sgd")
    with pytest.raises(TypeError, match=r"ids: a leaf i64\[3\] has the gradient f32\[3\]"):
        tx.fused({"ids": torch.ones(3)}, tx.init(values), values)


@every
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (5, 1), (0,)])
def test_a_kernel_never_sees_another_shape(name, donate, shape):
    tx = make(name)
    values = {"layer": {"weight": torch.zeros(5)}}
    state = tx.init(values)
    with pytest.raises(ValueError, match=r"layer/weight: the gradient is f32\[.*\], the parameter f32\[5\]; both must"):
        tx.fused({"layer": {"weight": torch.ones(shape)}}, state, values, donate=donate)
    if tree.describe(state) != tree.describe(make("sgd").init(values)):
        foreign = tx.init({"layer": {"weight": torch.zeros(shape)}})
        with pytest.raises(
            ValueError, match=r"layer/weight: the moment is f32\[.*\], the parameter f32\[5\]; both must"
        ):
            tx.fused({"layer": {"weight": torch.ones(5)}}, foreign, values, donate=donate)
    assert not values["layer"]["weight"].any()


@every
@pytest.mark.parametrize("run", ["update", "fused"])
def test_none_does_not_stand_for_a_subtree(name, run):
    tx = MAKE[name if name != "adamw mask" else "adamw"](fused=True)
    values = {"b": {"x": torch.ones(3), "y": torch.ones(2)}, "c": torch.ones(2)}
    with pytest.raises(ValueError, match=r"^b: grads has this leaf and params has not"):
        getattr(tx, run)({"b": None, "c": torch.ones(2)}, tx.init(values), values)


def test_nothing_is_overwritten_before_an_argument_is_refused():
    tx, values = make("sgd"), {"a": torch.ones(2)}
    for options, message in (({"cast_dtype": torch.int32}, "cast needs"), ({"donate": "no"}, "donate must be")):
        with pytest.raises(TypeError, match=message):
            tx.fused({"a": torch.ones(2)}, tx.init(values), values, **{"donate": True, **options})
        assert torch.equal(values["a"], torch.ones(2))


@every
def test_zeros_without_memory_get_update(name):
    tx = MAKE[name if name != "adamw mask" else "adamw"](fused=True)
    values = {"a": torch.ones(5), "b": torch.ones(2, dtype=torch.float64)}
    g = {"a": torch.ones(5), "b": cast(Any, torch)._efficientzerotensor(2, dtype=torch.float64)}
    state = tx.init(values)
    expected = by_update(tx, g, state, values)
    found, _, found_state = tx.fused(g, state, copy.deepcopy(values), donate=True)
    close((found, found_state), expected)


@pytest.mark.parametrize(
    ("grad", "kind"),
    [(1.0, "a float"), (np.ones(2), "a ndarray"), (torch.ones(2).to_sparse(), "a tensor with layout torch.sparse_coo")],
    ids=["number", "numpy", "sparse"],
)
@pytest.mark.parametrize("run", ["update", "fused", "unscaled"])
def test_a_gradient_that_is_no_dense_tensor_is_named(grad, kind, run):
    tx, values = make("adamw"), {"layer": [torch.ones(2)]}
    options = {"inv_scale": 0.5} if run == "unscaled" else {}
    with pytest.raises(TypeError, match=f"^layer/0: a gradient must be a dense tensor or None, got {kind}"):
        getattr(tx, "fused" if run == "unscaled" else run)({"layer": [grad]}, tx.init(values), values, **options)


def test_a_learning_rate_inside_of_a_parameter_is_not_overwritten():
    whole = torch.full((6,), 0.1)
    values = {"a": whole, "z": torch.ones(2, dtype=torch.float64)}
    tx, g = optim.sgd(whole[5], fused=True), {"a": torch.ones(6), "z": torch.ones(2, dtype=torch.float64)}
    expected, _ = by_update(tx, g, tx.init(values), values)
    assert tx.fused is not None
    found, _, _ = tx.fused(g, tx.init(values), values, donate=True)
    close(found, expected)


@pytest.mark.parametrize(
    "counts",
    [
        lambda vector: list(vector.unbind()),
        lambda vector: list(vector.flip(0).unbind()),
        lambda vector: list(vector.unbind())[::-1],
        lambda vector: list(vector.unbind())[:-1],
        lambda vector: [vector[0], vector[0], vector[2], vector[3]],
        lambda vector: [vector[0].view(torch.float32)] * 4,
        lambda vector: list(vector.view(torch.float32).unbind()),
        lambda vector: [*vector.unbind()[:3], torch.tensor(7, dtype=torch.int32)],
        lambda vector: list(vector[::2].unbind()),
        lambda vector: [torch.tensor(7, dtype=torch.int32)],
    ],
)
def test_counts_of_any_origin_are_stacked(counts):
    found = counts(torch.tensor([3, 1, 4, 5], dtype=torch.int32))
    expected = torch.tensor([count.item() for count in found], dtype=found[0].dtype)
    assert same_bits(stacked(found), expected)
