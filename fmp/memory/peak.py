"""`fmp.memory.peak`: the most memory that a call needs at once."""

from collections.abc import Callable
from typing import Any

from fmp import _compat
from fmp.live_memory import Watch, storages, uncompiled
from fmp.memory.holders import held
from fmp.memory.stand_ins import stand_ins


def peak(fn: Callable[..., Any], /, *args: Any, fake: bool = False, **kwargs: Any) -> int:
    """Calls a function, and measures the most bytes that are live at once beyond those live before the call.

    Counted is each storage that an op returns, from then until the storage dies, on all devices together; the result
    lives until the end. Arguments, closures and parameters were there before; where the call frees one of them, as a
    donating train step does, its bytes count as free from then on. It works the same below autograd, torch.func
    transforms and `fmp.remat`, in any nesting, and on fake and meta tensors, which take no memory.

    Not counted is what an op allocates and frees inside itself (workspaces; for `torch.cond` and the like, all but the
    result), how an allocator rounds, memory of other libraries, the states of random generators (5 kB each), and what
    the call frees that is no argument and that no op has read. Memory that is released by resizing a storage is noticed
    when an op next uses it. A function from torch.compile runs as if it were not compiled.

    Args:
        fn: Any function, or an `nn.Module`. It is called once.
        *args: Its arguments.
        fake: Whether to run on fake tensors instead, which have shapes and no data: the result is the same, and nothing
            is allocated or changed. Replaced are all tensors in arguments, containers, closures, default arguments,
            partials, bound methods, global variables that the function names, modules with their gradients, and the
            attributes of other objects that are reached in these ways; not what only an object of a library holds,
            such as a `torch.optim` optimizer, whose step is then left out. Tensors on
            the meta device count as on the CPU, so a model too large for the machine can be made under
            `torch.device("meta")`. A function that looks at values cannot run on them. Of a few kernels torch does not
            know what they return besides, and counts too little: those of `nn.LSTM`, and of batch normalization with a
            16-bit input and float32 weights, on the CPU.
        **kwargs: Its keyword arguments.

    Returns:
        The number of bytes.

    Raises:
        ValueError: If `fake` is set and a tensor is fake already, is sparse, nested, or a wrapper of others, or was not
            found, or if the function looks at values.

    Example:
        >>> def loss(w, x):
        ...     return torch.tanh(torch.tanh(x @ w) @ w).sum()
        >>> w, x = torch.ones(16, 16), torch.ones(1024, 16)
        >>> fmp.memory.peak(loss, w, x) // x.nbytes
        2
        >>> fmp.memory.peak(torch.func.grad(loss), w, x) // x.nbytes
        5
        >>> fmp.memory.peak(fmp.grad(loss), w, x) // x.nbytes
        3
        >>> with torch.device("meta"):
        ...     layer, x = torch.nn.Linear(10**6, 10**6), torch.ones(1, 10**6)
        >>> fmp.memory.peak(layer, x, fake=True)
        4000000
    """
    if fake:
        with stand_ins(fn, args, kwargs) as (fake_fn, fake_args, fake_kwargs):
            return _peak(fake_fn, [fake_args, fake_kwargs])
    return _peak(fn, [args, kwargs])


class _FreeingWatch(Watch):
    """A watch that also takes off what was live before and dies."""

    def note(self, value: Any) -> None:
        """Sees what is there before."""
        for tensor in held(value):
            for storage in () if _compat.wrapped_by_transform(tensor) else storages(tensor):
                self._see(storage, is_new=False)

    def _forget(self, address: int) -> Callable[[Any], None]:
        forget, memories, freed = super()._forget(address), self.memories, self._freed

        def end(reference: Any) -> None:
            memory = memories.get(address)
            if memory is not None and not memory.is_new:
                freed.append(memory.nbytes)
            forget(reference)

        return end


def _peak(fn: Callable[..., Any], given: list[Any]) -> int:
    watch = _FreeingWatch()
    watch.note(given)
    with uncompiled(), watch:
        result = fn(*given[0], **given[1])
    del result
    return watch.most
