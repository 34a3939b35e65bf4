"""What torch knows of the memory of tensors."""

from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)

_C: Any = cast(Any, torch._C)
# Of a device that torch has no kernels for. It comes after the `__torch_dispatch__` of a class, and before the kernels.
_NO_KERNEL: Any = _C.DispatchKeySet(_C.DispatchKey.MAIA)


def without_memory(
    kind: type[T], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> T:
    """Makes a tensor that nothing can read, of a class with a `__torch_dispatch__`.

    Where that is not asked, because someone switched it off, there is no kernel for the tensor. Who asks for the
    address of its memory, as numpy does and what launches kernels itself, gets an error.
    """
    make: Any = Tensor._make_wrapper_subclass
    tensor = make(kind, shape, strides=stride, dtype=dtype, device=device, _extra_dispatch_keys=_NO_KERNEL)
    _C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def count_holders(tensor: Tensor) -> int:
    """Counts what holds a tensor in C++, such as views of it and wrappers; all references of Python count as one."""
    return cast(Any, tensor)._use_count()


def count_tensors(memory_of: Tensor) -> int:
    """Counts the tensors that share the memory of one."""
    alone = torch.empty(0, device="cpu")
    return 1 + _count_uses(memory_of) - _count_uses(alone)


def _count_uses(tensor: Tensor) -> int:
    memory = tensor.untyped_storage()
    return _C._storage_Use_Count(memory._cdata)


def base_of(view: Tensor) -> Tensor | None:
    """Returns the tensor that a view keeps alive; None for what is no view."""
    return view._base
