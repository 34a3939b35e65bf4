"""Restores compressed tensors on a GPU, many in one launch."""

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from fmp.df11.huffman import SYMBOLS
from fmp.df11.layout import CHUNK, GROUP
from fmp.kernels.launch import launch
from fmp.kernels.tables import upload

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

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
_ALIGNMENT = 64  # numbers between which a tensor may begin
# The memory of weights that were whole when they were decoded before.
_sound: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def restore(parts: Parts) -> torch.Tensor:
    """Restores one tensor; that its parts fit together is found out the first time, for which the host waits.

    Args:
        parts: As for `decode`.

    Returns:
        bf16[numbers], in memory of its own.

    Raises:
        TypeError: As for `decode`.
        ValueError: As for `decode`; if the parts do not fit together.
    """
    (out,), damaged = decode([parts])
    identity = parts[-1].untyped_storage()
    if identity not in _sound and not (out.is_cuda and torch.cuda.is_current_stream_capturing()):
        if damaged.any():
            raise ValueError("the compressed numbers are corrupt: codes, lengths and positions do not fit together")
        _sound.add(identity)
    return out


def decode(tensors: Sequence[Parts]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Restores tensors from the parts that `fmp.df11.layout` describes.

    Args:
        tensors: For each tensor code_lengths u8[256], stream i64[words], chunk_bits i16[chunks], group_starts
            i64[groups] and sign_mantissa u8[numbers], contiguous and all on one device.

    Returns:
        The numbers, bf16[numbers] each, all in one piece of memory; and i32[tensors], which is not 0 where the parts do
        not fit together. Nobody waits for either.

    Raises:
        TypeError: If a part has another dtype, or is not contiguous, or on another device.
        ValueError: If a part has not the number of entries that the numbers need.
    """
    device, rows, end = tensors[0][0].device, np.zeros(len(tensors), _ROW), 0
    for row, parts in zip(rows, tensors, strict=True):
        _check(parts, device)
        for name, part in zip(_PARTS, parts, strict=True):
            row[name] = part.data_ptr()
        row["offset"], row["numbers"], row["words"] = end, parts[-1].numel(), 2 * parts[1].numel()
        end += -(-parts[-1].numel() // _ALIGNMENT) * _ALIGNMENT
    out = torch.empty(end, dtype=torch.bfloat16, device=device)
    damaged = torch.zeros(len(tensors), dtype=torch.int32, device=device)
    table = upload(rows, rows["numbers"].tolist(), _CHUNK, device)
    pointers = [tensor.data_ptr() for tensor in (table.rows, table.chunks, out, damaged)]
    launch(device, "df11_decode", of="df11", blocks=len(table.chunks), threads=_THREADS, arguments=pointers)
    return [out[row["offset"] : row["offset"] + row["numbers"]] for row in rows], damaged


def _check(parts: Parts, device: torch.device) -> None:
    numbers = parts[-1].numel()
    chunks = -(-numbers // CHUNK)
    wanted = {"code_lengths": SYMBOLS, "chunk_bits": chunks, "group_starts": -(-chunks // GROUP)}
    for (name, dtype), part in zip(_PARTS.items(), parts, strict=True):
        if part.dtype != dtype or part.device != device or not part.is_contiguous():
            raise TypeError(f"{name} must be contiguous, {dtype} and on {device}, got {part.dtype} on {part.device}")
        if part.numel() != wanted.get(name, part.numel()):
            raise ValueError(f"{numbers} numbers need {wanted[name]} entries of {name}, got {part.numel()}")
