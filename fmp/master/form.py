"""What a form of master weights is: three functions of one leaf."""

from collections.abc import Callable
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Form(NamedTuple):
    """How one narrow parameter and what is kept beside it stand for a float32 number.

    Attributes:
        init: `init(param, source) -> rest`: what is kept beside a parameter so that both stand for `source`, f32[...],
            as nearly as this parameter allows; a copy.
        merge: `merge(param, rest) -> full`: the number that both stand for, f32[...].
        split: `split(full, dtype, seed) -> (param, rest)`: takes the number apart into a parameter of a dtype and the
            rest. `seed` is i64[] of this leaf in this step, None without. With `start=`, which only a form that takes
            a seed is given, `full` is a part of a larger tensor, and begins at this flat index of it.
        dtypes: The dtypes that parameters may have.
        has_rest: Whether anything is kept; without it, every rest is None.
        takes_seed: Whether `split` makes use of its seed.
    """

    init: Callable[[Tensor, Tensor], Tensor | None]
    merge: Callable[[Tensor, Tensor], Tensor]
    split: Callable[..., tuple[Tensor, Tensor | None]]
    dtypes: frozenset[torch.dtype]
    has_rest: bool = True
    takes_seed: bool = False
