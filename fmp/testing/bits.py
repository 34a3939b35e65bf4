"""Comparing trees, bit for bit or closely, and finding tensors that share memory."""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch

from fmp import tree
from fmp.testing.invariants import Broken

Tree = Any

# Those of torch.testing.assert_close.
_RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float32: 1.3e-6, torch.float64: 1e-7}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    return tree.map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def pickled(value: Tree) -> Tree:
    """Sends a tree through pickle; classes go by reference, so that one defined inside a test function can go, too."""
    classes: list[type] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, type):
                return None
            classes.append(obj)
            return len(classes) - 1

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


def assert_same_kind(found: Tree, expected: Tree, what: str) -> None:
    """Raises `Broken` unless two trees have the same structure, shapes and dtypes."""
    _assert_same_structure(found, expected, what)
    for (path, new), old in zip(tree.items(found), tree.leaves(expected), strict=True):
        if _kind(new) != _kind(old):
            raise Broken(f"{what} is {_kind(new)}, expected {_kind(old)}", path)


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
        lambda a, b: torch.isclose(a, b, rtol=_RELATIVE.get(a.dtype, 0.0), atol=absolute, equal_nan=True),
    )


def assert_apart(results: Tree, what: str) -> None:
    """Raises `Broken` where two tensors of a tree share memory."""
    for (path, leaf), (other_path, other) in combinations(_with_memory(results), 2):
        if _address(leaf) == _address(other):
            raise Broken(f"{what} shares its memory with the one at {other_path}", path)


def assert_apart_from(results: Tree, given: Tree, what: str, *, passed_through: bool = False) -> None:
    """Raises `Broken` where a result shares memory with an argument.

    Args:
        results: The results.
        given: The arguments.
        what: What to call a result.
        passed_through: Whether a result may be an argument itself, the same object.
    """
    memory = {_address(leaf): path for path, leaf in _with_memory(given)}
    arguments = {id(leaf) for leaf in tensors(given)}
    for path, leaf in _with_memory(results):
        if _address(leaf) in memory and not (passed_through and id(leaf) in arguments):
            raise Broken(f"{what} shares its memory with the argument at {memory[_address(leaf)]}", path)


def _assert_leaves(
    found: Tree, expected: Tree, what: str, same: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    _assert_same_structure(found, expected, what)
    for (path, new), old in zip(tree.items(found), tree.leaves(expected), strict=True):
        if _kind(new) != _kind(old):
            raise Broken(f"{what} is {_kind(new)}, expected {_kind(old)}", path)
        if not isinstance(new, torch.Tensor):
            if new != old and not (new != new and old != old):
                raise Broken(f"{what} is {new!r}, expected {old!r}", path)
            continue
        wrong = ~same(new.detach(), old.detach())
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            element = f"element {list(index)} of " if index else ""
            raise Broken(
                f"{element}{what} is {new[index].item()!r}, expected {old[index].item()!r}, in {tree.describe(new)}",
                path,
            )


def _assert_same_structure(found: Tree, expected: Tree, what: str) -> None:
    if tree.structure(found) != tree.structure(expected):
        raise Broken(f"{what} has the structure {tree.structure(found)}, expected {tree.structure(expected)}")


def _kind(leaf: Any) -> str:
    return tree.describe(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype.is_complex:
        return _same_bits(a.real, b.real) & _same_bits(a.imag, b.imag)
    if not a.dtype.is_floating_point:
        return a == b
    bits = _BITS[a.dtype.itemsize]
    return a.resolve_neg().view(bits) == b.resolve_neg().view(bits)


def _with_memory(value: Tree) -> Iterator[tuple[str, torch.Tensor]]:
    return ((path, leaf) for path, leaf in tree.items(value) if isinstance(leaf, torch.Tensor) and leaf.numel())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
