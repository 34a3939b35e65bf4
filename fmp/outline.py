"""Outlines of trees: what a checkpoint says in JSON about every node and leaf, and how it is held against another tree.

The outline of a tree has one entry a path: the type and the static fields of a node, the dtype and shape of a tensor,
the value of any other leaf. Sealed with its own checksum, it is the manifest of a checkpoint.
"""

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import optree
import torch

from fmp import files
from fmp.donation import check_owned
from fmp.dtypes import parse_dtype, short_name
from fmp.encoding import decode, encode, fits, is_opaque
from fmp.errors import CheckpointError

Tree = Any
Entry = dict[str, Any]

_SHOWN = 10


def is_leaf(value: Any) -> bool:
    """Says whether a value is a leaf of a tree; None is one."""
    return optree.tree_is_leaf(value, none_is_leaf=True)


def walk(node: Tree, parents: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Iterates over the paths and values of all nodes and leaves, parents first and leaves in their order.

    Different keys give different paths, such as 0 and "0", or "a/b" and "b" in "a".

    Example:
        >>> [path for path, _ in walk({"a": [1, 2], "b/c": None})]
        ['', 'a', 'a/0', 'a/1', 'b~1c']
    """
    yield "/".join(parents), node
    if not is_leaf(node):
        children, _, keys, _ = optree.tree_flatten_one_level(node, none_is_leaf=True)
        for key, child in zip(keys, children, strict=True):
            yield from walk(child, (*parents, _segment(key, isinstance(node, Mapping))))


def outline(state: Tree, tensor_types: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)) -> dict[str, Entry]:
    """Describes every node and every leaf by its path, in values that JSON can hold.

    Args:
        state: Any tree.
        tensor_types: The classes of the tensors that the checkpoint can hold; their subclasses do not count.

    Returns:
        Entries by path, of one of three forms: `{"node": type, "static": fields}`, `{"dtype": name, "shape": sizes}`,
        `{"value": encoded}`.

    Raises:
        TypeError: If a leaf is of another type, or is a tensor without plain dense memory.
        ValueError: If two leaves have the same path, or a path is not valid Unicode.
        DonatedStateError: If a state in it was given to a donating step.

    Example:
        >>> outline({"w": torch.ones(3), "epoch": 2})["w"]
        {'dtype': 'float32', 'shape': [3]}
    """
    entries: dict[str, Entry] = {}
    for path, value in walk(state):
        if path in entries:
            raise ValueError(f"{path}: two leaves have this path; rename one of the keys")
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path!r}: this path is not valid Unicode; rename the key") from error
        entries[path] = _entry(path, value, tensor_types)
    return entries


def check_fits(saved: dict[str, Entry], wanted: dict[str, Entry]) -> None:
    """Raises unless a tree can be restored from a checkpoint.

    Args:
        saved: The outline in the checkpoint.
        wanted: The outline of the tree to restore. Values do not matter, and neither do static fields that can be read.

    Raises:
        CheckpointError: If they differ; the message names the leaves.
    """
    if problems := list(_differences(saved, wanted)):
        lines = problems[:_SHOWN]
        if len(problems) > _SHOWN:
            lines.append(f"and {len(problems) - _SHOWN} more")
        listing = "\n".join(f"  {line}" for line in lines)
        raise CheckpointError(f"the checkpoint does not fit `like`:\n{listing}")


def with_static_fields(state: Tree, entries: dict[str, Entry]) -> Tree:
    """Gives the nodes of a tree, just made and not seen by anyone yet, the static fields of the checkpoint.

    Args:
        state: The tree, whose nodes are written into.
        entries: The outline in the checkpoint, which must fit. Fields that it holds as a repr stay as they are.

    Returns:
        The same tree.

    Raises:
        CheckpointError: If a value does not go with the type hint of its field.
    """
    for path, node in walk(state):
        for field, encoded in entries[path].get("static", {}).items():
            if is_opaque(encoded):
                continue
            value, hint = decode(encoded), _type_hints(type(node)).get(field)
            # A class that does not keep to its own hints cannot be held to them.
            if fits(getattr(node, field), hint) and not fits(value, hint):
                kind = getattr(hint, "__name__", hint)
                raise CheckpointError(f"{named(path)}: the static field {field} is {value!r}, which is no {kind}")
            object.__setattr__(node, field, value)
    return state


def named(path: str) -> str:
    """Writes a path as messages show it."""
    return path or "the tree itself"


def seal(manifest: dict[str, Any]) -> str:
    """Writes a manifest as text that starts with the checksum of the rest.

    Example:
        >>> unseal(seal({"format": 1}))
        {'format': 1}
    """
    text = json.dumps(manifest, allow_nan=False)
    return f"{files.sha256(text.encode())} {text}"


def unseal(text: str) -> Any:
    """Reads what `seal` wrote.

    Raises:
        CheckpointError: If a single character of it is missing, added or different.
    """
    digest, _, contents = text.partition(" ")
    if files.sha256(contents.encode()) != digest:
        raise CheckpointError("the manifest is damaged, its checksum does not match")
    try:
        return json.loads(contents)
    # Whoever can write a file can write a matching checksum into it.
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"the manifest is not one that fmp writes: {error}") from error


def check_entry(path: str, entry: Any) -> None:
    """Raises unless an entry has one of the forms that `outline` writes.

    Raises:
        TypeError, ValueError, RuntimeError: If it has none of them.
    """
    match entry:
        case {"node": str(), "static": dict(static), **rest} if not rest:
            values = [value for value in static.values() if not is_opaque(value)]
        case {"dtype": str(dtype), "shape": list(shape), **rest} if not rest:
            values = [{"dtype": dtype}, {"Size": shape}]
        case {"value": value, **rest} if not rest:
            values = [value]
        case _:
            raise ValueError(f"{named(path)} has the entry {entry!r}")
    for value in values:
        decode(value)


def _segment(key: Any, in_mapping: bool) -> str:
    """Writes one key such that different paths stay different when they are joined."""
    if in_mapping and not isinstance(key, str):
        return f"~{type(key).__name__} {_escape(repr(key))}"
    # An empty key would vanish, and safetensors keeps one name for itself.
    return f"~{key}" if key in ("", "__metadata__") else _escape(str(key))


def _escape(text: str) -> str:
    return text.replace("~", "~0").replace("/", "~1")


def _entry(path: str, value: Any, tensor_types: tuple[type, ...]) -> Entry:
    if not is_leaf(value):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return {"node": kind, "static": {name: encode(getattr(value, name)) for name in _static_fields(value)}}
    if isinstance(value, torch.Tensor):
        # A distributed or otherwise wrapped tensor would lose what its class adds.
        if type(value) not in tensor_types or value.layout != torch.strided or value.is_quantized:
            raise TypeError(
                f"{named(path)} is a {type(value).__name__} of layout {value.layout}, not a plain tensor; compressed "
                "weights are saved by fmp.df11.save, distributed tensors by fmp.distributed.Checkpoints"
            )
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": encode(value)}
    check_owned(value, path or "this state")
    raise TypeError(
        f"{named(path)} is a {type(value).__name__}; a checkpoint holds tensors, None, bool, int, float and str, "
        "so convert it, for example with torch.as_tensor"
    )


def _static_fields(node: Any) -> list[str]:
    if not dataclasses.is_dataclass(node):
        return []
    return [field.name for field in dataclasses.fields(node) if field.metadata.get("static")]


def _differences(saved: dict[str, Entry], wanted: dict[str, Entry]) -> Iterator[str]:
    """Names everything that a checkpoint and the tree to restore disagree in, values aside."""
    for path in {**saved, **wanted}:
        ours, theirs = _kind(saved.get(path)), _kind(wanted.get(path))
        # A node may have a class with the name of a leaf's type.
        if ("node" in saved.get(path, ())) != ("node" in wanted.get(path, ())) or not _same_kind(ours, theirs):
            yield f"{named(path)} is {ours} in the file and {theirs} in `like`"
            continue
        absent = {"repr": "absent"}
        old, new = (entries[path].get("static", {}) for entries in (saved, wanted))
        for field in {**old, **new}:
            ours, theirs = old.get(field, absent), new.get(field, absent)
            if ours != theirs and (is_opaque(ours) or theirs is absent):
                shown = [value["repr"] if is_opaque(value) else repr(decode(value)) for value in (ours, theirs)]
                yield f"{named(path)}: the static field {field} is {shown[0]} in the file and {shown[1]} in `like`"


def _kind(entry: Entry | None) -> str:
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


def _type_hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (AttributeError, NameError, SyntaxError, TypeError):  # A hint in quotes need not mean anything here.
        return {}
