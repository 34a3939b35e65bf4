"""The form `stochastic`: nothing beside the parameter, which is rounded up or down by chance, 2 bytes.

    merge(param) = param
    split(full)  = the neighbor below, or with probability (full - below) / (above - below) the one above

The mean of the rounded number is the number itself, so updates that are far too small for the format still add up over
many steps. The chance is a hash of the seed and of the place of an element in its tensor (see `fmp.random`).

A number that the format has is never changed, nor are inf and NaN. Beyond the largest finite number there is no
neighbor above to take the mean with: up to one spacing further, where rounding to nearest would already give inf from
half way on, the result is the largest finite number, and never inf by bad luck; from there on it is inf.

References:
    Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015, arXiv:1502.02551 (the rounding, and
    saturation at the largest number). Croci et al., Stochastic Rounding: Implementation, Error Analysis and
    Applications, 2022. Zamirai et al., Revisiting BFloat16 Training, 2020, arXiv:2010.06192 (algorithm 2, for weights).
"""

import torch

from fmp import random
from fmp.master.form import Form
from fmp.master.rounding import overflow, spacing, straight_through
from fmp.tree.wholes import is_dtensor

Tensor = torch.Tensor


def init(param: Tensor, source: Tensor) -> None:
    """Keeps nothing."""
    return None


def merge(param: Tensor, rest: Tensor) -> Tensor:
    """Returns the parameter in float32."""
    return param.to(torch.float32)


def split(full: Tensor, dtype: torch.dtype, seed: Tensor | None, *, start: int = 0) -> tuple[Tensor, None]:
    """Rounds stochastically; without a seed, to nearest."""
    if seed is None:
        return full.to(dtype), None
    index = torch.arange(start, start + full.numel(), device=full.device).reshape(full.shape) if start else None
    return round_stochastically(full, dtype, seed, index=index), None


def round_stochastically(
    values: Tensor, dtype: torch.dtype, seed: random.Seed, *, index: Tensor | None = None
) -> Tensor:
    """Rounds float32 numbers to 16 bits, up or down by chance, such that the mean is the number.

    Args:
        values: f32[...].
        dtype: `torch.bfloat16` or `torch.float16`.
        seed: An integer, or i64[]; the same one rounds the same numbers the same way.
        index: i64[...] of the shape of `values`: the flat indices of these elements in a larger tensor, for a shard
            that is to be rounded as within the whole. By default `values` is the whole.

    Returns:
        Numbers of the dtype. The probability of either neighbor is exact in bfloat16, and within 2^-23 among the
        subnormal numbers of float16. The gradient passes straight through, as by a cast.

    Raises:
        TypeError: If `values` are not float32, or a DTensor, or `dtype` is not a 16-bit format.

    Example:
        >>> values = torch.full((1000,), 1.0 + 2.0**-9)  # a quarter of the way from 1 to the next bfloat16
        >>> float((round_stochastically(values, torch.bfloat16, seed=0) > 1).float().mean())
        0.2...
    """
    if values.dtype != torch.float32 or dtype not in FORM.dtypes:
        raise TypeError(f"stochastic rounding is from f32 to bf16 or f16, got {values.dtype} to {dtype}")
    if is_dtensor(values):
        raise TypeError(
            "stochastic rounding does not know which rows of a DTensor are this rank's; round values.to_local() with "
            "index=, the flat indices of its entries in the whole tensor, or use the master form 'kahan' or 'remainder'"
        )
    words = random.bits(seed, values.shape, device=values.device) if index is None else random.bits_at(seed, index)
    # Odd multiples of 2^-24: none is the place of a multiple of 2^-16, and as many as should are below it.
    threshold = ((words >> 9) * 2 + 1).to(torch.float32) * 2.0**-24

    start, largest = values.detach(), torch.finfo(dtype).max
    step = spacing(start, dtype)
    # The quotient, its whole part and the difference of both are exact.
    steps = start.abs() / step
    below = steps.floor()
    rounded = (below + (steps - below > threshold).to(torch.float32)) * step
    rounded = torch.where(below * step <= largest, rounded.clamp(max=largest), rounded)
    rounded = torch.where(start.isfinite(), overflow(rounded.copysign(start), dtype), start)
    return straight_through(rounded, values).to(dtype)


FORM = Form(init, merge, split, dtypes=frozenset({torch.bfloat16, torch.float16}), has_rest=False, takes_seed=True)
