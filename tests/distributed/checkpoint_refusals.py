"""What the processes of the tests of refused checkpoints run."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fmp import tree
from fmp.distributed import Checkpoints, Layout, as_dtensors, local_shards, own_shards, storage
from tests.bits import same_bits
from tests.distributed.checkpoint_cases import error_of, local, small


def refusals(folder: str) -> dict[str, str]:
    """Does what is refused on all ranks; returns the errors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    odd = rank == 1
    checkpoints = Checkpoints(folder)
    mesh = init_device_mesh("cpu", (size,))
    for step in (1, 2):
        checkpoints.save(small(step), step)
    errors = {}

    def refused(name: str, call: Callable[[], Any]) -> None:
        errors[name] = error_of(call)

    shards = own_shards({"block": [torch.zeros(4, 2)]}, mesh)
    large = own_shards({"w": torch.arange(4.0 * 2**18).reshape(4, 2**18)}, mesh)
    refused("a shard", lambda: checkpoints.save(shards, 3))
    refused("a large shard", lambda: checkpoints.save_async(large, 3))
    refused("a shard in like", lambda: checkpoints.load({"w": shards["block"][0]}))
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool):
        values = torch.zeros(3, 2**20, dtype=dtype).t()
        values[2**19 :] = rank
        refused(f"large, {dtype}", lambda values=values: checkpoints.save({"w": values}, 3))

    for name, mine, theirs in (("floats", 1, 1.0), ("bools", 1, True), ("signs", 0.0, -0.0)):
        refused(f"Python numbers, {name}", lambda value=theirs if odd else mine: checkpoints.save({"x": [value]}, 3))
    copies = torch.zeros(3, 2**18)
    copies[2, -1] = rank
    for name, part in (("small", copies[2, -1:]), ("large", copies)):
        copied = DTensor.from_local(part, mesh, [Replicate()], run_check=False)
        refused(f"{name} copies", lambda copied=copied: checkpoints.save_async({"x": copied}, 3))
    other = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(rank)], run_check=False)
    refused("placements", lambda: checkpoints.save({"x": other}, 3))

    partial = DTensor.from_local(torch.ones(11, 1), mesh, [Partial()], run_check=False)
    refused("a partial sum in like", lambda: checkpoints.load({**small(0), "w": partial}))
    refused("another step to load", lambda: checkpoints.load(small(0), 1 + rank))
    refused("no step on one", lambda: checkpoints.load(small(0), 1 if odd else None))
    refused("a step of another type", lambda: checkpoints.load(small(0), torch.tensor(1)))  # pyright: ignore[reportArgumentType]

    turned = DeviceMesh("cpu", torch.tensor([1, 0]))
    over_rows = DTensor.from_local(torch.ones(1, 1), turned, [Shard(0)], run_check=False)
    refused("a layout on a turned mesh", lambda: Layout(turned, zero=1))
    refused("a layout on turned copies", lambda: Layout(DeviceMesh("cpu", torch.tensor([[1], [0]])), zero=1))
    refused("shards of a turned mesh", lambda: own_shards({"w": torch.ones(2, 1)}, turned))
    refused("a turned mesh", lambda: checkpoints.save({"w": over_rows}, 3))
    refused("a turned mesh in like", lambda: checkpoints.load({**small(0), "w": _like(turned)}))

    # What fails on one rank before torch has begun.
    for name, (owner, attribute) in {
        "no writer": (FileSystemWriter, "__init__"),
        "no reader": (storage._Reader, "__init__"),
    }.items():
        broken = mock.patch.object(owner, attribute, side_effect=MemoryError("no memory"))
        with broken if odd else contextlib.nullcontext():
            refused(name, lambda: checkpoints.save(small(3), 3) if name == "no writer" else checkpoints.load(small(0)))

    # After all that, nothing has changed, and everything works.
    assert checkpoints.steps() == [1, 2]
    assert same_bits(local(checkpoints.load(small(0))), local(small(2)))
    return errors


def _like(mesh: DeviceMesh) -> DTensor:
    rows = 6 if mesh.get_coordinate() == (0,) else 5
    return DTensor.from_local(
        torch.zeros(rows, 1), mesh, [Shard(0)], run_check=False, shape=torch.Size([11, 1]), stride=(1, 1)
    )


def taken_as_they_are(folder: str) -> list[bool]:
    """Saves what looks like what is refused; says whether it came back."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    full = {"w": torch.arange(4.0 * 2**18).reshape(4, 2**18), "b": torch.arange(5.0), "scale": torch.tensor(2.0)}
    checkpoints = Checkpoints(folder)
    shards = own_shards(full, mesh)
    checkpoints.save(as_dtensors(shards, mesh), 1)
    plain = checkpoints.load(tree.map(torch.zeros_like, full))
    back = local_shards(checkpoints.load(as_dtensors(tree.map(torch.zeros_like, shards), mesh)))

    # Copies do not mind the order, and neither does a mesh that ascends along each dimension.
    crossed = DeviceMesh("cpu", torch.arange(size).reshape(2, size // 2).t())
    for ranks, placements in ((torch.arange(size).flip(0), [Replicate()]), (crossed.mesh, [Replicate(), Shard(0)])):
        checkpoints.save({"b": _placed(full["b"], DeviceMesh("cpu", ranks), placements)}, 2)
        assert same_bits(checkpoints.load({"b": torch.zeros(5)}), {"b": full["b"]})
    return [same_bits(plain, full), same_bits(back, shards)]


def groups(folder: str) -> list[str]:
    """Two groups of two ranks save what each has trained; returns the errors. What may be saved comes back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "data"))
    inner, group = mesh["data"], mesh.get_local_rank("group")
    like = {"w": distribute_tensor(torch.zeros(5, 2), inner, [Shard(0)]), "b": torch.zeros(1)}
    same = {**like, "w": like["w"] + 1}
    other = {**like, "w": like["w"] + group}
    checkpoints = Checkpoints(folder)
    found = [error_of(lambda: checkpoints.save(other, 1)), error_of(lambda: checkpoints.save_async(other, 1))]

    # A first part that is smaller in one group than in the other begins where that does.
    trio, single = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [3])
    its = trio if dist.get_rank() < 3 else single
    uneven = DTensor.from_local(torch.ones(6 // its.size(), 2), its, [Shard(0)], run_check=False)
    found.append(error_of(lambda: checkpoints.save({"w": uneven}, 1)))

    # Copies whose replicas have come apart in one row.
    rows = torch.zeros(2, 2)
    rows[-1, -1] = float(dist.get_rank() == 3)
    hybrid = DTensor.from_local(rows, mesh, [Replicate(), Shard(0)], run_check=False)
    found.append(error_of(lambda: checkpoints.save({"w": hybrid}, 1)))
    assert checkpoints.steps() == []

    checkpoints.save(same, 1)
    assert same_bits(local(checkpoints.load(like)), local(same))
    half = DeviceMesh("cpu", [0, 1])
    checkpoints.save({"w": DTensor.from_local(torch.ones(2, 2), half, [Shard(0)], run_check=False)}, 2)
    assert checkpoints.load({"w": torch.zeros(4, 2)})["w"].eq(1).all()

    def counted(state: Any) -> Any:
        part, shape = state["w"].to_local()[None], torch.Size((2, 5, 2))
        places = [Shard(0), Shard(1)]
        return {"w": DTensor.from_local(part, mesh, places, run_check=False, shape=shape, stride=(10, 2, 1))}

    checkpoints.save(counted(other), 3)
    back = checkpoints.load(counted(like))["w"].to_local()[0]
    assert same_bits(back, other["w"].to_local())
    return found


def _placed(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    copies = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(mesh, placements)


def two_objects(folder: str) -> tuple[list[int], bool]:
    """Saves in the background through an object of its own each time, then loads through one more."""
    pending = [Checkpoints(folder).save_async(small(step), step) for step in (10, 20, 30)]
    back = Checkpoints(folder).load(small(0))
    for save in pending:
        save.wait()
    return Checkpoints(folder).steps(), same_bits(local(back), local(small(30)))
