"""Catches code that looks at a tensor's value on the host, which on a GPU waits for the device."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_SYNCHRONIZING = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")


class NoHostSync(TorchDispatchMode):
    """Raises on `.item()`, `bool(tensor)`, `torch.equal` and whatever else needs a value on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Checks one operation, then runs it."""
        if func.name() in _SYNCHRONIZING:
            raise AssertionError(f"{func.name()} waits for the device")
        return func(*args, **(kwargs or {}))
