"""Launches of single kernels, with tables written as in the tests on the executor, for tensors on any device."""

from collections.abc import Sequence

import numpy as np
import torch

from fmp.kernels.launch import launch
from tests.kernels.harness import NAMES, chunks, table

CHUNK, THREADS = 65_536, 512

Found = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


def placed(content: torch.Tensor, device: torch.device, offset: int = 0) -> torch.Tensor:
    """Copies a tensor to a device, so many elements after an address that is a multiple of 64 bytes or more."""
    memory = torch.full((offset + content.numel() + 8,), 9.0, dtype=content.dtype, device=device)
    view = memory[offset : offset + content.numel()]
    return view.copy_(content)


def empty_like(tensors: Sequence[torch.Tensor], dtype: torch.dtype, offset: int = 0) -> list[torch.Tensor]:
    return [placed(torch.full((x.numel(),), 9.0, dtype=dtype), x.device, offset) for x in tensors]


def scale(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None,
    factor: torch.Tensor,
    *,
    divide: bool = True,
    target: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales tensors into others, or only measures; returns the norm and the flag."""
    device, sizes = inputs[0].device, [x.numel() for x in inputs]
    addresses = [0] * len(inputs) if outputs is None else _addresses(outputs)
    rows, entries = _on(device, table(_addresses(inputs), addresses, sizes), chunks(sizes, CHUNK))
    partials = torch.empty(len(entries), 2, device=device)
    name = f"scale_{NAMES[inputs[0].dtype]}_{NAMES[target if outputs is None else outputs[0].dtype]}"
    where = _addresses([rows, entries])
    arguments = [*where, np.int32(CHUNK), factor.data_ptr(), np.int32(divide), partials.data_ptr()]
    launch(device, name, of="scale", blocks=len(entries), threads=THREADS, arguments=arguments)
    return finish(partials)


def axpby(
    a: torch.Tensor,
    xs: Sequence[torch.Tensor],
    b: torch.Tensor,
    ys: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds tensors into others; returns the norm and the flag."""
    device, sizes = xs[0].device, [x.numel() for x in xs]
    columns = [_addresses(tensors) for tensors in (xs, ys, outputs)]
    rows, entries = _on(device, table(*columns, sizes), chunks(sizes, CHUNK))
    partials = torch.empty(len(entries), 2, device=device)
    name = "axpby_" + "_".join(NAMES[tensors[0].dtype] for tensors in (xs, ys, outputs))
    arguments = [*_addresses([rows, entries]), np.int32(CHUNK), *_addresses([a, b, partials])]
    launch(device, name, of="axpby", blocks=len(entries), threads=THREADS, arguments=arguments)
    return finish(partials)


def finish(partials: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    norm = torch.full((), -1.0, device=partials.device)
    finite = torch.zeros((), dtype=torch.bool, device=partials.device)
    arguments = [partials.data_ptr(), np.int64(len(partials)), *_addresses([norm, finite])]
    launch(partials.device, "finish", of="scale", blocks=1, threads=1024, arguments=arguments)
    return norm, finite


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _on(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]
