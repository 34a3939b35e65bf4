"""What a step on several processes sends and keeps, next to what the arithmetic of ZeRO asks for.

The step is that of examples/train_distributed.py at O2 in bfloat16, with AdamW. Each quantity is that of one rank, the
one with most of it, in bytes a parameter. "Sent" is measured in two ways:

    collectives   what the operators of torch.distributed are given, N ranks in the group, s the bytes of all inputs:
                  all-gather (N - 1) s,  reduce-scatter s (N - 1) / N,  all-reduce 2 s (N - 1) / N
                  which is what a ring sends, and the least that any algorithm can
    sockets       what the kernel says has left this process's TCP sockets, so what gloo really does (Linux only)

ZeRO's own count is the same with nothing but parameters and gradients in it: no padding, no norms and no flags.
"""

import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fmp
from fmp import tree
from fmp.distributed import Layout

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_distributed import batches, make_loss, make_params

WIDTH, BLOCKS = 250, 4  # four ranks share out neither 250 rows nor 750 evenly
FULL = 4  # bytes of a number in float32: masters, moments, and gradients as they are summed
_c10d: Any = distributed.distributed_c10d
_SENT_AT = 200  # where struct tcp_info has tcpi_bytes_sent, and behind it, how many of them were sent again


@dataclass(frozen=True)
class Leaf:
    """A parameter, for the arithmetic.

    Attributes:
        count: How many numbers it has.
        itemsize: The bytes of each in the compute dtype.
        is_in_block: Whether it is gathered twice with `zero=3`, when its block runs and for its gradient.
    """

    count: int
    itemsize: int
    is_in_block: bool


@dataclass(frozen=True)
class Measured:
    """Bytes a parameter on one rank: counted, and by ZeRO's arithmetic."""

    collectives: float
    sockets: float
    state: float
    least_sent: float
    least_state: float


def least_sent(leaves: Sequence[Leaf], zero: int, ranks: int) -> float:
    """Computes the bytes that a rank must send in a step.

    With P bytes of parameters in the compute dtype, G bytes of gradients in float32, and N ranks:

        zero=0    all-reduce                        2 G (N - 1) / N
        zero=1    reduce-scatter, all-gather        (G + P) (N - 1) / N
        zero=3    likewise, with two all-gathers    (G + 2 P) (N - 1) / N
    """
    grads = sum(FULL * leaf.count for leaf in leaves)
    gathered = sum(leaf.itemsize * leaf.count * (2 if zero == 3 and leaf.is_in_block else 1) for leaf in leaves)
    return (2 * grads if zero == 0 else grads + gathered) * (ranks - 1) / ranks


def least_state(leaves: Sequence[Leaf], zero: int, ranks: int) -> float:
    """Computes the bytes of parameters, masters (of those that are not in float32) and Adam's two moments on a rank."""
    whole = sum(leaf.count * (leaf.itemsize + (FULL if leaf.itemsize < FULL else 0) + 2 * FULL) for leaf in leaves)
    return whole if zero == 0 else whole / ranks


class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank sends in collectives.

    Attributes:
        sent: The bytes by collective, as the head of this file counts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait_tensor" not in func.name():
            inputs = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            self._count(func.name(), sum(tensor.nbytes for tensor in inputs), args[-1])
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, nbytes: int, group: str) -> None:
        ranks = _c10d._resolve_process_group(group).size()
        if "all_gather" in name:
            self.sent["all-gather"] += nbytes * (ranks - 1)
        elif "reduce_scatter" in name:
            self.sent["reduce-scatter"] += nbytes * (ranks - 1) // ranks
        elif "all_reduce" in name:
            self.sent["all-reduce"] += 2 * nbytes * (ranks - 1) // ranks
        else:
            raise NotImplementedError(f"nobody has said how many bytes {name} sends")


def sent_by_sockets() -> int:
    """Waits for all ranks, and returns the bytes that have left this process through the TCP sockets that are open."""
    distributed.barrier()  # of some hundred bytes; what a collective has sent may wait in the kernel until then
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_socket = os.readlink(entry).startswith("socket:")
        except OSError:  # closed since
            continue
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as own:
            if own.type == socket.SOCK_STREAM and own.family in (socket.AF_INET, socket.AF_INET6):
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT_AT + 16)
                sent, again = struct.unpack_from("=QQ", info, _SENT_AT)
                total += sent - again
    return total


def measure(zero: int) -> Measured:
    """Makes two steps, and measures the second; all ranks call it."""
    ranks = distributed.get_world_size()
    layout = Layout(init_device_mesh("cpu", (ranks,)), zero=zero, blocks=["blocks"] if zero == 3 else [])
    policy = fmp.opt_level("O2", half_dtype=torch.bfloat16)
    step = fmp.train_step(make_loss(layout), fmp.optim.adamw(1e-3), policy=policy, clip_norm=1.0, layout=layout)
    device = torch.device("cpu")
    params = make_params(WIDTH, BLOCKS, device)
    first, second = [
        tree.map(lambda whole: whole.chunk(ranks)[layout.part], batch) for batch in batches(2, WIDTH, device)
    ]
    state, _ = step(step.init(params), first)

    before = sent_by_sockets()
    with Traffic() as traffic:
        state, _ = step(state, second)
    after = sent_by_sockets()

    leaves = [
        Leaf(leaf.numel(), leaf.dtype.itemsize, path.startswith("blocks"))
        for path, leaf in tree.items(policy.cast_to_compute(params))
    ]
    count = sum(leaf.count for leaf in leaves)
    return Measured(
        traffic.sent.total() / count,
        (after - before) / count,
        nbytes_of(layout.opened(state)[0]) / count,
        least_sent(leaves, zero, ranks) / count,
        least_state(leaves, zero, ranks) / count,
    )


def nbytes_of(values: Any) -> int:
    """Returns the bytes of the memory behind a tree of tensors, whatever part of it they show."""
    storages = [leaf.untyped_storage() for leaf in tree.leaves(values) if leaf is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def largest(found: Sequence[Measured]) -> Measured:
    """Takes the most that any rank sends, and the most that any keeps."""
    return Measured(*[max(values) for values in zip(*[astuple(each) for each in found], strict=True)])
