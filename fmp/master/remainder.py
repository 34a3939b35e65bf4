"""The form `remainder`: a bfloat16 parameter and the 16 bits that it lacks, 4 bytes, exact.

With the bits of a float32 number as an integer of 32 bits:

    param = (bits + 0x8000) >> 16            # rounded half up in magnitude, as a bfloat16
    rest  = bits - (param << 16)             # from -0x8000 to 0x7fff, an int16
    bits  = (param << 16) + rest

That is exact for every number: zeros of both signs, subnormal numbers, inf; only the payload of a NaN is not kept.
Rounding to nearest even would not do: an even bfloat16 is then the rounding of 65,537 float32 numbers, one more than an
int16 can tell apart. So a parameter differs from the cast of its master where the master lies half way between two,
and the cast would round towards zero.

The numbers beyond the largest finite bfloat16, from 3.3961e38 on, have inf as their parameter, as the cast has it; the
rest tells them from a true inf, so that a later step can bring them back.

References:
    NVIDIA Apex, `DistributedFusedAdam(store_param_remainders=True)`.
"""

import torch

from fmp import _compat
from fmp.master.form import Form
from fmp.master.rounding import straight_through

Tensor = torch.Tensor

_QUIET_NAN = 0x7FC00000


def init(param: Tensor, source: Tensor) -> Tensor:
    """Makes the rest that brings a given parameter closest to the source.

    A source half way above an even parameter comes out one unit in the last place too small, since only rounding to
    even makes this parameter of it; `split` makes both and is exact.
    """
    distance = _bits(source.to(torch.float32)) - _shifted_up(_high(param))
    return torch.where(param.isnan(), 0, distance.clamp(-0x8000, 0x7FFF)).to(torch.int16)


def merge(param: Tensor, rest: Tensor) -> Tensor:
    """Puts the two halves together; gradients pass to the parameter as if the rest were a constant."""
    bits = _shifted_up(_high(param)) + rest.to(torch.int32)
    return straight_through(_compat.reinterpreted(bits, torch.float32), param.to(torch.float32))


def split(full: Tensor, dtype: torch.dtype, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rounds half up and keeps the difference; gradients pass to the parameter as by a cast."""
    bits = _bits(full)
    high = torch.bitwise_right_shift(bits + 0x8000, 16)
    rest = (bits - _shifted_up(high)).to(torch.int16)
    param = _compat.reinterpreted(high.to(torch.int16), torch.bfloat16)
    return straight_through(param, full.to(torch.bfloat16)), rest


def _bits(full: Tensor) -> Tensor:
    # The payload of a NaN may round to inf, or run over into the sign.
    return torch.where(full.isnan(), _QUIET_NAN, _compat.reinterpreted(full.detach(), torch.int32))


def _shifted_up(high: Tensor) -> Tensor:
    # Not by `<<`: of a DTensor torch takes that as well, but shifts by nothing, and so it does with `>>`.
    return torch.bitwise_left_shift(high, 16)


def _high(param: Tensor) -> Tensor:
    return _compat.reinterpreted(param.detach(), torch.int16).to(torch.int32)


FORM = Form(init, merge, split, dtypes=frozenset({torch.bfloat16}))
