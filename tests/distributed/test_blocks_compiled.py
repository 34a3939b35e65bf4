"""Gathered blocks under torch.compile: the same gradients, the same collectives, and nothing compiled twice."""

import pytest

from tests.distributed import block_costs as costs
from tests.distributed.processes import run

EXACT = 1e-6
BLOCKS = 2


@pytest.mark.parametrize(
    ("how", "form", "gathers"),
    [
        ("step", "dtensor", BLOCKS),  # compiled whole: the compiler keeps what was gathered
        ("torch.func.grad", "local", BLOCKS),
        ("loss", "local", 2 * BLOCKS),  # the compiled backward pass gathers again
        ("function", "dtensor", 2 * BLOCKS),  # compiled without the gather
    ],
)
def test_compiled_gradients_are_those_of_one_process(how: str, form: str, gathers: int) -> None:
    for error, counts in run(2, costs.compiled, how, form):
        assert error < EXACT
        assert counts == {"allgather_into_tensor_coalesced_": gathers, "reduce_scatter_tensor_coalesced_": BLOCKS}


def test_one_compiled_block_takes_blocks_of_several_sizes() -> None:
    assert max(run(2, costs.compiled_for_many_sizes)) < EXACT
