"""The forms under test; a new form joins by adding one row."""

from typing import NamedTuple

import torch

HALVES = (torch.bfloat16, torch.float16)


class Case(NamedTuple):
    """What the tests know of a form.

    Attributes:
        form: Its name.
        rest: The dtype of what it keeps beside a bf16 parameter, None for nothing.
        dtypes: The 16-bit formats of parameters that it is for.
        digits: How many binary digits of a bf16 number it carries, at least.
        exact: Whether it carries every float32 number bit for bit.
    """

    form: str
    rest: torch.dtype | None
    dtypes: tuple[torch.dtype, ...]
    digits: int
    exact: bool = False


CASES = [
    Case("f32", torch.float32, HALVES, digits=24, exact=True),
    Case("remainder", torch.int16, (torch.bfloat16,), digits=24, exact=True),
    Case("kahan", torch.bfloat16, HALVES, digits=16),
    Case("stochastic", None, HALVES, digits=7),
]
BY_DTYPE = [(case, dtype) for case in CASES for dtype in case.dtypes]


def named(value: object) -> str | None:
    """Gives the rows their names in the report."""
    return value.form if isinstance(value, Case) else str(value) if isinstance(value, torch.dtype) else None
