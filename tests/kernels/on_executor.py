"""Lets fmp run its kernels on the CPU executor, as if the CPU were a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fmp.kernels import eligible, launch, tables, trust
from tests.cuda_executor import Module
from tests.kernels.harness import module


@contextmanager
def kernels_on_cpu(mode: str = "fast", trusted: bool = True) -> Iterator[list[str]]:
    """Makes CPU tensors usable for kernels.

    Args:
        mode: Of the executor.
        trusted: Whether kernels need not be tried before their first use.

    Yields:
        The names of the kernels that are launched, in order.
    """
    names: list[str] = []

    class Listed:
        """Notes what is launched."""

        def __init__(self, of: str):
            self._kernels: Module = module(of, mode)

        def get_function(self, name: str) -> Callable[..., None]:
            names.append(name)
            return self._kernels.get_function(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eligible, "has_kernels", lambda device: True)
        patch.setattr(launch, "module_on", lambda device, of: Listed(of))
        patch.setattr(tables, "_known", type(tables._known)())
        if trusted:
            patch.setattr(trust, "agrees", lambda kernel, device: True)
        else:
            patch.setattr(trust, "_verdicts", {})
        yield names


@contextmanager
def exact_root() -> Iterator[None]:
    """Makes `update` take roots as IEEE 754 and a GPU do; torch on a CPU asks MKL, whose last bit may be wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("fmp.optim.adam"), "square_root", lambda x: x.double().sqrt().to(x.dtype))
        yield


class Watched(TorchFunctionMode):
    """Tells the checker of all memory that torch gives out, and that nothing else may be touched.

    Args:
        of: The sources whose kernels are launched.
        read: Tensors that they may only read.
        written: Tensors from outside that they may write.
    """

    def __init__(self, of: Sequence[str], *, read: Sequence[torch.Tensor] = (), written: Sequence[torch.Tensor] = ()):
        super().__init__()
        self._modules = [module(name, "checked") for name in of]
        self._open: list[Any] = []
        self._read, self._written = list(read), list(written)
        self._alive: list[torch.Tensor] = []  # no address is given out twice
        self._known = {tensor.untyped_storage().data_ptr() for tensor in (*read, *written)}

    def __enter__(self) -> Any:
        for kernels in self._modules:
            self._open.append(kernels.memory(read=_named(self._read), written=_named(self._written)))
            self._open[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for memory in reversed(self._open):
            memory.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in result if isinstance(result, list | tuple) else [result]:
            if isinstance(found, torch.Tensor) and found.numel():
                whole = torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage())
                if whole.data_ptr() not in self._known:
                    self._known.add(whole.data_ptr())
                    self._alive.append(whole)
                    for kernels in self._modules:
                        self._open.append(kernels.memory(written={f"made by {func}": whole}))
                        self._open[-1].__enter__()
        return result


def _named(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"given {index}": tensor for index, tensor in enumerate(tensors) if tensor.numel()}
