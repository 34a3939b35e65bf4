"""The form `f32`, and what holds for trees of parameters whatever the form."""

import pytest
import torch
from hypothesis import given, strategies as st

import fmp.tree
from fmp import master

NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
WIDE = [torch.float32, torch.float64]


def mixed():
    return {
        "half": [torch.tensor([1.0, -0.5]).half(), torch.ones(2).bfloat16()],
        "single": torch.tensor([3.0]),
        "double": torch.ones(1, dtype=torch.float64),
        "ids": torch.arange(3),
        "complex": torch.ones(1, dtype=torch.complex64),
        "none": None,
        "number": 2,
    }


def dtypes(tree):
    return [leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in fmp.tree.leaves(tree)]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_leaves_have_a_float32_master(dtype):
    params = torch.randn(5, 4).to(dtype)
    wide = master.init(params)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, params.float())
    assert torch.equal(wide.to(dtype).float(), params.float())


@pytest.mark.parametrize(
    "leaf", [*[torch.ones(2, dtype=dtype) for dtype in WIDE], torch.arange(2), None, 3, 0.5, "text"]
)
def test_everything_else_has_none(leaf):
    assert master.init({"leaf": leaf}) == {"leaf": None}


def test_masters_share_no_storage_with_what_they_were_made_of():
    params, source = {"w": torch.ones(2).half()}, {"w": torch.full((2,), 1.0001)}
    wide = master.init(params)
    wide["w"].zero_()
    assert params["w"].tolist() == [1.0, 1.0]
    wide = master.init(params, source)
    assert torch.equal(wide["w"], source["w"])
    wide["w"].zero_()
    assert source["w"].tolist() != [0.0, 0.0]


def test_a_source_gives_masters_their_values_before_rounding():
    source = mixed() | {"single": torch.tensor([7.0]), "half": [torch.tensor([1.0001, 2.0]), torch.tensor([0.3, 0.7])]}
    wide = master.init(mixed(), source)
    assert torch.equal(wide["half"][0], source["half"][0])
    assert torch.equal(wide["half"][1], source["half"][1])
    assert wide["single"] is None


def test_merge_and_split_undo_each_other():
    params = mixed()
    wide = master.init(params)
    full = master.merge(params, wide)
    assert dtypes(full) == [torch.float32 if dtype in NARROW else dtype for dtype in dtypes(params)]
    new_params, new_wide = master.split(full, params, wide)
    for new, old in ((new_params, params), (new_wide, wide)):
        assert fmp.tree.structure(new) == fmp.tree.structure(old)
        assert dtypes(new) == dtypes(old)
        for left, right in zip(fmp.tree.leaves(new), fmp.tree.leaves(old), strict=True):
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8),
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5),
    st.sampled_from(NARROW),
)
def test_parameters_are_always_the_rounded_masters(values, steps, dtype):
    params = {"w": torch.tensor(values).to(dtype), "norm": torch.ones(2)}
    wide = master.init(params)
    exact = params["w"].float()
    for step in steps:
        full = fmp.tree.map(lambda leaf: leaf + step, master.merge(params, wide))
        params, wide = master.split(full, params, wide)
        exact = exact + step
        assert params["w"].dtype == dtype
        assert torch.equal(params["w"].float(), wide["w"].to(dtype).float())
    assert torch.equal(wide["w"], exact)
    assert wide["norm"] is None
    assert params["norm"].dtype == torch.float32


def test_updates_too_small_for_the_parameter_add_up():
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    wide = master.init(params)
    for _ in range(100):
        params, wide = master.split(fmp.tree.map(lambda leaf: leaf + 1e-4, master.merge(params, wide)), params, wide)
    assert float(wide["w"]) == pytest.approx(1.01, rel=1e-5)
    assert float(params["w"]) == float(torch.tensor(1.01).bfloat16()) != 1.0


def test_empty_trees():
    for empty in ({}, [], None):
        assert master.init(empty) == empty
        assert master.merge(empty, empty) == empty
        assert master.split(empty, empty, empty) == (empty, empty)


def test_under_vmap():
    params = {"w": torch.ones(3, 2).half(), "norm": torch.ones(3, 2)}
    wide = torch.func.vmap(lambda params: master.init(params)["w"])(params)
    assert (wide.shape, wide.dtype) == ((3, 2), torch.float32)
    rounded = torch.func.vmap(lambda full, w: master.split({"w": full}, {"w": w}, {"w": full})[0])(
        wide + 1, params["w"]
    )
    assert rounded["w"].dtype == torch.float16


@pytest.mark.parametrize("params", [{"w": torch.ones(2).half(), "norm": torch.ones(2)}, {"norm": torch.ones(2)}, {}])
def test_compiled(params):
    def step(params, wide):
        full = fmp.tree.map(lambda leaf: leaf * 1.5, master.merge(params, wide))
        new = master.split(full, params, wide)
        return fmp.tree.select(fmp.tree.all_finite(full), new, (params, wide)), master.init(params)

    wide = master.init(params)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(params, wide)
    expected = step(params, wide)
    assert fmp.tree.structure(found) == fmp.tree.structure(expected)
    assert dtypes(found) == dtypes(expected)


def test_no_form_is_that_of_a_policy_without_masters():
    params = {"w": torch.ones(2)}
    none = master.init(params, form=None)
    assert master.merge(params, none, form=fmp.opt_level("O1").master_form) == params
    assert none == {"w": None}


@pytest.mark.parametrize("form", ["remainder", "kahan"])
def test_what_another_form_keeps_is_no_master(form):
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    rest = master.init(params, form=form)
    with pytest.raises(TypeError, match=r"'f32' is in f32, and this one is in (i|bf)16; pass form=policy\.master_form"):
        master.merge(params, rest)
