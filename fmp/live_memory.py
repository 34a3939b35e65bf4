"""Counts the memory that is live, by the lifetimes of storages.

    op(inputs) -> outputs
        storage of an input that was never seen      it was there before: nothing to count
        storage of an output that was never seen     new: live += its bytes
        storage whose size has changed               live += the difference
    a new storage dies                               live -= its bytes

A dispatch mode lies below autograd and below the transforms of torch.func, so it sees what they run, on plain tensors.
Fake tensors and those on the meta device have storages of the same sizes and lifetimes, without memory behind them.
"""

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from fmp._compat import TorchDispatchMode, wraps_tensors

# What is noted of a new value: the operator, and what it returned.
Note = Callable[[Any, Tensor], Any]

_FRESH: Any = torch.ops.aten.lift_fresh.default  # shows a tensor that torch.tensor has just made
_SPARSE_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


@dataclasses.dataclass
class Memory:
    """A storage.

    Attributes:
        reference: The storage, unless it is dead.
        nbytes: Its size when last seen.
        is_new: Whether it was allocated under the watch.
        origin: What was noted of the operator that wrote it.
    """

    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    is_new: bool
    origin: Any = None


class Watch(TorchDispatchMode):
    """A mode that counts the bytes that are live, beyond those that were live before.

    Args:
        note: Called with each operator that writes memory which is new, and the tensor; what it returns is the origin.

    Attributes:
        most: The most bytes that were live at once.
        memories: The storages that are alive, by address.
    """

    supports_higher_order_operators = True  # such as torch.cond; these have no schema, and run their parts unseen

    def __init__(self, note: Note | None = None):
        super().__init__()
        self.most = 0
        self.memories: dict[int, Memory] = {}
        self._note = note
        self._allocated = 0
        self._freed: list[int] = []  # a storage may die at any time, so also in the middle of a sum

    @property
    def live(self) -> int:
        """The bytes that are live."""
        while self._freed:
            self._allocated -= self._freed.pop()
        return self._allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator, and counts what it allocates."""
        if any(map(wraps_tensors, types)):
            return NotImplemented  # it runs operators on what it wraps; these are the ones to count
        kwargs = kwargs or {}
        if func is not _FRESH:
            for tensor in _tensors((*args, *kwargs.values())):
                for storage in storages(tensor):
                    self._see(storage, is_new=False)
        output = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        writes = schema is not None and schema.is_mutable
        for tensor in _tensors((output,)):
            for storage in storages(tensor):
                memory = self._see(storage, is_new=True)
                overwritten = writes and tensor.nbytes == memory.nbytes
                if self._note is not None and memory.is_new and (overwritten or memory.origin is None):
                    memory.origin = self._note(func, tensor)
        self.most = max(self.most, self.live)
        return output

    def _see(self, storage: torch.UntypedStorage, is_new: bool) -> Memory:
        address, nbytes = storage._cdata, storage.nbytes()
        memory = self.memories.get(address)
        if memory is None:
            memory = Memory(weakref.ref(storage, self._forget(address)), 0 if is_new else nbytes, is_new)
            self.memories[address] = memory
        self._allocated += nbytes - memory.nbytes
        memory.nbytes = nbytes
        return memory

    def _forget(self, address: int) -> Callable[[Any], None]:
        memories, freed = self.memories, self._freed

        def forget(_: Any) -> None:
            memory = memories.pop(address, None)
            if memory is not None and memory.is_new:
                freed.append(memory.nbytes)

        return forget


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Lists the storages behind a tensor: one, or those of its parts; none for other layouts."""
    if wraps_tensors(type(tensor)):
        wrapped = [getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0]]
        # A DTensor lists its mesh among them.
        return [storage for part in wrapped if isinstance(part, Tensor) for storage in storages(part)]
    if tensor.layout == torch.strided and not tensor.is_nested:
        return [tensor.untyped_storage()]
    parts: tuple[Tensor, ...] = ()
    if tensor.layout == torch.sparse_coo:
        parts = tensor._indices(), tensor._values()
    elif tensor.layout in _SPARSE_ROWS:
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    elif tensor.layout in _SPARSE_COLUMNS:
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return [part.untyped_storage() for part in parts]


def uncompiled() -> AbstractContextManager[Any]:
    """Makes functions from torch.compile run as they were written: no mode sees what compiled ones run."""
    # Without the compiler, nothing can be compiled, and it takes seconds to load.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
