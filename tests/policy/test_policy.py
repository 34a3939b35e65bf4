import copy
import pickle
import re

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fmp
from fmp import tree
from fmp.patterns import matcher
from fmp.policy import Policy

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2fnuz]
dtypes = st.sampled_from([None, *FLOATS])
tokens = st.sampled_from(["*", "?", "[0-9]", "[!a]", "[", ".", "/", "-", "_", "%", " ", "norm", "ü"])


def is_pattern(text: str) -> bool:
    """Says whether a policy takes the pattern; it refuses outer spaces, and ranges like `_-[`, which are reversed."""
    try:
        matcher([text])
    except (ValueError, re.error):
        return False
    return text == text.strip()


patterns = st.lists(tokens, min_size=1, max_size=5).map("".join).filter(is_pattern)
scales = st.none() | st.just("dynamic") | st.floats(2.0**-120, 2.0**120)
policies = st.builds(
    Policy,
    dtypes,
    dtypes,
    dtypes,
    keep_full=st.lists(patterns, max_size=3),
    master_weights=st.sampled_from([False, True, "kahan", "stochastic"]),
    loss_scale=scales,
)


def params():
    return {
        "blocks": [{"w": torch.ones(2, 3), "norm": {"scale": torch.ones(3), "bias": torch.zeros(3)}}],
        "head.norm.weight": torch.ones(3, dtype=torch.float64),
        "inv_freq": torch.ones(2, dtype=torch.bfloat16),
        "ids": torch.arange(3),
        "mask": torch.ones(2, dtype=torch.bool),
        "phase": torch.ones(2, dtype=torch.complex64),
        "rate": 0.5,
        "hole": None,
    }


# --- construction


@pytest.mark.parametrize(
    ("value", "stored", "form"),
    [
        (False, False, None),
        ("False", False, None),
        ("none", False, None),
        (True, True, "f32"),
        ("true", True, "f32"),
        ("f32", True, "f32"),
        (" Remainder", "remainder", "remainder"),
        ("kahan", "kahan", "kahan"),
        ("stochastic", "stochastic", "stochastic"),
    ],
)
def test_master_forms(value, stored, form):
    policy = Policy("bf16", "bf16", "f32", master_weights=value)
    assert (policy.master_weights, policy.master_form) == (stored, form)
    assert Policy.parse(str(policy)) == policy
    assert Policy.parse(f"p=bf16,c=bf16,o=f32,master={value}") == policy
    assert str(policy).endswith({None: "output=f32", "f32": "master=true"}.get(form, f"master={form}"))


@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_a_remainder_is_of_bfloat16(dtype):
    with pytest.raises(ValueError, match=f"master_weights='remainder' .* param_dtype is {dtype}; use bf16"):
        Policy(dtype, dtype, dtype, master_weights="remainder")
    assert Policy(None, dtype, dtype, master_weights="remainder").master_form == "remainder"


def test_dtypes_are_stored_as_torch_dtypes_whatever_names_them():
    assert Policy("f32", "torch.bfloat16", torch.float16) == Policy(torch.float32, "BF16", "half")
    policy = Policy("f32", "none", None)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == (torch.float32, None, None)
    assert (policy.keep_full, policy.master_weights, policy.loss_scale) == ((), False, None)


@pytest.mark.parametrize(
    ("value", "stored"), [("dynamic", "dynamic"), (" Dynamic", "dynamic"), ("128.0", 128.0), (8, 8.0), ("none", None)]
)
def test_loss_scale_forms(value, stored):
    assert Policy("f32", "f16", "f32", loss_scale=value).loss_scale == stored


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"compute_dtype": "bf17"}, ValueError, "compute_dtype: 'bf17' is not the name of a dtype"),
        ({"param_dtype": torch.int32}, ValueError, "param_dtype must be a floating-point dtype, got i32"),
        ({"output_dtype": "c64"}, ValueError, "output_dtype must be a floating-point dtype, got c64"),
        ({"output_dtype": 16}, TypeError, "output_dtype: expected a dtype or its name, got 16"),
        ({"keep_full": ["a,b"]}, ValueError, r"keep_full: pattern 'a,b' .* write '\?'"),
        ({"keep_full": "a=b"}, ValueError, "keep_full: pattern 'a=b'"),
        ({"keep_full": ["a|b"]}, ValueError, r"keep_full: pattern 'a\|b'"),
        ({"keep_full": ["a", ""]}, ValueError, "keep_full: pattern ''"),
        ({"keep_full": [" a"]}, ValueError, "keep_full: pattern ' a'"),
        ({"keep_full": ["[z-a]"]}, ValueError, r"keep_full: pattern '\[z-a\]' has an empty or reversed range"),
        ({"keep_full": ["a[z-b]"]}, ValueError, r"keep_full: pattern 'a\[z-b\]' has an empty or reversed range"),
        ({"keep_full": ["a", 3]}, TypeError, "keep_full must be a sequence of name patterns"),
        ({"keep_full": {"a": 1}}, TypeError, "keep_full must be a sequence of name patterns"),
        ({"keep_full": nn.Linear(1, 1)}, TypeError, "keep_full must be a sequence of name patterns"),
        ({"master_weights": 1}, TypeError, "master_weights must be True, False or one of 'f32', .*'stochastic', got 1"),
        ({"master_weights": "yes"}, ValueError, "master_weights must be 'True', 'False' or one of .*, got 'yes'"),
        ({"loss_scale": "big"}, ValueError, "loss_scale 'big': use 'dynamic'"),
        ({"loss_scale": 0}, ValueError, "loss_scale must be positive"),
        ({"loss_scale": -1.0}, ValueError, "loss_scale must be positive"),
        ({"loss_scale": float("nan")}, ValueError, "loss_scale must be positive"),
        ({"loss_scale": float("inf")}, ValueError, "loss_scale must be positive"),
        ({"loss_scale": 1e-40}, ValueError, "finite inverse in float32"),
        ({"loss_scale": 10**400}, ValueError, "loss_scale"),
        ({"loss_scale": True}, TypeError, "loss_scale must be 'dynamic', a number or None, got True"),
        ({"loss_scale": [1.0]}, TypeError, "give a scaler object to train_step"),
    ],
)
def test_bad_arguments_are_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        Policy(**{"param_dtype": "f32", "compute_dtype": "f16", "output_dtype": "f32", **kwargs})


def test_a_single_pattern_is_not_taken_apart_into_letters():
    assert Policy("f32", "f16", "f32", keep_full="norm").keep_full == ("norm",)


@given(policies)
def test_a_policy_is_hashable_frozen_and_survives_copies(policy):
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), Policy.parse(str(policy))):
        assert other == policy
        assert hash(other) == hash(policy)
    with pytest.raises(AttributeError):
        policy.param_dtype = torch.float32


def test_a_policy_is_not_a_pytree():
    policy = Policy("f32", "f16", "f32")
    assert tree.leaves(policy) == [policy]


def test_every_field_takes_part_in_equality():
    policy = Policy("f32", "f16", "f32")
    others = [
        Policy("f16", "f16", "f32"),
        Policy("f32", "bf16", "f32"),
        Policy("f32", "f16", "f16"),
        Policy("f32", "f16", "f32", keep_full="a"),
        Policy("f32", "f16", "f32", master_weights=True),
        Policy("f32", "f16", "f32", loss_scale="dynamic"),
        Policy("f32", "f16", "f32", loss_scale=2.0),
    ]
    assert len({policy, *others}) == len(others) + 1


# --- the string form


@given(policies)
def test_strings_parse_back_to_an_equal_policy(policy):
    assert Policy.parse(str(policy)) == policy
    assert str(Policy.parse(str(policy))) == str(policy)


def test_the_string_form_shows_only_what_is_not_default():
    assert str(Policy("f32", "bf16", "f32")) == "params=f32,compute=bf16,output=f32"
    full = Policy(None, "f16", "f32", keep_full=["*.norm.*", "inv_freq"], master_weights=True, loss_scale=128)
    assert str(full) == "params=none,compute=f16,output=f32,keep=*.norm.*|inv_freq,master=true,scale=128.0"


@pytest.mark.parametrize(
    "text",
    [
        "params=float32,compute=bfloat16,output=float32",
        "p=f32,c=bf16,o=f32",
        "param=full,compute=bf16,output=full",
        " O = f32 , P = torch.float32 , C = BF16 ",
        "p=f32,c=bf16,o=f32,master=False,scale=None",
    ],
)
def test_spellings_of_one_policy(text):
    assert Policy.parse(text) == Policy("f32", "bf16", "f32")


@pytest.mark.parametrize(
    ("text", "dtype"), [("half", "f16"), ("bf16", "bf16"), (" full ", "f32"), ("float64", "f64"), ("none", None)]
)
def test_one_name_sets_all_three(text, dtype):
    assert Policy.parse(text) == Policy(dtype, dtype, dtype)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "policy: '' is not the name of a dtype"),
        ("   ", "is not the name of a dtype"),
        ("bf17", "policy: 'bf17' is not the name of a dtype"),
        ("O2", "policy: 'O2' is not the name of a dtype"),
        ("i32", "policy must be a floating-point dtype, got i32"),
        ("params=f32", "does not set compute and output"),
        ("p=f32,c=bf16", "does not set output"),
        ("p=f32,c=bf16,o=f32,", "'' is not key=value"),
        ("bf16,master=true", "'bf16' is not key=value"),
        ("p=f32,c,o=f32", "'c' is not key=value"),
        ("p=f32,c=bf16,o=f32,x=f32", "'x=f32' is not key=value with a key of params, param, p"),
        ("p=f32,c=bf16,params=f16,o=f32", "sets param_dtype twice, the second time by 'params=f16'"),
        ("p=f32,c=bf16,o=f32,scale=2,scale=4", "sets loss_scale twice"),
        ("p=f32,c=,o=f32", "compute_dtype: '' is not the name of a dtype"),
        ("p=f32,c=f16=bf16,o=f32", "compute_dtype: 'f16=bf16' is not the name of a dtype"),
        ("p=f32,c=i8,o=f32", "compute_dtype must be a floating-point dtype, got i8"),
        ("p=f32,c=bf16,o=f32,keep=", "keep_full: pattern ''"),
        ("p=f32,c=bf16,o=f32,keep=a||b", "keep_full: pattern ''"),
        ("p=f32,c=bf16,o=f32,master=1", "master_weights must be 'True', 'False' or one of 'f32', .*, got '1'"),
        ("p=f16,c=f16,o=f32,master=remainder", "param_dtype is f16; use bf16, or another form"),
        ("p=f32,c=bf16,o=f32,scale=-1", "loss_scale must be positive"),
        ("p=f32,c=bf16,o=f32,scale=fast", "loss_scale 'fast'"),
    ],
)
def test_bad_strings_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


def test_only_strings_are_parsed():
    with pytest.raises(TypeError, match="expected a policy string, got None"):
        Policy.parse(None)  # type: ignore[arg-type]


# --- casting


def test_casts_reach_floating_point_tensors_only():
    policy = Policy("f16", "bf16", "f32")
    for cast, dtype in (
        (policy.cast_to_param, torch.float16),
        (policy.cast_to_compute, torch.bfloat16),
        (policy.cast_to_output, torch.float32),
    ):
        before = params()
        after = cast(before)
        for path, old in tree.items(before):
            new = dict(tree.items(after))[path]
            if isinstance(old, torch.Tensor) and old.dtype.is_floating_point:
                torch.testing.assert_close(new, old.to(dtype), rtol=0, atol=0)
            else:
                assert new is old
        assert tree.describe(before) == tree.describe(params())


@pytest.mark.parametrize("cast", ["cast_to_param", "cast_to_compute"])
def test_kept_leaves_become_float32_or_stay_wider(cast):
    policy = Policy("f16", "f16", "f16", keep_full=["*.norm", "inv_freq", "ids", "phase", "rate", "hole"])
    assert tree.describe(getattr(policy, cast)(params())) == tree.describe(
        {
            "blocks": [{"w": torch.ones(2, 3).half(), "norm": {"scale": torch.ones(3), "bias": torch.zeros(3)}}],
            "head.norm.weight": torch.ones(3, dtype=torch.float64),
            "inv_freq": torch.ones(2),
            "ids": torch.arange(3),
            "mask": torch.ones(2, dtype=torch.bool),
            "phase": torch.ones(2, dtype=torch.complex64),
            "rate": 0.5,
            "hole": None,
        }
    )


def test_a_kept_leaf_is_never_narrower_than_the_others():
    cast = Policy("f64", "f64", "f64", keep_full="norm").cast_to_compute({"w": torch.ones(1), "norm": torch.ones(1)})
    assert tree.describe(cast) == "{'w': f64[1], 'norm': f64[1]}"


def test_outputs_are_cast_whatever_they_are_called():
    policy = Policy("f16", "f16", "f32", keep_full="norm")
    assert policy.cast_to_output({"norm": torch.ones(1).double()})["norm"].dtype == torch.float32


def test_a_dtype_of_none_returns_the_very_same_tree():
    values = params()
    policy = Policy(None, None, None, keep_full="*")
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        assert cast(values) is values


@pytest.mark.parametrize("keep_full", [(), ("norm",)])
def test_a_leaf_that_has_its_dtype_is_not_copied(keep_full):
    values = {"w": torch.ones(2).half(), "norm": torch.ones(2).half() if not keep_full else torch.ones(2)}
    cast = Policy("f16", "f16", "f16", keep_full=keep_full).cast_to_param(values)
    assert cast["w"] is values["w"]
    assert cast["norm"] is values["norm"]


def test_modules_agree_with_half():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    ours = Policy("f16", "f16", "f32").cast_to_param(dict(module.state_dict()))
    for name, tensor in module.half().state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)


def test_patterns_are_matched_in_every_structure_and_not_remembered_across_them():
    policy = Policy("f16", "f16", "f32", keep_full="*.norm")
    one, two = torch.ones(1), torch.ones(1)
    assert tree.describe(policy.cast_to_param({"norm": one, "w": two})) == "{'norm': f32[1], 'w': f16[1]}"
    assert tree.describe(policy.cast_to_param({"v": one, "w": two})) == "{'v': f16[1], 'w': f16[1]}"
    assert tree.describe(policy.cast_to_param([{"norm": one}, two])) == "[{'norm': f32[1]}, f16[1]]"
    other = Policy("f16", "f16", "f32", keep_full="w")
    assert tree.describe(other.cast_to_param({"norm": one, "w": two})) == "{'norm': f16[1], 'w': f32[1]}"


@pytest.mark.parametrize("keep_full", [(), ("*.norm",)])
def test_casts_work_under_transforms_and_compile(keep_full):
    policy = Policy("f32", "bf16", "f32", keep_full=keep_full)
    values = {"w": torch.randn(4, 3), "norm": torch.randn(4, 3), "ids": torch.arange(4)}
    expected = policy.cast_to_compute(values)

    compiled = torch.compile(policy.cast_to_compute, backend="eager", fullgraph=True)(values)
    batched = torch.func.vmap(policy.cast_to_compute)(values)
    for name, tensor in expected.items():
        assert torch.equal(compiled[name], tensor)
        assert torch.equal(batched[name], tensor)
        assert compiled[name].dtype == batched[name].dtype == tensor.dtype

    floating = {"w": values["w"], "norm": values["norm"]}
    grads = torch.func.grad(lambda p: sum(leaf.float().sum() for leaf in policy.cast_to_compute(p).values()))(floating)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, torch.ones_like(floating[name]))


def test_with_output_dtype_changes_nothing_else():
    policy = Policy("f16", "bf16", "f32", keep_full="norm", master_weights=True, loss_scale="dynamic")
    changed = policy.with_output_dtype("f64")
    assert changed.output_dtype == torch.float64
    assert changed.with_output_dtype(torch.float32) == policy
    with pytest.raises(ValueError, match="output_dtype"):
        policy.with_output_dtype("int8")


def test_the_public_name():
    assert fmp.Policy is Policy


FLOATS = {value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.is_floating_point}


@pytest.mark.parametrize("dtype", sorted(FLOATS, key=str), ids=str)
def test_a_dtype_is_accepted_if_torch_can_cast_to_it(dtype):
    try:
        torch.ones(2).to(dtype)
    except NotImplementedError:
        with pytest.raises(ValueError, match="policy: torch cannot cast to"):
            Policy.parse(str(dtype))
    else:
        assert Policy.parse(str(dtype)).cast_to_compute(torch.ones(2)).dtype == dtype
