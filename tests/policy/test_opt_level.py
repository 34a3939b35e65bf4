import argparse
from typing import Any

import pytest
import torch
from torch import nn

import fmp
from fmp import tree
from fmp.policy import NORM_PATTERNS, OpRules, Policy, opt_level

HALVES = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    """Norms of four kinds, two of them under names that no pattern guesses, and a linear layer called like a norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.ln_f = nn.LayerNorm(4)
        self.scale = nn.GroupNorm(2, 4)
        self.norm_rms = nn.RMSNorm(4)
        self.normal = nn.Linear(4, 2)
        self.register_buffer("inv_freq", torch.ones(2))


KEPT_BY_TYPE = {
    "stem.1.weight", "stem.1.bias", "stem.1.running_mean", "stem.1.running_var",
    "ln_f.weight", "ln_f.bias", "scale.weight", "scale.bias", "norm_rms.weight",
}  # fmt: skip
KEPT_BY_NAME = {"ln_f.weight", "ln_f.bias", "norm_rms.weight", "normal.weight", "normal.bias"}


def kept(policy, module):
    cast = policy.cast_to_param(dict(module.state_dict()))
    return {name for name, tensor in cast.items() if tensor.dtype == torch.float32}


# --- the levels


@pytest.mark.parametrize("half", HALVES)
def test_defaults_of_each_level(half):
    scale = "dynamic" if half == torch.float16 else None
    assert opt_level("O0", half) == Policy("f32", "f32", "f32")
    assert opt_level("O1", half_dtype=half) == Policy("f32", half, "f32", loss_scale=scale, op_rules=OpRules.apex())
    assert opt_level("O3", half_dtype=half) == Policy(half, half, "f32")
    assert opt_level("O2", half_dtype=half) == Policy(
        half, half, "f32", keep_full=NORM_PATTERNS, master_weights=True, loss_scale=scale
    )


def test_half_is_float16_unless_said():
    assert opt_level("O2") == opt_level("O2", torch.float16) == opt_level("O2", "half")
    assert opt_level("O3", "bf16") == opt_level("O3", torch.bfloat16)


@pytest.mark.parametrize("half", ["f32", torch.float64, torch.int16, "f8e4m3", torch.complex32])
def test_half_has_16_bits(half):
    with pytest.raises(ValueError, match="half_dtype must be a 16-bit format, f16 or bf16"):
        opt_level("O2", half_dtype=half)


@pytest.mark.parametrize(("half", "error"), [("hlf", ValueError), (None, TypeError), (16, TypeError)])
def test_half_must_be_a_dtype(half, error):
    with pytest.raises(error, match="half_dtype"):
        opt_level("O2", half_dtype=half)


@pytest.mark.parametrize("level", ["02", "01", "O4", "O5", "o2", "o1", "", "2", "O2 "])
def test_unknown_levels_are_refused(level):
    with pytest.raises(ValueError, match="use 'O0', 'O1', 'O2' or 'O3', with the letter O, not zero"):
        opt_level(level)


@pytest.mark.parametrize("level", [2, None, ("O2",)])
def test_a_level_is_a_string(level):
    with pytest.raises(TypeError, match="opt level must be a string"):
        opt_level(level)


# --- overrides that change something


@pytest.mark.parametrize(
    ("level", "overrides", "expected"),
    [
        ("O0", {"loss_scale": 128.0}, "params=f32,compute=f32,output=f32,scale=128.0"),
        ("O0", {"loss_scale": "dynamic"}, "params=f32,compute=f32,output=f32,scale=dynamic"),
        ("O0", {"cast_model_outputs": "f64"}, "params=f32,compute=f32,output=f64"),
        ("O0", {"cast_model_type": False}, "params=none,compute=none,output=none"),
        ("O0", {"keep_full": "inv_freq"}, "params=f32,compute=f32,output=f32,keep=inv_freq"),
        ("O2", {"loss_scale": 128.0}, "params=f16,compute=f16,output=f32,keep=NORMS,master=true,scale=128.0"),
        ("O2", {"loss_scale": 1}, "params=f16,compute=f16,output=f32,keep=NORMS,master=true,scale=1.0"),
        ("O2", {"loss_scale": "none"}, "params=f16,compute=f16,output=f32,keep=NORMS,master=true"),
        ("O2", {"keep_norm_fp32": False}, "params=f16,compute=f16,output=f32,master=true,scale=dynamic"),
        ("O2", {"keep_batchnorm_fp32": False}, "params=f16,compute=f16,output=f32,master=true,scale=dynamic"),
        ("O2", {"master_weights": False}, "params=f16,compute=f16,output=f32,keep=NORMS,scale=dynamic"),
        (
            "O2",
            {"cast_model_outputs": "half"},
            "params=f16,compute=f16,output=f16,keep=NORMS,master=true,scale=dynamic",
        ),
        ("O2", {"cast_model_type": False}, "params=none,compute=none,output=none,master=true,scale=dynamic"),
        (
            "O2",
            {"cast_model_type": "False", "cast_model_outputs": torch.float32, "keep_norm_fp32": False},
            "params=none,compute=none,output=f32,master=true,scale=dynamic",
        ),
        (
            "O2",
            {"half_dtype": "bf16", "loss_scale": "dynamic"},
            "params=bf16,compute=bf16,output=f32,keep=NORMS,master=true,scale=dynamic",
        ),
        (
            "O2",
            {"keep_full": ("inv_freq", "*.gate")},
            "params=f16,compute=f16,output=f32,keep=NORMS|inv_freq|*.gate,master=true,scale=dynamic",
        ),
        (
            "O2",
            {"keep_full": "inv_freq", "keep_norm_fp32": False},
            "params=f16,compute=f16,output=f32,keep=inv_freq,master=true,scale=dynamic",
        ),
        ("O3", {"keep_norm_fp32": True}, "params=f16,compute=f16,output=f32,keep=NORMS"),
        ("O3", {"keep_batchnorm_fp32": "True"}, "params=f16,compute=f16,output=f32,keep=NORMS"),
        ("O3", {"master_weights": True}, "params=f16,compute=f16,output=f32,master=true"),
        ("O2", {"master_weights": "f32"}, "params=f16,compute=f16,output=f32,keep=NORMS,master=true,scale=dynamic"),
        ("O2", {"master_weights": "kahan"}, "params=f16,compute=f16,output=f32,keep=NORMS,master=kahan,scale=dynamic"),
        (
            "O2",
            {"master_weights": "remainder", "half_dtype": "bf16"},
            "params=bf16,compute=bf16,output=f32,keep=NORMS,master=remainder",
        ),
        (
            "O3",
            {"master_weights": "remainder", "half_dtype": "bf16"},
            "params=bf16,compute=bf16,output=f32,master=remainder",
        ),
        ("O3", {"master_weights": "Stochastic"}, "params=f16,compute=f16,output=f32,master=stochastic"),
        ("O3", {"loss_scale": "dynamic"}, "params=f16,compute=f16,output=f32,scale=dynamic"),
        ("O3", {"keep_full": ["inv_freq"]}, "params=f16,compute=f16,output=f32,keep=inv_freq"),
    ],
)
def test_overrides(level, overrides, expected):
    assert str(opt_level(level, **overrides)) == expected.replace("NORMS", "|".join(NORM_PATTERNS))


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_what_the_level_says_anyway_changes_nothing(level):
    half = level != "O0"
    choices: list[dict[str, Any]] = [
        {"enabled": True},
        {"patch_torch_functions": False},
        {"cast_model_type": torch.float16 if half else torch.float32},
        {"cast_model_type": "torch.float16" if half else "f32"},
        {"cast_model_outputs": "f32"},
        {"keep_norm_fp32": level == "O2"},
        {"keep_batchnorm_fp32": str(level == "O2")},
        {"master_weights": level == "O2"},
        {"loss_scale": "dynamic" if level == "O2" else "none"},
        {"keep_full": ()},
        dict.fromkeys(("enabled", "patch_torch_functions", "cast_model_type", "cast_model_outputs"), None),
        dict.fromkeys(("keep_norm_fp32", "keep_batchnorm_fp32", "master_weights", "loss_scale"), None),
        dict.fromkeys(("enabled", "patch_torch_functions", "cast_model_type", "cast_model_outputs"), "None"),
        dict.fromkeys(("keep_norm_fp32", "keep_batchnorm_fp32", "master_weights"), "None"),
    ]
    for overrides in choices:
        assert opt_level(level, **overrides) == opt_level(level), overrides


def test_a_command_line_of_strings():
    parser = argparse.ArgumentParser()
    for name in ("--opt-level", "--half-dtype", "--keep-batchnorm-fp32", "--master-weights", "--loss-scale"):
        parser.add_argument(name)
    line = "--opt-level O3 --half-dtype bf16 --keep-batchnorm-fp32 True --master-weights false --loss-scale 128.0"
    args = vars(parser.parse_args(line.split()))
    assert opt_level(args.pop("opt_level"), **args) == opt_level(
        "O3", half_dtype=torch.bfloat16, keep_norm_fp32=True, master_weights=False, loss_scale=128.0
    )
    args = vars(parser.parse_args(["--opt-level", "O2", "--half-dtype", "half"]))
    assert opt_level(args.pop("opt_level"), **args) == opt_level("O2")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("enabled", [False, "False"])
def test_a_disabled_level_does_nothing(level, enabled):
    policy = opt_level(level, enabled=enabled, master_weights=True, loss_scale="dynamic", keep_norm_fp32=True)
    assert policy == opt_level("O2", enabled=False) == Policy.parse("none")
    assert (policy.master_weights, policy.loss_scale) == (False, None)
    values = {"w": torch.ones(2), "norm": torch.ones(2).half()}
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        assert cast(values) is values


# --- combinations that make no sense


@pytest.mark.parametrize(
    ("level", "overrides", "message"),
    [
        ("O0", {"master_weights": True}, "O0 with master_weights=True: .* use 'O2'"),
        ("O0", {"master_weights": "kahan"}, "O0 with master_weights=kahan: float32 parameters are their own masters"),
        ("O2", {"master_weights": "remainder"}, "O2 with master_weights=remainder: .* half_dtype is f16; use .*'bf16'"),
        ("O3", {"master_weights": "remainder"}, "O3 with master_weights=remainder: .* or 'kahan'"),
        ("O2", {"master_weights": "half"}, "master_weights must be 'True', 'False' or one of 'f32', .*, got 'half'"),
        ("O0", {"keep_norm_fp32": True}, "O0 with keep_norm_fp32=True: everything is float32 already"),
        ("O0", {"keep_batchnorm_fp32": "True"}, "O0 with keep_norm_fp32=True"),
        ("O0", {"patch_torch_functions": True}, "O0 with patch_torch_functions=True: only O1"),
        ("O2", {"patch_torch_functions": "True"}, "O2 with patch_torch_functions=True: only O1"),
        ("O3", {"patch_torch_functions": True}, "O3 with patch_torch_functions=True: only O1"),
        ("O0", {"cast_model_type": torch.float16}, "O0 with cast_model_type=torch.float16: .* use 'O2' or 'O3'"),
        ("O0", {"cast_model_type": "f64"}, "O0 with cast_model_type=f64: the model is stored in float32"),
        ("O0", {"op_rules": "apex"}, "O0 with op_rules: only O1 casts op by op"),
        ("O2", {"op_rules": OpRules.torch()}, "O2 with op_rules: only O1 casts op by op"),
        ("O3", {"op_rules": OpRules()}, "O3 with op_rules: only O1 casts op by op"),
        ("O2", {"cast_model_type": torch.float32}, "O2 with cast_model_type=torch.float32: .* use 'O0'"),
        ("O3", {"cast_model_type": "f32"}, "O3 with cast_model_type=f32: .* use 'O0'"),
        ("O2", {"cast_model_type": "bf16"}, "O2 with cast_model_type=bf16: half_dtype is f16; .* choose by half_dtype"),
        ("O3", {"cast_model_type": "f64"}, "O3 with cast_model_type=f64: half_dtype is f16"),
        ("O2", {"cast_model_type": False, "keep_norm_fp32": True}, "O2 with cast_model_type=False: nothing is cast"),
        ("O2", {"cast_model_type": False, "keep_full": "inv_freq"}, "O2 with cast_model_type=False: nothing is cast"),
        ("O3", {"cast_model_type": False, "keep_full": Net()}, "O3 with cast_model_type=False: nothing is cast"),
        ("O2", {"keep_norm_fp32": False, "keep_full": Net()}, "O2 with keep_norm_fp32=False: keep_full has a module"),
        ("O2", {"keep_norm_fp32": True, "keep_batchnorm_fp32": True}, "are the same property; give keep_norm_fp32"),
        ("O2", {"keep_norm_fp32": "yes"}, "keep_norm_fp32 must be 'True' or 'False', got 'yes'"),
        ("O2", {"enabled": "no"}, "enabled must be 'True' or 'False', got 'no'"),
        ("O2", {"cast_model_type": "halb"}, "cast_model_type: 'halb' is not the name of a dtype"),
        ("O2", {"cast_model_outputs": "i32"}, "cast_model_outputs must be a floating-point dtype, got i32"),
        ("O2", {"keep_full": "a,b"}, "keep_full: pattern 'a,b'"),
    ],
)
def test_contradictions_are_refused(level, overrides, message):
    with pytest.raises(ValueError, match=message):
        opt_level(level, **overrides)


@pytest.mark.parametrize("value", ["fast", "", "nan", float("nan"), float("inf"), "-inf", -128.0, 0, "0", 1e60])
@pytest.mark.parametrize("enabled", [True, False])
def test_loss_scales_must_be_positive_and_finite(value, enabled):
    with pytest.raises(ValueError, match="loss_scale"):
        opt_level("O2", loss_scale=value, enabled=enabled)


@pytest.mark.parametrize(
    "overrides",
    [
        {"enabled": 1},
        {"patch_torch_functions": 0},
        {"keep_norm_fp32": 1.0},
        {"keep_batchnorm_fp32": []},
        {"master_weights": 1},
        {"cast_model_type": True},
        {"cast_model_type": 16},
        {"cast_model_outputs": False},
        {"loss_scale": True},
        {"loss_scale": [128.0]},
        {"keep_full": True},
        {"keep_full": {"norm": 1}},
        {"keep_full": ["norm", 3]},
        {"op_rules": True},
        {"op_rules": ["apex"]},
    ],
)
def test_wrong_types_are_refused(overrides):
    with pytest.raises(TypeError, match=next(iter(overrides))):
        opt_level("O2", **overrides)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("keep_batchnorm", "did you mean 'keep_batchnorm_fp32'"),
        ("master_weight", "did you mean 'master_weights'"),
        ("half_type", "did you mean 'half_dtype'"),
        ("min_loss_scale", r"fmp.DynamicLossScale\(min_scale="),
        ("max_loss_scale", r"fmp.DynamicLossScale\(max_scale="),
        ("num_losses", "dict of losses"),
        ("xyzzy", "the overrides are half_dtype, enabled, cast_model_type, .* keep_full"),
    ],
)
def test_unknown_overrides_get_advice(name, advice):
    overrides: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"opt_level takes no {name!r}; .*{advice}"):
        opt_level("O2", **overrides)


# --- what stays in float32


def test_patterns_guess_norms_by_name():
    assert kept(opt_level("O2"), Net()) == KEPT_BY_NAME
    assert kept(opt_level("O2", keep_full="inv_freq"), Net()) == KEPT_BY_NAME | {"inv_freq"}


@pytest.mark.parametrize(
    "name",
    ["bn1.weight", "layer1.0.bn2.running_mean", "h.0.ln_1.bias", "ln_f.weight", "norm.weight", "input_layernorm.weight",
     "blocks/3/norm1/bias", "encoder/final_norm"],
)  # fmt: skip
def test_usual_names_of_norms_are_kept(name):
    assert opt_level("O2").cast_to_compute({name: torch.ones(1)})[name].dtype == torch.float32


@pytest.mark.parametrize("name", ["weight", "conv1.weight", "mlp.0.bias", "kiln.weight", "subnet.weight", "tln"])
def test_other_names_are_not(name):
    assert opt_level("O2").cast_to_compute({name: torch.ones(1)})[name].dtype == torch.float16


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_module_or_model_names_its_norms_exactly(level):
    module = Net()
    for keep_full in (module, fmp.functionalize(module), [module], (fmp.functionalize(module),)):
        assert kept(opt_level(level, keep_full=keep_full), module) == KEPT_BY_TYPE
    assert kept(opt_level(level, keep_full=[module, "inv_freq"]), module) == KEPT_BY_TYPE | {"inv_freq"}


def test_a_container_of_modules_prefixes_their_names():
    nets = nn.ModuleDict({"generator": Net(), "critic": Net()})
    params = {name: dict(net.state_dict()) for name, net in nets.items()}
    cast = opt_level("O2", keep_full=nets).cast_to_param(params)
    full = {path for path, leaf in tree.items(cast) if leaf.dtype == torch.float32}
    assert full == {f"{prefix}/{name}" for prefix in params for name in KEPT_BY_TYPE}


def test_a_module_without_norms_keeps_nothing():
    assert opt_level("O2", keep_full=nn.Linear(2, 2)).keep_full == ()


def test_odd_module_names_stand_for_themselves():
    module = nn.ModuleDict({"a[0]": nn.LayerNorm(1), "b|c=d": nn.LayerNorm(1), "a0": nn.Linear(1, 1)})
    policy = opt_level("O2", keep_full=module)
    assert kept(policy, module) == {"a[0].weight", "a[0].bias", "b|c=d.weight", "b|c=d.bias"}
    assert Policy.parse(str(policy)) == policy


def test_the_public_name():
    assert fmp.opt_level is opt_level
