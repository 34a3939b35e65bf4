"""The form `f32`: a float32 copy beside each narrower parameter, 6 bytes for one of 16 bits.

    merge(param, rest) = rest
    split(full)        = (round(full), full)

`params == cast(master)` after every step, rounded to nearest.

References:
    Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740 (section 3.1).
"""

import torch

from fmp.dtypes import full_precision, short_name
from fmp.master.form import Form

Tensor = torch.Tensor

NARROW = frozenset(
    getattr(torch, name)
    for name in (
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)


def init(param: Tensor, source: Tensor) -> Tensor:
    """Copies the values before rounding."""
    return source.to(full_precision(param.dtype), copy=True)


def merge(param: Tensor, rest: Tensor) -> Tensor:
    """Returns the copy.

    Raises:
        TypeError: If it is what another form keeps.
    """
    if rest.dtype != full_precision(param.dtype):
        raise TypeError(
            f"a master of the form 'f32' is in {short_name(full_precision(param.dtype))}, and this one is in "
            f"{short_name(rest.dtype)}; pass form=policy.master_form"
        )
    return rest


def split(full: Tensor, dtype: torch.dtype, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rounds to nearest and keeps the value."""
    return full.to(dtype), full


FORM = Form(init, merge, split, dtypes=NARROW)
