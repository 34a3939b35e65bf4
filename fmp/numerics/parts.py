"""Measuring DTensors: each rank measures the rows that it holds, and gets what the others have measured of theirs.

    found  = measured(this rank's part)                   any numbers of one shape, also of a part without entries
    result = one row a part, the same on every rank       a part that several ranks hold has one row

So only the measurements travel, and what is made of the rows, such as their largest, is computed on every rank by the
same operators as on one. What a backend does where it reduces is of no account: the largest of several processes'
numbers, as gloo takes it, may leave out a NaN.

DTensors are known by what they have, and their class is asked of them: to import it takes longer than to import fmp.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fmp import _compat
from fmp.tree.wholes import is_dtensor

Tensor = torch.Tensor


def of_parts(measured: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Measures a tensor part by part; every rank that holds a part must call it.

    Args:
        measured: Called with this rank's part of each tensor; what it returns must not depend on the shape of a part.
        *tensors: The tensor, and others of its shape. If the first is a DTensor, so must the others be; they are moved
            to where it lies. No gradient passes.

    Returns:
        `[parts, ...]`, what it returned of each part, as a plain tensor; of a plain tensor there is one.

    Raises:
        TypeError: Under vmap over a DTensor.

    Example:
        >>> of_parts(torch.sum, torch.ones(3))
        tensor([3.])
    """
    if not is_dtensor(tensors[0]):
        return measured(*[tensor.detach() for tensor in tensors]).unsqueeze(0)
    with _outside():
        like, *others = [_below(tensor).detach() for tensor in tensors]
        if any(placement.is_partial() for placement in like.placements):  # to be added up, so there are no parts
            return measured(*[tensor.full_tensor() for tensor in (like, *others)]).unsqueeze(0)
        moved = [tensor.redistribute(like.device_mesh, like.placements) for tensor in others]
        row = measured(*[tensor.to_local() for tensor in (like, *moved)])
        # One entry in each dimension that may be shared out: gathered, there are as many as parts.
        own = row.reshape(*[1] * like.ndim, *row.shape)
        rows = type(like).from_local(own, like.device_mesh, like.placements, run_check=False).full_tensor()
        return rows.reshape(-1, *row.shape)


def summed(measured: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Adds up what is measured of each part, such as counts; see `of_parts`."""
    return of_parts(measured, *tensors).sum(0) if is_dtensor(tensors[0]) else measured(*tensors)


def own_part(leaf: Any) -> Any:
    """Returns this rank's part of a DTensor, in its memory, and anything else as it is."""
    return leaf.detach().to_local() if is_dtensor(leaf) else leaf


def gathered(leaf: Any) -> Any:
    """Returns all of a DTensor, which every rank must ask for, and anything else as it is."""
    return leaf.full_tensor() if is_dtensor(leaf) else leaf


def _below(tensor: Any) -> Any:
    """Takes off what torch.func puts around a DTensor, whose methods cannot be called through it."""
    if torch.compiler.is_compiling():
        return tensor
    below = _compat.below_transforms(tensor)
    if below.shape != tensor.shape:
        raise TypeError("a DTensor cannot be measured under vmap; map over plain tensors, or measure it outside")
    return below


def _outside() -> AbstractContextManager[Any]:
    """Suspends transforms of torch.func, inside of which no method of a DTensor that moves data can be called."""
    is_inside = not torch.compiler.is_compiling() and _compat.transform_active()
    return _compat.without_transforms() if is_inside else nullcontext()
