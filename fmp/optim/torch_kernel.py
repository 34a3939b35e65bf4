"""Whole trees for torch's fused kernels, which overwrite lists of tensors of one device and dtype."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fmp import _compat, tree
from fmp.dtypes import full_precision
from fmp.optim import checks
from fmp.optim.aliasing import NBYTES, PLAIN, intervals_from, intervals_of, intervals_overlap, shares_memory
from fmp.optim.base import check_trainable
from fmp.optim.columns import chosen, copies, laid_out_as, put

Tree = Any


class Launch(NamedTuple):
    """What one launch of a kernel works on: leaves of one device and dtype, each in the same layout as its moments.

    Attributes:
        indices: The places of the leaves in the tree.
        params: The parameters, to be overwritten.
        grads: Their gradients.
        moments: For each tree of moments the tensors, to be overwritten.
        skip: f32[], 1 where everything must stay as it is, else 0; None for never.
    """

    indices: list[int]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: tuple[list[torch.Tensor], ...]
    skip: torch.Tensor | None


def overwrite(
    kernel: Callable[..., None],
    grads: Tree,
    params: Tree,
    *moments: Tree,
    others: Sequence[Any] = (),
    kinds: Sequence[Hashable] | None = None,
    finite: torch.Tensor | None,
    donate: bool,
) -> tuple[Tree, ...] | None:
    """Runs a kernel over whole trees of plain tensors, with one launch for each device, dtype and kind.

    Args:
        kernel: `kernel(launch)`, or `kernel(launch, kind)` if there are kinds; see `Launch`.
        grads: The gradients. Where one is None, the leaf is left out.
        params: The parameters. One narrower than float32 is computed on in float32, and rounded once at the end.
        *moments: Trees of moments, which have the dtype in which parameters are computed on.
        others: What else the kernel reads, such as the learning rate.
        kinds: For each leaf, what may differ between launches.
        finite: bool[], false where nothing may change; None for always true.
        donate: Whether the kernel may overwrite parameters and moments; otherwise it gets copies. Those that share
            memory with one another are always copied.

    Returns:
        The new parameters, then the new trees of moments; or None, with nothing done, if a kernel cannot read and write
        the tensors without anyone but us noticing.

    Raises:
        TypeError: If a leaf that has a gradient is not a floating-point tensor, or its gradient is complex.
        ValueError: If a gradient or a moment has not the shape of its parameter, or the trees differ in structure.
    """
    # Whatever is asked of every leaf is asked by functions that loop in C: loops in Python would outlast the kernel.
    grad_leaves, spec = checks.params_match(grads, params)
    new_columns: list[list[Any]] = [list(spec.flatten_up_to(other)) for other in (params, *moments)]
    due = list(range(len(grad_leaves)))
    if type(None) in set(map(type, grad_leaves)):
        due = [index for index in due if grad_leaves[index] is not None]
    columns = [chosen(column, due) for column in (grad_leaves, *new_columns)]
    everything = list(chain.from_iterable(columns))
    types = set(map(type, everything))
    if type(None) in types:
        _check_shapes(grads, grad_leaves, new_columns)
    others = [other for other in others if isinstance(other, torch.Tensor)]
    if not PLAIN.issuperset(types) or not PLAIN.issuperset(map(type, others)):
        return None
    addresses = _addresses(everything, others)
    if addresses is None:
        return None
    are_contiguous = all(map(torch.Tensor.is_contiguous, everything))
    dtypes = list(map(_DTYPE, columns[1]))
    if not all(map(_IS_FLOATING_POINT, set(dtypes))) or any(map(_IS_COMPLEX, set(map(_DTYPE, columns[0])))):
        check_trainable(grads, grad_leaves, new_columns[0])
    if not all(all(map(torch.Tensor.is_same_size, columns[0], column)) for column in columns[1:]):
        _check_shapes(grads, grad_leaves, new_columns)
    if donate and are_contiguous and len(due) == len(grad_leaves):
        sizes, count = list(map(NBYTES, everything)), len(due)
        read, written = [intervals_from(addresses[part], sizes[part]) for part in (slice(count), slice(count, None))]
        donate = not intervals_overlap(written, read, intervals_of(others))
    elif donate:
        donate = not shares_memory(chain.from_iterable(new_columns), [*columns[0], *others])

    kinds_due = [()] * len(due) if kinds is None else [(kinds[index],) for index in due]
    groups = _places_by_key(list(map(_DEVICE, columns[1])), dtypes, kinds_due)
    for (device, dtype, kind), places in groups.items():
        its_grads, old, *its_moments = [chosen(column, places) for column in columns]
        wide = full_precision(dtype)
        new = _writable(old, wide, donate, are_contiguous)
        laid_out = partial(laid_out_as, new, are_contiguous=are_contiguous, dtype=wide)
        launch = Launch(
            chosen(due, places),
            new,
            laid_out(its_grads),
            tuple([laid_out(moment, copy=not donate) for moment in its_moments]),
            skip=None if finite is None else (~finite).to(device, torch.float32),
        )
        kernel(launch, *kind)
        for column, leaves in zip(new_columns, (_narrowed(new, old, finite), *launch.moments), strict=True):
            put(leaves, column, launch.indices)
    return tuple(tree.unflatten(spec, column) for column in new_columns)


_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")
_REQUIRES_GRAD, _IS_CPU = attrgetter("requires_grad"), attrgetter("is_cpu")
_IS_FLOATING_POINT, _IS_COMPLEX = attrgetter("is_floating_point"), attrgetter("is_complex")


def _addresses(tensors: list[Any], others: list[torch.Tensor]) -> list[int] | None:
    """Where the memory of each tensor begins; None if there is one that is more than memory with a shape."""
    if not all(map(_IS_CPU, tensors)) and not {"cpu", "cuda"} >= {device.type for device in map(_DEVICE, tensors)}:
        return None
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, chain(tensors, others))):
        return None
    if any(map(torch.Tensor.is_neg, tensors)):
        return None
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse one has none
        return None
    return None if 0 in addresses and any(map(_compat.is_zero_tensor, tensors)) else addresses


def _places_by_key(*parts: list[Any]) -> dict[Any, list[int]]:
    """Lists for each key the places that it is at; one part of each key comes from each list."""
    count = len(parts[0])
    if count and all(part.count(part[0]) == count for part in parts):
        return {tuple([part[0] for part in parts]): list(range(count))}
    groups: dict[Any, list[int]] = {}
    for place, key in enumerate(zip(*parts, strict=True)):
        groups.setdefault(key, []).append(place)
    return groups


def _check_shapes(grads: Tree, grad_leaves: list[Any], columns: list[list[Any]]) -> None:
    # A kernel reads and writes as many numbers as the parameter has, wherever they lie.
    for index, (grad, param, *moments) in enumerate(zip(grad_leaves, *columns, strict=True)):
        if grad is None:
            continue
        for what, other in (("gradient", grad), *(("moment", moment) for moment in moments)):
            if not isinstance(other, torch.Tensor) or other.shape != param.shape:
                raise ValueError(
                    f"{tree.paths(grads)[index] or 'params'}: the {what} is {tree.describe(other)}, the parameter "
                    f"{tree.describe(param)}; both must have one shape"
                )


def _writable(params: list[torch.Tensor], dtype: torch.dtype, donate: bool, are_contiguous: bool) -> list[torch.Tensor]:
    if params[0].dtype != dtype:
        params = [param.to(dtype) for param in params]
    elif not donate:
        return list(map(torch.Tensor.clone, params)) if are_contiguous else copies(params, torch.contiguous_format)
    # A kernel sees memory, not strides: entries must neither overlap nor leave gaps.
    return params if are_contiguous else [param if _is_dense(param) else param.contiguous() for param in params]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _narrowed(new: list[torch.Tensor], old: list[torch.Tensor], finite: torch.Tensor | None) -> list[torch.Tensor]:
    if new[0].dtype == old[0].dtype:
        return new
    narrow = [leaf.to(old[0].dtype) for leaf in new]
    return narrow if finite is None else [torch.where(finite, *pair) for pair in zip(narrow, old, strict=True)]
