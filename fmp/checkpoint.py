"""Saves any state tree to one file, and loads it again bit for bit, or not at all.

The file is a safetensors file, one tensor a leaf, named by the leaf's path. Its metadata holds a manifest in JSON: the
type and the static fields of every node, the dtype, shape and SHA-256 of every tensor, the values of the other leaves;
and the manifest's own SHA-256. One file is replaced by one rename, so a reader never meets half of a checkpoint.
Nothing in it is ever unpickled or executed.
"""

import os
from typing import Any

import safetensors
import safetensors.torch
import torch

from fmp import _compat, files, tree
from fmp.encoding import decode
from fmp.errors import CheckpointError
from fmp.outline import (
    Entry,
    check_entry,
    check_fits,
    is_leaf,
    named,
    outline,
    seal,
    unseal,
    walk,
    with_static_fields,
)

Tree = Any

_FORMAT = 1
_MANIFEST = "fmp_checkpoint"

# The others (complex, wide unsigned, rarer 8-bit floats) are stored as their bytes: older releases lack them.
_STORED_AS_THEY_ARE = frozenset(
    {
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def save(state: Tree, path: str | os.PathLike[str]) -> None:
    """Writes a state tree to a file, atomically.

    Whatever happens, `path` afterwards holds either what it held before or the whole new state, synced to disk. A
    process that is killed may leave a part of the new one in the same folder, in a file `.fmp-*.tmp` or `.tmp*`.

    Args:
        state: Any tree of tensors, None, and Python bools, ints, floats and strings; for example a `TrainState`.
            Tensors that share memory are written separately. Those on another device are first copied to the host, all
            of them. Static fields of `fmp.tree.dataclass` nodes are written too; those that JSON cannot hold, such as
            functions, as their repr.
        path: The file to create or replace, which then keeps its permissions. Its folder must exist.

    Raises:
        TypeError: If a leaf is of another type, or is a tensor without plain dense memory; or if `path` is no path.
        ValueError: If two leaves have the same path, a path is not valid Unicode, or a tensor is on the meta device.
        RuntimeError: Inside `torch.func.vmap`, `grad` or another transform, where tensors may have no memory to read.
        DonatedStateError: If the state was given to a donating step.
        OSError: If the file cannot be written, or `path` is something else than a file, such as a pipe.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.tensor([1.0, 2.0]), "master": None, "epoch": 3}
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     save(state, file.name)
        ...     load({"w": torch.zeros(2), "master": None, "epoch": 0}, file.name)
        {'w': tensor([1., 2.]), 'master': None, 'epoch': 3}
    """
    _check_path(path, "save(state, path)")
    if _compat.transform_active():
        raise RuntimeError("save cannot run inside vmap, grad or another transform; save what it returns")
    entries = outline(state)
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, leaf in walk(state):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_meta:
                raise ValueError(f"{named(name)} is on the meta device and has no values to save")
            raw = files.raw_bytes(leaf)
            # The library refuses tensors that share memory.
            if raw.untyped_storage().data_ptr() in storages:
                raw = raw.clone()
            storages.add(raw.untyped_storage().data_ptr())
            entries[name]["sha256"] = files.sha256(raw)
            tensors[name] = raw.view(leaf.dtype).reshape(leaf.shape) if leaf.dtype in _STORED_AS_THEY_ARE else raw

    # One entry only: the library writes several in any order, and the same state would give different bytes.
    metadata = {_MANIFEST: seal({"format": _FORMAT, "entries": entries})}
    with files.atomic_write(path) as temporary:
        try:
            safetensors.torch.save_file(tensors, temporary, metadata)
            # The library writes headers of any size, but refuses to read those above 100 MB.
            with safetensors.safe_open(temporary, "pt"):
                pass
        except safetensors.SafetensorError as error:
            raise OSError(f"{os.fspath(path)}: the checkpoint could not be written: {error}") from error


def load(like: Tree, path: str | os.PathLike[str]) -> Tree:
    """Reads a state tree back from a file.

    Args:
        like: A tree with the structure, dtypes and shapes of the saved one, for example `step.init(params)`. Its
            tensors give the restored ones their device and strides; those on the meta device are restored on the CPU.
            Its values do not matter.
        path: The file that `save` wrote.

    Returns:
        A tree of the same structure as `like`. Tensors, Python values and static fields are the saved ones, the tensors
        bit for bit and without `requires_grad`. Static fields that were saved as their repr must match those of `like`,
        and are taken from there.

    Raises:
        CheckpointError: If the file is no checkpoint, is incomplete or damaged, or does not fit `like`; the message
            names what does not fit, leaf by leaf.
        TypeError: If `like` has leaves that no checkpoint can hold, or `path` is no path.
        DonatedStateError: If `like` was given to a donating step.
        OSError: If the file cannot be opened.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.ones(2), "step": torch.tensor(3)}
        >>> path = f"{tempfile.mkdtemp()}/state.fmp"
        >>> save(state, path)
        >>> load({"w": torch.zeros(2), "step": torch.tensor(0)}, path)
        {'w': tensor([1., 1.]), 'step': tensor(3)}
    """
    _check_path(path, "load(like, path)")
    wanted = outline(like)
    if os.path.isdir(path):
        raise CheckpointError(f"{os.fspath(path)}: a folder, not a checkpoint file")
    found = os.stat(path)
    try:
        return _load(like, wanted, path)
    except CheckpointError as error:
        now = os.stat(path)
        if (now.st_ino, now.st_mtime_ns) == (found.st_ino, found.st_mtime_ns):
            raise CheckpointError(f"{os.fspath(path)}: {error}") from error.__cause__
        # The library opens a file twice; this one was replaced in between.
        return load(like, path)


def _check_path(path: Any, call: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the path of a file, got a {type(path).__name__}; the order is {call}")


def _load(like: Tree, wanted: dict[str, Entry], path: str | os.PathLike[str]) -> Tree:
    try:
        with safetensors.safe_open(path, "pt") as file:
            entries = _read_manifest(file.metadata() or {})
            check_fits(entries, wanted)
            leaves = [_read_leaf(file, name, entries[name], leaf) for name, leaf in walk(like) if is_leaf(leaf)]
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"not a checkpoint file, or an incomplete one: {error}") from error
    return with_static_fields(tree.unflatten(tree.structure(like), leaves), entries)


def _read_manifest(metadata: dict[str, str]) -> dict[str, Entry]:
    if _MANIFEST not in metadata:
        raise CheckpointError("a safetensors file, but not a checkpoint of fmp")
    contents = unseal(metadata[_MANIFEST])
    try:
        found, entries = contents["format"], contents.get("entries")
        if found == _FORMAT:
            for path, entry in entries.items():
                _check_entry(path, entry)
    # Whoever can write a file can write a matching checksum into it.
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest is not one that fmp writes: {error}") from error
    if found != _FORMAT:
        raise CheckpointError(f"it has format {found}, this fmp reads format {_FORMAT}; use the fmp that wrote it")
    return entries


def _check_entry(path: str, entry: Any) -> None:
    if "dtype" in entry:
        if type(entry["sha256"]) is not str:
            raise ValueError(f"{named(path)} has the entry {entry!r}")
        entry = {key: value for key, value in entry.items() if key != "sha256"}
    check_entry(path, entry)


def _read_leaf(file: Any, path: str, entry: dict[str, Any], like: Any) -> Any:
    if not isinstance(like, torch.Tensor):
        return decode(entry["value"])
    # The library's tensor is a view of the mapped file; the copy is checked and then belongs to the caller.
    stored = file.get_tensor(path)
    if like.dtype in _STORED_AS_THEY_ARE:
        dtype, shape = like.dtype, like.shape
    else:
        dtype, shape = torch.uint8, torch.Size([like.numel() * like.dtype.itemsize])
    if (stored.dtype, stored.shape) != (dtype, shape):
        raise CheckpointError(f"{named(path)} is damaged, it is stored as {tree.describe(stored)}")
    raw = files.raw_bytes(stored.clone())
    if files.sha256(raw) != entry["sha256"]:
        raise CheckpointError(f"{named(path)} is damaged, its checksum does not match")
    return _placed_like(raw.view(like.dtype).reshape(like.shape), like)


def _placed_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    if like.stride() == tensor.stride():
        return tensor.to(device)
    # Strides matter to the last bit: kernels may sum in another order.
    return torch.empty_like(like, device=device).copy_(tensor)
