"""Whether kernels may work on tensors, so that nobody but the kernel could notice.

A kernel sees addresses. It must not run where something else than memory stands behind a tensor: a transform of
`torch.func`, a graph that autograd records, a trace, a class of its own.
"""

import functools
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from fmp import _compat
from fmp.kernels import launch, trust
from fmp.kernels.multi_tensor import NAMES

_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])
_DEVICE, _DTYPE, _LAYOUT = attrgetter("device"), attrgetter("dtype"), attrgetter("layout")
_REQUIRES_GRAD = attrgetter("requires_grad")
_Columns = Sequence[Sequence[torch.Tensor]]


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Says whether kernels can run on a device at all; `fmp.kernels.launch.missing` says why not."""
    return device.type == "cuda" and launch.missing(device) is None


def runs(kernel: str, device: torch.device) -> bool:
    """Says whether a kernel runs on a device, and is trusted there. The first time, `fmp.kernels.trust` tries it.

    Args:
        kernel: A key of `fmp.kernels.trials.TRIALS`.
        device: The device.
    """
    return has_kernels(device) and trust.agrees(kernel, device)


def usable(kernel: str, *columns: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor | None] = ()) -> bool:
    """Says whether a kernel may work on tensors.

    Args:
        kernel: The source, `cuda/<kernel>.cu`. The first time on a device, it is tried on small tensors.
        *columns: Tensors of float32, float16 or bfloat16. Of several columns, those in one row have one shape and must
            lie in memory in the same order.
        numbers: Further tensors that it reads, f32[] each; None is left out.

    Returns:
        Whether there are tensors, all of them `are_plain` and with their entries side by side, in the same order within
        a row, and the kernel is trusted.
    """
    if torch.compiler.is_compiling() or not columns[0]:
        return False
    given = [number for number in numbers if number is not None]
    if not are_plain([*chain.from_iterable(columns), *given]):
        return False
    if not all(number.ndim == 0 and number.dtype == torch.float32 for number in given):
        return False
    if not NAMES.keys() >= set(map(_DTYPE, chain.from_iterable(columns))) or not are_alike(columns):
        return False
    return trust.agrees(kernel, columns[0][0].device)


def are_plain(tensors: Sequence[Any]) -> bool:
    """Says whether tensors are memory on one device that has kernels, and nobody looks.

    Args:
        tensors: Any number of tensors, of any dtype and strides.
    """
    # Whatever is asked of every tensor is asked by functions that loop in C: loops in Python would outlast the kernel.
    if torch.compiler.is_compiling() or not tensors or not isinstance(tensors[0], torch.Tensor):
        return False
    if not has_kernels(tensors[0].device) or not are_memory(tensors):
        return False
    return len(set(map(_DEVICE, tensors))) == 1


def are_memory(tensors: Sequence[Any]) -> bool:
    """Says whether tensors are memory with a shape and nothing else, which no transform, mode or graph watches.

    Args:
        tensors: Any number of tensors, on any devices.
    """
    if not _PLAIN.issuperset(map(type, tensors)) or _compat.transform_active() or _compat.dispatch_modes():
        return False
    if any(map(_compat.wrapped_by_transform, tensors)) or not {torch.strided}.issuperset(map(_LAYOUT, tensors)):
        return False
    if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
        return False
    if any(map(_compat.is_zero_tensor, tensors)):
        return False
    return not torch.is_grad_enabled() or not any(map(_REQUIRES_GRAD, tensors))


def are_alike(columns: _Columns) -> bool:
    """Says whether the entries of each tensor lie side by side, and those of one row in the same order."""
    if all(map(torch.Tensor.is_contiguous, chain.from_iterable(columns))):
        return True
    strides, *others = [list(map(torch.Tensor.stride, column)) for column in columns]
    return all(map(_is_dense, columns[0])) and all(other == strides for other in others)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
