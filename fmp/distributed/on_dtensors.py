"""What an optimizer needs to run on DTensors, so that norms and means in it are those of whole tensors."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication

from fmp import tree
from fmp.distributed.gathering import placements

Tree = Any


def dtensor(part: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    """Makes a DTensor of this rank's rows.

    Args:
        part: The rows.
        shape: The shape of the whole.
        mesh: Where it lies.
    """
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(part, mesh, placements(mesh), run_check=False, shape=torch.Size(shape), stride=stride)


def mixing() -> AbstractContextManager[Any]:
    """Lets operators take DTensors together with plain tensors, which count as equal on all ranks."""
    # torch.compile cannot trace it.
    return nullcontext() if torch.compiler.is_compiling() else implicit_replication()


def mixed(values: Tree, mesh: DeviceMesh) -> Tree:
    """Does by hand what `mixing` cannot do while torch.compile traces; single numbers mix by themselves."""

    def replicated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.numel() <= 1:
            return leaf
        return DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return tree.map(replicated, values) if torch.compiler.is_compiling() else values


def settled(leaf: Any, mesh: DeviceMesh) -> Any:
    """Lets a DTensor that an optimizer has made lie by rows, or on every rank if it was made for no rows."""
    if not isinstance(leaf, DTensor):
        return leaf
    if any(placement.is_shard(0) for placement in leaf.placements):
        return leaf.redistribute(mesh, placements(mesh))
    return leaf.full_tensor()


def part_of(leaf: Any, rows: slice | None, mesh: DeviceMesh) -> Any:
    """Takes this rank's part out of what an optimizer has returned.

    Args:
        leaf: What it has returned.
        rows: This rank's rows; None for what every rank has.
        mesh: Where rows lie.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    if rows is None:
        return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    if isinstance(leaf, DTensor):
        return leaf.redistribute(mesh, placements(mesh)).to_local()
    return leaf[rows]
