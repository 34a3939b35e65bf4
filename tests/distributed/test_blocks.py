"""Blocks whose parameters are gathered for the call: the same gradients as in one process, by real processes."""

import re

import pytest
import torch

import fmp
from fmp.distributed import gathered_block, local_shards
from fmp.distributed.gathering import rows
from tests.distributed import block_cases as cases, block_costs as costs, block_model as model
from tests.distributed.processes import run

FORMS = ("dtensor", "local")
EXACT = 1e-6


@pytest.mark.parametrize("by", ["fmp", "grad", "vjp"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_are_those_of_one_process(size: int, form: str, by: str) -> None:
    assert max(run(size, cases.gradients, form, by)) < EXACT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by", ["fmp", "grad"])
def test_a_mesh_that_repeats_shards_averages_over_all_ranks(form: str, by: str) -> None:
    assert max(run(4, cases.gradients, form, by, True)) < EXACT


@pytest.mark.parametrize("form", FORMS)
def test_a_block_needs_three_collectives(form: str) -> None:
    blocks = 3
    for forward, both in run(2, costs.collectives, form, blocks):
        assert forward == {"allgather_into_tensor_coalesced_": blocks}
        assert both == {"allgather_into_tensor_coalesced_": 2 * blocks, "reduce_scatter_tensor_coalesced_": blocks}
    for _, both in run(2, costs.collectives, form, blocks, fmp.saveable.everything):
        assert both == {"allgather_into_tensor_coalesced_": blocks, "reduce_scatter_tensor_coalesced_": blocks}


def test_parameters_of_one_block_live_at_a_time() -> None:
    blocks, width, size = 8, 64, 2
    small = 8 * 4 * 2 * width  # bytes of activations, at most
    for found in run(size, costs.peaks, blocks, width):
        block = found["block"]
        grads = blocks * block // size
        late = block  # a thread of gloo lets go of what it has gathered a moment later
        assert block <= found["forward"] <= block + late + small
        # One block's parameters, its gradients, and those of all blocks that are scattered.
        assert found["gradient"] <= grads + 2 * block + late + small
        assert found["func.grad"] <= grads + 2 * block + late + small
        assert found["everything"] >= blocks * block


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_parameters_are_cast_before_they_are_gathered(name: str) -> None:
    short = {"bfloat16": "bf16", "float16": "f16"}[name]
    for arrived, error, of_one in run(2, costs.low_precision, name):
        assert arrived == f"{{'norm': {{'scale': f32[9], 'shift': f32[9]}}, 'qkv': {short}[27,9], 'ids': i64[9]}}"
        assert error < 1.5 * of_one
    sent = run(2, costs.low_precision_bytes, name)
    assert sent == [(half, 2 * half) for half, _ in sent]


@pytest.mark.parametrize("reduce_dtype", ["float16", "bfloat16", "float32"])
def test_large_gradients_are_averaged_without_overflow(reduce_dtype: str) -> None:
    for found in run(2, costs.reductions, reduce_dtype):
        assert found == pytest.approx([40000.0] * 4, rel=2**-8)


def test_second_derivatives() -> None:
    for reverse, forward in run(2, cases.second_derivatives):
        assert reverse < EXACT
        assert forward < EXACT


def test_gradients_of_each_sample_are_averaged_over_ranks() -> None:
    assert max(run(2, cases.per_sample)) < EXACT


def test_rows_of_jacobians() -> None:
    found = run(2, cases.rows_of_jacobians)
    rows = torch.cat([each["rows"] for each in found], 1)
    torch.testing.assert_close(rows, found[0]["expected"])
    for each in found:
        assert each["message"].startswith("gathered parameters cannot be differentiated with is_grads_batched=True")


def test_random_numbers_are_drawn_again() -> None:
    assert max(run(2, cases.drawn)) == 0


@pytest.mark.parametrize("form", FORMS)
def test_tied_frozen_and_unused_parameters(form: str) -> None:
    for found in run(2, cases.tied_and_frozen, form):
        assert found["error"] < EXACT
        # Three calls of blocks, gathered twice each; what is frozen adds no collective.
        assert found["counts"] == {"allgather_into_tensor_coalesced_": 6, "reduce_scatter_tensor_coalesced_": 3}


@pytest.mark.parametrize("form", FORMS)
def test_blocks_inside_of_remat_and_of_each_other(form: str) -> None:
    assert max(run(2, cases.nested, form)) < EXACT


def test_a_loss_that_is_not_finite_on_one_rank_keeps_nobody_waiting() -> None:
    assert run(2, cases.not_finite) == [[False, False], [False, False]]


def test_no_policy_keeps_what_was_gathered() -> None:
    for error, asked in run(2, costs.kept, "local"):
        assert error < EXACT
        assert "aten.mm.default" in asked
        assert not [op for op in asked if op.startswith("_c10d_functional")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 4])
def test_compressed_weights_travel_compressed(size: int, form: str) -> None:
    for found in run(size, costs.compressed, form):
        assert found["equal"]
        assert found["error"] < EXACT
        assert found["is_raw"] == [False, True]
        padding = 8 * 12  # an element a part, for those that no number of ranks divides
        assert found["nbytes"] <= size * found["sent"] <= found["nbytes"] + size * padding


@pytest.mark.parametrize("size", [1, 2])
def test_leaves_of_any_kind_arrive_as_they_were(size: int) -> None:
    for found in run(size, cases.other_forms):
        assert found == {"same": True, "grads": [True, True, True]}


def test_a_policy_that_casts_op_by_op_reaches_into_blocks() -> None:
    (one,) = run(1, cases.under_op_rules)
    assert 1e-4 < one < 0.2  # it did cast
    assert max(run(2, cases.under_op_rules)) < 1.5 * one


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("replicated", r"TypeError: w is a DTensor on \(Replicate\(\),\); a layout takes \(Shard\(dim=0\),\)"),
        ("columns", r"TypeError: w is a DTensor on \(Shard\(dim=1\),\)"),
        ("mesh", r"TypeError: w is a DTensor on another mesh"),
        ("rows", r"ValueError: w holds f32\[4,4\]; of \[4, 4\], rank \d of 4 has \[1, 4\]"),
        ("number", r"ValueError: w holds f32\[\]; of \[\], rank \d of 4 has nothing: it is one number, so pass it"),
        ("compiled", r"w is a DTensor, which torch.compile cannot differentiate"),
    ],
)
def test_shards_that_lie_in_another_way_are_refused(which: str, message: str) -> None:
    for found in run(4, cases.refused, which):
        assert re.search(message, found), found


def test_without_a_layout_a_block_is_remat() -> None:
    params, x = model.model_params(), model.batch()
    expected = fmp.grad(model.loss_with(fmp.remat(model.transformer)))(params, x)
    found = fmp.grad(model.loss_with(gathered_block(model.transformer)))(params, x)
    assert model.worst(found, expected) == 0
    kept = fmp.memory.peak(fmp.grad(model.loss_with(model.transformer)), params, x)
    assert fmp.memory.peak(fmp.grad(model.loss_with(gathered_block(model.transformer))), params, x) < kept


def test_without_a_layout_compressed_weights_are_decoded_and_parameters_cast() -> None:
    weights = {"w": torch.full((64, 64), 0.5).bfloat16(), "scale": torch.ones(64)}

    @gathered_block(layout=None, compute="bf16")
    def block(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return x @ params["w"] * params["scale"]

    out = block(fmp.df11.compress(weights, select=["w"]), torch.ones(2, 64, dtype=torch.bfloat16))
    assert torch.equal(out, torch.full((2, 64), 32.0).bfloat16())


def test_what_cannot_be_a_block_is_refused() -> None:
    with pytest.raises(TypeError, match=r"layout must be a fmp.distributed.Layout or None, got 3"):
        gathered_block(torch.sin, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"gathered_block transforms a function, got 3"):
        gathered_block(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"saveable must be"):
        gathered_block(torch.sin, saveable=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"compute must be a floating-point dtype"):
        gathered_block(torch.sin, compute=torch.int32)
    assert local_shards({"w": 1, "x": None}) == {"w": 1, "x": None}


@pytest.mark.parametrize("count", range(10))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_rows_are_those_of_torch_chunk(count: int, size: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(count).chunk(size)] if count else []
    chunks += [[]] * (size - len(chunks))
    found = [rows(count, size, rank) for rank in range(size)]
    assert [list(range(start, start + length)) for start, length in found] == chunks
