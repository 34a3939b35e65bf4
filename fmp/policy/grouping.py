"""Treats equal layers as one: paths that differ only in numbers, such as `blocks.0.mlp` and `blocks.1.mlp`."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

# The number of a layer ends a word: that of `norm1`, but not that of `conv2d`.
_NUMBER = re.compile(r"\d+(?![a-zA-Z0-9])")


def family(path: str) -> str:
    """Gives all paths that differ only in numbers the same name; a line, such as `model.py:12`, keeps its own.

    Example:
        >>> family("blocks.3.norm1"), family("model.py:12")
        ('blocks.*.norm*', 'model.py:12')
    """
    return path if ":" in path else _NUMBER.sub("*", path)


def common(paths: Sequence[str]) -> str:
    """Writes paths of one family as one, with a star for each number in which they differ; "" for others and for none.

    Example:
        >>> common(["blocks.0.norm1", "blocks.1.norm1"])
        'blocks.*.norm1'
        >>> common(["blocks.0", "head"])
        ''
    """
    if len({family(path) for path in paths}) != 1:
        return ""
    numbers = iter(zip(*[_NUMBER.findall(path) for path in paths], strict=True))

    def shared(_: re.Match[str]) -> str:
        found = next(numbers)
        return found[0] if len(set(found)) == 1 else "*"

    return _NUMBER.sub(shared, paths[0])


def grouped(items: Iterable[Item], key: Callable[[Item], object]) -> list[list[Item]]:
    """Collects the items of one key, in the order of the first of each."""
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
