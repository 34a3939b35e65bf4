"""Precision policies: the dtype that parameters are stored in, the one they compute in, the one that comes out."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from fmp.dtypes import full_precision, is_castable, short_name
from fmp.patterns import matcher
from fmp.policy.fields import as_dtype, as_loss_scale, as_masters, as_op_rules, as_patterns
from fmp.policy.op_rules import OpRules
from fmp.tree import Spec, cast, flatten, join, unflatten
from fmp.tree.values import cast_leaf

Tree = Any

# What the string form calls the fields; jmp's abbreviations are read, the first spelling of each is written.
_KEYS = {
    "params": "param_dtype",
    "param": "param_dtype",
    "p": "param_dtype",
    "compute": "compute_dtype",
    "c": "compute_dtype",
    "output": "output_dtype",
    "o": "output_dtype",
    "keep": "keep_full",
    "master": "master_weights",
    "scale": "loss_scale",
    "ops": "op_rules",
}

# What op rules may call low precision.
_OF_OPS = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """Says which dtype the leaves of a tree take at each point of a train step.

    A policy is hashable, static configuration, not a pytree: close over it. Only floating-point tensors are cast;
    integers, booleans, complex tensors, None and Python numbers pass through untouched.

    Args:
        param_dtype: The dtype that parameters are stored in: a dtype, its name, or None to leave them as they are.
        compute_dtype: The dtype of parameters and inputs in the forward and backward pass; likewise.
        output_dtype: The dtype of what the model returns; likewise.
        keep_full: Name patterns (see `fmp.patterns.matches`) of parameters and buffers that are stored and used in
            float32, or wider where they already are, whatever the dtypes above say.
        master_weights: Whether the optimizer works on more than the 16 bits of the narrower parameters: True or `"f32"`
            for float32 copies, or another form of `fmp.master`: `"remainder"` (bf16 only, as exact, in 4 bytes a
            parameter and not 6), `"kahan"` (nearly so) or `"stochastic"` (2 bytes).
        loss_scale: The loss scaling this policy asks for: `"dynamic"`, a positive number, or None for no scaling.
        op_rules: Cast op by op (see `fmp.autocast`): `fmp.OpRules`, or `"apex"` or `"torch"` for their lists.
            Parameters and inputs then stay as they are until an op casts them; `compute_dtype` is what the rules call
            low precision, and `keep_full` is about how parameters are stored.

    Raises:
        ValueError: If a dtype is unknown or not a floating-point one, a pattern is empty or could not be written in the
            string form, the loss scale is not positive and finite, or the masters are of an unknown form or of one that
            is not made for `param_dtype`.
        TypeError: If an argument is of another type.

    References:
        The three dtypes and the string form are those of jmp, https://github.com/google-deepmind/jmp.

    Example:
        >>> from fmp.tree import describe
        >>> policy = Policy("f32", "bf16", "f32", keep_full=["*.norm"])
        >>> params = {"head": torch.ones(2), "norm": {"scale": torch.ones(2)}, "ids": torch.arange(2)}
        >>> describe(policy.cast_to_compute(params))
        "{'head': bf16[2], 'norm': {'scale': f32[2]}, 'ids': i64[2]}"
        >>> print(policy)
        params=f32,compute=bf16,output=f32,keep=*.norm
    """

    param_dtype: torch.dtype | None
    compute_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    keep_full: tuple[str, ...]
    master_weights: bool | str
    loss_scale: float | str | None
    op_rules: OpRules | None

    def __init__(
        self,
        param_dtype: torch.dtype | str | None,
        compute_dtype: torch.dtype | str | None,
        output_dtype: torch.dtype | str | None,
        *,
        keep_full: str | Sequence[str] = (),
        master_weights: bool | str = False,
        loss_scale: float | str | None = None,
        op_rules: OpRules | str | None = None,
    ):
        for name, value in {
            "param_dtype": as_dtype("param_dtype", param_dtype),
            "compute_dtype": as_dtype("compute_dtype", compute_dtype),
            "output_dtype": as_dtype("output_dtype", output_dtype),
            "keep_full": as_patterns(keep_full),
            "master_weights": as_masters(master_weights),
            "loss_scale": as_loss_scale(loss_scale),
            "op_rules": as_op_rules(op_rules),
        }.items():
            object.__setattr__(self, name, value)
        if self.op_rules is not None and self.compute_dtype not in (None, *_OF_OPS):
            raise ValueError(
                f"compute_dtype is {_name(self.compute_dtype)}, but op rules cast to float32 and what is narrower than "
                "that; use bf16 or f16, or f32 for no low precision"
            )
        if self.master_weights == "remainder" and self.param_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"master_weights='remainder' is the 16 bits that a bf16 parameter lacks of f32, and param_dtype is "
                f"{_name(self.param_dtype)}; use bf16, or another form"
            )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Reads a policy from its string form.

        Args:
            text: `"params=f32,compute=bf16,output=f32"`, with `p`, `c` and `o` as short keys, in any order, or one
                dtype name for all three. `none` leaves tensors as they are. Optional keys: `keep=*.norm|inv_freq`,
                `master=true` or a form of masters (`master=remainder`), `scale=dynamic` or a number, and `ops=apex` or
                `ops=torch`.

        Returns:
            The policy. `Policy.parse(str(policy)) == policy`.

        Raises:
            ValueError: If a key is unknown, missing or given twice, or a value is not valid for its key.
            TypeError: If `text` is not a string.

        Example:
            >>> Policy.parse("p=f32,c=bf16,o=f32") == Policy("f32", "bf16", "f32")
            True
            >>> Policy.parse("half").compute_dtype
            torch.float16
        """
        if not isinstance(text, str):
            raise TypeError(f"expected a policy string, got {text!r} of type {type(text).__name__}")
        if "=" not in text:
            dtype = as_dtype("policy", text)
            return cls(dtype, dtype, dtype)
        fields: dict[str, Any] = {}
        for part in text.split(","):
            key, separator, value = (piece.strip() for piece in part.partition("="))
            field = _KEYS.get(key.lower())
            if not separator or field is None:
                raise ValueError(f"policy {text!r}: {part.strip()!r} is not key=value with a key of {', '.join(_KEYS)}")
            if field in fields:
                raise ValueError(f"policy {text!r} sets {field} twice, the second time by {part.strip()!r}")
            fields[field] = value
        if missing := [key for key in ("params", "compute", "output") if _KEYS[key] not in fields]:
            raise ValueError(
                f"policy {text!r} does not set {' and '.join(missing)}; write all of params, compute, output"
            )
        if "keep_full" in fields:
            fields["keep_full"] = fields["keep_full"].split("|")
        return cls(**fields)

    def __str__(self) -> str:
        parts = [
            f"params={_name(self.param_dtype)}",
            f"compute={_name(self.compute_dtype)}",
            f"output={_name(self.output_dtype)}",
        ]
        if self.keep_full:
            parts.append(f"keep={'|'.join(self.keep_full)}")
        if self.master_weights:
            parts.append(f"master={str(self.master_weights).lower()}")
        if self.loss_scale is not None:
            parts.append(f"scale={self.loss_scale}")
        if self.op_rules is not None:
            parts.append(f"ops={_base(self.op_rules)}")
        return ",".join(parts)

    @property
    def master_form(self) -> str | None:
        """The form of the masters, a key of `fmp.master.FORMS`; None without masters."""
        if isinstance(self.master_weights, str):
            return self.master_weights
        return "f32" if self.master_weights else None

    def cast_to_param(self, tree: Tree) -> Tree:
        """Casts parameters or buffers to the dtype they are stored in.

        Args:
            tree: Any tree. Leaves whose path matches `keep_full` become float32, or wider where they already are.

        Returns:
            A tree of the same structure. A leaf that already has its dtype is the same tensor, not a copy.
        """
        return self._cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Casts parameters, buffers or inputs to the dtype the model computes in; with op rules, each op does that.

        Args:
            tree: Any tree. Leaves whose path matches `keep_full` become float32, or wider where they already are.

        Returns:
            A tree of the same structure. A leaf that already has its dtype is the same tensor, not a copy.
        """
        return tree if self.op_rules is not None else self._cast(tree, self.compute_dtype)

    def cast_to_output(self, tree: Tree) -> Tree:
        """Casts what a model returns to the output dtype; `keep_full` names parameters and does not apply here."""
        return tree if self.output_dtype is None else cast(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: torch.dtype | str | None) -> "Policy":
        """Returns the same policy with another output dtype.

        Example:
            >>> print(Policy.parse("bf16").with_output_dtype("f32"))
            params=bf16,compute=bf16,output=f32
        """
        return dataclasses.replace(self, output_dtype=output_dtype)

    def _cast(self, tree: Tree, dtype: torch.dtype | None) -> Tree:
        if dtype is None:
            return tree
        if not self.keep_full:
            return cast(tree, dtype)
        leaves, spec = flatten(tree)
        # torch.compile warns about a cache that it would have to look through.
        kept = (_kept if torch.compiler.is_compiling() else _kept_once)(spec, self.keep_full)
        return unflatten(spec, [_cast_leaf(leaf, dtype, full) for leaf, full in zip(leaves, kept, strict=True)])


def _cast_leaf(leaf: Any, dtype: torch.dtype, full: bool) -> Any:
    if not is_castable(leaf):
        return cast_leaf(leaf, dtype)
    # A float64 policy must not leave the kept leaves as the narrowest ones.
    return leaf.to(torch.promote_types(full_precision(leaf.dtype), full_precision(dtype)) if full else dtype)


def _kept(spec: Spec, patterns: tuple[str, ...]) -> tuple[bool, ...]:
    matches = matcher(patterns)
    return tuple([matches(join(path)) for path in spec.paths()])


# A step casts trees of the same few structures over and over; matching every path again would cost more than the cast.
_kept_once = functools.lru_cache(maxsize=256)(_kept)


def _base(rules: OpRules) -> str:
    if rules.changes or not rules.base:
        raise ValueError(
            "a policy with op rules of your own has no string form; keep the Python that builds it, or use the rules "
            "'apex' or 'torch' as they are"
        )
    return rules.base


def _name(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else short_name(dtype)
