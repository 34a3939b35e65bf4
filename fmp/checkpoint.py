"""Saves any state tree to one file, and loads it again bit for bit, or not at all.

The file is a safetensors file, one tensor a leaf, named by the leaf's path. Its metadata holds a manifest in JSON: the
type and the static fields of every node, the dtype, shape and SHA-256 of every tensor, the values of the other leaves;
and the manifest's own SHA-256. One file is replaced by one rename, so a reader never meets half of a checkpoint.
Nothing in it is ever unpickled or executed.
"""

import dataclasses
import json
import os
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import optree
import safetensors
import safetensors.torch
import torch

from fmp import _compat, files, tree
from fmp.dtypes import parse_dtype, short_name
from fmp.encoding import decode, encode, fits, is_opaque
from fmp.errors import CheckpointError

Tree = Any

_FORMAT = 1
_MANIFEST = "fmp_checkpoint"
_SHOWN = 10

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
        TypeError: If a leaf is of another type, or is a tensor without plain dense memory.
        ValueError: If two leaves have the same path, a path is not valid Unicode, or a tensor is on the meta device.
        RuntimeError: Inside `torch.func.vmap`, `grad` or another transform, where tensors may have no memory to read.
        OSError: If the file cannot be written, or `path` is something else than a file, such as a pipe.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.tensor([1.0, 2.0]), "master": None, "epoch": 3}
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     save(state, file.name)
        ...     load({"w": torch.zeros(2), "master": None, "epoch": 0}, file.name)
        {'w': tensor([1., 2.]), 'master': None, 'epoch': 3}
    """
    if _compat.transform_active():
        raise RuntimeError("save cannot run inside vmap, grad or another transform; save what it returns")
    entries = _outline(state)
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, leaf in _walk(state):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_meta:
                raise ValueError(f"{_named(name)} is on the meta device and has no values to save")
            raw = files.raw_bytes(leaf)
            # The library refuses tensors that share memory.
            if raw.untyped_storage().data_ptr() in storages:
                raw = raw.clone()
            storages.add(raw.untyped_storage().data_ptr())
            entries[name]["sha256"] = files.sha256(raw)
            tensors[name] = raw.view(leaf.dtype).reshape(leaf.shape) if leaf.dtype in _STORED_AS_THEY_ARE else raw

    manifest = json.dumps({"format": _FORMAT, "entries": entries}, allow_nan=False)
    # One entry only: the library writes several in any order, and the same state would give different bytes.
    metadata = {_MANIFEST: f"{files.sha256(manifest.encode())} {manifest}"}
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
        TypeError: If `like` has leaves that no checkpoint can hold.
        OSError: If the file cannot be opened.
    """
    wanted = _outline(like)
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


def _load(like: Tree, wanted: dict[str, dict[str, Any]], path: str | os.PathLike[str]) -> Tree:
    try:
        with safetensors.safe_open(path, "pt") as file:
            entries = _read_manifest(file.metadata() or {})
            if problems := list(_differences(entries, wanted)):
                raise CheckpointError(f"the checkpoint does not fit `like`:\n{_listing(problems)}")
            leaves = [_read_leaf(file, name, entries[name], leaf) for name, leaf in _walk(like) if _is_leaf(leaf)]
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"not a checkpoint file, or an incomplete one: {error}") from error
    return _with_static_fields(tree.unflatten(tree.structure(like), leaves), entries)


def _is_leaf(value: Any) -> bool:
    return optree.tree_is_leaf(value, none_is_leaf=True)


def _walk(node: Tree, parents: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Iterates over the paths and values of all nodes and leaves, parents first and leaves in their order."""
    yield "/".join(parents), node
    if not _is_leaf(node):
        children, _, keys, _ = optree.tree_flatten_one_level(node, none_is_leaf=True)
        for key, child in zip(keys, children, strict=True):
            yield from _walk(child, (*parents, _segment(key, isinstance(node, Mapping))))


def _segment(key: Any, in_mapping: bool) -> str:
    """Writes one key such that different paths stay different when they are joined."""
    if in_mapping and not isinstance(key, str):
        return f"~{type(key).__name__} {_escape(repr(key))}"
    # An empty key would vanish, and safetensors keeps one name for itself.
    return f"~{key}" if key in ("", "__metadata__") else _escape(str(key))


def _escape(text: str) -> str:
    return text.replace("~", "~0").replace("/", "~1")


def _outline(state: Tree) -> dict[str, dict[str, Any]]:
    """Describes every node and every leaf by its path, in values that JSON can hold."""
    entries: dict[str, dict[str, Any]] = {}
    for path, value in _walk(state):
        if path in entries:
            raise ValueError(f"{path}: two leaves have this path; rename one of the keys")
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path!r}: this path is not valid Unicode; rename the key") from error
        entries[path] = _entry(path, value)
    return entries


def _entry(path: str, value: Any) -> dict[str, Any]:
    if not _is_leaf(value):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return {"node": kind, "static": {name: encode(getattr(value, name)) for name in _static_fields(value)}}
    if isinstance(value, torch.Tensor):
        # A distributed or otherwise wrapped tensor would lose what its class adds.
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            raise TypeError(
                f"{_named(path)} is a {type(value).__name__} of layout {value.layout}, not a plain tensor; compressed "
                "weights are saved by fmp.df11.save"
            )
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": encode(value)}
    raise TypeError(
        f"{_named(path)} is a {type(value).__name__}; a checkpoint holds tensors, None, bool, int, float and str, "
        "so convert it, for example with torch.as_tensor"
    )


def _static_fields(node: Any) -> list[str]:
    if not dataclasses.is_dataclass(node):
        return []
    return [field.name for field in dataclasses.fields(node) if field.metadata.get("static")]


def _read_manifest(metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
    if _MANIFEST not in metadata:
        raise CheckpointError("a safetensors file, but not a checkpoint of fmp")
    digest, _, manifest = metadata[_MANIFEST].partition(" ")
    if files.sha256(manifest.encode()) != digest:
        raise CheckpointError("the manifest is damaged, its checksum does not match")
    try:
        contents = json.loads(manifest)
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
    match entry:
        case {"node": str(), "static": dict(static), **rest} if not rest:
            values = [value for value in static.values() if not is_opaque(value)]
        case {"dtype": str(dtype), "shape": list(shape), "sha256": str(), **rest} if not rest:
            values = [{"dtype": dtype}, {"Size": shape}]
        case {"value": value, **rest} if not rest:
            values = [value]
        case _:
            raise ValueError(f"{_named(path)} has the entry {entry!r}")
    for value in values:
        decode(value)


def _differences(saved: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Names everything that a checkpoint and the tree to restore disagree in, values aside."""
    for path in {**saved, **wanted}:
        ours, theirs = _kind(saved.get(path)), _kind(wanted.get(path))
        # A node may have a class with the name of a leaf's type.
        if ("node" in saved.get(path, ())) != ("node" in wanted.get(path, ())) or not _same_kind(ours, theirs):
            yield f"{_named(path)} is {ours} in the file and {theirs} in `like`"
            continue
        absent = {"repr": "absent"}
        old, new = (entries[path].get("static", {}) for entries in (saved, wanted))
        for field in {**old, **new}:
            ours, theirs = old.get(field, absent), new.get(field, absent)
            if ours != theirs and (is_opaque(ours) or theirs is absent):
                shown = [value["repr"] if is_opaque(value) else repr(decode(value)) for value in (ours, theirs)]
                yield f"{_named(path)}: the static field {field} is {shown[0]} in the file and {shown[1]} in `like`"


def _kind(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "absent"
    if "node" in entry:
        return entry["node"]
    if "dtype" in entry:
        return f"{short_name(parse_dtype(entry['dtype']))}[{','.join(str(size) for size in entry['shape'])}]"
    value = decode(entry["value"])
    return "None" if value is None else type(value).__name__


def _same_kind(one: str, other: str) -> bool:
    # A class in a script is called `__main__.State` when the script runs and `script.State` when it is imported.
    return one == other or any(
        script.startswith("__main__.") and name.endswith(script.removeprefix("__main__"))
        for script, name in ((one, other), (other, one))
    )


def _named(path: str) -> str:
    return path or "the tree itself"


def _listing(problems: list[str]) -> str:
    lines = problems[:_SHOWN]
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more")
    return "\n".join(f"  {line}" for line in lines)


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
        raise CheckpointError(f"{_named(path)} is damaged, it is stored as {tree.describe(stored)}")
    raw = files.raw_bytes(stored.clone())
    if files.sha256(raw) != entry["sha256"]:
        raise CheckpointError(f"{_named(path)} is damaged, its checksum does not match")
    return _placed_like(raw.view(like.dtype).reshape(like.shape), like)


def _placed_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    if like.stride() == tensor.stride():
        return tensor.to(device)
    # Strides matter to the last bit: kernels may sum in another order.
    return torch.empty_like(like, device=device).copy_(tensor)


def _with_static_fields(state: Tree, entries: dict[str, dict[str, Any]]) -> Tree:
    """Gives the nodes of a tree, just made and not seen by anyone yet, the static fields of the file."""
    for path, node in _walk(state):
        for field, encoded in entries[path].get("static", {}).items():
            if is_opaque(encoded):
                continue
            value, hint = decode(encoded), _type_hints(type(node)).get(field)
            # A class that does not keep to its own hints cannot be held to them.
            if fits(getattr(node, field), hint) and not fits(value, hint):
                kind = getattr(hint, "__name__", hint)
                raise CheckpointError(f"{_named(path)}: the static field {field} is {value!r}, which is no {kind}")
            object.__setattr__(node, field, value)
    return state


def _type_hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (AttributeError, NameError, SyntaxError, TypeError):  # A hint in quotes need not mean anything here.
        return {}
