"""Restores compressed tensors on a GPU, many in one launch."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fmp.df11_codec.huffman import SYMBOLS
from fmp.df11_codec.layout import CHUNK, GROUP
from fmp.kernels.launch import launch
from fmp.kernels.tables import upload

_WARPS = 8
_CHUNK, _THREADS = _WARPS * GROUP * CHUNK, _WARPS * GROUP
_PARTS = {
    "code_lengths": torch.uint8,
    "stream": torch.int64,
    "chunk_bits": torch.int16,
    "group_starts": torch.int64,
    "sign_mantissa": torch.uint8,
}
_ROW = np.dtype(
    [*[(name, np.uint64) for name in _PARTS], *[(name, np.int64) for name in ("offset", "numbers", "words")]]
)


class Parts(NamedTuple):
    """The parts of one tensor, as `fmp.df11_codec.layout` describes them, contiguous and on one device.

    Attributes:
        code_lengths: u8[256].
        stream: i64[words].
        chunk_bits: i16[chunks].
        group_starts: i64[groups].
        sign_mantissa: u8[numbers].
    """

    code_lengths: torch.Tensor
    stream: torch.Tensor
    chunk_bits: torch.Tensor
    group_starts: torch.Tensor
    sign_mantissa: torch.Tensor


class _Look(NamedTuple):
    """What a part was when it was looked at. Two of them are equal if nothing can have changed in between."""

    storage: weakref.ref[torch.UntypedStorage]
    offset: int
    size: int
    version: int


# By the memory of the signs and mantissas, and where in it they begin: the parts of weights that were whole.
_sound: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[int, tuple[_Look, ...]]] = weakref.WeakKeyDictionary()


def restore(tensors: Sequence[Parts]) -> list[torch.Tensor]:
    """Restores tensors; that their parts fit together is found out the first time, for which the host waits.

    Args:
        tensors: As for `decode`.

    Returns:
        As of `decode`.

    Raises:
        TypeError: As for `decode`.
        ValueError: As for `decode`; if the parts of a tensor do not fit together.
    """
    found, damaged = decode(tensors)
    if damaged.is_cuda and torch.cuda.is_current_stream_capturing():
        return found
    looks = [tuple(map(_look, parts)) for parts in tensors]
    known = [_sound.setdefault(parts[-1].untyped_storage(), {}) for parts in tensors]
    if any(own.get(look[-1].offset) != look for own, look in zip(known, looks, strict=True)):
        if damaged.any():
            raise ValueError("the compressed numbers are corrupt: codes, lengths and positions do not fit together")
        for own, look in zip(known, looks, strict=True):
            own[look[-1].offset] = look
    return found


def decode(tensors: Sequence[Parts]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Restores tensors, all in one launch.

    Args:
        tensors: The parts of each, all of them on one device.

    Returns:
        The numbers, bf16[numbers] each, in memory of its own; and i32[tensors], which is not 0 where the parts do not
        fit together. Nobody waits for either.

    Raises:
        TypeError: If a part has another dtype, or is not contiguous, or on another device.
        ValueError: If a part has not the number of entries that the numbers need.
    """
    device, rows = tensors[0][0].device, np.zeros(len(tensors), _ROW)
    for row, parts in zip(rows, tensors, strict=True):
        _check(parts, device)
        for name, part in zip(_PARTS, parts, strict=True):
            row[name] = part.data_ptr()
        row["numbers"], row["words"] = parts[-1].numel(), 2 * parts[1].numel()
    found = [torch.empty(parts[-1].numel(), dtype=torch.bfloat16, device=device) for parts in tensors]
    # Relative to the first, so that one tensor has the same row each time, wherever it is restored to.
    rows["offset"] = [(out.data_ptr() - found[0].data_ptr()) // out.element_size() for out in found]
    damaged = torch.zeros(len(tensors), dtype=torch.int32, device=device)
    table = upload(rows, rows["numbers"].tolist(), _CHUNK, device)
    pointers = [tensor.data_ptr() for tensor in (table.rows, table.chunks, found[0], damaged)]
    launch(device, "df11_decode", of="df11", blocks=len(table.chunks), threads=_THREADS, arguments=pointers)
    return found, damaged


def _look(part: torch.Tensor) -> _Look:
    version = 0 if part.is_inference() else part._version  # inference tensors have none: they are looked at once
    return _Look(weakref.ref(part.untyped_storage()), int(part.storage_offset()), part.numel(), version)


def _check(parts: Parts, device: torch.device) -> None:
    numbers = parts[-1].numel()
    chunks = -(-numbers // CHUNK)
    wanted = {"code_lengths": SYMBOLS, "chunk_bits": chunks, "group_starts": -(-chunks // GROUP)}
    for (name, dtype), part in zip(_PARTS.items(), parts, strict=True):
        if part.dtype != dtype or part.device != device or not part.is_contiguous():
            raise TypeError(f"{name} must be contiguous, {dtype} and on {device}, got {part.dtype} on {part.device}")
        if part.numel() != wanted.get(name, part.numel()):
            raise ValueError(f"{numbers} numbers need {wanted[name]} entries of {name}, got {part.numel()}")
