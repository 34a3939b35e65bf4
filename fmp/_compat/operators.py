"""Operators of torch that have no public name."""

from typing import Any, cast

import torch
from torch._library.custom_ops import CustomOpDef

# What torch.optim launches for `fused=True`; they write parameters and moments in place.
fused_adam_: Any = cast(Any, torch)._fused_adam_
fused_adamw_: Any = cast(Any, torch)._fused_adamw_
fused_sgd_: Any = cast(Any, torch)._fused_sgd_


def registered_op(op: Any) -> Any:
    """Returns the operator that `torch.library.custom_op` registered; anything else as it is."""
    return op._opoverload if isinstance(op, CustomOpDef) else op
