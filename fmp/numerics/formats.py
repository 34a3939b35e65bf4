"""The number formats that training is cast to: how far each reaches, and where its rounding changes its mind."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fmp.dtypes import parse_dtype, short_name


@dataclass(frozen=True)
class Format:
    """The facts of a floating-point format. Magnitudes are exact as Python floats.

    Attributes:
        dtype: The torch dtype.
        max: The largest finite number.
        smallest_normal: The smallest number with all mantissa bits.
        smallest_subnormal: The smallest number above zero; also the distance of the numbers below `smallest_normal`.
        mantissa_bits: The stored bits of the mantissa, without the leading one.
        max_is_even: Whether the last mantissa bit of `max` is zero. Only in float8_e4m3fn, whose last pattern is NaN.

    Example:
        >>> FORMATS[torch.float16].max, FORMATS[torch.float16].smallest_subnormal == 2.0**-24
        (65504.0, True)
    """

    dtype: torch.dtype
    max: float
    smallest_normal: float
    smallest_subnormal: float
    mantissa_bits: int
    max_is_even: bool = False

    @property
    def name(self) -> str:
        """The compact name, such as `bf16`."""
        return short_name(self.dtype)

    @property
    def zero_up_to(self) -> float:
        """The largest magnitude that rounds to zero: half the smallest subnormal, since ties go to even."""
        return self.smallest_subnormal / 2

    @property
    def normal_from(self) -> float:
        """The smallest magnitude that rounds to a normal number, itself included, since ties go to even."""
        return self.smallest_normal - self.smallest_subnormal / 2

    @property
    def max_rounded(self) -> float:
        """Half a step above `max`, where overflow starts: the tie itself overflows unless `max_is_even`."""
        step = self.smallest_subnormal / self.smallest_normal * _power_of_two_below(self.max)
        return self.max + step / 2

    @property
    def compared_in(self) -> torch.dtype:
        """The dtype in which all of these magnitudes are exact, and through which torch casts to this format."""
        return torch.float64 if self.dtype.itemsize > 2 else torch.float32

    def overflows(self, magnitude: torch.Tensor) -> torch.Tensor:
        """Says which magnitudes, in `compared_in`, are too large for the format; NaN is not."""
        return magnitude > self.max_rounded if self.max_is_even else magnitude >= self.max_rounded


def _power_of_two_below(number: float) -> float:
    return 2.0 ** (int(number).bit_length() - 1)


FORMATS: Mapping[torch.dtype, Format] = MappingProxyType(
    {
        item.dtype: item
        for item in (
            Format(torch.float32, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 23),
            Format(torch.bfloat16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 7),
            Format(torch.float16, 65504.0, 2.0**-14, 2.0**-24, 10),
            Format(torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 3, max_is_even=True),
            Format(torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 2),
        )
    }
)


def number_format(dtype: torch.dtype | str) -> Format:
    """Looks up the facts of a format.

    Args:
        dtype: A dtype, or one of its usual names: `"fp16"`, `"bf16"`, `"f8e4m3"`, `"float8_e5m2"`, ...

    Returns:
        The format.

    Raises:
        ValueError: If the dtype is not among float32, bfloat16, float16, float8_e4m3fn and float8_e5m2.

    Example:
        >>> number_format("f8e4m3").max, number_format(torch.bfloat16).mantissa_bits
        (448.0, 7)
    """
    found = FORMATS.get(parse_dtype(dtype))
    if found is None:
        raise ValueError(
            f"{dtype} is no format to cast to; use one of {', '.join(item.name for item in FORMATS.values())}"
        )
    return found
