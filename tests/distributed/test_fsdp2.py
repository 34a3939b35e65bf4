"""FSDP2 as a source of gradients: two ranks train like one process."""

import pytest
import torch

from tests.distributed import fsdp2_cases as cases
from tests.distributed.processes import run


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_train_like_one_process(size: int) -> None:
    losses, params = cases.single(4)
    for found_losses, found in run(size, cases.steps, 4):
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found.keys() == params.keys()
        for name, param in params.items():
            torch.testing.assert_close(found[name], param, rtol=1e-4, atol=1e-5)
    assert losses[-1] != losses[0]


def test_it_is_a_pure_function() -> None:
    for found in run(2, cases.purity):
        assert found == {
            "same loss": True,
            "same gradients": True,
            "inputs unchanged": True,
            "no grad left": True,
            "none": ["frozen", "unused"],
            "placed": True,
            "aux": (2, False),
            "detached": True,
        }


def test_gradients_of_low_precision_are_reduced_in_full_precision() -> None:
    for dtypes, error in run(2, cases.low_precision):
        assert dtypes == "torch.float32"
        assert 0 < error < 0.1


def test_what_it_cannot_do_is_refused() -> None:
    for found in run(2, cases.errors):
        assert found["plain"].startswith("TypeError: module must be one that torch.distributed.fsdp.fully_shard was")
        assert found["missing"].startswith("KeyError: 'params: missing blocks.0.0.bias; missing blocks.0.0.weight")
        assert found["replicated"].startswith(
            "ValueError: params['blocks.0.0.weight'] is f32[9, 7], but f32[9, 7] placed"
        )
        assert found["double"].startswith("ValueError: params['blocks.0.0.weight'] is f64[9, 7] placed (Shard(dim=0),)")
        assert found["vector"].startswith("ValueError: loss_fn must return a scalar, got f32[7]")
        assert found["integer"].startswith("TypeError: loss_fn must return a real floating-point scalar, got i64[]")
        assert found["statistics"].startswith("ValueError: the module changed its buffer norm.")
        assert found["transform"].startswith("RuntimeError: FSDP2 works by hooks of autograd")


def test_gradients_of_ignored_parameters_are_averaged_too() -> None:
    for kept, error, nothing_shared in run(2, cases.ignored):
        assert kept == ["blocks.1.0.weight", "norm.weight"]
        assert error < 1e-6
        assert nothing_shared.startswith("TypeError: module has no parameter that FSDP2 shares out")


def test_gradients_that_would_not_be_reduced_are_refused() -> None:
    ways = ["requires_gradient_sync", "requires_all_reduce", "is_last_backward"]
    for *set_so, left, after in run(2, cases.without_sync):
        for way, message in zip(ways, set_so, strict=True):
            assert message.startswith(f"RuntimeError: the module is set by set_{way}(False) to leave gradients"), (
                message
            )
        assert left.startswith("RuntimeError: the module holds gradients of a backward pass without gradient sync")
        assert after == "nothing"


def test_gradients_that_would_not_be_means_are_refused() -> None:
    other = "RuntimeError: the module is set by set_gradient_divide_factor(3.0) to return gradients that are not means"
    for outer, right, inner, again in run(2, cases.other_divisors):
        assert outer.startswith(other)
        assert inner.startswith(other)
        assert right == again == "nothing"


def test_an_error_in_the_middle_of_a_pass_does_not_stay() -> None:
    assert run(2, cases.cut_short) == [[True] * 15] * 2


def test_an_error_that_torch_cannot_get_over_is_told() -> None:
    for first, *later in run(2, cases.no_way_back):
        assert first.startswith("IndexError")
        assert all(each.startswith("RuntimeError: an error has cut a pass of the module short") for each in later)
