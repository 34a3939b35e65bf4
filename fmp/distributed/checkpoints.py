"""Checkpoints of a training run: written by all ranks together, read by any number of ranks, complete or not there.

A checkpoint is a folder. torch.distributed.checkpoint writes each rank's parts into it; when all ranks are done, and
everything is on disk, rank 0 writes the manifest, and only that makes it a checkpoint. What a killed run leaves behind
has no manifest and is never loaded.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fmp import _compat, files, tree
from fmp.distributed import alike, manifest, places, storage
from fmp.distributed.agreement import Group, gathered, on_the_first, rank_and_size, together
from fmp.distributed.shards import LocalShard
from fmp.distributed.turns import PendingSave as PendingSave, turns_of
from fmp.encoding import decode
from fmp.errors import CheckpointError
from fmp.outline import Entry, check_fits, is_leaf, named, outline, walk, with_static_fields

Tree = Any
T = TypeVar("T")


@dataclasses.dataclass
class _Session:
    """What belongs to an object: where the folder is, and the process group of its own."""

    folder: Path
    world: dist.ProcessGroup | None = None
    group: Group = None

    def current_group(self) -> Group:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        # Collectives of a background save must not mix with those of training; and few can run without a GPU on NCCL.
        if self.world is not dist.group.WORLD:
            self.world, self.group = dist.group.WORLD, cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        return self.group


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one training run, in one folder.

    All ranks call `save`, `save_async` and `load`, together and in the same order; when one of them fails, all of them
    raise. Without a process group, a lone process does the same by itself. What any number of ranks wrote, in any
    placement, is read by any number, in any placement.

    Each checkpoint is a folder `000007-step-1200`: the seventh one saved, at step 1200. It holds files of
    `torch.distributed.checkpoint`, which are flat, a tensor for each leaf under its path, and a manifest. It is
    complete if the manifest is there, and the manifest comes last. An incomplete one, which a killed run leaves, stays
    for a look until the next save begins, and is then removed. One run at a time may save into a folder; in one
    process, saves into it wait for each other, from whatever object and thread.

    Attributes:
        folder: Where the checkpoints are. It must be on a file system that all ranks share. The first save creates it.
            A relative path starts at the folder in which the process is when this object is made.
        keep: How many to keep, the latest ones saved; None keeps all. Older ones are removed when a new one is
            complete. One with a damaged manifest, or a file that is missing or cut, does not count.

    Raises:
        ValueError: If `keep` is not a positive number.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpoints(folder, keep=2)
        ...     for step in (10, 20, 30):
        ...         checkpoints.save({"w": torch.full((2,), float(step)), "epoch": step // 10}, step)
        ...     checkpoints.steps(), checkpoints.latest()
        ...     checkpoints.load({"w": torch.zeros(2), "epoch": 0})
        ([20, 30], 30)
        {'w': tensor([30., 30.]), 'epoch': 3}
    """

    folder: str | os.PathLike[str]
    keep: int | None = 3
    _session: _Session = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise ValueError(f"keep must be a positive number of checkpoints, or None for all, got {self.keep!r}")
        object.__setattr__(self, "_session", _Session(Path(os.path.abspath(self.folder))))

    def save(self, state: Tree, step: int) -> None:
        """Writes a state tree; it is complete, and on disk, when this returns.

        Args:
            state: Any tree of plain and distributed tensors, None, and Python bools, ints, floats and strings, with the
                same structure on all ranks. Plain tensors must be the same on all ranks, and so must the parts of
                distributed ones that several ranks have; one of them writes each. That is checked, for those of more
                than 1 MiB by some of their entries.
            step: The number to find it by. A step that was saved before is replaced.

        Raises:
            CheckpointError: If it could not be written, or differs between the ranks, or the save before it, in the
                background, failed. What was complete before still is.
            TypeError: If a leaf is of another type, or in a `LocalShard`, or `step` is not an int.
            ValueError: If `step` is negative, two leaves have the same path, or a tensor has no values to save: it is
                on the meta device, a `Partial` sum, or shared out over a mesh whose ranks do not ascend.
            RuntimeError: Inside `torch.func.vmap`, `grad` or another transform.
            DonatedStateError: If the state was given to a donating step.
        """
        with turns_of(self._session.folder).lock:
            self._begin(state, step, copy=False)()

    def save_async(self, state: Tree, step: int) -> PendingSave:
        """Copies a state tree to the host, and writes the copy in the background.

        Args:
            state: As for `save`. It may be changed as soon as this returns.
            step: As for `save`.

        Returns:
            A handle to wait for. The next save waits for this one, and raises its error if nobody has seen it. Wait
            before the process group is destroyed.

        Raises:
            CheckpointError, TypeError, ValueError, RuntimeError, DonatedStateError: As `save` does, for what is found
                before writing.
        """
        turns = turns_of(self._session.folder)
        with turns.lock:
            turns.pending = pending = PendingSave(step, self._begin(state, step, copy=True))
        return pending

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in the order they were saved in.

        It looks at the folder and the manifests only, and any process may call it at any time. A checkpoint that was
        damaged later is among them, and `load` says what is wrong with it. One whose folder was renamed to another
        step is not.
        """
        return places.steps(self._session.folder)

    def latest(self) -> int | None:
        """Returns the step of the complete checkpoint that was saved last, or None if there is none."""
        return places.latest(self._session.folder)

    def load(self, like: Tree, step: int | None = None) -> Tree:
        """Reads a state tree back, after every file of the checkpoint has been checked.

        Args:
            like: A tree with the structure, dtypes and global shapes of the saved one, for example `step.init(params)`.
                Its tensors give the restored ones their device, strides and placement, and need not be placed as those
                that were saved. Plain ones on the meta device are restored on the host, distributed ones on the device
                of their mesh. Its values do not matter.
            step: Which one to load, by default the one saved last. If that is damaged, no other is loaded in its place;
                pass the step before.

        Returns:
            A tree of the same structure as `like`, with the saved tensors, bit for bit and without `requires_grad`, and
            the saved Python values and static fields. Static fields that were saved as their repr must match those of
            `like`, and are taken from there.

        Raises:
            CheckpointError: On all ranks, if there is no such checkpoint, if a file of it is missing, cut, damaged or
                not fmp's, or if it does not fit `like`; the message names the file or the leaves. Also if the ranks
                ask for different steps.
            TypeError: If `like` has leaves that no checkpoint can hold, or `step` is not an int.
            ValueError: If a tensor of `like` is placed as `save` would not take it.
            DonatedStateError: If `like` was given to a donating step.
        """
        turns = turns_of(self._session.folder)
        with turns.lock:
            turns.finish()
            return self._load(like, step)

    def _load(self, like: Tree, step: int | None) -> Tree:
        folder, group = self._session.folder, self._session.current_group()
        rank, size = rank_and_size(group)
        together(group, lambda: step is None or _check_step(step))
        alike.check_same(group, {"the step to load": step})
        path = folder / on_the_first(group, lambda: places.find(folder, step).path.name)

        def prepare() -> tuple[manifest.Manifest, dict[str, torch.Tensor]]:
            _check_no_shards(like)
            wanted = outline(like, storage.TENSOR_TYPES)
            found = manifest.read(path)
            check_fits(found.entries, wanted)
            tensors = {name: _named_errors(name, storage.empty_like, leaf) for name, leaf in _tensors(like)}
            # Each rank reads its share of the files.
            manifest.verify(path, found.stamps, sorted(found.stamps)[rank::size])
            return found, tensors

        try:
            found, tensors = together(group, prepare)
            storage.read(tensors, path, group)
            leaves = [
                tensors[name] if name in tensors else decode(found.entries[name]["value"])
                for name, leaf in walk(like)
                if is_leaf(leaf)
            ]
            return with_static_fields(tree.unflatten(tree.structure(like), leaves), found.entries)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__

    def _begin(self, state: Tree, step: int, copy: bool) -> Callable[[], None]:
        """Takes the state, agrees with the other ranks on it, and returns what writes it."""
        folder, group = self._session.folder, self._session.current_group()
        rank, _ = rank_and_size(group)

        def take() -> tuple[dict[str, Entry], dict[str, storage.Part]]:
            turns_of(folder).settle()
            _check_step(step)
            if _compat.transform_active():
                raise RuntimeError("save cannot run inside vmap, grad or another transform; save what it returns")
            _check_no_shards(state)
            entries = outline(state, storage.TENSOR_TYPES)
            return entries, {name: _named_errors(name, storage.part, leaf, copy) for name, leaf in _tensors(state)}

        entries, parts = together(group, take)
        alike.check_alike(group, step, entries, parts)
        written = turns_of(folder).written

        def make() -> str:
            name = places.next_name(folder, step, written)
            written.add(name)  # or a save that a signal handler begins in the middle of this one would remove it
            try:
                places.make(folder / name, written)
            except BaseException:
                written.discard(name)
                raise
            return name

        path = folder / on_the_first(group, make)

        def write() -> None:
            try:
                storage.write(parts, path, group)
                stamps = gathered(group, lambda: _stamps(path, rank))
                stamped = {name: stamp for own in stamps for name, stamp in own.items()}
                on_the_first(group, lambda: self._complete_place(path, manifest.Manifest(step, entries, stamped)))
            finally:
                written.discard(path.name)

        return write

    def _complete_place(self, path: Path, contents: manifest.Manifest) -> None:
        """Turns a folder into a checkpoint, then removes the old ones."""
        found, written = storage.written_files(path), sorted(contents.stamps)
        if found != written:
            raise CheckpointError(
                f"{path} holds {found} as rank 0 sees it, but the ranks wrote {written}; it must be on a file system "
                "that all ranks share"
            )
        for folder in (path, path.parent):
            files.sync(folder)
        manifest.write(path, contents)
        places.unmark(path)
        places.remove_old(path.parent, self.keep)


def _check_step(step: int) -> None:
    if type(step) is not int:
        raise TypeError(f"step must be an int, got {step!r}; of a tensor, take int(step)")
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")


def _tensors(state: Tree) -> list[tuple[str, torch.Tensor]]:
    return [(name, leaf) for name, leaf in walk(state) if isinstance(leaf, torch.Tensor)]


def _check_no_shards(state: Tree) -> None:
    for name, node in walk(state):
        if isinstance(node, LocalShard):
            raise TypeError(
                f"{named(name)} is a LocalShard, which does not know the mesh that shares it out; save and load "
                "fmp.distributed.as_dtensors(state, mesh), and take that apart with local_shards"
            )


def _named_errors(name: str, work: Callable[..., T], *args: Any) -> T:
    try:
        return work(*args)
    except ValueError as error:
        raise ValueError(f"{named(name)}: {error}") from error


def _stamps(path: Path, rank: int) -> dict[str, manifest.Stamp]:
    """Stamps the files that this rank wrote."""
    names = storage.written_files(path, rank)
    for name in names:
        files.sync(path / name)
    return {name: manifest.stamp(path / name) for name in names}
