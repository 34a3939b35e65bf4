"""Weights on which the DF11 decoders are compared with what was encoded, bit for bit; and damage that they must see."""

import numpy as np
import numpy.typing as npt
import torch

from fmp.df11_codec import codec
from fmp.df11_codec.published.groups import encode_group
from fmp.kernels import df11, df11_published

_BLOCK = 2**17  # numbers that a block of the native decoder restores


def native(device: torch.device) -> bool:
    """Says whether the decoder of fmp's layout is right on a device."""
    numbers = [_numbers(700), _numbers(_BLOCK + 600)]
    parts = [_parts(each, device) for each in numbers]
    short = parts[0]._replace(stream=parts[0].stream[:-1])
    wrong = parts[0]._replace(chunk_bits=parts[0].chunk_bits + 1)
    found, damaged = df11.decode([*parts, short, wrong])
    return damaged.bool().tolist() == [False, False, True, True] and all(map(_equal, found, numbers))


def published(device: torch.device) -> bool:
    """Says whether the decoder of the published layout is right on a device."""
    numbers = _numbers(40_000)  # several blocks
    group = encode_group(numbers)
    parts = df11_published.Parts(
        *[torch.from_numpy(getattr(group, name)).to(device) for name in df11_published.Parts._fields]
    )
    found, damaged = df11_published.decode(parts)
    wrong = df11_published.decode(parts._replace(gaps=parts.gaps.flip(0)))[1]
    return not damaged.item() and bool(wrong.item()) and _equal(found, numbers)


def _numbers(size: int) -> npt.NDArray[np.uint16]:
    """Makes bf16 numbers, as bits. Each exponent is half as frequent as the one before, so codes have all lengths."""
    index = np.arange(1, size + 1, dtype=np.int64)
    exponents = 100 + np.log2(index & -index).astype(np.int64)
    return (exponents << 7 | index * 40503 & 0x807F).astype(np.uint16)


def _parts(numbers: npt.NDArray[np.uint16], device: torch.device) -> df11.Parts:
    encoded = codec.encode(numbers, even_if_larger=True)
    assert encoded is not None
    parts = (
        encoded.code_lengths,
        encoded.stream.view(np.int64),
        encoded.chunk_bits.view(np.int16),
        encoded.group_starts,
        encoded.sign_mantissa,
    )
    return df11.Parts(*[torch.from_numpy(part).to(device) for part in parts])


def _equal(found: torch.Tensor, numbers: npt.NDArray[np.uint16]) -> bool:
    return torch.equal(found.view(torch.int16).cpu(), torch.from_numpy(numbers.view(np.int16)))
