"""Leaves products out of a recomputation whose values nothing needs: early stop, where a transform records the graph.

A formula for the gradient of `x + gelu(x @ up) @ down` reads all that its recomputation makes but for the last product,
and a third of the work is in that. The graph needs its node all the same, so the function runs to its end:

    first     which products are read by nothing but additions and views, whose formulas keep no values, and by these
              only on the way to the result, and is none of it held by anything else?
    again     tensors without values stand in for what those return

The first pass may be wrong: it does not see what a kernel reads that Python code launches itself, or another thread,
and the second pass may read more. So it decides only whether an attempt is worth it. A tensor without values cannot be
read: who tries gets an error, in any thread and any mode. An attempt in which that happens, or of which something is
held in the end, is made once more, in full, and so are all that come later.
"""

import dataclasses
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fmp import _compat
from fmp.errors import RematError
from fmp.rematerialization.operators import Facts, facts_of, has_storage, memory_of, tensors_in

_aten: Any = torch.ops.aten

# Their formulas do not read what they return.
_PRODUCTS = frozenset(getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))

# Nor do these, and they do not read what they are given either.
_TRANSPARENT = frozenset(
    [
        *(getattr(_aten, name).Tensor for name in ("add", "sub", "slice")),
        *(getattr(_aten, name).int for name in ("transpose", "select")),
        *(getattr(_aten, name).default for name in ("view", "_unsafe_view", "t", "permute", "expand", "unsqueeze")),
        *(getattr(_aten, name).default for name in ("alias", "detach", "clone", "_to_copy", "neg", "squeeze")),
        *(_aten.squeeze.dim, _aten.squeeze.dims),
        *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
    ]
)


@dataclasses.dataclass
class Usefulness:
    """Whether leaving out is still worth a try, for all calls of one function.

    Attributes:
        is_given_up: Whether a value that was left out turned out to be needed.
    """

    is_given_up: bool = False


class Made(NamedTuple):
    """A call of an operator: what it was given, how what it returned lies in memory, and of which products it is made.

    The products are named by how many calls came before.
    """

    op: Any
    given: Facts
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sources: frozenset[int]


class ValueNeeded(RematError):
    """Something reads a value that was left out."""


class Unread:
    """The operators of one call whose values no gradient needs.

    Args:
        usefulness: What other calls have shown.

    Attributes:
        left_out: What they return, by how many calls of operators came before.
    """

    def __init__(self, usefulness: Usefulness):
        self.usefulness = usefulness
        self.left_out: dict[int, Made] = {}
        self._recorder: _Recorder | None = None

    def recording(self) -> AbstractContextManager[Any]:
        """Finds the operators while the function runs inside; those of an attempt that was given up are dropped."""
        self._recorder = None if self.usefulness.is_given_up else _Recorder()
        return self._recorder or nullcontext()

    def settle(self, result: Any) -> None:
        """Takes over what was found, when nothing but its result is left of the function."""
        self.left_out = self._recorder.unread(result) if self._recorder else {}
        self._recorder = None

    def attempt(self) -> "Attempt | None":
        """Returns a mode that leaves them out, once; None if that leaves out nothing, or others look at operators."""
        if not self.left_out or self.usefulness.is_given_up or _compat.dispatch_modes():
            return None
        return Attempt(self.left_out, self.usefulness)


class _Recorder(_compat.TorchDispatchMode):
    """Follows where the values of products go."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._made: dict[int, Made] = {}
        self._read: set[int] = set()
        self._sources: dict[int, frozenset[int]] = {}  # by memory: of which products it is made
        self._memory: dict[int, StorageWeakRef] = {}  # as long as these live, no other memory gets the same number

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator. Unless it is transparent, what it reads is needed."""
        kwargs = kwargs or {}
        index, self._count = self._count, self._count + 1
        given = tensors_in((args, kwargs))
        sources = self._sources_of(given)
        output = func(*args, **kwargs)
        if func in _PRODUCTS:
            self._read |= sources
            sources = frozenset([index])
        if sources and (func in _TRANSPARENT or func in _PRODUCTS) and all(map(_is_plain, (*given, output))):
            facts = output.shape, output.stride(), output.dtype, output.device
            self._made[index] = Made(func, facts_of(args, kwargs), *facts, sources)
            self._sources[memory_of(output)] = sources
            self._memory[memory_of(output)] = StorageWeakRef(output.untyped_storage())
        else:
            self._read |= sources
        return output

    def unread(self, result: Any) -> dict[int, Made]:
        """Lists what is made of a product that nothing reads and nothing but the result holds."""
        only_shown = _held_by_nothing_else(tensors_in(result))
        for memory, sources in self._sources.items():
            if memory not in only_shown and not self._memory[memory].expired():
                self._read |= sources
        return {index: made for index, made in self._made.items() if not made.sources <= self._read}

    def _sources_of(self, tensors: list[Tensor]) -> frozenset[int]:
        """Lists the products of which tensors are made, but for those that something reads already."""
        found = [self._sources[memory] for memory in map(memory_of, tensors) if memory in self._sources]
        return frozenset[int]().union(*found) - self._read if found else frozenset()


class Attempt(_compat.TorchDispatchMode):
    """Puts tensors without values in the place of what was left out, while the function runs once more inside."""

    def __init__(self, left_out: dict[int, Made], usefulness: Usefulness):
        super().__init__()
        self._left_out = left_out
        self._usefulness = usefulness
        self._count = 0
        self._absent: list[StorageWeakRef] = []
        self._has_failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator, which raises if it reads what is absent, or leaves it out."""
        kwargs = kwargs or {}
        index, self._count = self._count, self._count + 1
        made = self._left_out.get(index)
        if made is None or made.op != func or made.given != facts_of(args, kwargs):
            return func(*args, **kwargs)
        absent = Absent(made, self)
        self._absent.append(StorageWeakRef(absent.untyped_storage()))
        return absent

    def fail(self) -> None:
        """Takes note that a value was needed that was left out."""
        self._has_failed = self._usefulness.is_given_up = True

    def has_failed(self) -> bool:
        """Says, when nothing but the graph is left of the function, whether a value was needed that was left out."""
        if any(not memory.expired() for memory in self._absent):
            self.fail()
        return self._has_failed


class Absent(Tensor):
    """What an operator would have returned that was left out: it can be passed on, but not be read.

    Args:
        made: What it stands for.
        attempt: By which it was left out.
    """

    __torch_function__ = _compat.plain_torch_function
    attempt: Attempt

    @staticmethod
    def __new__(cls, made: Made, attempt: Attempt) -> "Absent":
        """Makes one without memory."""
        absent = _compat.without_memory(cls, made.shape, made.stride, made.dtype, made.device)
        absent.attempt = attempt
        return absent

    def __init__(self, made: Made, attempt: Attempt):
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        """Refuses to be read."""
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, Absent):
                tensor.attempt.fail()
        raise ValueNeeded(
            f"remat: {func} reads a value that a recomputation had left out, since no gradient needs it. Something has "
            "held it since; let it hold that in the first pass, too, or pass determinism_check='none'"
        )

    def share_memory_(self) -> NoReturn:
        """Refuses to be read by other processes."""
        self.attempt.fail()
        raise ValueNeeded("remat: a value that was left out is shared with other processes")


_PLAIN = frozenset([Tensor, torch.nn.Parameter, Absent])


def _held_by_nothing_else(tensors: list[Tensor]) -> set[int]:
    """Lists the memory of those tensors that nothing holds but the list, nor their memory but they and their bases."""
    below = {id(tensor): _compat.below_transforms(tensor) for tensor in tensors}
    distinct = {id(each): each for each in below.values()}.values()
    bases = [base for base in map(_compat.base_of, distinct) if base is not None]
    known = {id(each): each for each in (*distinct, *bases) if has_storage(each)}
    holders = Counter([id(each) for each in bases])  # a view holds its base, and a wrapper what it wraps
    holders.update([id(each) for tensor, each in below.items() if tensor != id(each)])
    sharing = Counter(map(memory_of, known.values()))
    held = {
        memory_of(each)
        for each in known.values()
        if _compat.count_holders(each) > 1 + holders[id(each)] or _compat.count_tensors(each) > sharing[memory_of(each)]
    }
    wrappers = [tensor for tensor in tensors if _compat.wrapped_by_transform(tensor)]
    held |= {memory_of(below[id(tensor)]) for tensor in wrappers if _compat.count_holders(tensor) > 1}
    return sharing.keys() - held


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and has_storage(tensor)
