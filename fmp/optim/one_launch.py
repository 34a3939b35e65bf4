"""Whole trees for the CUDA kernels of an optimizer: all leaves in one launch, or one for each pair of dtypes."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fmp import tree
from fmp.kernels import trust
from fmp.kernels.eligible import are_alike, are_memory, are_plain
from fmp.optim import checks
from fmp.optim.aliasing import PLAIN, shares_memory
from fmp.optim.base import Scalar
from fmp.optim.fused import Request

Tree = Any
Tensor = torch.Tensor


class Leaves(NamedTuple):
    """What a launch works on.

    Attributes:
        indices: The places of the leaves in the tree.
        gradients: Their gradients, still scaled.
        params: The parameters, f32, to be overwritten.
        moments: For each tree of moments the tensors, f32, to be overwritten.
        low: The casts, to be overwritten; None for none.
        factors: The keywords of a kernel of `fmp.kernels` scale, clip and finite, each on the device or None.
    """

    indices: list[int]
    gradients: list[Tensor]
    params: list[Tensor]
    moments: tuple[list[Tensor], ...]
    low: list[Tensor | None]
    factors: dict[str, Any]


def in_one_launch(
    kernel: str,
    launch: Callable[[Leaves], None],
    grads: Tree,
    params: Tree,
    *moments: Tree,
    counts: Sequence[Tensor],
    numbers: Sequence[Any],
    request: Request,
) -> tuple[Tree, ...] | None:
    """Runs a kernel over whole trees.

    Args:
        kernel: Its source, `cuda/<kernel>.cu`.
        launch: `launch(leaves)` runs it.
        grads: The gradients. Where one is None, the leaf is left out.
        params: The parameters.
        *moments: Trees of moments.
        counts: Tensors that are read on the device of the parameters.
        numbers: The hyper-parameters; those that are tensors may be anywhere.
        request: What is asked for besides.

    Returns:
        The new parameters, the new casts, and the new trees of moments; or None, with nothing done, if the kernel
        cannot work on these tensors.
    """
    checks.params_match(grads, params)
    grad_leaves, spec = tree.flatten(grads)
    due = [index for index, grad in enumerate(grad_leaves) if grad is not None]
    columns = [list(spec.flatten_up_to(other)) for other in (params, *moments)]
    low: list[Any] = [None] * len(grad_leaves) if request.low is None else list(spec.flatten_up_to(request.low))
    gradients, own_low = _chosen(grad_leaves, due), _chosen(low, due)
    own = [_chosen(column, due) for column in columns]
    places = [place for place, cast in enumerate(own_low) if cast is not None]
    casts, their_params = _chosen(own_low, places), _chosen(own[0], places)
    if not _fit(gradients, own, casts, their_params):
        return None
    device = own[0][0].device
    factors = {
        "scale": _on_device(request.inv_scale, device),
        "clip": _on_device(request.clip, device),
        "finite": request.finite,
    }
    read = [*gradients, *counts, *[factor for factor in factors.values() if factor is not None]]
    if not are_plain([*chain.from_iterable(own), *read, *casts]) or not are_memory(_tensors(numbers)):
        return None
    if not are_alike(own) or not are_alike([their_params, casts]) or not trust.agrees(kernel, device):
        return None
    gradients = _laid_out_as(own[0], gradients)
    if not request.donate or shares_memory(chain(*columns, low), chain(read, _tensors(numbers))):
        own = [_copies(column) for column in own]
        for place, cast in zip(places, _copies(casts), strict=True):
            own_low[place] = cast
    launch(Leaves(due, gradients, own[0], tuple(own[1:]), own_low, factors))
    for column, leaves in zip((*columns, low), (*own, own_low), strict=True):
        for index, leaf in zip(due, leaves, strict=True):
            column[index] = leaf
    new_params, *new_moments = [tree.unflatten(spec, column) for column in columns]
    return new_params, None if request.low is None else tree.unflatten(spec, low), *new_moments


def as_rows(row: Sequence[Scalar], like: torch.Tensor) -> torch.Tensor:
    """Makes a table whose columns are numbers, 0-dim tensors, which may be elsewhere, or vectors.

    Args:
        row: The columns.
        like: f32[n], which says how many rows there are and where.

    Returns:
        f32[n, columns].

    Example:
        >>> as_rows([0.5, torch.tensor(2.0)], like=torch.zeros(2))
        tensor([[0.5000, 2.0000],
                [0.5000, 2.0000]])
    """
    return torch.stack([_column(value, like) for value in row], dim=1)


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_GRADIENTS = frozenset([torch.float32, torch.float16, torch.bfloat16])
_CASTS = frozenset([torch.float16, torch.bfloat16])


def _fit(gradients: list[Any], own: list[list[Any]], casts: list[Any], their_params: list[Any]) -> bool:
    """Says whether these are tensors of the dtypes that kernels take, and those of each row of one shape."""
    if not own[0] or not PLAIN.issuperset(map(type, chain(gradients, *own, casts))):
        return False
    if not _GRADIENTS.issuperset(map(_DTYPE, gradients)) or not _CASTS.issuperset(map(_DTYPE, casts)):
        return False
    if not {torch.float32}.issuperset(map(_DTYPE, chain.from_iterable(own))):
        return False
    shapes = list(map(_SHAPE, own[0]))
    if any(list(map(_SHAPE, column)) != shapes for column in (gradients, *own[1:])):
        return False
    return list(map(_SHAPE, casts)) == list(map(_SHAPE, their_params))


def _chosen(items: Sequence[Any], places: list[int]) -> list[Any]:
    return [items[place] for place in places]


def _tensors(items: Sequence[Any]) -> list[Tensor]:
    return [item for item in items if isinstance(item, Tensor)]


def _on_device(number: Tensor | float | None, device: torch.device) -> Tensor | None:
    if number is None or isinstance(number, Tensor):
        return number if number is None else number.to(torch.float32)
    return torch.full((), number, dtype=torch.float32, device=device)


def _laid_out_as(params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    if all(map(Tensor.is_contiguous, chain(params, gradients))):
        return gradients
    return [
        grad if grad.stride() == param.stride() else torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        for param, grad in zip(params, gradients, strict=True)
    ]


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _column(value: Scalar, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full_like(like, value)
    return value if value.ndim else torch.ones_like(like) * value.to(like.dtype)
