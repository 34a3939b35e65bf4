"""Apex's opt levels as policies: the same names, properties and defaults, and a reason for each combination refused."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from fmp.dtypes import parse_dtype, short_name
from fmp.module import Model, norm_names
from fmp.policy.fields import as_dtype, as_flag, as_loss_scale, as_masters, as_op_rules
from fmp.policy.op_rules import OpRules
from fmp.policy.policy import Policy

# What normalization layers are usually called; a module or model given as `keep_full` names its own exactly.
NORM_PATTERNS = ("*norm*", "*.bn*", "*.ln*")

Kept = str | nn.Module | Model


class _Level(NamedTuple):
    half: bool
    keep_norm_fp32: bool
    master_weights: bool
    scales_fp16: bool


_LEVELS = {
    "O0": _Level(half=False, keep_norm_fp32=False, master_weights=False, scales_fp16=False),
    "O1": _Level(half=False, keep_norm_fp32=False, master_weights=False, scales_fp16=True),
    "O2": _Level(half=True, keep_norm_fp32=True, master_weights=True, scales_fp16=True),
    "O3": _Level(half=True, keep_norm_fp32=False, master_weights=False, scales_fp16=False),
}

# Arguments of `apex.amp.initialize` that have another home here.
_ELSEWHERE = {
    "min_loss_scale": "give train_step loss_scale=fmp.DynamicLossScale(min_scale=...)",
    "max_loss_scale": "give train_step loss_scale=fmp.DynamicLossScale(max_scale=...)",
    "num_losses": "give train_step a dict of losses",
}


def opt_level(
    level: str,
    half_dtype: torch.dtype | str = torch.float16,
    *,
    enabled: bool | str | None = None,
    cast_model_type: torch.dtype | str | Literal[False] | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_norm_fp32: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    op_rules: OpRules | str | None = None,
    keep_full: Kept | Sequence[Kept] = (),
    **unknown: object,
) -> Policy:
    """Makes the policy of one of Apex's opt levels.

    | level | parameters, compute, output | norm layers in float32 | float32 masters | loss scaling      |
    |-------|-----------------------------|------------------------|-----------------|-------------------|
    | O0    | f32, f32, f32               | as everything          | no              | none              |
    | O1    | f32, op by op, f32          | as everything          | no              | dynamic with fp16 |
    | O2    | half, half, f32             | yes                    | yes             | dynamic with fp16 |
    | O3    | half, half, f32             | no                     | no              | none              |

    O1 runs each op in half or in float32 as its rules say, see `fmp.autocast`. Every override also takes the string
    that a command line gives: `"True"`, `"128.0"`, `"bf16"`. One that is None is not given, and the level decides.

    Args:
        level: `"O0"`, `"O1"`, `"O2"` or `"O3"`, with the letter O.
        half_dtype: What half means: `torch.float16` or `torch.bfloat16`.
        enabled: False gives a policy that casts nothing and asks for nothing, whatever the level.
        cast_model_type: The level's own dtype, or False to cast nothing and have only masters and loss scaling, for a
            model that mixes dtypes already.
        patch_torch_functions: Apex's name for casting op by op; False takes that from O1 and leaves its loss scaling.
        keep_norm_fp32: Whether normalization layers stay in float32.
        keep_batchnorm_fp32: Apex's name for `keep_norm_fp32`.
        master_weights: Whether the optimizer works on more than the 16 bits of the half parameters: True for float32
            copies, or another form of `fmp.master`: `"remainder"` (with bf16), `"kahan"` or `"stochastic"`.
        loss_scale: `"dynamic"`, a number, or `"none"`.
        cast_model_outputs: The output dtype.
        op_rules: The rules of O1, Apex's by default: `fmp.OpRules`, `"apex"` or `"torch"`.
        keep_full: What else stays in float32: a name pattern such as `"inv_freq"`, an `nn.Module`, a `fmp.Model`, or a
            sequence of these. A module or model stands for its normalization layers, under their names in
            `Model.params`; it takes the place of `NORM_PATTERNS`, which guesses them. For parameters of several
            modules in a dictionary, give an `nn.ModuleDict` with the same keys. Where the guess misses norms of a
            `fmp.Model` that the loss calls, `TrainStep.init` warns.
        **unknown: Must be empty; a misspelt override is answered with the nearest one.

    Returns:
        The policy.

    Raises:
        ValueError: If the level or a value is unknown, or the overrides contradict the level or each other.
        TypeError: If an override is unknown or of a wrong type.

    References:
        NVIDIA Apex, https://nvidia.github.io/apex/amp.html.

    Example:
        >>> print(opt_level("O2"))
        params=f16,compute=f16,output=f32,keep=*norm*|*.bn*|*.ln*,master=true,scale=dynamic
        >>> print(opt_level("O3", half_dtype="bf16", keep_full="inv_freq"))
        params=bf16,compute=bf16,output=f32,keep=inv_freq
        >>> print(opt_level("O1", half_dtype="bf16"))
        params=f32,compute=bf16,output=f32,ops=apex
        >>> opt_level("O3", patch_torch_functions=True)
        Traceback (most recent call last):
        ValueError: opt level O3 with patch_torch_functions=True: only O1 casts around functions; leave it out
    """
    _check_level(level)
    _check_known(unknown)
    given = _Overrides(
        half=_half(half_dtype),
        cast_model_type=_model_dtype(cast_model_type),
        patch_torch_functions=_flag("patch_torch_functions", patch_torch_functions),
        keep_norm_fp32=_keep_norm(keep_norm_fp32, keep_batchnorm_fp32),
        master_weights=None if _is_none(master_weights) else as_masters(master_weights),
        loss_scale=as_loss_scale(loss_scale),
        cast_model_outputs=as_dtype("cast_model_outputs", cast_model_outputs),
        op_rules=as_op_rules(op_rules),
        keep_full=_names(keep_full),
    )
    if _flag("enabled", enabled) is False:
        return Policy(None, None, None)
    for is_given, override, allowed, reason in _refusals(given, str(cast_model_type)):
        if is_given and level not in allowed:
            raise ValueError(f"opt level {level} with {override}: {reason}")

    defaults, half, masters = _LEVELS[level], given.half, given.master_weights
    norms, patterns = given.keep_full
    if norms is None:
        keep_norm = defaults.keep_norm_fp32 if given.keep_norm_fp32 is None else given.keep_norm_fp32
        norms = NORM_PATTERNS if keep_norm else ()
    default_scale = "dynamic" if defaults.scales_fp16 and half == torch.float16 else None
    dtype = None if given.cast_model_type is False else half if defaults.half else torch.float32
    by_op = level == "O1" and given.patch_torch_functions is not False
    output = given.cast_model_outputs
    return Policy(
        param_dtype=dtype,
        compute_dtype=half if by_op else dtype,
        output_dtype=output if dtype is None or output is not None else torch.float32,
        keep_full=() if dtype is None else (*norms, *patterns),
        master_weights=defaults.master_weights if masters is None else masters,
        loss_scale=default_scale if loss_scale is None else given.loss_scale,
        op_rules=(given.op_rules or OpRules.apex()) if by_op else None,
    )


class _Overrides(NamedTuple):
    """What `opt_level` is given, as it was read; `keep_full` as exact names, None without a module, and patterns."""

    half: torch.dtype
    cast_model_type: torch.dtype | Literal[False] | None
    patch_torch_functions: bool | None
    keep_norm_fp32: bool | None
    master_weights: bool | str | None
    loss_scale: float | str | None
    cast_model_outputs: torch.dtype | None
    op_rules: OpRules | None
    keep_full: tuple[tuple[str, ...] | None, tuple[str, ...]]


_BY_OP, _FULL, _HALF = ("O1",), ("O0", "O1"), ("O2", "O3")
_NOT_BY_OP, _NO_LEVEL = ("O0", "O2", "O3"), ()


def _refusals(given: _Overrides, dtype: str) -> list[tuple[object, str, tuple[str, ...], str]]:
    """Lists what may be refused.

    Args:
        given: The overrides.
        dtype: How `cast_model_type` was written.

    Returns:
        Whether it is given; the overrides; the levels that allow them; what others answer.
    """
    half, model_dtype, patch, keep_norm, masters, _, _, rules, (norms, patterns) = given
    keeps, casts = norms is not None or patterns, model_dtype not in (None, False)
    stored = "all parameters stay in float32, and each op casts what it takes; leave it out"
    return [
        (
            casts and model_dtype != torch.float32,
            f"cast_model_type={dtype}",
            _HALF,
            "the model is stored in float32; use 'O2' or 'O3' with half_dtype",
        ),
        (
            model_dtype == torch.float32,
            f"cast_model_type={dtype}",
            _FULL,
            "the model runs in half_dtype; use 'O0' for float32",
        ),
        (
            casts and model_dtype not in (torch.float32, half),
            f"cast_model_type={dtype}",
            _NO_LEVEL,
            f"half_dtype is {short_name(half)}; leave cast_model_type out and choose by half_dtype",
        ),
        (
            model_dtype is False and (keep_norm or keeps),
            "cast_model_type=False",
            _NO_LEVEL,
            "nothing is cast, so there is nothing to keep in float32; leave out keep_norm_fp32 and keep_full",
        ),
        (patch, "patch_torch_functions=True", _BY_OP, "only O1 casts around functions; leave it out"),
        (rules, "op_rules", _BY_OP, "only O1 casts op by op; leave them out, or use 'O1'"),
        (
            rules and patch is False,
            "op_rules and patch_torch_functions=False",
            _NO_LEVEL,
            "these contradict each other; leave out one of the two",
        ),
        (keep_norm is not None, f"keep_norm_fp32={keep_norm}", _NOT_BY_OP, stored),
        (masters is not None, f"master_weights={masters}", _NOT_BY_OP, stored),
        (
            keeps,
            "keep_full",
            _NOT_BY_OP,
            "all parameters stay in float32; choose what runs in float32 by op_rules or fmp.full_precision",
        ),
        (keep_norm, "keep_norm_fp32=True", _HALF, "everything is float32 already; leave it out, or use 'O2'"),
        (
            keep_norm is False and norms is not None,
            "keep_norm_fp32=False",
            _NO_LEVEL,
            "keep_full has a module, which stands for its normalization layers; leave out one of the two",
        ),
        (
            masters,
            f"master_weights={masters}",
            _HALF,
            "float32 parameters are their own masters; leave it out, or use 'O2'",
        ),
        (
            masters == "remainder" and half != torch.bfloat16,
            "master_weights=remainder",
            _NO_LEVEL,
            f"it is the 16 bits that bf16 lacks of float32, and half_dtype is {short_name(half)}; use "
            "half_dtype='bf16', or 'kahan'",
        ),
    ]


def _check_level(level: Any) -> None:
    levels = "'O0', 'O1', 'O2' or 'O3'"
    if not isinstance(level, str):
        raise TypeError(f"opt level must be a string, {levels}, got {level!r} of type {type(level).__name__}")
    if level not in _LEVELS:
        raise ValueError(f"opt level {level!r} is not known; use {levels}, with the letter O, not zero")


def _check_known(unknown: dict[str, Any]) -> None:
    known = ["half_dtype", *(opt_level.__kwdefaults__ or ())]
    for name in unknown:
        if name in _ELSEWHERE:
            raise TypeError(f"opt_level takes no {name!r}; {_ELSEWHERE[name]}")
        nearest = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {nearest[0]!r}?" if nearest else f"the overrides are {', '.join(known)}"
        raise TypeError(f"opt_level takes no {name!r}; {advice}")


def _half(value: Any) -> torch.dtype:
    try:
        dtype = parse_dtype(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"half_dtype: {error}") from None
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"half_dtype must be a 16-bit format, f16 or bf16, got {short_name(dtype)}")
    return dtype


def _model_dtype(value: Any) -> torch.dtype | Literal[False] | None:
    if value is False or (isinstance(value, str) and value.strip().lower() == "false"):
        return False
    return as_dtype("cast_model_type", value)


def _flag(name: str, value: Any) -> bool | None:
    return None if _is_none(value) else as_flag(name, value)


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() == "none")


def _keep_norm(keep_norm_fp32: Any, keep_batchnorm_fp32: Any) -> bool | None:
    ours = _flag("keep_norm_fp32", keep_norm_fp32)
    apex = _flag("keep_batchnorm_fp32", keep_batchnorm_fp32)
    if ours is not None and apex is not None:
        raise ValueError("keep_norm_fp32 and keep_batchnorm_fp32 are the same property; give keep_norm_fp32 alone")
    return apex if ours is None else ours


def _names(keep_full: Any) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Takes `keep_full` apart into the exact names of norm layers, None without a module, and the patterns."""
    items = [keep_full] if isinstance(keep_full, Kept) else keep_full
    if not isinstance(items, Sequence) or not all(isinstance(item, Kept) for item in items):
        raise TypeError(f"keep_full must be name patterns, an nn.Module or a fmp.Model, got {keep_full!r}")
    patterns = tuple([item for item in items if isinstance(item, str)])
    modules = [item for item in items if not isinstance(item, str)]
    if not modules:
        return None, patterns
    names = [norm_names(item) if isinstance(item, nn.Module) else item.norm_params for item in modules]
    # A name is not a pattern: what has a meaning in one may only stand for itself.
    return tuple([re.sub(r"[][*?,=|]", "?", name) for group in names for name in group]), patterns
