"""Leaves products out of a recomputation whose values nothing needs: early stop, where a transform records the graph.

A formula for the gradient of `x + gelu(x @ up) @ down` reads all that its recomputation makes but for the last product,
and a third of the work is in that. The graph needs its node all the same, so the function runs to its end:

    first     which products are read by nothing but additions and views, whose formulas keep no values, and by these
              only on the way to the result?
    again     memory without values stands in for what those return

If another operator reads such memory, or something holds it in the end, the recomputation is made once more, in full,
and so are all that come later.
"""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fmp import _compat
from fmp.rematerialization.operators import Facts, facts_of, memory_of, tensors_in

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

_PLAIN = frozenset([Tensor, torch.nn.Parameter])


@dataclasses.dataclass
class Usefulness:
    """Whether leaving out is still worth a try, for all calls of one function.

    Attributes:
        is_given_up: Whether a value that was left out turned out to be needed.
    """

    is_given_up: bool = False


class Product(NamedTuple):
    """A call of a product: what it was given, and how what it returned lies in memory."""

    op: Any
    given: Facts
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class ValueNeeded(Exception):
    """Something reads a value that was left out."""


class Unread:
    """The products of one call whose values no gradient needs.

    Args:
        usefulness: What other calls have shown.
    """

    def __init__(self, usefulness: Usefulness):
        self.usefulness = usefulness
        self.products: dict[int, Product] = {}
        self.stands_in: list[StorageWeakRef] = []
        self.has_failed = False

    def recording(self) -> AbstractContextManager[Any]:
        """Finds the products while the function runs inside; those of an attempt that was given up are dropped."""
        self.products = {}
        return nullcontext() if self.usefulness.is_given_up else _Recorder(self)

    def again(self) -> AbstractContextManager[Any]:
        """Leaves the products out while the function runs inside, where nobody else looks at the operators."""
        if not self.products or self.usefulness.is_given_up or _compat.dispatch_modes():
            return nullcontext()
        self.stands_in, self.has_failed = [], False
        return _Replayer(self)

    def fail(self) -> None:
        """Takes note that a value was needed that was left out."""
        self.has_failed = self.usefulness.is_given_up = True

    def is_needed(self) -> bool:
        """Says, when nothing but the graph is left of the function, whether a value was needed that was left out."""
        if any(not memory.expired() for memory in self.stands_in):
            self.fail()
        return self.has_failed


class _Follower(TorchDispatchMode):
    """Counts operators, and follows where the values of products go."""

    def __init__(self, unread: Unread):
        super().__init__()
        self.unread = unread
        self.count = 0
        self.sources: dict[int, frozenset[int]] = {}  # by memory: of which products it is made
        # As long as these live, no other memory gets the same number.
        self.references: list[StorageWeakRef] = []

    def sources_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Lists the products of which values are read."""
        if not self.sources:
            return frozenset()
        return frozenset().union(*(self.sources.get(memory_of(each), ()) for each in tensors_in((args, kwargs))))

    def follow(self, output: Tensor, sources: frozenset[int]) -> StorageWeakRef:
        """Takes note of what a result is made of."""
        self.sources[memory_of(output)] = sources
        self.references.append(StorageWeakRef(output.untyped_storage()))
        return self.references[-1]


class _Recorder(_Follower):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator. Unless it is transparent, what it reads is needed."""
        kwargs = kwargs or {}
        index, self.count = self.count, self.count + 1
        sources = self.sources_of(args, kwargs)
        output = func(*args, **kwargs)
        if sources and func in _TRANSPARENT:
            self.follow(output, sources)
            return output
        for source in sources:
            self.unread.products.pop(source, None)
        if func in _PRODUCTS and _PLAIN.issuperset(map(type, tensors_in((args, kwargs, output)))):
            facts = output.shape, output.stride(), output.dtype, output.device
            self.unread.products[index] = Product(func, facts_of(args, kwargs), *facts)
            self.follow(output, frozenset([index]))
        return output


class _Replayer(_Follower):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator, or returns memory without values."""
        kwargs = kwargs or {}
        index, self.count = self.count, self.count + 1
        product = self.unread.products.get(index)
        if product is not None and (product.op, product.given) == (func, facts_of(args, kwargs)):
            output = torch.empty_strided(product.shape, product.stride, dtype=product.dtype, device=product.device)
            self.unread.stands_in.append(self.follow(output, frozenset([index])))
            return output
        sources = self.sources_of(args, kwargs)
        if sources and func not in _TRANSPARENT:
            self.unread.fail()
            raise ValueNeeded(f"remat: {func} reads a value that was left out")
        output = func(*args, **kwargs)
        if sources:
            self.unread.stands_in.append(self.follow(output, sources))
        return output
