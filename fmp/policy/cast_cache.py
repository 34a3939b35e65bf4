"""Casts a weight once in a call, however often it is used."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from fmp import _compat


class _Entry(NamedTuple):
    """A cast with what it was made of.

    It holds no graph, which would hold the source: a weight that nobody else has is to go, and its casts with it.
    """

    source: weakref.ref[torch.Tensor]
    version: int
    values: torch.Tensor
    is_recorded: bool


class CastCache:
    """The casts that one call made of tensors that exist outside of it: its arguments, and parameters of modules.

        cast(w):   return w.to(dtype), made once      for values
                   and once more as a graph edge       for each further use that autograd records

    Each use has an edge of its own, so gradients are summed in the dtype of the weight, as without a cache, not in 16
    bits. A weight that was written to in between is cast again, and so is one used in a transform that began later. The
    casts of a weight go when it does.

    Args:
        arguments: Tensors to remember, besides `nn.Parameter`s.
    """

    def __init__(self, arguments: Iterable[torch.Tensor]):
        self._arguments = {id(tensor): tensor for tensor in arguments}
        self._level = _compat.transform_level()
        self._entries: dict[Any, _Entry] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Casts a tensor, or finds the cast that was made before."""
        if (id(tensor) not in self._arguments and type(tensor) is not nn.Parameter) or not self._remembers(tensor):
            return tensor.to(dtype)
        key = (id(tensor), dtype, torch.is_grad_enabled() and tensor.requires_grad)
        entry = self._entries.get(key)
        if entry is None or entry.version != tensor._version:
            cast = tensor.to(dtype)
            source = weakref.ref(tensor, functools.partial(_forget, weakref.ref(self), key))
            values = cast.detach() if cast.requires_grad else cast
            self._entries[key] = _Entry(source, tensor._version, values, cast.requires_grad)
            return cast
        if entry.is_recorded or _compat.wrapped_by_transform(tensor):
            return _UseAgain.apply(tensor, entry.values.detach())
        return entry.values

    def _remembers(self, tensor: torch.Tensor) -> bool:
        # Inference tensors do not count their changes, and what is made in inference mode is of no use outside of it.
        # Forward mode keeps nothing, so there is nothing to save.
        return (
            not (tensor.is_inference() or torch.is_inference_mode_enabled())
            and self._level == _compat.transform_level()
            and not _compat.forward_mode_active()
        )


def _forget(cache: weakref.ref[CastCache], key: Any, source: weakref.ref[torch.Tensor]) -> None:
    """Drops a cast whose source is gone, before another tensor can have its id."""
    alive = cache()
    if alive is not None:
        alive._entries.pop(key, None)


class _UseAgain(torch.autograd.Function):
    """Stands for `source.to(dtype)` where that is known already."""

    generate_vmap_rule = True

    @staticmethod
    def forward(source: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        return cast.view_as(cast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.to(ctx.dtype), None
