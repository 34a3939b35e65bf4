"""Columns: what is picked goes back to its place, ages count what is not skipped, and layouts follow others."""

import pytest
import torch
from hypothesis import given, strategies as st

from fmp.optim.columns import advance, chosen, copies, laid_out_as, put

LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@given(st.lists(st.integers()), st.data())
def test_what_is_picked_and_put_back_changes_nothing_else(column, data):
    places = sorted(data.draw(st.sets(st.sampled_from(range(len(column)))) if column else st.just(set())))
    changed = list(column)
    put([entry + 1 for entry in chosen(column, places)], changed, places)
    assert changed == [entry + (place in places) for place, entry in enumerate(column)]


@pytest.mark.parametrize("finite", [None, True, False])
@pytest.mark.parametrize("places", [[0, 1, 2], [0, 2], [1]])
@pytest.mark.parametrize("taken_apart", [True, False])
def test_ages_grow_where_an_update_is_made(finite, places, taken_apart):
    vector = torch.tensor([3, 0, 7], dtype=torch.int32)
    ages = list(vector.unbind()) if taken_apart else [age.clone() for age in vector]
    flag = None if finite is None else torch.tensor(finite)
    old = advance(ages, places, flag, whole=vector if taken_apart else None)
    assert old.tolist() == [[3, 0, 7][place] for place in places]
    assert vector.tolist() == [3, 0, 7]
    grown = [start + (place in places and finite is not False) for place, start in enumerate([3, 0, 7])]
    assert [age.item() for age in ages] == grown
    assert {age.dtype for age in ages} == {torch.int32}


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("of_like", LAYOUTS)
@pytest.mark.parametrize("of_tensor", LAYOUTS)
def test_tensors_lie_as_others_do(of_like, of_tensor, dtype, copy):
    like, tensor = LAYOUTS[of_like](torch.zeros(2, 3, 4, 5)), LAYOUTS[of_tensor](torch.randn(2, 3, 4, 5))
    known = of_like == of_tensor == "contiguous"
    (found,) = laid_out_as([like], [tensor], are_contiguous=known, dtype=dtype, copy=copy)
    assert found.stride() == like.stride()
    assert found.dtype == (dtype or tensor.dtype)
    assert torch.equal(found.float(), tensor)
    assert (found is tensor) == (not copy and of_like == of_tensor and dtype != torch.float64)
    assert found is tensor or found.data_ptr() != tensor.data_ptr()


def test_copies_are_apart_and_holes_stay():
    tensor = torch.randn(3, 2).t()
    same, hole = copies([tensor, None])
    (contiguous,) = copies([tensor], torch.contiguous_format)
    assert hole is None
    assert same.stride() == tensor.stride()
    assert contiguous.is_contiguous()
    for copy in (same, contiguous):
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr()
