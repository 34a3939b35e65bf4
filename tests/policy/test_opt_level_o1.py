"""The opt level O1, which casts op by op, and all levels with every combination of overrides."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fmp
from fmp.dtypes import parse_dtype
from fmp.policy import NORM_PATTERNS, OpRules, Policy, opt_level


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, "params=f32,compute=f16,output=f32,scale=dynamic,ops=apex"),
        ({"half_dtype": "bf16"}, "params=f32,compute=bf16,output=f32,ops=apex"),
        ({"loss_scale": "128.0"}, "params=f32,compute=f16,output=f32,scale=128.0,ops=apex"),
        ({"loss_scale": "none"}, "params=f32,compute=f16,output=f32,ops=apex"),
        ({"cast_model_outputs": "half"}, "params=f32,compute=f16,output=f16,scale=dynamic,ops=apex"),
        ({"op_rules": "torch"}, "params=f32,compute=f16,output=f32,scale=dynamic,ops=torch"),
        ({"cast_model_type": False}, "params=none,compute=f16,output=none,scale=dynamic,ops=apex"),
        (
            {"cast_model_type": "False", "cast_model_outputs": "f32", "half_dtype": "bf16"},
            "params=none,compute=bf16,output=f32,ops=apex",
        ),
        ({"patch_torch_functions": False}, "params=f32,compute=f32,output=f32,scale=dynamic"),
        ({"patch_torch_functions": "False", "half_dtype": "bf16"}, "params=f32,compute=f32,output=f32"),
        (
            {"patch_torch_functions": False, "cast_model_type": False},
            "params=none,compute=none,output=none,scale=dynamic",
        ),
    ],
)
def test_overrides(overrides, expected):
    policy = opt_level("O1", **overrides)
    assert str(policy) == expected
    assert Policy.parse(expected) == policy


def test_what_o1_says_anyway_changes_nothing():
    choices: list[dict[str, Any]] = [
        {"enabled": True},
        {"patch_torch_functions": True},
        {"patch_torch_functions": "True"},
        {"cast_model_type": torch.float32},
        {"cast_model_type": "f32"},
        {"cast_model_outputs": "f32"},
        {"loss_scale": "dynamic"},
        {"op_rules": "apex"},
        {"op_rules": OpRules.apex()},
        {"op_rules": "none"},
        {"keep_full": ()},
        dict.fromkeys(("keep_norm_fp32", "keep_batchnorm_fp32", "master_weights", "op_rules", "loss_scale"), None),
        dict.fromkeys(("keep_norm_fp32", "keep_batchnorm_fp32", "master_weights", "patch_torch_functions"), "None"),
    ]
    for overrides in choices:
        assert opt_level("O1", **overrides) == opt_level("O1"), overrides


def test_o1_takes_rules_of_ones_own():
    rules = OpRules.apex().full("relu")
    policy = opt_level("O1", half_dtype="bf16", op_rules=rules)
    assert (policy.op_rules, policy.compute_dtype) == (rules, torch.bfloat16)
    assert fmp.autocast(lambda x: (x @ x).relu().dtype, policy)(torch.ones(2, 2)) == torch.float32


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cast_model_type": torch.float16}, "cast_model_type=torch.float16: .* use 'O2' or 'O3'"),
        ({"cast_model_type": "bf16", "half_dtype": "bf16"}, "cast_model_type=bf16: .* float32"),
        ({"cast_model_type": "f64"}, "cast_model_type=f64: the model is stored in float32"),
        ({"keep_norm_fp32": True}, "keep_norm_fp32=True: all parameters stay in float32"),
        ({"keep_norm_fp32": False}, "keep_norm_fp32=False: all parameters stay in float32"),
        ({"keep_batchnorm_fp32": False}, "keep_norm_fp32=False: .* leave it out"),
        ({"keep_batchnorm_fp32": "False"}, "keep_norm_fp32=False: .* leave it out"),
        ({"keep_batchnorm_fp32": "True"}, "keep_norm_fp32=True: .* leave it out"),
        ({"master_weights": True}, "master_weights=True: all parameters stay in float32"),
        ({"master_weights": "kahan"}, "master_weights=kahan: all parameters stay in float32"),
        ({"master_weights": False}, "master_weights=False: .* leave it out"),
        ({"master_weights": "False"}, "master_weights=False: .* leave it out"),
        ({"keep_full": "inv_freq"}, "keep_full: .* op_rules or fmp.full_precision"),
        ({"keep_full": nn.LayerNorm(1)}, "keep_full"),
        ({"keep_full": nn.Linear(1, 1)}, "keep_full"),
        (
            {"op_rules": "apex", "patch_torch_functions": False},
            "op_rules and patch_torch_functions=False",
        ),
        ({"op_rules": "apx"}, "op_rules 'apx': use 'apex', 'torch' or 'none'"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        opt_level("O1", **overrides)


def test_every_combination_gives_what_was_asked_for_or_a_reason():
    values: dict[str, list[Any]] = {
        "cast_model_type": [None, False, "f32", "f16"],
        "patch_torch_functions": [None, False, True],
        "keep_norm_fp32": [None, False, True],
        "master_weights": [None, False, True],
        "loss_scale": [None, "dynamic", 2.0],
        "keep_full": [(), "inv_freq"],
        "op_rules": [None, "torch"],
    }
    for level, *choice in itertools.product(["O0", "O1", "O2", "O3"], *values.values()):
        overrides = dict(zip(values, choice, strict=True))
        cast, patch, keep_norm, masters, scale, keep_full, rules = choice
        dtype = "f32" if level in ("O0", "O1") else "f16"
        if (
            (level != "O1" and (patch or rules))
            or (level == "O1" and ((keep_norm, masters) != (None, None) or keep_full or (rules and patch is False)))
            or (level == "O0" and (keep_norm or masters))
            or (cast not in (None, False, dtype))
            or (cast is False and (keep_norm or keep_full))
        ):
            with pytest.raises(ValueError, match=f"opt level {level} with "):
                opt_level(level, **overrides)
            continue
        policy = opt_level(level, **overrides)
        by_op = level == "O1" and patch is not False
        assert policy.param_dtype == (None if cast is False else parse_dtype(dtype))
        assert policy.compute_dtype == (torch.float16 if by_op else policy.param_dtype)
        assert policy.op_rules == ((OpRules.torch() if rules else OpRules.apex()) if by_op else None)
        assert policy.master_weights == ((level == "O2") if masters is None else masters)
        assert policy.loss_scale == (("dynamic" if level in ("O1", "O2") else None) if scale is None else scale)
        norms = NORM_PATTERNS if cast is not False and ((level == "O2") if keep_norm is None else keep_norm) else ()
        assert policy.keep_full == norms + ((keep_full,) if keep_full else ())
        assert Policy.parse(str(policy)) == policy
