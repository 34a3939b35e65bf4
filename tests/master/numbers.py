"""float32 numbers by their bits, and the neighbors of a number in 16 bits."""

import numpy as np
import torch
from hypothesis import strategies as st

# One in each stretch between two ties or representable numbers, in bfloat16 (16 bits) and in float16 (13 bits).
_LOW_HALVES = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)

words = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def from_words(values: list[int]) -> torch.Tensor:
    """Makes f32[n] of n words of 32 bits."""
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).view(torch.float32)


def every_high_half() -> torch.Tensor:
    """Returns all signs, exponents and leading digits, each with several low halves, f32[589824]."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).unsqueeze(1) << 16
    return (high | torch.tensor(_LOW_HALVES, dtype=torch.int32)).flatten().view(torch.float32)


def neighbors(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers of a 16-bit format next below and next above finite numbers, as f64[...]; equal if exact."""
    nearest = values.to(dtype)
    wide = nearest.double()
    if dtype == torch.bfloat16:
        down, up = (torch.nextafter(nearest, torch.full_like(nearest, end)).double() for end in (-np.inf, np.inf))
    else:
        half = nearest.numpy()
        with np.errstate(over="ignore"):
            down, up = (torch.from_numpy(np.nextafter(half, np.float16(end))).double() for end in (-np.inf, np.inf))
    exact = values.double()
    return torch.where(wide <= exact, wide, down), torch.where(wide >= exact, wide, up)
