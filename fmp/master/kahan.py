"""The form `kahan`: a 16-bit parameter and its rounding error as a second number of the same format, 4 bytes.

    merge(param, rest) = param + rest
    split(full)        = (p, round(full - p))  with  p = round(full)

Both are rounded to nearest, and `param == cast(param + rest)`. The pair has 17 digits (bf16) or 23 (f16), the sign of
the rest counted, against the 24 of float32. In float16 the rest is a multiple of 2^-24 like any number: weights below
1e-3 gain few digits, those below 2^-14 none.

A number that overflows its format is inf from then on; there is no error to keep beside it.

References:
    Kahan, Further Remarks on Reducing Truncation Errors, 1965; Zamirai et al., Revisiting BFloat16 Training, 2020,
    arXiv:2010.06192 (algorithm 3, for weights).
"""

import torch

from fmp.master.form import Form
from fmp.master.rounding import nearest

Tensor = torch.Tensor


def init(param: Tensor, source: Tensor) -> Tensor:
    """Makes the error of a parameter that the source was rounded to."""
    return _error(source.to(torch.float32), param.to(torch.float32)).to(param.dtype)


def merge(param: Tensor, rest: Tensor) -> Tensor:
    """Adds the two."""
    return param.to(torch.float32) + rest.to(torch.float32)


def split(full: Tensor, dtype: torch.dtype, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rounds to nearest, and the error likewise."""
    first = nearest(full, dtype)
    # An error just below half a digit rounds to half, and then another parameter may be the nearest to the sum. Taking
    # the sum apart once more makes a pair that the next step, if it adds nothing, takes apart into the same.
    total = first + nearest(_error(full, first), dtype)
    param = nearest(total, dtype)
    return param.to(dtype), _error(total, param).to(dtype)


def _error(full: Tensor, rounded: Tensor) -> Tensor:
    # No error is -0.0, which changes no number that it is added to, not even the sign of a zero.
    return (-(rounded - full)).nan_to_num(-0.0, -0.0, -0.0)


FORM = Form(init, merge, split, dtypes=frozenset({torch.bfloat16, torch.float16}))
