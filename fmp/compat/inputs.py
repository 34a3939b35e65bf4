"""Casting what goes into a model and what comes out, whatever containers it is in."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fmp import tree
from fmp.dtypes import is_castable
from fmp.tree.values import cast_leaf


def cast_nested(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in an argument or a result of a model.

    Args:
        value: Tensors in any nesting of containers. Lists, tuples, named tuples, dictionaries and dataclasses of
            `fmp.tree` keep their type; other mappings become dictionaries. Of an object with a method `to`, such as a
            batch, a shallow copy is cast by its `to(dtype)`. Everything else is passed on.
        dtype: The dtype.

    Returns:
        The same nesting.

    Example:
        >>> cast_nested({"x": torch.ones(1), "n": 3, "ids": torch.arange(1)}, torch.bfloat16)
        {'x': tensor([1.], dtype=torch.bfloat16), 'n': 3, 'ids': tensor([0])}
    """
    return tree.map(lambda leaf: _cast_leaf(leaf, dtype), value)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Mapping):
        copied: Any = copy.copy(leaf)
        if callable(getattr(copied, "to", None)):
            return copied.to(dtype)
        return {key: cast_nested(item, dtype) for key, item in leaf.items()}
    if isinstance(leaf, set | frozenset):
        return type(leaf)([cast_nested(item, dtype) for item in leaf])
    return cast_leaf(leaf, dtype)


# Classes and not closures: a model that is pickled or deep-copied takes its hooks along.


class CastInputs:
    """A forward pre-hook that casts all arguments.

    Args:
        dtype: The dtype.
        follows: Whether to take another dtype once no parameter of the module has this one: somebody has called
            `module.float()`, as for an average of the weights.
    """

    def __init__(self, dtype: torch.dtype, *, follows: bool = False):
        self.dtype = dtype
        self.follows = follows

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the cast arguments."""
        dtype = self._dtype_of(module) if self.follows else self.dtype
        return cast_nested(args, dtype), cast_nested(kwargs, dtype)

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        first = None
        for param in module.parameters():
            if param.dtype == self.dtype:
                return self.dtype
            first = param.dtype if first is None and is_castable(param) else first
        return first or self.dtype


class CastOutputs:
    """A forward hook that casts the result.

    Args:
        dtype: The dtype.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns the cast result."""
        return cast_nested(output, self.dtype)


def cast_to_weights(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Casts the arguments of a recurrent network to the dtype of its weights, which it insists on.

    The function that it calls then casts both alike; widening before changes nothing.
    """
    dtype = next((param.dtype for param in module.parameters() if is_castable(param)), None)
    return None if dtype is None else (cast_nested(args, dtype), cast_nested(kwargs, dtype))


def state_dict_in_float32(module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
    """Makes float32 copies of the 16-bit tensors in a state dict; a hook."""
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor) and value.dtype in (torch.half, torch.bfloat16):
            state_dict[name] = value.float()
