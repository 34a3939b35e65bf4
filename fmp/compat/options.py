"""What `amp.initialize` was asked for: Apex's properties, their defaults by opt level, and the overrides it refuses."""

import dataclasses
from typing import Any, Literal

import torch

from fmp.policy import opt_level as level_policy
from fmp.policy.fields import as_dtype, as_flag

# Apex tells "no" from "not a question at this level".
_KEEPS_BATCHNORM = {"O0": None, "O1": None, "O2": True, "O3": False}

_MEANING = {
    "O0": "everything in float32",
    "O1": "weights in float32, each torch function in half or in float32",
    "O2": "model in half, batch normalization in float32, float32 masters",
    "O3": "everything in half",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Apex's properties.

    Attributes:
        opt_level: `"O0"` to `"O3"`.
        half: What half means.
        cast_model_type: The dtype that models are cast to; None or False for none.
        patch_torch_functions: Whether each torch function casts its arguments. (Nothing is patched.)
        keep_batchnorm_fp32: Whether affine batch normalization is left out of the cast.
        master_weights: Whether optimizers work on float32 copies of half parameters.
        loss_scale: `"dynamic"` or a number.
        cast_model_outputs: The dtype of what models return, or None to leave it.
    """

    opt_level: str
    half: torch.dtype
    cast_model_type: torch.dtype | Literal[False] | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    cast_model_outputs: torch.dtype | None = None

    @property
    def model_dtype(self) -> torch.dtype | None:
        """The dtype that models and their inputs are cast to; None for none."""
        return self.cast_model_type or None

    @property
    def output_dtype(self) -> torch.dtype | None:
        """The dtype that outputs are cast to; None for none."""
        if self.cast_model_outputs is None and self.model_dtype is not None:
            return torch.float32
        return self.cast_model_outputs

    def meaning(self) -> str:
        """Says what the opt level is."""
        return _MEANING[self.opt_level]

    def describe(self) -> list[str]:
        """Lists Apex's properties and their values, one a line."""
        names = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
        lines = {"enabled": True, "opt_level": self.opt_level} | {name: getattr(self, name) for name in names}
        return [f"{name:22} : {value}" for name, value in lines.items()]


def defaults(opt_level: Any, half_dtype: Any = torch.float16) -> Options:
    """Returns the properties of an opt level.

    Args:
        opt_level: `"O0"` to `"O3"`.
        half_dtype: `torch.float16` or `torch.bfloat16`.

    Raises:
        RuntimeError: If the level is unknown, as in Apex.
        ValueError: If `half_dtype` is no 16-bit format.

    Example:
        >>> defaults("O2").loss_scale, defaults("O2", torch.bfloat16).loss_scale
        ('dynamic', 1.0)
    """
    if not isinstance(opt_level, str) or opt_level not in _MEANING:
        raise RuntimeError(
            f"opt_level must be 'O0', 'O1', 'O2' or 'O3', got {opt_level!r}; the first character is the letter O, not "
            "a zero"
        )
    policy = level_policy(opt_level, half_dtype)
    by_op = policy.op_rules is not None
    scale = policy.loss_scale
    return Options(
        opt_level=opt_level,
        half=_half(half_dtype),
        cast_model_type=None if by_op else policy.param_dtype,
        patch_torch_functions=by_op,
        keep_batchnorm_fp32=_KEEPS_BATCHNORM[opt_level],
        master_weights=None if by_op else bool(policy.master_weights),
        loss_scale=1.0 if scale is None else scale,
    )


def override(
    options: Options,
    *,
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
) -> Options:
    """Changes properties; None is no change.

    Raises:
        RuntimeError: If an override contradicts the opt level.
        AssertionError: If `keep_batchnorm_fp32` is neither a bool nor the string of one.
        ValueError: If a value cannot be read.
        TypeError: If a value is of a wrong type.

    Example:
        >>> override(defaults("O3"), keep_batchnorm_fp32="True", loss_scale="128.0").describe()[4:]
        ['keep_batchnorm_fp32    : True', 'master_weights         : False', 'loss_scale             : 128.0']
    """
    changes = {
        "cast_model_type": _cast_model_type(options, cast_model_type),
        "patch_torch_functions": _patch(options, patch_torch_functions),
        "keep_batchnorm_fp32": _keep_batchnorm(options, keep_batchnorm_fp32),
        "master_weights": _masters(options, master_weights),
        "loss_scale": _loss_scale(loss_scale),
        "cast_model_outputs": as_dtype("cast_model_outputs", cast_model_outputs),
    }
    return dataclasses.replace(options, **{name: value for name, value in changes.items() if value is not None})


def _half(value: Any) -> torch.dtype:
    dtype = as_dtype("half_dtype", value)
    assert dtype is not None  # `opt_level` has read it before
    return dtype


def _by_op(options: Options) -> bool:
    return options.opt_level == "O1"


def _cast_model_type(options: Options, value: Any) -> torch.dtype | Literal[False] | None:
    if value is False or value is None:
        return value
    dtype = as_dtype("cast_model_type", value)
    if _by_op(options) and dtype not in (None, torch.float32):
        raise RuntimeError(
            f"cast_model_type={value} at O1: the weights stay in float32, and each function casts what it takes; leave "
            "it out, or use O2 or O3"
        )
    return dtype


def _patch(options: Options, value: Any) -> bool | None:
    flag = None if value is None else as_flag("patch_torch_functions", value)
    if flag and not _by_op(options):
        raise RuntimeError(
            f"patch_torch_functions=True at {options.opt_level}: only O1 casts around functions; leave it out, or use "
            "O1"
        )
    return flag


def _keep_batchnorm(options: Options, value: Any) -> bool | None:
    if value is None:
        return None
    if _by_op(options):
        raise RuntimeError(
            f"keep_batchnorm_fp32={value} at O1: all weights stay in float32, and batch normalization runs in float32 "
            "inside; leave it out"
        )
    if not isinstance(value, bool) and value not in ("True", "False"):
        raise AssertionError(f"keep_batchnorm_fp32 must be True, False, 'True', 'False' or None, got {value!r}")
    return as_flag("keep_batchnorm_fp32", value)


def _masters(options: Options, value: Any) -> bool | None:
    if value is None:
        return None
    if _by_op(options):
        raise RuntimeError(
            f"master_weights={value} at O1: the weights are float32 and need no masters; leave it out, or use O2"
        )
    return as_flag("master_weights", value)


def _loss_scale(value: Any) -> float | str | None:
    if value is None or (isinstance(value, str) and value == "dynamic"):
        return value
    try:
        if isinstance(value, bool | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"loss_scale must be 'dynamic', a number or its string, got {value!r}") from None
