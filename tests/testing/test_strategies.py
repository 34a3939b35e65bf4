import math

import pytest
import torch
from hypothesis import find, given, settings, strategies as st

from fmp import tree
from fmp.dtypes import is_castable
from fmp.scaling import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from fmp.testing import strategies

LIKE = {
    "layer": [torch.zeros(2, 3, dtype=torch.float16), torch.zeros((), dtype=torch.bfloat16)],
    "empty": torch.zeros(0),
    "ids": torch.arange(2),
    "hole": None,
}
FLOATING = ["empty", "layer/0", "layer/1"]


def reachable(strategy, condition):
    """Says whether a strategy draws something that meets a condition; `find` raises if it does not."""
    return condition(find(strategy, condition, settings=settings(max_examples=5000, derandomize=True, database=None)))


def nonfinite_paths(grads):
    return [path for path, grad in tree.items(grads) if grad is not None and not grad.isfinite().all()]


@pytest.mark.parametrize("dtype", strategies.DTYPES)
@pytest.mark.parametrize("edge", ["zero", "-zero", "subnormal", "largest subnormal", "normal", "max", "-max"])
def test_values_reach_the_edges(dtype, edge):
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    wanted = {
        "zero": 0.0,
        "-zero": -0.0,
        "subnormal": subnormal,
        "largest subnormal": info.smallest_normal - subnormal,
        "normal": info.smallest_normal,
        "max": info.max,
        "-max": -info.max,
    }[edge]

    def is_wanted(tensor):
        return tensor.tolist() == [wanted] and math.copysign(1.0, tensor.item()) == math.copysign(1.0, wanted)

    assert reachable(strategies.tensors([dtype], [(1,)]), is_wanted)


@given(strategies.tensors())
def test_tensors_are_finite_and_floating(tensor):
    assert tensor.dtype in strategies.DTYPES
    assert tuple(tensor.shape) in strategies.SHAPES
    assert tensor.isfinite().all()


@pytest.mark.parametrize("shape", strategies.SHAPES)
def test_tensors_have_every_shape(shape):
    assert reachable(strategies.tensors(), lambda tensor: tensor.shape == shape)


@pytest.mark.parametrize("dtype", strategies.DTYPES)
def test_tensors_have_every_dtype(dtype):
    assert reachable(strategies.tensors(), lambda tensor: tensor.dtype == dtype)


def test_large_tensors_are_filled_too():
    large = find(strategies.tensors([torch.float32], [(50, 50)]), lambda tensor: bool((tensor != 0).any()))
    assert large.shape == (50, 50)


@pytest.mark.parametrize("kind", [dict, list, tuple, strategies.Node, int, type(None)])
def test_trees_have_every_kind_of_node(kind):
    assert reachable(strategies.trees(st.just(1)), lambda drawn: type(drawn) is kind)
    inner = lambda drawn: isinstance(drawn, dict) and any(type(value) is kind for value in drawn.values())
    assert reachable(strategies.trees(st.just(1)), inner)


@given(strategies.trees(st.integers()))
def test_trees_are_trees(drawn):
    assert all(leaf is None or isinstance(leaf, int) for leaf in tree.leaves(drawn))
    leaves = tree.leaves(tree.unflatten(tree.structure(drawn), tree.leaves(drawn)))
    assert leaves == tree.leaves(drawn)


@given(strategies.params([torch.bfloat16]))
def test_params_have_the_dtypes_asked_for(params):
    assert isinstance(params, dict)
    assert all(leaf is None or leaf.dtype in (torch.bfloat16, torch.int64) for leaf in tree.leaves(params))


@pytest.mark.parametrize(
    "condition",
    [
        lambda leaves: not leaves,
        lambda leaves: None in leaves,
        lambda leaves: any(leaf is not None and leaf.dtype == torch.int64 for leaf in leaves),
        lambda leaves: any(is_castable(leaf) and leaf.ndim == 0 for leaf in leaves),
        lambda leaves: len({leaf.dtype for leaf in leaves if is_castable(leaf)}) > 1,
    ],
    ids=["empty", "hole", "integer", "scalar", "mixed"],
)
def test_params_are_of_all_kinds(condition):
    assert reachable(strategies.params(), lambda params: condition([*map(tensor_or_none, tree.leaves(params))]))


def tensor_or_none(leaf):
    assert leaf is None or isinstance(leaf, torch.Tensor)
    return leaf


@given(strategies.gradients(LIKE))
def test_gradients_fit_their_tree(grads):
    assert tree.structure(grads) == tree.structure(LIKE)
    assert nonfinite_paths(grads) == []
    for (path, grad), leaf in zip(tree.items(grads), tree.leaves(LIKE), strict=True):
        if grad is not None:
            assert (path in FLOATING, grad.dtype, grad.shape) == (True, leaf.dtype, leaf.shape)


@given(strategies.gradients(LIKE, holes=False))
def test_gradients_without_holes(grads):
    assert [path for path, grad in tree.items(grads) if grad is not None] == FLOATING


@given(strategies.gradients(LIKE, nonfinite=True))
def test_gradients_that_are_not_finite(grads):
    assert set(nonfinite_paths(grads)) & {"layer/0", "layer/1"}


def test_gradients_that_may_be_finite_or_not():
    maybe = strategies.gradients(LIKE, nonfinite=None)
    assert reachable(maybe, lambda grads: bool(nonfinite_paths(grads)))
    assert reachable(maybe, lambda grads: not nonfinite_paths(grads) and grads["layer"][0] is not None)
    assert reachable(maybe, lambda grads: grads["layer"][0] is None)


@given(strategies.gradients(LIKE, nonfinite={"layer/0": -math.inf}))
def test_gradients_with_a_chosen_value_at_a_chosen_leaf(grads):
    assert nonfinite_paths(grads) == ["layer/0"]
    assert (grads["layer"][0] == -math.inf).sum() == 1


def test_places_that_cannot_be_are_refused():
    with pytest.raises(KeyError, match="'layer/9' is not the path of a floating-point leaf; there are"):
        strategies.gradients(LIKE, nonfinite={"layer/9": math.inf})
    with pytest.raises(KeyError, match="'ids' is not the path"):
        strategies.gradients(LIKE, nonfinite={"ids": math.inf})
    with pytest.raises(ValueError, match="'empty' has no elements"):
        strategies.gradients(LIKE, nonfinite={"empty": math.inf})
    with pytest.raises(ValueError, match=r"needs a floating-point leaf with elements, got \{'e': f32\[0\]\}"):
        strategies.gradients({"e": torch.zeros(0)}, nonfinite=True)
    with pytest.raises(ValueError, match=r"dtype must be one of \['f16', 'bf16', 'f32', 'f64'\], got torch.int64"):
        strategies.values(torch.int64)


def test_one_place_is_enough():
    assert reachable(strategies.gradients({"w": torch.zeros(())}, nonfinite=True), lambda grads: grads["w"].isnan())


@given(strategies.loss_scales())
def test_loss_scales_are_valid_states(scaler):
    assert isinstance(scaler, LossScale)
    if isinstance(scaler, DynamicLossScale):
        assert scaler.min_scale <= float(scaler.loss_scale) <= scaler.max_scale
        assert 0 <= int(scaler.growth_count) < scaler.growth_interval
        assert (scaler.loss_scale.dtype, scaler.growth_count.dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize(
    "condition",
    [
        lambda scaler: isinstance(scaler, NoOpLossScale),
        lambda scaler: isinstance(scaler, StaticLossScale),
        lambda scaler: float(scaler.loss_scale) == getattr(scaler, "min_scale", None),
        lambda scaler: float(scaler.loss_scale) == getattr(scaler, "max_scale", None),
        lambda scaler: getattr(scaler, "growth_interval", 0) == 2000 and int(scaler.growth_count) == 1999,
    ],
    ids=["no-op", "static", "smallest", "largest", "about to grow"],
)
def test_loss_scales_at_the_edges(condition):
    assert reachable(strategies.loss_scales(), condition)


@given(st.integers(0, 12).flatmap(lambda n: st.tuples(st.just(n), strategies.histories(n))))
def test_histories_have_the_length_asked_for(drawn):
    length, history = drawn
    assert len(history) == length
    assert all(type(finite) is bool for finite in history)


@pytest.mark.parametrize("bad", [0, 1, 29, 30])
def test_histories_of_all_and_of_all_but_one(bad):
    assert reachable(strategies.histories(30), lambda history: history.count(False) == bad)
