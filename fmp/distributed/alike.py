"""Whether the ranks save the same state, so that one of them may write what several have.

Of a plain tensor all ranks have the whole. Of a distributed one several may have the same part: along a dimension of
the mesh that repeats, or in meshes of some ranks each. torch knows a part by its name and by where it begins, and
writes one of those that are alike in that, whatever is in them; so here their numbers are compared before.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fmp import files
from fmp.distributed import storage
from fmp.distributed.agreement import Group, gathered, rank_and_size
from fmp.encoding import is_opaque
from fmp.errors import CheckpointError
from fmp.outline import Entry, named

_COMPARED = 2**20  # bytes; of larger parts, only some entries are compared across ranks
_SAMPLE = 2**12  # entries
_DIGEST = 8  # bytes


def check_alike(group: Group, step: int, entries: dict[str, Entry], parts: Mapping[str, storage.Part]) -> None:
    """Raises on all ranks unless they save the same step of the same tree, with the same numbers where they share some.

    Args:
        group: The process group.
        step: The step to save.
        entries: The outline of the tree.
        parts: What this rank has of each tensor.

    Raises:
        CheckpointError: If they do not; the message names the leaf, and two ranks.
    """
    if group is None:
        return
    check_same(group, {"the step": step})
    _, size = rank_and_size(group)
    mine: dict[str, Any] = {}
    for name, entry in entries.items():
        # The repr of a set, for one, is another in every process.
        static = {field: value for field, value in entry.get("static", {}).items() if not is_opaque(value)}
        mine[named(name)] = [{**entry, "static": static}, _held(parts[name], size) if name in parts else None]
    check_same(group, mine, "; a leaf that differs between ranks must be a distributed tensor, placed alike on all")
    _check_copies(group, {name: parts[name] for name in sorted(parts) if _may_be_elsewhere(parts[name].whole, size)})


def check_same(group: Group, mine: Mapping[str, Any], advice: str = "") -> None:
    """Raises on all ranks, and names the first difference, unless all of them have the same values.

    Args:
        group: The process group.
        mine: This rank's values, which JSON can hold, by what to call them. As texts they are compared, so that 1, 1.0
            and True are three values, and 0.0 and -0.0 are two; the order does not matter.
        advice: What the message ends with.

    Raises:
        CheckpointError: If they have not.
    """
    texts = {name: json.dumps(value, sort_keys=True) for name, value in mine.items()}
    digest = files.sha256(json.dumps(texts, sort_keys=True).encode())
    if len(set(gathered(group, lambda: digest))) == 1:
        return
    theirs = gathered(group, lambda: texts)
    rank, name = next(
        (rank, name)
        for rank, other in enumerate(theirs)
        for name in {**theirs[0], **other}
        if theirs[0].get(name) != other.get(name)
    )
    raise CheckpointError(f"{name} is not the same on the ranks 0 and {rank}{advice}")


def _held(part: storage.Part, size: int) -> Any:
    """Says what must be the same on all ranks: the numbers of a plain tensor, how a distributed one is placed."""
    whole = part.whole
    if not isinstance(whole, DTensor):
        return _fingerprint(part.local)
    if whole.device_mesh.size() < size:
        return "on some of the ranks"
    # Where ranks ascend, these say which rank has which part.
    return [list(whole.device_mesh.shape), [str(placement) for placement in whole.placements]]


def _may_be_elsewhere(whole: torch.Tensor, size: int) -> bool:
    """Says of a distributed tensor whether a rank may have the part of another one."""
    if not isinstance(whole, DTensor):
        return False
    mesh = whole.device_mesh
    repeats = [placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(whole.placements)]
    return mesh.size() < size or any(repeats)


def _check_copies(group: Group, parts: Mapping[str, storage.Part]) -> None:
    """Raises unless ranks that have the same part of a tensor have the same numbers there."""
    if not parts:
        return
    places = {name: storage.place(part) for name, part in parts.items()}

    def digests() -> bytes:
        found = bytearray()
        for name, part in parts.items():
            found += _digest(str(places[name]))
            # A part that begins where another one does, and is larger, is not the same.
            found += _digest(f"{list(part.local.shape)} {_fingerprint(part.local)}" if places[name] else "")
        return bytes(found)

    everyone = gathered(group, digests)
    for index, name in enumerate(parts):
        start = index * 2 * _DIGEST
        seen: dict[bytes, tuple[int, bytes]] = {}
        for rank, theirs in enumerate(everyone):
            place, numbers = theirs[start : start + _DIGEST], theirs[start + _DIGEST : start + 2 * _DIGEST]
            first, expected = seen.setdefault(place, (rank, numbers))
            if numbers != expected:
                raise CheckpointError(
                    f"{named(name)}: the ranks {first} and {rank} have the same part of it with other numbers, and "
                    "only one of them would be saved. Copies must be equal. What groups of ranks train each for itself "
                    "must be one tensor on a mesh of all ranks, with a first dimension that counts the groups: "
                    "DTensor.from_local(tensor.to_local()[None], mesh, [Shard(0), Shard(1)])"
                )


def _digest(text: str) -> bytes:
    return bytes.fromhex(files.sha256(text.encode()))[:_DIGEST]


def _fingerprint(tensor: torch.Tensor) -> str:
    """Computes a checksum of a tensor, or of entries that are spread evenly over a large one."""
    if tensor.nbytes > _COMPARED:
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # any dtype of so many bytes
        bits = tensor.view(words.get(tensor.itemsize, tensor.dtype))
        places = torch.arange(_SAMPLE, device=tensor.device) * (tensor.numel() - 1) // (_SAMPLE - 1)
        tensor = bits[torch.unravel_index(places, tensor.shape)]
    return files.sha256(tensor)
