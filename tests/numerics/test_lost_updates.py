"""Lost updates: half units in the last place by construction, and against additions in the weight's own dtype."""

import pytest
import torch
from torch.func import vmap

import fmp
from fmp.numerics.lost_updates import lost_updates
from tests.bits import same_bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_below_half_a_unit_is_lost(dtype):
    half = torch.finfo(dtype).eps / 2  # of 1; below 1 numbers lie twice as close
    params = torch.ones(6, dtype=dtype)
    updates = torch.tensor([half, half * 0.99, half * 1.01, -half / 2, -half * 0.51, 0.0], dtype=torch.float64)
    wide = updates if dtype in (torch.float32, torch.float64) else updates.float()
    lost = lost_updates({"w": params}, {"w": wide})
    if dtype != torch.float32:
        assert (lost.total.tolist(), lost.lost.tolist()) == ([5], [3])  # both ties go to 1, which is even
        torch.testing.assert_close(lost.overall, torch.tensor(0.6))
    else:  # the sum itself is in float32, and 1.01 halves is rounded up in it all the same
        assert (lost.total.tolist(), lost.lost.tolist()) == ([5], [3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_what_apply_updates_does_for_every_weight(dtype):
    params = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    updates = torch.randn(2**16) * 2.0**-9 * params.float().abs().nan_to_num(1.0, 1.0)
    after = fmp.optim.apply_updates({"w": params}, {"w": updates})["w"]
    counted = params.isfinite() & (updates != 0)
    lost = lost_updates({"w": params}, {"w": updates})
    assert lost.total.item() == int(counted.sum())
    assert lost.lost.item() == int((counted & (after == params)).sum())
    assert 0.1 < lost.overall < 0.9


def test_a_planted_fraction_is_measured_by_leaf_and_overall():
    params = {"a": torch.ones(100, dtype=torch.bfloat16), "b": torch.ones(300, dtype=torch.bfloat16)}
    updates = {"a": torch.full((100,), 1e-3), "b": torch.full((300,), 0.1)}
    updates["a"][:63] = 0.1
    lost = lost_updates(params, updates)
    torch.testing.assert_close(lost.by_leaf, torch.tensor([0.37, 0.0]))
    torch.testing.assert_close(lost.overall, torch.tensor(37 / 400))
    assert lost_updates(fmp.cast(params, torch.float32), updates).overall == 0


def test_what_is_no_update_is_not_counted():
    params = {
        "w": torch.tensor([1.0, 1.0, float("inf"), float("nan")]),
        "ids": torch.arange(2),
        "f": torch.ones(1),
        "n": None,
    }
    updates = {"w": torch.tensor([float("nan"), 1e-9, 1.0, 1.0]), "ids": None, "f": None, "n": None}
    lost = lost_updates(params, updates)
    assert lost.names == ("w",)
    assert (lost.total.tolist(), lost.lost.tolist()) == ([1], [1])
    assert lost_updates({}, {}).overall == 0
    assert lost_updates({"w": torch.ones(0)}, {"w": torch.ones(0)}).by_leaf.tolist() == [0]


def test_an_update_below_the_weights_range_is_lost_and_an_8_bit_one_counts():
    weights = torch.zeros(2, dtype=torch.float16)
    assert lost_updates([weights], [torch.tensor([1e-9, 1e-6], dtype=torch.float64)]).overall == 0.5
    eighth = torch.full((2,), 0.125).to(torch.float8_e4m3fn)
    assert lost_updates([torch.full((2,), 64.0).to(torch.float8_e4m3fn)], [eighth]).overall == 1


def test_members_and_compiled_calls_count_the_same():
    params = {"w": torch.randn(3, 50).bfloat16()}
    updates = {"w": torch.randn(3, 50) * torch.tensor([[1e-4], [1e-3], [1e-2]])}
    together = vmap(lost_updates)(params, updates)
    apart = [lost_updates({"w": params["w"][i]}, {"w": updates["w"][i]}).lost for i in range(3)]
    assert same_bits(together.lost, torch.stack(apart))
    assert together.overall.shape == (3,)
    assert together.overall[0] > together.overall[2]
    compiled = torch.compile(vmap(lost_updates), backend="aot_eager", fullgraph=True)(params, updates)
    assert same_bits(compiled, together)


def test_trees_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="params and updates differ in structure"):
        lost_updates({"w": torch.ones(1)}, {"v": torch.ones(1)})
    with pytest.raises(ValueError, match=r"a/w: the update is f32\[3\], the parameter f32\[2\]"):
        lost_updates({"a": {"w": torch.ones(2)}}, {"a": {"w": torch.ones(3)}})
