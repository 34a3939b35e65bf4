"""Operators of torch that have no public name, and where torch keeps its functions."""

from typing import Any, cast

import torch
from torch._library.custom_ops import CustomOpDef

# What torch.optim launches for `fused=True`; they write parameters and moments in place.
fused_adam_: Any = cast(Any, torch)._fused_adam_
fused_adamw_: Any = cast(Any, torch)._fused_adamw_
fused_sgd_: Any = cast(Any, torch)._fused_sgd_

# The functions in C++ of `torch`, `torch.nn.functional` and `torch.sparse`.
FUNCTIONS: Any = cast(Any, torch._C)._VariableFunctions
NN_FUNCTIONS: Any = cast(Any, torch._C)._nn
SPARSE_FUNCTIONS: Any = cast(Any, torch._C)._sparse


def packet_name(packet: Any) -> str:
    """Returns the name of all overloads of an operator: `aten::add`."""
    return packet._qualified_op_name


def registered_op(op: Any) -> Any:
    """Returns the operator that `torch.library.custom_op` registered; anything else as it is."""
    return op._opoverload if isinstance(op, CustomOpDef) else op
