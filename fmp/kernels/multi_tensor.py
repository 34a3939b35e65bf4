"""Passes over lists of tensors in one launch for each dtype, with their norm and whether all are finite.

Nobody waits for a result. The callers make sure that `fmp.kernels.eligible.usable` says yes.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fmp.kernels.launch import launch
from fmp.kernels.tables import Table, upload

Tensor = torch.Tensor
Number = Tensor | float

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""The dtypes that kernels read, and what they are called in the names of kernels."""

CHUNK, THREADS = 2**16, 512  # elements of a block, and its threads
_FINISH_THREADS = 1024
_PARTIAL_BYTES = 8
_DTYPE = attrgetter("dtype")


class Measured(NamedTuple):
    """What a pass has found besides its results.

    Attributes:
        norm: f32[], the Euclidean norm of all results together.
        finite: bool[], whether all of them are finite.
    """

    norm: Tensor
    finite: Tensor


class _Pass(NamedTuple):
    """One launch: the kernel, its table, and the tensors that must live until it returns."""

    name: str
    table: Table


def measure(tensors: Sequence[Tensor], scale: Tensor | None = None) -> Measured:
    """Finds the norm of `tensor / scale` and whether all of it is finite, and writes nothing.

    Args:
        tensors: f32, f16 or bf16, at least one, of any sizes and all on one device.
        scale: f32[], on the same device; None for 1.

    Returns:
        The norm, whose squares are summed in float32 by each thread and in float64 over blocks, and the flag.
    """
    passes = [
        _Pass(f"scale_{NAMES[dtype]}_f32", _table([_addresses(group), None], group))
        for dtype, (group,) in _by_dtype(tensors).items()
    ]
    return _run("scale", passes, [_address(scale), np.int32(True)], tensors[0].device)


def unscale(tensors: Sequence[Tensor], scale: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Divides tensors by a number, in float32.

    Args:
        tensors: As for `measure`.
        scale: f32[], on the same device.

    Returns:
        The quotients, f32 in the layout of the tensors; their norm, f32[]; and whether all are finite, bool[].
    """
    quotients = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    passes = [
        _Pass(f"scale_{NAMES[dtype]}_f32", _table([_addresses(group), _addresses(into)], group))
        for dtype, (group, into) in _by_dtype(tensors, quotients).items()
    ]
    found = _run("scale", passes, [_address(scale), np.int32(True)], tensors[0].device)
    return quotients, found.norm, found.finite


def axpby(a: Number, xs: Sequence[Tensor], b: Number, ys: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Adds two lists of tensors, each times a number, in float32: `a * x + b * y`.

    Args:
        a: A number, or f32[] on the device of the tensors.
        xs: f32, f16 or bf16, at least one, of any sizes and all on one device.
        b: As `a`.
        ys: As many, each with the shape of its x and in the same layout.

    Returns:
        The sums, f32; their norm, f32[]; and whether all are finite, bool[]. Products and sum are rounded once each.
    """
    device = xs[0].device
    # The kernels take one narrow operand at most, and as the first; a sum has no order.
    ys = [y if torch.float32 in (x.dtype, y.dtype) else y.to(torch.float32) for x, y in zip(xs, ys, strict=True)]
    factors = [_as_tensor(a, device), _as_tensor(b, device)]
    sums = [torch.empty_like(x, dtype=torch.float32) for x in xs]
    passes: list[_Pass] = []
    arguments: list[list[Any]] = []
    places: dict[tuple[torch.dtype, bool], list[int]] = {}
    for place, (x, y) in enumerate(zip(xs, ys, strict=True)):
        is_swapped = y.dtype != torch.float32
        places.setdefault((y.dtype if is_swapped else x.dtype, is_swapped), []).append(place)
    for (dtype, is_swapped), chosen in places.items():
        x, y, z = ([column[place] for place in chosen] for column in (xs, ys, sums))
        first, second = (y, x) if is_swapped else (x, y)
        table = _table([_addresses(first), _addresses(second), _addresses(z)], z)
        passes.append(_Pass(f"axpby_{NAMES[dtype]}_f32_f32", table))
        arguments.append([_address(factor) for factor in (factors[::-1] if is_swapped else factors)])
    found = _run("axpby", passes, arguments, device)
    return sums, found.norm, found.finite


def _run(of: str, passes: list[_Pass], arguments: list[Any], device: torch.device) -> Measured:
    """Launches passes that share one array of partial results, and what adds it up.

    Args:
        of: The source.
        passes: The launches.
        arguments: What the kernels take between the table and the partial results; or a list of it for each pass.
        device: Where.
    """
    blocks = [len(one.table.chunks) for one in passes]
    partials = torch.empty((sum(blocks), 2), dtype=torch.float32, device=device)
    address = partials.data_ptr()
    for index, (one, count) in enumerate(zip(passes, blocks, strict=True)):
        own = arguments[index] if isinstance(arguments[0], list) else arguments
        given = [one.table.rows.data_ptr(), one.table.chunks.data_ptr(), np.int32(CHUNK), *own, address]
        launch(device, one.name, of=of, blocks=count, threads=THREADS, arguments=given)
        address += _PARTIAL_BYTES * count
    norm = torch.empty((), dtype=torch.float32, device=device)
    finite = torch.empty((), dtype=torch.bool, device=device)
    given = [partials.data_ptr(), np.int64(len(partials)), norm.data_ptr(), finite.data_ptr()]
    launch(device, "finish", of="scale", blocks=1, threads=_FINISH_THREADS, arguments=given)
    return Measured(norm, finite)


def _by_dtype(tensors: Sequence[Tensor], *columns: Sequence[Tensor]) -> dict[torch.dtype, list[list[Tensor]]]:
    """Groups the rows of columns by the dtype of the first."""
    dtypes = list(map(_DTYPE, tensors))
    if len(set(dtypes)) == 1:
        return {dtypes[0]: [list(tensors), *map(list, columns)]}
    return {
        dtype: [[column[place] for place, own in enumerate(dtypes) if own == dtype] for column in (tensors, *columns)]
        for dtype in dict.fromkeys(dtypes)
    }


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _table(columns: Sequence[list[int] | None], tensors: Sequence[Tensor]) -> Table:
    """Uploads rows of addresses, null for a column that is absent, and the size of each row's tensors."""
    sizes = list(map(Tensor.numel, tensors))
    return upload(packed([*columns, sizes]), sizes, CHUNK, tensors[0].device)


def packed(columns: Sequence[list[int] | None]) -> npt.NDArray[np.int64]:
    """Packs columns of addresses, sizes and flags into the rows that a kernel reads; None is a column of zeros."""
    length = max([len(column) for column in columns if column is not None])
    rows = np.zeros((length, len(columns)), np.int64)
    for index, column in enumerate(columns):
        if column is not None:
            rows[:, index] = np.array(column, np.uint64).view(np.int64)
    return rows


def _address(number: Tensor | None) -> int:
    return 0 if number is None else number.data_ptr()


def _as_tensor(number: Number, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.full((), number, dtype=torch.float32, device=device)
