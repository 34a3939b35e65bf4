"""Operators of torch that have no public name, and where torch keeps its functions."""

from typing import Any, cast

import torch
from torch._library.custom_ops import CustomOpDef

from fmp._compat.compiler import _VERSION
from fmp._compat.levels import tracing_a_transform

# What torch.optim launches for `fused=True`; they write parameters and moments in place.
fused_adam_: Any = cast(Any, torch)._fused_adam_
fused_adamw_: Any = cast(Any, torch)._fused_adamw_
fused_sgd_: Any = cast(Any, torch)._fused_sgd_

# The functions in C++ of `torch`, `torch.nn.functional` and `torch.sparse`.
FUNCTIONS: Any = cast(Any, torch._C)._VariableFunctions
NN_FUNCTIONS: Any = cast(Any, torch._C)._nn
SPARSE_FUNCTIONS: Any = cast(Any, torch._C)._sparse


def reinterpreted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reads the bits of a tensor as another dtype of the same size: `view`, which torch maps only since 2.13."""
    return tensor.view(dtype) if _VIEWS_ARE_MAPPED or not tracing_a_transform() else _mapped_view(tensor, dtype)


_VIEWS_ARE_MAPPED = _VERSION >= (2, 13)
if not _VIEWS_ARE_MAPPED:

    @torch.library.custom_op("fmp::reinterpreted", mutates_args=())
    def _mapped_view(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.view(dtype).clone()

    _mapped_view.register_fake(lambda tensor, dtype: torch.empty_like(tensor, dtype=dtype))
    _mapped_view.register_vmap(lambda info, dims, tensor, dtype: (_mapped_view(tensor, dtype), dims[0]))


def packet_name(packet: Any) -> str:
    """Returns the name of all overloads of an operator: `aten::add`."""
    return packet._qualified_op_name


def registered_op(op: Any) -> Any:
    """Returns the operator that `torch.library.custom_op` registered; anything else as it is."""
    return op._opoverload if isinstance(op, CustomOpDef) else op
