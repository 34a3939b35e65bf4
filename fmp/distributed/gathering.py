"""One differentiable operation: from the shards of some tensors to the full tensors, all in one collective.

    gather     full_i = all_gather(cast(shard_i))                     shards of all ranks, one after the other
    scatter    shard_i = mean over ranks of reduce_scatter(full_i)    each rank's part of what is summed over ranks

Each is the other's derivative, if the loss is the mean of the ranks' losses: so they can be differentiated any number
of times. The cast comes before the gather, so that 16-bit parameters travel as 16 bits. Gradients are summed in a dtype
of their own, float32 unless the layout says otherwise.

Bytes are gathered, so tensors of all dtypes travel together, also those that a backend does not know (int16, float8).
A tensor whose first dimension is not a multiple of the number of ranks is padded on the way.

Both are autograd.Functions whose backward pass calls the other one: torch's own collectives raise inside of
torch.func transforms. Below torch.compile they are one node of the graph, because the tracer would drop the backward
pass of a Function that is differentiated by torch.func.grad.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fmp import _compat
from fmp._compat import collectives
from fmp.distributed.meshes import check_groups


class Ranks(NamedTuple):
    """Who holds what.

    Attributes:
        group: The name of the process group that shares the tensors.
        size: How many ranks are in it.
        rank: Which of these this process is.
        replicas: The name of the group of those that hold the same shards; "" if there are no others.
        copies: How many there are.
    """

    group: str
    size: int
    rank: int
    replicas: str = ""
    copies: int = 1


class Leaf(NamedTuple):
    """One tensor.

    Attributes:
        shape: The shape of the full tensor.
        stored: The dtype of the shards.
        dtype: The dtype of the full tensor.
        is_placed: Whether the shards are DTensors.
    """

    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype
    is_placed: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a gather has to know, besides the shards.

    Attributes:
        mesh: The device mesh; its last dimension shares the tensors, one before that repeats them.
        leaves: The tensors.
        reduce_dtype: The dtype in which gradients are summed; those in float64 are summed in float64.
    """

    mesh: DeviceMesh
    leaves: tuple[Leaf, ...]
    reduce_dtype: torch.dtype

    def only(self, chosen: Sequence[int]) -> "Plan":
        """Leaves some tensors out."""
        return dataclasses.replace(self, leaves=tuple([self.leaves[index] for index in chosen]))

    def mapped(self, tensors: Sequence[Tensor], dims: Sequence[int | None], index: int = 1) -> "Plan":
        """Gives those tensors that are mapped over one more dimension, the second."""
        leaves = [
            leaf if dim is None else leaf._replace(shape=(leaf.shape[0], tensor.shape[dim], *leaf.shape[index:]))
            for leaf, tensor, dim in zip(self.leaves, tensors, dims, strict=True)
        ]
        return dataclasses.replace(self, leaves=tuple(leaves))


def gather(plan: Plan, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gathers tensors.

    Args:
        plan: What they are; the same on every rank.
        shards: This rank's part of each: the rows that `rows` gives of the first dimension. Of a tensor that is
            placed, the DTensor.

    Returns:
        The full tensors, plain. What is differentiated by them reaches the shards as the mean over all ranks.
    """
    if not plan.leaves:
        return ()
    if torch.compiler.is_compiling():
        return run_in_graph(place_in_graphs(plan.mesh, plan.leaves, plan.reduce_dtype), *shards)
    with _compat.replaced_function_modes():  # such as one that casts; they cannot follow into a Function
        return Gather.apply(plan, *shards)  # pyright: ignore[reportReturnType]  # declared to return one tensor


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """Looks at a mesh.

    Raises:
        ValueError: If it has more than two dimensions, or this process is not in it.
        RuntimeError: If its process groups have been destroyed.
    """
    if mesh.ndim > 2:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions; use one, over which tensors are shared, or two, of which the first "
            "repeats and the second shares them"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this process, rank {torch.distributed.get_rank()}, is not in the mesh, whose ranks are "
            f"{mesh.mesh.flatten().tolist()}; make layouts and steps on these only, or a mesh of all ranks"
        )
    if not torch.compiler.is_compiling():
        check_groups(mesh)
    last = mesh.ndim - 1
    group, size, rank = mesh.get_group(last).group_name, mesh.size(last), mesh.get_local_rank(last)
    if last == 0 or mesh.size(0) == 1:
        return Ranks(group, size, rank)
    return Ranks(group, size, rank, mesh.get_group(0).group_name, mesh.size(0))


def placements(mesh: DeviceMesh) -> list[Any]:
    """Says how the tensors lie on a mesh, in the terms of DTensor."""
    return [*[Replicate()] * (mesh.ndim - 1), Shard(0)]


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to sum gradients in that are kept in a dtype of at least 32 bits."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else reduce_dtype


def to_sum(tensor: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Casts what ranks are to add up, and divides it already if the sum might overflow where the mean does not.

    Args:
        tensor: Real numbers.
        count: How many ranks add up.
        dtype: The dtype to add up in.
    """
    if dtype != torch.float16:
        return tensor.to(dtype)
    # Before the cast, which may overflow, too.
    return (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) / count).to(dtype)


def mean_of(summed: Tensor, count: int) -> Tensor:
    """Computes the mean from the sum of what `to_sum` made."""
    return summed if summed.dtype == torch.float16 else summed / count


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor, in row-major order, as u8[n].

    Args:
        tensor: Of any dtype and strides. Its memory is shared where that is possible.
    """
    plain = tensor.resolve_conj().resolve_neg()
    # Strides that do not matter, of a tensor with at most one element, would not let it be viewed as bytes.
    dense = plain.contiguous() if plain.numel() > 1 else plain.clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)


def rows(count: int, size: int, rank: int) -> tuple[int, int]:
    """Says which rows of a tensor a rank holds, as DTensor's `Shard(0)` shares them out.

    Args:
        count: How many there are.
        size: How many ranks there are.
        rank: Which one is meant.

    Returns:
        The first row, and how many; the last ranks may have fewer than the others, or none.

    Example:
        >>> [rows(7, 4, rank) for rank in range(4)]
        [(0, 2), (2, 2), (4, 2), (6, 1)]
    """
    most = -(-count // size)
    start = min(rank * most, count)
    return start, min(most, count - start)


class Gather(torch.autograd.Function):
    """From shards to full tensors: `apply(plan, *shards)`."""

    @staticmethod
    def forward(plan: Plan, *shards: Tensor) -> tuple[Tensor, ...]:
        """Gathers."""
        ranks, sent = ranks_of(plan.mesh), []
        for leaf, shard in zip(plan.leaves, shards, strict=True):
            local: Tensor = shard.to_local() if isinstance(shard, DTensor) else shard
            most = -(-leaf.shape[0] // ranks.size)
            sent.append(as_bytes(_padded(local.detach().to(leaf.dtype), most)))
        received = collectives.all_gather(sent, ranks.size, ranks.group)
        found = []
        for leaf, data in zip(plan.leaves, received, strict=True):
            most = -(-leaf.shape[0] // ranks.size)
            found.append(data.view(leaf.dtype).view(ranks.size * most, *leaf.shape[1:])[: leaf.shape[0]])
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the plan and no tensor."""
        ctx.plan = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        """Scatters the cotangents of what is differentiated; which that is must be the same on every rank."""
        if _compat.gradients_are_batched():
            raise RuntimeError(
                "gathered parameters cannot be differentiated with is_grads_batched=True, which no collective can be "
                "mapped by; use torch.func.vmap of torch.func.vjp"
            )
        wanted = [index for index in range(len(cotangents)) if ctx.needs_input_grad[index + 1]]
        return None, *_spread(Scatter, ctx.plan, wanted, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Tensor | None, ...]:
        """Gathers the tangents."""
        return tuple(_spread(Gather, ctx.plan, _given(tangents), tangents))

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: Plan, *tensors: Tensor) -> tuple[Any, Any]:
        """Maps over a dimension that no rank shares."""
        return _mapped(Gather, in_dims[1:], plan, tensors)


class Scatter(torch.autograd.Function):
    """From full tensors, different on each rank, to shards of their mean: `apply(plan, *tensors)`."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Sums over the ranks that share, then over those that repeat."""
        ranks, sent = ranks_of(plan.mesh), []
        count = ranks.size * ranks.copies
        for leaf, tensor in zip(plan.leaves, tensors, strict=True):
            real = torch.view_as_real(tensor.detach().resolve_conj()) if leaf.dtype.is_complex else tensor.detach()
            part = to_sum(real, count, torch.float64 if real.dtype == torch.float64 else plan.reduce_dtype)
            sent.append(_padded(part, -(-leaf.shape[0] // ranks.size) * ranks.size).contiguous())
        received = collectives.reduce_scatter(sent, ranks.size, ranks.group)
        if ranks.copies > 1:
            received = _summed(received, ranks.replicas)
        means = [mean_of(summed, count) for summed in received]
        return tuple([_shard(plan, ranks, leaf, mean) for leaf, mean in zip(plan.leaves, means, strict=True)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the plan and no tensor."""
        ctx.plan = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        """Gathers the cotangents of what is differentiated."""
        wanted = [index for index in range(len(cotangents)) if ctx.needs_input_grad[index + 1]]
        return None, *_spread(Gather, ctx.plan, wanted, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Tensor | None, ...]:
        """Scatters the tangents."""
        return tuple(_spread(Scatter, ctx.plan, _given(tangents), tangents))

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: Plan, *tensors: Tensor) -> tuple[Any, Any]:
        """Maps over a dimension that no rank shares."""
        return _mapped(Scatter, in_dims[1:], plan, tensors)


_IN_GRAPHS = _compat.Numbered[Plan]()  # what graphs of torch.compile may call


@_compat.constant_while_tracing
def place_in_graphs(mesh: DeviceMesh, leaves: tuple[Leaf, ...], reduce_dtype: torch.dtype) -> int:
    """Returns the number by which `run_in_graph` knows a plan; equal ones share it."""
    torch.compiler.allow_in_graph(run_in_graph)
    # An equal mesh may be of a process group that is gone.
    return _IN_GRAPHS.number_of(Plan(mesh, leaves, reduce_dtype), lambda a, b: a == b and a.mesh is b.mesh)


def run_in_graph(place: int, *shards: Tensor) -> tuple[Tensor, ...]:
    """Gathers, under torch.compile, as one node of the graph."""
    return Gather.apply(_IN_GRAPHS[place], *shards)  # pyright: ignore[reportReturnType]


def _spread(function: Any, plan: Plan, chosen: list[int], tensors: Sequence[Any]) -> list[Tensor | None]:
    """Applies a function to some of the tensors; None stands for the others."""
    found: list[Tensor | None] = [None] * len(tensors)
    if chosen:
        results = function.apply(plan.only(chosen), *[tensors[index] for index in chosen])
        for index, result in zip(chosen, results, strict=True):
            found[index] = result
    return found


def _given(tangents: Sequence[Any]) -> list[int]:
    return [index for index, tangent in enumerate(tangents) if tangent is not None]


def _mapped(function: Any, dims: Sequence[int | None], plan: Plan, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    moved = [each if dim is None else each.movedim(dim, 1) for each, dim in zip(tensors, dims, strict=True)]
    outputs = function.apply(plan.mapped(tensors, dims), *moved)
    return outputs, tuple([None if dim is None else 1 for dim in dims])


def _summed(tensors: Sequence[Tensor], group: str) -> list[Tensor]:
    """Adds up tensors over ranks, in one collective for each dtype."""
    found = list(tensors)
    for dtype in dict.fromkeys([each.dtype for each in tensors]):
        chosen = [index for index, each in enumerate(tensors) if each.dtype == dtype]
        for index, total in zip(chosen, collectives.all_reduce([tensors[i] for i in chosen], group), strict=True):
            found[index] = total
    return found


def _padded(tensor: Tensor, count: int) -> Tensor:
    """Appends zeros to the first dimension."""
    missing = count - tensor.shape[0]
    return tensor if missing == 0 else torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


def _shard(plan: Plan, ranks: Ranks, leaf: Leaf, summed: Tensor) -> Tensor:
    """Makes what `reduce_scatter` returned a shard: without padding, in the dtype and form of those that came."""
    real = summed[: rows(leaf.shape[0], ranks.size, ranks.rank)[1]]
    local = (torch.view_as_complex(real) if leaf.stored.is_complex else real).to(leaf.stored)
    if not leaf.is_placed:
        return local
    stride = torch.empty(leaf.shape, device="meta").stride()
    return DTensor.from_local(
        local, plan.mesh, placements(plan.mesh), run_check=False, shape=torch.Size(leaf.shape), stride=stride
    )
