"""`fmp.memory.saved_residuals`: what a function keeps for its gradient.

A value is kept if it outlives the call and dies with the graph. So the call runs under a watch on storages, and then

    drop the result, but not its graph      what is alive now ...
    drop the graph                          ... and is dead now was kept

That finds all that takes memory, whoever holds it: autograd, a custom Function, torch.utils.checkpoint, or a policy of
fmp.remat. Walking over the graph tells which ops hold it, and which of the arguments they hold besides.
"""

import dataclasses
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fmp import _compat, tree
from fmp.live_memory import Watch, storages, uncompiled
from fmp.memory.stand_ins import stand_ins
from fmp.rematerialization.recording import NameListener
from fmp.user_line import user_line


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that is kept for the gradient.

    Attributes:
        name: Where it is among the arguments, such as `args/0/weight`, or `fn/weight` in the function itself; else the
            op that computed it, after the name that `fmp.checkpoint_name` gave it.
        shape: Its shape.
        dtype: Its dtype.
        nbytes: How many bytes are kept: all of the storage, even if the value is a part of it.
        saved_by: The nodes of the graph that keep it; empty if something else does, such as a policy of `fmp.remat`.
        is_argument: Whether it was there before the call, so that keeping it costs nothing.
        line: The line of the user's code that called the op; empty for an argument.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    saved_by: tuple[str, ...]
    is_argument: bool
    line: str


class Residuals(tuple[Residual, ...]):
    """Several values that are kept; `str` makes a table of them."""

    __slots__ = ()

    @property
    def total_bytes(self) -> int:
        """How many bytes they take, not counting arguments."""
        return sum(residual.nbytes for residual in self if not residual.is_argument)

    def __str__(self) -> str:
        rows = [("bytes", "value", "kept by", "computed in")]
        for residual in self:
            nbytes = "argument" if residual.is_argument else f"{residual.nbytes:,}"
            described = tree.describe(torch.empty(residual.shape, dtype=residual.dtype, device="meta"))
            saved_by = ", ".join(residual.saved_by) or "-"
            rows.append((nbytes, f"{residual.name} -> {described}", saved_by, residual.line))
        rows.append((f"{self.total_bytes:,}", "in all", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}" for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def saved_residuals(fn: Callable[..., Any], /, *args: Any, fake: bool = False, **kwargs: Any) -> Residuals:
    """Calls a function, and lists what is kept until its result is differentiated.

    It is differentiated with respect to the floating-point and complex tensors among the arguments, and to all else
    that requires grad: parameters, and tensors that the function closes over. So close over what needs no gradient,
    such as a batch. A frozen parameter stays frozen. Each storage is listed once, however many ops keep it.

    Not listed are the states of random generators that a recomputation needs (5 kB each). Where the function uses a
    torch.func transform inside, it is called twice, since saved-tensor hooks cannot be around one; then the arguments
    that torch.utils.checkpoint keeps are not listed. A function from torch.compile runs as if it were not compiled.

    Args:
        fn: Any function, or an `nn.Module`.
        *args: Its arguments.
        fake: Whether to run on fake tensors, as for `fmp.memory.peak`.
        **kwargs: Its keyword arguments.

    Returns:
        The values: those that cost memory in the order in which they were computed, then the arguments.

    Raises:
        RuntimeError: Inside of a torch.func transform or torch.inference_mode.
        ValueError: As for `fmp.memory.peak`.

    References:
        `jax.ad_checkpoint.print_saved_residuals`.

    Example:
        >>> def block(x, w):
        ...     return torch.tanh(torch.tanh(x @ w) @ w)
        >>> x, w = torch.ones(8, 4), torch.ones(4, 4)
        >>> for residual in fmp.memory.saved_residuals(block, x, w):
        ...     print(residual.name, residual.nbytes, residual.saved_by)
        tanh 128 ('MmBackward0', 'TanhBackward0')
        tanh 128 ('TanhBackward0',)
        args/0 128 ('MmBackward0',)
        args/1 64 ('MmBackward0',)
        >>> kept = fmp.memory.saved_residuals(fmp.remat(block, saveable=fmp.saveable.dots), x, w)
        >>> [residual.name for residual in kept], kept.total_bytes
        (['mm', 'mm', 'args/0', 'args/1'], 256)
    """
    if _compat.transform_active():
        raise RuntimeError("saved_residuals measures a whole call; call it outside of torch.func transforms")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("saved_residuals differentiates; call it outside of torch.inference_mode")
    if fake:
        with stand_ins(fn, args, kwargs) as (fake_fn, fake_args, fake_kwargs):
            return saved_residuals(fake_fn, *fake_args, **fake_kwargs)
    packs: list[weakref.ref[_Pack]] = []

    def pack(tensor: Tensor) -> _Pack:
        packed = _Pack(tensor.detach())
        packs.append(weakref.ref(packed))
        return packed

    with torch.enable_grad():
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
                return _residuals(fn, args, kwargs, packs)
        except RuntimeError as error:
            if not _compat.refuses_saved_tensor_hooks(error):
                raise
        return _residuals(fn, args, kwargs, [])


class _Pack:
    """A saved tensor; it lives as long as what saved it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


@dataclasses.dataclass
class _Origin:
    """What computed a value."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    line: str
    names: tuple[str, ...] = ()


class _NamingWatch(Watch, NameListener):
    """A watch that notes which op computed what, and where."""

    def __init__(self) -> None:
        super().__init__(lambda op, tensor: _Origin(_op_name(op), tuple(tensor.shape), tensor.dtype, user_line()))

    def name(self, tensor: Tensor, name: str) -> None:
        """Notes the name of a value."""
        for storage in storages(tensor):
            memory = self.memories.get(storage._cdata)
            if memory is not None and memory.is_new and name not in memory.origin.names:
                memory.origin.names += (name,)


def _residuals(fn: Any, args: Any, kwargs: Any, packs: list[weakref.ref[_Pack]]) -> Residuals:
    args, kwargs = _requiring_grad((args, kwargs))
    first = _compat.next_number()
    watch = _NamingWatch()
    with uncompiled(), watch:
        nodes = _nodes(fn(*args, **kwargs))
        if not nodes:
            return Residuals()
        gc.collect()  # garbage that the call has left is not of the graph
        savers = _savers(nodes, first, packs)
        new = {address: memory for address, memory in watch.memories.items() if memory.is_new}
        given = _given({address: saver for address, saver in savers.items() if address not in new}, fn, args, kwargs)
        names = {address: tuple(saver.names) for address, saver in savers.items()}
        del nodes, savers
        gc.collect()
    kept = [
        _computed(memory.origin, memory.nbytes, names.get(address, ()))
        for address, memory in new.items()
        if memory.reference() is None and memory.nbytes
    ]
    return Residuals([*kept, *given])


def _requiring_grad(arguments: Any) -> Any:
    made: dict[int, Tensor] = {}

    def wanted(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
            return leaf
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        return made.setdefault(id(leaf), leaf.detach().requires_grad_())

    return tree.map(wanted, arguments)


def _nodes(result: Any) -> list[Any]:
    tensors = [leaf for leaf in tree.leaves(result) if isinstance(leaf, Tensor)]
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


@dataclasses.dataclass
class _Saver:
    """The nodes that keep a storage, and a tensor that shows it."""

    tensor: Tensor
    names: list[str]


def _savers(nodes: list[Any], first: int, packs: list[weakref.ref[_Pack]]) -> dict[int, _Saver]:
    """Finds out which storages the nodes of a graph keep, by address."""
    savers: dict[int, _Saver] = {}
    alive = [pack for reference in packs if (pack := reference()) is not None]
    for name, tensor in (*_saved(nodes, first), *(("", pack.tensor) for pack in alive)):
        for storage in storages(tensor):
            saver = savers.setdefault(storage._cdata, _Saver(tensor, []))
            if name and name not in saver.names:
                saver.names.append(name)
    return savers


def _saved(nodes: list[Any], first: int) -> Iterator[tuple[str, Tensor]]:
    """Yields what the nodes of a graph save, without unpacking it: that might recompute it."""
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if node in seen or _compat.recorded_at(node) < first:
            continue  # it was recorded before the call
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions if following is not None)
        for data in _compat.saved_data(node):
            tensor = data.tensor if isinstance(data, _Pack) else data
            if isinstance(tensor, Tensor):
                yield node.name(), tensor


def _computed(origin: _Origin, nbytes: int, saved_by: tuple[str, ...]) -> Residual:
    name = ", ".join(origin.names) + ": " + origin.op if origin.names else origin.op
    return Residual(name, origin.shape, origin.dtype, nbytes, saved_by, False, origin.line)


def _given(savers: dict[int, _Saver], fn: Any, args: Any, kwargs: Any) -> list[Residual]:
    known: dict[int, tuple[str, Tensor]] = {}
    fn = inspect.unwrap(fn)
    for name, tensor in _named_tensors({"args": args, "kwargs": kwargs, "fn": getattr(fn, "__self__", fn)}):
        for storage in storages(tensor):
            known.setdefault(storage._cdata, (name, tensor))
    residuals: dict[int, Residual] = {}
    for address in sorted(savers, key=[*known, *savers].index):
        saver = savers[address]
        name, tensor = known.get(address, ("closed over", saver.tensor))
        nbytes = sum(storage.nbytes() for storage in storages(saver.tensor) if storage._cdata == address)
        if id(tensor) in residuals:  # a tensor that wraps others has a storage for each
            nbytes += residuals[id(tensor)].nbytes
        residuals[id(tensor)] = Residual(name, tuple(tensor.shape), tensor.dtype, nbytes, tuple(saver.names), True, "")
    return list(residuals.values())


def _named_tensors(values: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in tree.items(values):
        if isinstance(leaf, Tensor):
            yield path, leaf
        elif isinstance(leaf, nn.Module):
            for name, tensor in (*leaf.named_parameters(), *leaf.named_buffers()):
                yield f"{path}/{name.replace('.', '/')}", tensor


def _op_name(op: Any) -> str:
    schema = getattr(op, "_schema", None)
    return str(op) if schema is None else schema.name.removeprefix("aten::")
