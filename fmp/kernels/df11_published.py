"""Restores groups of the published DFloat11 format on a GPU."""

from typing import NamedTuple

import numpy as np
import torch

from fmp.df11_codec.published.code import MAX_ROWS
from fmp.df11_codec.published.groups import Group, decode_group
from fmp.df11_codec.published.loops import BLOCK
from fmp.df11_codec.published.tables import check_tables
from fmp.kernels.launch import launch

_BLOCK_BYTES, _GAP_BYTES = 8 * BLOCK, BLOCK * 5 // 8
_LARGEST = 2**31 - 1


class Parts(NamedTuple):
    """The arrays of a group as they are stored, u8 all of them, contiguous and on one device.

    Attributes:
        luts: u8[rows + 1, 256].
        encoded_exponent: u8[bytes].
        sign_mantissa: u8[n].
        output_positions: u8[4 * (blocks + 1)], or without the last entry.
        gaps: u8[320 * blocks].
    """

    luts: torch.Tensor
    encoded_exponent: torch.Tensor
    sign_mantissa: torch.Tensor
    output_positions: torch.Tensor
    gaps: torch.Tensor


def restore(group: Group, device: torch.device) -> torch.Tensor:
    """Restores a group that was read from a file, and checks all that `decode_group` does; the host waits for it.

    Args:
        group: The arrays, with any sizes and contents.
        device: A GPU, on which `fmp.kernels.eligible.runs` this kernel.

    Returns:
        bf16[n] on the device.

    Raises:
        ValueError: As `decode_group`.
    """
    check_tables(group.luts)
    numbers, damaged = decode(Parts(*(torch.from_numpy(getattr(group, name)).to(device) for name in Parts._fields)))
    if damaged.item():  # where, the other decoder says
        return torch.from_numpy(decode_group(group).view(np.int16)).view(torch.bfloat16).to(device)
    return numbers


def decode(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Restores a group whose tables are known to be sound: `check_tables` raises nothing.

    Args:
        parts: The arrays. Tables that are not sound can go unnoticed, and give wrong numbers.

    Returns:
        The numbers, bf16[n]; and i32[], which is not 0 where codes, gaps and positions do not fit together. Some
        numbers are then not written. Nobody waits for either.

    Raises:
        TypeError: If an array has another dtype, or is not contiguous, or on another device.
        ValueError: If the sizes do not fit each other.
    """
    device = parts.luts.device
    blocks = _blocks(parts)
    out = torch.empty(parts.sign_mantissa.numel(), dtype=torch.bfloat16, device=device)
    damaged = torch.zeros((), dtype=torch.int32, device=device)
    pointers = [tensor.data_ptr() for tensor in (*parts, out, damaged)]
    tables, entries = len(parts.luts) - 1, parts.output_positions.numel() // 4
    sizes = [np.uint32(size) for size in (tables, parts.encoded_exponent.numel(), out.numel(), entries)]
    name, arguments = "df11_published_decode", [*pointers, *sizes]
    launch(device, name, of="df11_published", blocks=blocks, threads=BLOCK, arguments=arguments)
    return out, damaged


def _blocks(parts: Parts) -> int:
    """Checks the arrays, and returns how many blocks of codes there are."""
    for name, part in zip(Parts._fields, parts, strict=True):
        if part.dtype != torch.uint8 or part.device != parts.luts.device or not part.is_contiguous():
            raise TypeError(
                f"{name} must be contiguous, torch.uint8 and on {parts.luts.device}, got {part.dtype} on {part.device}"
            )
    if parts.luts.dim() != 2 or parts.luts.shape[1] != 256 or not 2 <= len(parts.luts) <= MAX_ROWS + 1:
        raise ValueError(f"luts must be u8[2 to {MAX_ROWS + 1}, 256], got {list(parts.luts.shape)}")
    n, size = parts.sign_mantissa.numel(), parts.encoded_exponent.numel()
    if not 0 < n <= _LARGEST or not 0 < size <= _LARGEST:
        raise ValueError(f"sign_mantissa has {n} bytes and encoded_exponent {size}; both must have 1 to {_LARGEST}")
    blocks = -(-size // _BLOCK_BYTES)
    if parts.output_positions.numel() not in (4 * blocks, 4 * blocks + 4):
        raise ValueError(
            f"output_positions has {parts.output_positions.numel()} bytes; {blocks} blocks need {4 * blocks + 4}"
        )
    if parts.gaps.numel() != _GAP_BYTES * blocks:
        raise ValueError(f"gaps has {parts.gaps.numel()} bytes; {blocks} blocks need {_GAP_BYTES * blocks}")
    return blocks
