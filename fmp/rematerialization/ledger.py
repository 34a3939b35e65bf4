"""Adds up what operators allocate and what they cost, for the measurements of `fmp.rematerialization.chain`."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fmp import tree
from fmp.live_memory import Watch
from fmp.rematerialization.operators import has_storage, memory_of

# So many operations take about as long as moving one byte: some 10 on a CPU, up to 200 on a GPU.
_OPERATIONS_A_BYTE = 100


class Ledger(Watch):
    """A watch that adds up what operators cost, too.

    Attributes:
        cost: Bytes read and written, plus operations of matrix products and the like in their time in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = 0

    def restart(self) -> int:
        """Forgets peak and cost; returns what is live."""
        self.most, self.cost = self.live, 0
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator, and enters what it allocates and costs."""
        kwargs = kwargs or {}
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if output is NotImplemented:
            return output
        given, made = tensors_of((args, kwargs)), tensors_of(output)
        memory = {memory_of(tensor) for tensor in given}
        if not {memory_of(tensor) for tensor in made} <= memory or func._schema.is_mutable:  # a view costs nothing
            self.cost += sum(tensor.nbytes for tensor in (*given, *made))
        if func.overloadpacket in flop_registry:
            operations = flop_registry[func.overloadpacket](*args, **kwargs, out_val=output)
            self.cost += operations // _OPERATIONS_A_BYTE
        return output


def tensors_of(value: Any) -> list[Tensor]:
    """Lists the tensors of a tree that have a storage."""
    return [leaf for leaf in tree.leaves(value) if has_storage(leaf)]


def new_bytes(leaves: Iterable[Any], known: Iterable[int] = ()) -> list[int]:
    """Counts the bytes of the memory of each leaf, but of none twice, nor of what is known."""
    seen = set(known)
    sizes: list[int] = []
    for leaf in leaves:
        is_new = has_storage(leaf) and memory_of(leaf) not in seen
        sizes.append(leaf.untyped_storage().nbytes() if is_new else 0)
        if is_new:
            seen.add(memory_of(leaf))
    return sizes
