"""The part of a tensor that this process holds, as a node of a tree: it knows the shape of the whole.

A DTensor knows that, too. But inside of a torch.func transform it is hidden behind a plain tensor, and torch.compile
traces its Python for every operator. A `LocalShard` holds a plain tensor, and is carried by whatever carries trees.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fmp import _compat, _traced, tree
from fmp.distributed.gathering import Ranks, placements, ranks_of, rows
from fmp.distributed.meshes import check_ascending
from fmp.dtypes import short_name
from fmp.patterns import matcher

Tree = Any


@tree.dataclass
class LocalShard:
    """This rank's rows of a tensor that is shared out along its first dimension, as by DTensor's `Shard(0)`.

    Attributes:
        local: The rows, a plain tensor.
        shape: The shape of the full tensor.

    Example:
        >>> LocalShard(torch.ones(2, 3), torch.Size([4, 3]))
        shard of f32[4,3]
    """

    __is_part__: ClassVar[bool] = True  # for `fmp.tree.wholes`

    local: Tensor
    shape: torch.Size = tree.static()

    def __repr__(self) -> str:
        return f"shard of {self.__describe__()}"

    def __describe__(self) -> str:
        if not isinstance(self.local, Tensor):  # None where a gradient or a master is missing
            return str(self.local)
        return f"{short_name(self.local.dtype)}[{','.join(str(size) for size in self.shape)}]"


def own_shards(params: Tree, mesh: DeviceMesh) -> Tree:
    """Takes this rank's part of tensors that every rank has in full; nothing is sent.

    Args:
        params: Any tree. The parts of a `CompressedTensor` are tensors like others.
        mesh: The mesh over whose last dimension they are shared out.

    Returns:
        The tree with a `LocalShard`, in memory of its own, in place of each tensor; those without dimensions, or
        without elements, stay. What is in the tree twice is so in the result.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> own_shards({"w": torch.ones(4, 3), "step": torch.tensor(0)}, mesh)
        {'w': shard of f32[4,3], 'step': tensor(0)}
        >>> dist.destroy_process_group()
    """
    check_ascending(mesh)
    ranks, made = ranks_of(mesh), {}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.numel() == 0:
            return leaf
        if id(leaf) not in made:
            start, count = rows(leaf.shape[0], ranks.size, ranks.rank)
            made[id(leaf)] = LocalShard(leaf[start : start + count].clone(), leaf.shape)
        return made[id(leaf)]

    return tree.map(own, params)


def local_shards(params: Tree) -> Tree:
    """Takes DTensors apart.

    Args:
        params: Any tree.

    Returns:
        The tree with a `LocalShard` in place of each DTensor that is shared out along its first dimension; it shares
        the memory of the DTensor's local part. What is in the tree twice is so in the result.

    Raises:
        TypeError: If a DTensor lies in another way.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> weight = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        >>> local_shards({"w": weight})
        {'w': shard of f32[4,3]}
        >>> dist.destroy_process_group()
    """
    made: dict[int, LocalShard] = {}

    def taken_apart(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if torch.compiler.is_compiling():  # which would compile again for each tensor whose id it is asked for
            return LocalShard(leaf.to_local(), leaf.shape)
        check_placed(path, leaf, leaf.device_mesh)
        if id(leaf) not in made:
            made[id(leaf)] = LocalShard(leaf.to_local(), leaf.shape)
        return made[id(leaf)]

    return tree.map_with_path(taken_apart, params)


def as_dtensors(params: Tree, mesh: DeviceMesh) -> Tree:
    """Makes DTensors of what `local_shards` returned, or of gradients by it.

    Args:
        params: Any tree.
        mesh: The mesh on which the tensors lie.

    Returns:
        The tree with a DTensor in place of each `LocalShard`, and None where one holds None.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> weight = as_dtensors({"w": LocalShard(torch.ones(4, 3), torch.Size([4, 3]))}, mesh)["w"]
        >>> weight.placements, weight.to_local().shape
        ((Shard(dim=0),), torch.Size([4, 3]))
        >>> dist.destroy_process_group()
    """

    def put_together(leaf: Any) -> Any:
        if not isinstance(leaf, LocalShard) or not isinstance(leaf.local, Tensor):
            return leaf.local if isinstance(leaf, LocalShard) else leaf
        stride = torch.empty(leaf.shape, device="meta").stride()
        return DTensor.from_local(
            leaf.local, mesh, placements(mesh), run_check=False, shape=torch.Size(leaf.shape), stride=stride
        )

    leaves, unflatten = flatten(params)
    return unflatten([put_together(leaf) for leaf in leaves])


def flatten(params: Tree) -> tuple[list[Any], Callable[[list[Any]], Tree]]:
    """Takes a tree apart, with each `LocalShard` as one leaf; returns a function that puts it together again."""
    if torch.compiler.is_compiling():
        leaves, spec = _traced.flatten(params, _is_shard)
    else:
        leaves, spec = optree.tree_flatten(params, is_leaf=_is_shard, none_is_leaf=True)
    return leaves, spec.unflatten


def check_blocks(patterns: Sequence[str], values: Tree) -> None:
    """Refuses a name of a block that no parameter has: what it means would be gathered before the loss.

    Raises:
        ValueError: If a pattern matches none of the paths.
    """
    paths = tree.paths(values)
    missing = [pattern for pattern in patterns if not any(map(matcher([pattern]), paths))]
    if missing and paths:
        shown = ", ".join(repr(path) for path in paths[:5])
        raise ValueError(f"the layout's blocks name {missing[:5]}, but no leaf matches; the paths are {shown}, ...")


def check_placed(path: str, tensor: DTensor, mesh: DeviceMesh) -> None:
    """Refuses a DTensor that does not lie as a layout puts it.

    Raises:
        TypeError: If it is on another mesh, or not shared out along its first dimension over the mesh's last one.
    """
    if not is_placed_on(tensor, mesh):
        found, wanted = list(tensor.placements), placements(mesh)
        where = "another mesh" if tensor.device_mesh != mesh else f"{tuple(found)}"
        raise TypeError(
            f"{path or 'the tensor'} is a DTensor on {where}; a layout takes {tuple(wanted)} on its mesh: "
            "place it with tensor.redistribute(mesh, placements), or pass a plain tensor, which every rank has"
        )


def is_placed_on(tensor: DTensor, mesh: DeviceMesh) -> bool:
    """Says whether a DTensor lies as a layout puts it."""
    return tensor.device_mesh == mesh and list(tensor.placements) == placements(mesh)


def check_local(path: str, shard: LocalShard, ranks: Ranks) -> None:
    """Refuses a shard that is not this rank's.

    Raises:
        ValueError: If it has other sizes than this rank's rows of the full tensor.
    """
    shape = tuple(shard.shape)
    wanted = (rows(shape[0], ranks.size, ranks.rank)[1], *shape[1:]) if shape else None
    if tuple(shard.local.shape) != wanted:
        raise ValueError(
            f"{path or 'the shard'} holds {tree.describe(shard.local)}; of {list(shape)}, rank {ranks.rank} of "
            f"{ranks.size} has {'nothing: it is one number, so pass it plain' if wanted is None else list(wanted)}"
        )


def is_placed(leaf: Any) -> bool:
    """Says whether a tensor is a DTensor, perhaps inside of torch.func transforms."""
    if torch.compiler.is_compiling():
        return isinstance(leaf, DTensor)
    return isinstance(leaf, Tensor) and isinstance(_compat.below_transforms(leaf), DTensor)


def _is_shard(node: Any) -> bool:
    return isinstance(node, LocalShard)
