"""Tensors by name, on disk through torch.distributed.checkpoint: every rank writes its own parts, and any rank reads.

The files are those of torch, and its tools read them. Of the pickled index that torch puts beside them, only the few
classes that torch puts into it are ever unpickled here.
"""

import contextlib
import dataclasses
import pathlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.tensor import DTensor

from fmp.distributed.agreement import Group, describe_failures, rank_and_size, together
from fmp.distributed.meshes import check_stored
from fmp.errors import CheckpointError

INDEX = ".metadata"
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, DTensor)


@dataclasses.dataclass(frozen=True)
class Part:
    """What one rank has of a tensor.

    Attributes:
        whole: The tensor on the meta device: its shape, dtype and placement.
        local: The numbers; all of them for a plain tensor, this rank's for a distributed one.
    """

    whole: torch.Tensor
    local: torch.Tensor


def part(tensor: torch.Tensor, copy: bool) -> Part:
    """Takes this rank's part of a tensor.

    Args:
        tensor: A plain or distributed tensor.
        copy: Whether to copy the numbers, to the host; otherwise they are the tensor's own.

    Raises:
        ValueError: If the tensor is on the meta device, or `check_stored` refuses it.
    """
    tensor = tensor.detach()
    if tensor.is_meta:
        raise ValueError("it is on the meta device and has no values to save")
    if not isinstance(tensor, DTensor):
        whole, local = torch.empty_like(tensor, device="meta"), tensor
    else:
        check_stored(tensor)
        local = tensor.to_local()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        whole = _placed_as(tensor, torch.empty_like(local, device="meta"))
    local = local.resolve_conj().resolve_neg()
    return Part(whole, local.to("cpu", copy=True) if copy else local)


def place(part: Part) -> tuple[int, ...] | None:
    """Says where a part begins in the whole tensor; None if this rank has no part. So torch tells parts apart."""
    items = create_default_local_save_plan({"": part.whole}, is_coordinator=False).items
    return next((tuple(item.index.offset or ()) for item in items), None)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor to read into: of the same shape, dtype, strides, device and placement, without `requires_grad`.

    Args:
        tensor: A plain or distributed tensor. A plain one on the meta device gives one on the host, a distributed one
            gives one on the device of its mesh.

    Raises:
        ValueError: If `check_stored` refuses the tensor.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        check_stored(tensor)
        device = tensor.device_mesh.device_type if tensor.is_meta else None
        return _placed_as(tensor, torch.empty_like(tensor.to_local(), device=device))
    return torch.empty_like(tensor, device="cpu" if tensor.is_meta else None)


def write(parts: Mapping[str, Part], folder: Path, group: Group) -> None:
    """Writes tensors to an empty folder, all ranks together; of what several ranks have, one of them writes it.

    Raises:
        CheckpointError: If some rank cannot; on all ranks.
    """

    def prepare() -> tuple[_PartPlanner, filesystem.FileSystemWriter]:
        return _PartPlanner({name: part.local for name, part in parts.items()}), filesystem.FileSystemWriter(folder)

    wholes = {name: part.whole for name, part in parts.items()}
    with _checkpoint_errors("written", group):
        # Once torch has begun, the ranks wait for each other; what fails before must fail on all of them.
        planner, writer = together(group, prepare)
        if group is not None:
            state_dict_saver.save(wholes, storage_writer=writer, planner=planner, process_group=group)
            return
        # The same without collectives; torch would warn about every lone process.
        planner.set_up_planner(wholes, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(True)
        plans, index = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        [plan] = writer.prepare_global_plan(plans)
        writer.finish(index, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def written_files(folder: Path, rank: int | None = None) -> list[str]:
    """Lists the files that `write` wrote, of one rank or of all; the index counts as rank 0's."""
    prefix = "__" if rank is None else f"__{rank}_"
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if name.startswith(prefix) or (name == INDEX and not rank))


def read(tensors: dict[str, torch.Tensor], folder: Path, group: Group) -> None:
    """Reads into tensors, all ranks together; each reads what its own parts need.

    Args:
        tensors: What to fill. Names, global shapes and dtypes must be those of the folder, placements need not.
        folder: Where `write` wrote.
        group: The process group.

    Raises:
        CheckpointError: If some rank cannot; on all ranks.
    """
    with _checkpoint_errors("read", group):
        planner, reader = together(group, lambda: (DefaultLoadPlanner(), _Reader(folder)))
        if group is not None:
            state_dict_loader.load(tensors, storage_reader=reader, planner=planner, process_group=group)
            return
        index = reader.read_metadata()
        planner.set_up_planner(tensors, index, is_coordinator=True)
        reader.set_up_storage_reader(index, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        [plan] = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()


def _placed_as(tensor: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class _PartPlanner(DefaultSavePlanner):
    """Plans from shapes and placements alone, and looks up the numbers where they are."""

    def __init__(self, locals_: Mapping[str, torch.Tensor]):
        super().__init__()
        self._locals = locals_

    def lookup_object(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self._locals[index.fqn]


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with open(Path(self.path) / INDEX, "rb") as file:
            return _IndexUnpickler(file).load()


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = None
        if module == metadata.__name__:
            found = getattr(metadata, name, None)
        elif (module, name) == (filesystem.__name__, "_StorageInfo"):
            return filesystem._StorageInfo
        elif (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        elif module == "torch":
            found = getattr(torch, name, None)
        elif module.startswith("pathlib") and name.endswith("Path"):
            return pathlib.PurePath  # where the folder was when it was written, which nobody asks
        if isinstance(found, torch.dtype) or (isinstance(found, type) and (module != "torch" or found is torch.Size)):
            return found
        raise pickle.UnpicklingError(f"{INDEX} holds {module}.{name}, which torch does not put there")


@contextlib.contextmanager
def _checkpoint_errors(done: str, group: Group) -> Iterator[None]:
    try:
        yield
    # It derives from BaseException, and comes on all ranks.
    except CheckpointException as error:
        rank, size = rank_and_size(group)
        own = error.failures[rank][0] if rank in error.failures else None
        if own is not None and not isinstance(own, Exception):
            raise own from None
        texts = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
        raise CheckpointError(f"the checkpoint could not be {done}: {describe_failures(texts, size)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint could not be {done}: {error}") from error.__cause__
    except Exception as error:
        raise CheckpointError(f"the checkpoint could not be {done}: {type(error).__name__}: {error}") from error
