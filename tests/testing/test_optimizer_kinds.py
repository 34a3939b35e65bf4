"""What check_optimizer must not take for a fault: masks that are trees, parts of a chain, parameters of any kind."""

import pytest
import torch

from fmp import optim, tree
from fmp.testing import check_optimizer
from tests.testing.broken_optimizers import GOOD, cut_off, refusing_empty, unnamed
from tests.versions import BEFORE_2_13, differentiates_in_inference_mode

TREE = {"a": torch.ones(2), "b": {"c": torch.ones(2, 3), "d": torch.ones(())}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.adamw(0.1, mask={"a": True, "b": False}),
        lambda: optim.chain(optim.freeze({"a": True, "b": {"c": False, "d": True}}), optim.adam(0.1)),
        lambda: optim.partition({"x": optim.adam(0.1), "y": optim.sgd(0.1)}, {"a": "x", "b": {"c": "y", "d": "x"}}),
        lambda: optim.chain(optim.masked(optim.clip_by_global_norm(0.1), {"a": True, "b": False}), optim.lion(0.1)),
    ],
    ids=["decay", "freeze", "partition", "masked"],
)
def test_masks_and_labels_may_be_trees(make):
    check_optimizer(make(), params=TREE, decays=True, compile=False, examples=5)


def test_a_mask_that_is_a_tree_excuses_no_failure_on_holes():
    def update(grads, state, params):
        updates, state = masked.update(grads, state, params)
        largest = max(leaf.numel() for leaf in tree.leaves(grads) if leaf is not None)
        return tree.map(lambda leaf: None if leaf is None else leaf / largest, updates), state

    masked = optim.masked(optim.ema(0.9), {"a": True, "b": False})
    with pytest.raises(AssertionError, match=r"empty_trees_work is broken[^\n]*\nValueError: max\(\)"):
        check_optimizer(masked._replace(update=update), params=TREE, invariants=["empty_trees_work"])


def test_only_masks_excuse_a_refusal():
    with pytest.raises(AssertionError, match=r"empty_trees_work is broken[^\n]*\nValueError: no parameters"):
        check_optimizer(refusing_empty(), invariants=["empty_trees_work"])


@pytest.mark.parametrize(
    "make",
    [
        optim.chain,
        lambda: optim.masked(optim.ema(0.9), ["*.weight"]),
        lambda: unnamed(fading=False),
        lambda: optim.partition(
            {"matrix": unnamed(fading=False), "other": optim.adam(lambda count: 0.1 / (count + 1))},
            lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
        ),
    ],
    ids=["empty chain", "masked", "unnamed", "unnamed in a group"],
)
def test_parts_of_all_kinds_pass(make):
    check_optimizer(make(), compile=False, examples=5)


OTHER_PARAMETERS = {
    "no entries": {"w": torch.zeros(0)},
    "single": torch.ones(3),
    "complex": {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex64)},
    "number": {"w": torch.ones(2), "n": 3, "x": 0.5},
    "text": {"w": torch.ones(2), "name": "encoder"},
}


@pytest.mark.parametrize("name", OTHER_PARAMETERS)
def test_parameters_of_other_kinds(name):
    check_optimizer(optim.adam(0.1), params=OTHER_PARAMETERS[name], compile=False, examples=5)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=differentiates_in_inference_mode)]
)
def test_the_modes_of_the_caller_do_not_matter(mode):
    with mode():
        check_optimizer(optim.adam(0.1), compile=False, examples=5)
        with pytest.raises(AssertionError, match="update_is_differentiable"):
            check_optimizer(cut_off(), invariants=["update_is_differentiable"])


UNSIGNED = [
    pytest.param(dtype, marks=pytest.mark.skipif(BEFORE_2_13, reason="torch.where takes these since torch 2.13"))
    for dtype in (torch.uint16, torch.uint32, torch.uint64)
]


@pytest.mark.parametrize("dtype", [*UNSIGNED, torch.bool, torch.complex64])
def test_state_of_any_dtype_travels(dtype):
    def init(params):
        return torch.ones(2).to(dtype), GOOD.init(params)

    def update(grads, state, params):
        updates, inner = GOOD.update(grads, state[1], params)
        return updates, (state[0].clone(), inner)

    check_optimizer(optim.GradientTransformation(init, update), compile=False, examples=5)
