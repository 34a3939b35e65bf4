"""A train step on 1, 2 and 4 processes is the train step on one."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import fmp
from fmp import optim
from tests.distributed import layout_cases as cases
from tests.distributed.processes import run

Tree = Any
ADAMW = functools.partial(optim.adamw, 1e-2)
HALF = functools.partial(fmp.opt_level, "O2", half_dtype=torch.bfloat16)
HYBRID = {"shape": (2, 2)}


def clipped_adamw() -> optim.GradientTransformation:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))


def larc_sgd() -> optim.GradientTransformation:
    return optim.chain(optim.larc(0.1), optim.sgd(0.1, momentum=0.9))


def parted() -> optim.GradientTransformation:
    parts = {"bias": optim.rmsprop(1e-2), "rest": optim.inject_hyperparams(optim.lamb)(learning_rate=1e-2)}
    return optim.partition(parts, lambda path, leaf: "bias" if "bias" in path else "rest")


def smoothed() -> optim.GradientTransformation:
    return optim.accumulate(optim.chain(optim.clip_by_value(0.01), optim.ema(0.9), optim.lion(1e-2)), 2)


def scheduled() -> optim.GradientTransformation:
    return optim.masked(optim.from_torch(torch.optim.AdamW, lr=1e-2), ["hidden", "norm*", "out*"])


OPTIMIZERS = {
    "sgd": functools.partial(optim.sgd, 0.1, momentum=0.9),
    "adam, fused": functools.partial(optim.adam, 1e-2, fused=True),
    "lion": functools.partial(optim.lion, 1e-3, weight_decay=0.1),
    "rmsprop": functools.partial(optim.rmsprop, 1e-2),
    "lamb": functools.partial(optim.lamb, 1e-2, weight_decay=0.1),
    "adafactor": functools.partial(optim.adafactor, 1e-2),
    "larc": larc_sgd,
    "clip": clipped_adamw,
    "partition": parted,
    "accumulate": smoothed,
    "from_torch": scheduled,
}


@functools.cache
def alone(case: str, *args: Any, **options: Any) -> Any:
    """What a case gives without a layout, in one process."""
    return run(1, functools.partial(getattr(cases, case), None, *args, **options))[0]


def assert_close(results: list[Any], expected: Any, tolerance: float = 1e-5, state_tolerance: float = 2e-6) -> None:
    """Checks that every rank has the expected losses, norms and state, and all of them the same bits."""
    assert_alike(results)
    found = results[0]
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=tolerance, atol=0.0)
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=tolerance, atol=1e-7)
    left, right = fmp.tree.flatten(found["state"]), fmp.tree.flatten(expected["state"])
    assert left[1] == right[1]
    for path, new, old in zip(fmp.tree.paths(found["state"]), left[0], right[0], strict=True):
        assert (new is None) == (old is None), path
        if new is not None:
            torch.testing.assert_close(
                new, old, rtol=1e-4, atol=state_tolerance, msg=lambda text, p=path: f"{p}: {text}"
            )


def assert_alike(results: list[Any]) -> None:
    """Checks that all ranks have the same bits, but not as many of them."""
    for found in results:
        assert_equal(found | {"bytes": 0}, results[0] | {"bytes": 0})


def assert_equal(found: Tree, expected: Tree) -> None:
    """Checks for equal bits."""
    left, right = fmp.tree.leaves(found), fmp.tree.leaves(expected)
    assert len(left) == len(right)
    for new, old in zip(left, right, strict=True):
        if isinstance(new, torch.Tensor):
            torch.testing.assert_close(new, old, rtol=0.0, atol=0.0, equal_nan=True)
        else:
            assert new == old


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_losses_and_state_do_not_depend_on_the_number_of_ranks(zero: int, ranks: int) -> None:
    options = {"clip_norm": 0.5, "ema": 0.9}
    expected = alone("train", ADAMW, **options)
    found = run(ranks, functools.partial(cases.train, zero, ADAMW, **options))
    assert_close(found, expected)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_mesh_may_share_out_and_repeat(zero: int) -> None:
    expected = alone("train", clipped_adamw)
    assert_close(run(4, functools.partial(cases.train, zero, clipped_adamw, how=HYBRID)), expected)


def test_every_optimizer_runs_on_what_is_shared_out() -> None:
    expected = run(1, cases.train_many, None, OPTIMIZERS)[0]
    found = run(4, cases.train_many, 1, OPTIMIZERS)
    for name in OPTIMIZERS:
        assert_close([result[name] for result in found], expected[name], state_tolerance=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_microbatches_are_reduced_once(zero: int) -> None:
    expected = alone("train", ADAMW)  # a mean of means of equal parts
    assert_close(run(2, functools.partial(cases.train, zero, ADAMW, accumulate=2)), expected)


def test_weights_of_microbatches_count_over_all_ranks() -> None:
    expected = alone("weighted", 4)
    assert_close(run(2, cases.weighted, 1, 2), expected)
    assert_close(run(4, cases.weighted, 0, 1), expected)


@pytest.mark.parametrize("form", ["f32", "remainder", "kahan", "stochastic"])
def test_masters_are_rounded_as_in_one_process(form: str) -> None:
    expected = alone("exact", form)
    for zero, ranks in ((0, 2), (1, 1), (1, 2), (1, 4)):
        for found in run(ranks, cases.exact, zero, form):
            assert_equal(found["state"], expected["state"])


def test_dropout_does_not_depend_on_the_number_of_ranks() -> None:
    expected = alone("noisy")
    assert not torch.equal(expected["aux"][0]["mask"], expected["aux"][1]["mask"])
    for zero, ranks in ((0, 2), (1, 4)):
        for found in run(ranks, cases.noisy, zero):
            assert_equal(found["aux"], expected["aux"])
            assert_equal(found["state"], expected["state"])


@pytest.mark.parametrize(("zero", "ranks"), [(0, 2), (1, 2), (1, 4), (3, 2)])
def test_an_overflow_on_one_rank_is_skipped_by_all(zero: int, ranks: int) -> None:
    bad = 2
    results = run(ranks, cases.overflowing, zero, bad)
    assert_alike(results)
    for found in results:
        assert [bool(skipped) for skipped in found["skipped"]] == [index == bad for index in range(4)]
        assert [float(scale) for scale in found["scales"]] == [256.0, 256.0, 256.0, 128.0]
        assert int(found["state"].step) == 3
        assert int(found["state"].skip_count) == 1


@pytest.mark.parametrize(("zero", "ranks"), [(0, 2), (1, 4)])
def test_several_losses_and_optimizers(zero: int, ranks: int) -> None:
    expected = alone("several")
    results = run(ranks, cases.several, zero)
    assert_alike(results)
    found = results[0]
    for what in ("losses", "norms"):
        torch.testing.assert_close(found[what], expected[what], rtol=1e-5, atol=1e-6)
    assert_equal(found["aux"][0]["first"].shape, expected["aux"][0]["first"].shape)
    torch.testing.assert_close(
        fmp.tree.leaves(found["state"].params), fmp.tree.leaves(expected["state"].params), rtol=1e-4, atol=2e-6
    )


@pytest.mark.parametrize(("zero", "ranks"), [(0, 2), (1, 4)])
def test_buffers_and_auxiliary_output_are_those_of_the_whole_batch(zero: int, ranks: int) -> None:
    expected = alone("sharing")
    for found in run(ranks, cases.sharing, zero):
        assert_equal(found["state"].buffers["count"], expected["state"].buffers["count"])
        assert_equal(found["state"].buffers["fixed"], expected["state"].buffers["fixed"])
        torch.testing.assert_close(found["state"].buffers["mean"], expected["state"].buffers["mean"])
        for new, old in zip(found["aux"], expected["aux"], strict=True):
            for name in ("hits", "rows", "signs", "place"):
                assert_equal(new[name], old[name])
            torch.testing.assert_close(new["number"], old["number"])
            torch.testing.assert_close(new["half"], old["half"], rtol=0.02, atol=0.0)


def test_auxiliary_output_of_microbatches_is_concatenated_within_each() -> None:
    whole = alone("noisy")["aux"][0]["rows"]
    found = run(2, cases.noisy, 0, 2)[0]["aux"][0]["rows"]
    assert found.shape == (2, 4)  # microbatch, rows of both ranks
    assert whole.shape == (8,)


def test_one_collective_gathers_one_returns_and_one_agrees() -> None:
    assert run(2, cases.collectives, 0)[0] == ["all_reduce_coalesced", "all_reduce_coalesced"]
    expected = ["all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "all_reduce_coalesced"]
    assert run(2, cases.collectives, 1)[0] == expected
    assert run(2, functools.partial(cases.collectives, 1, accumulate=2))[0] == expected


def test_a_rank_holds_its_part() -> None:
    whole = alone("train", ADAMW)["bytes"]
    halves = [found["bytes"] for found in run(2, functools.partial(cases.train, 1, ADAMW))]
    quarters = [found["bytes"] for found in run(4, functools.partial(cases.train, 1, ADAMW))]
    assert max(halves) < 0.6 * whole
    assert max(quarters) < 0.4 * whole  # 7 rows of the largest one: 2, 2, 2 and 1
    assert all(found["bytes"] == whole for found in run(2, functools.partial(cases.train, 0, ADAMW)))


@pytest.mark.parametrize("zero", [0, 1])
def test_parameters_are_added_in_the_middle(zero: int) -> None:
    expected = alone("extended")
    assert_close(run(2, cases.extended, zero), expected)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_donated_state_is_gone(zero: int) -> None:
    assert run(2, cases.donated, zero) == [["kept 0", "gone"]] * 2
    expected = alone("train", ADAMW)
    options = {"donate": True, "ema": None}
    assert_close(run(2, functools.partial(cases.train, zero, ADAMW, **options)), expected)


def test_a_replicated_state_is_saved_as_ever(tmp_path: Path) -> None:
    assert run(2, cases.saved, str(tmp_path / "state")) == [True, True]


def test_what_is_refused() -> None:
    messages = run(2, cases.refusals)[0]
    expected = [
        "ValueError: params/out.bias: the ranks have different values",
        "ValueError: the ranks have different trees of tensors",
        "ValueError: seed: the ranks have different values",
        "ValueError: a step with a layout cannot run inside torch.func transforms",
        "ValueError: w: a tensor on meta, but the mesh is on cpu",
        "TypeError: aux: it is bool[], which processes cannot share",
        "ValueError: zero must be 0, 1 or 3, got 2",
        "ValueError: zero=3 needs blocks",
        "ValueError: zero=1 takes no blocks",
        "ValueError: reduce_dtype must be a floating-point dtype",
        "TypeError: mesh must be a DeviceMesh",
        "TypeError: layout must be a fmp.distributed.Layout",
        "ValueError: microbatch_weight cannot be used with zero=3",
        "TypeError: state: params/hidden/bias is a DTensor, since this state belongs to a layout; pass layout=",
        "no error",
    ]
    assert len(messages) == len(expected)
    for message, beginning in zip(messages, expected, strict=True):
        assert message.startswith(beginning), message
