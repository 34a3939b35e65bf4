"""What processes must agree on they do agree on, and what would give one of them a silent wrong number is refused."""

import math
from pathlib import Path

import pytest
import torch

from tests.distributed import guard_cases as cases
from tests.distributed.layout_cases import ROWS
from tests.distributed.processes import run
from tests.distributed.test_layout import assert_equal

UNEQUAL = "ValueError: batch: the ranks have different numbers of rows"
ROWS_OF = "is a LocalShard, of which other ranks have other rows: "


@pytest.mark.parametrize(("size", "loss_scale"), [(2.0**-30, 2.0**30), (2.0**17, 2.0**-4)])
def test_float16_sums_scaled_gradients(size: float, loss_scale: float) -> None:
    for found in run(2, cases.narrow_sums, size, loss_scale):
        for means, double in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(means, torch.full((3,), 2.0), rtol=2**-10, atol=0.0)
            assert double.tolist() == [-3.0]


def test_what_is_refused() -> None:
    for rank, messages in enumerate(run(2, cases.refusals)):
        expected = [
            "TypeError: hidden/bias is a DTensor, but with zero=0 every rank has all of each tensor",
            "TypeError: hidden/bias is a DTensor, but with zero=0",
            "TypeError: /2/first_moment/hidden/bias is a DTensor, but with zero=0",
            "ValueError: the layout's blocks name ['typo*'], but no leaf matches; the paths are 'hidden/bias'",
            f"{UNEQUAL}, this one {ROWS // 2 - rank}, so the mean",
            f"{UNEQUAL}, this one 9 of weights, {ROWS // 2 - rank} of xy/0",
            "ValueError: aux: aux has different shapes or dtypes on the ranks, this one's is f32[",
            "ValueError: aux: aux has different shapes or dtypes on the ranks, this one's is f32[",
            "ValueError: aux: aux has different shapes or dtypes on the ranks",
            f"TypeError: hidden/bias {ROWS_OF}the flag",
            f"TypeError: hidden/bias {ROWS_OF}the norm",
            f"TypeError: hidden/bias {ROWS_OF}the norm",
            f"TypeError: hidden/bias {ROWS_OF}the means of Adafactor",
            f"TypeError: hidden/bias {ROWS_OF}the norms of LAMB",
            f"TypeError: hidden/bias {ROWS_OF}the norms of LARC",
            f"TypeError: params/hidden/bias {ROWS_OF}a state",
            f"TypeError: params/hidden/bias {ROWS_OF}a state",
            f"TypeError: hidden/bias {ROWS_OF}the norm",
        ]
        assert len(messages) == len(expected)
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning), message


def test_no_step_overwrites_what_was_gathered() -> None:
    for found in run(2, cases.full_is_kept):
        for before, after in found:
            assert_equal(before, after)


def test_a_process_outside_of_the_mesh_is_told_so() -> None:
    *inside, outside = run(3, cases.outside)
    assert inside == ["no error"] * 2
    assert outside.startswith("ValueError: this process, rank 2, is not in the mesh, whose ranks are [0, 1]; make")


def test_parts_of_different_sizes_may_be_weighted() -> None:
    (expected,) = run(1, cases.uneven_but_weighted, None)
    for found in run(2, cases.uneven_but_weighted, 1):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("zero", [0, 1])
def test_buffers_are_the_same_on_a_rank_whose_microbatches_count_for_nothing(zero: int) -> None:
    results = run(4, cases.buffers_of_idle_ranks, zero)
    for found in results:
        assert_equal(found, results[0])
        buffers, _ = found
        assert int(buffers["count"]) == 1  # the second microbatch counts nowhere
        assert bool(buffers["seen"])
        assert buffers["mean"].tolist() == [0.75, 0.75]


def test_whole_numbers_are_added_up_exactly() -> None:
    for whole, real in run(2, cases.integers):
        assert [int(each) for each in whole] == [2**61 + 3, -(2**62) - 2, 201]
        assert [each.dtype for each in whole] == [torch.int64, torch.int64, torch.uint8]
        assert float(real) == 2**-30 + 0.5


def test_factored_moments_are_shared_out_like_their_parameters() -> None:
    rows = "{'matrix': f32[4,1], 'stack': f32[2,3,1]}"
    columns = "{'matrix': f32[1,3], 'stack': f32[2,1,5]}"
    assert run(2, cases.factored_moments) == [f"({rows}, {columns})"] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_travel_whatever_their_strides(size: int) -> None:
    for found in run(size, cases.odd_strides):
        for name, value, expected in found:
            torch.testing.assert_close(
                value, expected, rtol=1e-6, atol=0.0, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)])
def test_a_block_may_have_leaves_of_several_dtypes(shape: tuple[int, ...]) -> None:
    for found, expected in run(math.prod(shape), cases.two_dtypes, shape):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_belongs_to_a_process_group_that_is_gone_says_so(tmp_path: Path) -> None:
    for messages in run(2, cases.after_the_end, str(tmp_path)):
        assert len(messages) == 8
        for message in messages:
            assert message.startswith("RuntimeError: the process groups of the mesh have been destroyed since it was")


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    *others, last = run(4, cases.one_alone)
    assert [message[:12] for message in last] == ["KeyError: 'x"] * 6
    for rank, messages in enumerate(others):
        for one, again, everywhere in (messages[:3], messages[3:]):
            assert one == again
            assert one.startswith("ValueError: on rank 3 of 4: KeyError: 'xxx")
            assert len(one) < 1100
            assert everywhere == ("KeyError: 'short'" if rank == 0 else f"KeyError: '{'x' * 2000}'")
