"""Comparing trees, bit for bit or closely, and finding tensors that share memory."""

import io
import pickle
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import torch

from fmp import tree
from fmp.testing.invariants import Broken

Tree = Any

# Those of torch.testing.assert_close.
_RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float32: 1.3e-6, torch.float64: 1e-7}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of these, torch pickles a tensor into what it cannot load. (torch.save, which has a way of its own, can.)
_NOT_PICKLED = (torch.uint16, torch.uint32, torch.uint64)


def tensors(*trees: Tree) -> list[torch.Tensor]:
    """Returns the tensors among the leaves of some trees."""
    return [leaf for leaf in tree.leaves(trees) if isinstance(leaf, torch.Tensor)]


def with_tensors(like: Tree, replacements: Sequence[Any]) -> Tree:
    """Puts other tensors into a tree, for the transforms that take tensors only."""
    leaves, spec = tree.flatten(like)
    rest = iter(replacements)
    return tree.unflatten(spec, [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def snapshot(value: Tree) -> Tree:
    """Copies a tree, for a later look at whether it was changed in place."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return tree.map(copied, value)


def pickled(value: Tree) -> Tree:
    """Sends a tree through pickle; classes go by reference, so that one defined inside a test function can go, too."""
    classes: list[type] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, type):
                return None
            classes.append(obj)
            return len(classes) - 1

        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, torch.Tensor) or not (obj.dtype in _NOT_PICKLED or _is_8_bit(obj)):
                return NotImplemented
            return torch.Tensor.view, (obj.detach().view(_BITS[obj.dtype.itemsize]), obj.dtype)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> type:
            return classes[pid]

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return Unpickler(io.BytesIO(buffer.getvalue())).load()


def versions(value: Tree) -> dict[str, int]:
    """Returns how often each tensor of a tree was written to in place; inference tensors do not count this."""
    return {
        path: leaf._version
        for path, leaf in tree.items(value)
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    }


def autograd_marks(value: Tree) -> dict[str, tuple[bool, Tree]]:
    """Returns what autograd keeps at each tensor of a tree: whether it requires gradients, and a copy of its .grad."""
    return {
        path: (leaf.requires_grad, snapshot(leaf.grad) if leaf.is_leaf else None)
        for path, leaf in tree.items(value)
        if isinstance(leaf, torch.Tensor)
    }


def assert_same_kind(found: Tree, expected: Tree, what: str, *, reason: str = "") -> None:
    """Raises `Broken` unless two trees have the same structure, shapes and dtypes; the reason ends the message."""
    _assert_same_structure(found, expected, what)
    for (path, new), old in zip(tree.items(found), tree.leaves(expected), strict=True):
        if _kind(new) != _kind(old):
            raise Broken(f"{what} is {_kind(new)}, expected {_kind(old)}{reason}", path)


def assert_same_bits(found: Tree, expected: Tree, what: str) -> None:
    """Raises `Broken` unless two trees are the same, bit for bit: NaN equals itself, and -0.0 is not 0.0."""
    _assert_leaves(found, expected, what, _same_bits)


def assert_same_values(found: Tree, expected: Tree, what: str) -> None:
    """Raises `Broken` unless two trees have the same dtypes and values; -0.0 is 0.0, and NaN equals itself."""
    _assert_leaves(found, expected, what, lambda a, b: (a == b) | ((a != a) & (b != b)))


def assert_close(found: Tree, expected: Tree, what: str, *, absolute: float = 1e-5) -> None:
    """Raises `Broken` unless two trees have the same dtypes and differ by no more than rounding.

    Args:
        found: The one tree.
        expected: The other one.
        what: What to call the first.
        absolute: A difference that counts as rounding, however small the values are.
    """
    _assert_leaves(
        found,
        expected,
        what,
        lambda a, b: torch.isclose(
            *((a.float(), b.float()) if _is_8_bit(a) else (a, b)),
            rtol=_RELATIVE.get(a.dtype, 0.0),
            atol=absolute,
            equal_nan=True,
        ),
    )


def assert_apart(results: Tree, what: str) -> None:
    """Raises `Broken` where two tensors or arrays of a tree share memory."""
    for (path, memory, _), (other_path, other, _) in combinations(_memories(results), 2):
        if _overlap(memory, other):
            raise Broken(f"{what} shares its memory with the one at {other_path}", path)


def assert_apart_from(results: Tree, given: Tree, what: str, *, passed_through: bool = False) -> None:
    """Raises `Broken` where a result shares memory with an argument.

    Args:
        results: The results.
        given: The arguments.
        what: What to call a result.
        passed_through: Whether a result may be an argument itself, the same object.
    """
    for (path, memory, leaf), (other_path, other, argument) in product(_memories(results), _memories(given)):
        if _overlap(memory, other) and not (passed_through and leaf is argument):
            raise Broken(f"{what} shares its memory with the argument at {other_path}", path)


def _assert_leaves(
    found: Tree, expected: Tree, what: str, same: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    _assert_same_structure(found, expected, what)
    for (path, new), old in zip(tree.items(found), tree.leaves(expected), strict=True):
        if _kind(new) != _kind(old):
            raise Broken(f"{what} is {_kind(new)}, expected {_kind(old)}", path)
        if isinstance(new, torch.Tensor):
            for part, other in zip(_parts(new), _parts(old), strict=True):
                _assert_tensor(part.detach(), other.detach(), what, path, same)
        elif not _same_plain(new, old):
            raise Broken(f"{what} is {new!r}, expected {old!r}", path)


def _assert_tensor(
    new: torch.Tensor,
    old: torch.Tensor,
    what: str,
    path: str,
    same: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    if new.shape != old.shape:  # as parts of sparse tensors may be
        raise Broken(f"{what} has {tree.describe(new)} entries, expected {tree.describe(old)}", path)
    if new.is_meta:  # has no values
        return
    wrong = ~same(new, old)
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        element = f"element {list(index)} of " if index else ""
        raise Broken(
            f"{element}{what} is {new[index].item()!r}, expected {old[index].item()!r}, in {tree.describe(new)}", path
        )


def _same_plain(new: Any, old: Any) -> bool:
    if isinstance(new, np.ndarray):
        return np.array_equal(new, old) if new.dtype.hasobject else new.tobytes() == old.tobytes()
    return new == old or (new != new and old != old)


def _assert_same_structure(found: Tree, expected: Tree, what: str) -> None:
    if tree.structure(found) != tree.structure(expected):
        raise Broken(f"{what} has the structure {tree.structure(found)}, expected {tree.structure(expected)}")


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return tree.describe(leaf) + ("" if leaf.layout == torch.strided else f" in {leaf.layout}")
    return f"{leaf.dtype}{list(leaf.shape)} of numpy" if isinstance(leaf, np.ndarray) else type(leaf).__name__


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Takes a sparse or jagged tensor apart into its entries and their places; another tensor is its only part."""
    if tensor.layout == torch.jagged:
        return [tensor.values(), tensor.offsets()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return [tensor]


def _is_8_bit(leaf: torch.Tensor) -> bool:
    return leaf.dtype.is_floating_point and leaf.dtype.itemsize == 1


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype.is_complex:
        return _same_bits(a.real, b.real) & _same_bits(a.imag, b.imag)
    if not a.dtype.is_floating_point:
        return a == b
    bits = _BITS[a.dtype.itemsize]
    return a.resolve_neg().view(bits) == b.resolve_neg().view(bits)


def _memories(value: Tree) -> list[tuple[str, tuple[int, int], Any]]:
    """Lists the leaves with memory: the path, where the memory begins and ends, and the leaf itself.

    The places of the entries of a sparse or jagged tensor do not count: torch's own functions share them.
    """
    found = []
    for path, leaf in tree.items(value):
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            storage = _parts(leaf)[0].untyped_storage()
            begin, size = storage.data_ptr(), storage.nbytes() if leaf.numel() else 0
        elif isinstance(leaf, np.ndarray):
            whole = leaf
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            begin, size = whole.ctypes.data, whole.nbytes if leaf.size else 0
        else:
            continue
        if size:
            found.append((path, (begin, begin + size), leaf))
    return found


def _overlap(memory: tuple[int, int], other: tuple[int, int]) -> bool:
    return memory[0] < other[1] and other[0] < memory[1]
