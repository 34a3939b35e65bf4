"""The seeds by which the leaves of a tree draw: each is derived from the seed of a step and from the path of the leaf.

By the path and not by a count: parameters that are added to a tree leave the draws of the others alone.
"""

from typing import Any

import torch

from fmp import random

# Constants of the hash FNV-1a, https://datatracker.ietf.org/doc/draft-eastlake-fnv/.
_OFFSET, _PRIME = 0xCBF29CE484222325, 0x100000001B3


def name_of(path: tuple[Any, ...]) -> str:
    """Writes a path such that two paths whose keys differ, be it in type, have two names.

    Example:
        >>> name_of(("blocks", 0))
        'str blocks/int 0'
    """
    return "/".join([f"{type(key).__name__} {key}" for key in path])


def word_of(name: str) -> int:
    """Hashes a name to an integer that takes 64 bits with its sign."""
    word = _OFFSET
    for character in name:
        word = (word ^ ord(character)) * _PRIME % 2**64
    return word - 2**63


def seed_of(path: tuple[Any, ...], seed: random.Seed) -> torch.Tensor:
    """Derives the seed of one leaf.

    Args:
        path: Where it is, as `Spec.paths` of `fmp.tree` has it.
        seed: An integer, or i64[].

    Returns:
        i64[]. Those of many leaves come from `fmp.random.fold_in` as well, with their words as a vector.

    Example:
        >>> words = torch.tensor([word_of(name_of((key,))) for key in "ab"])
        >>> random.fold_in(7, words) == torch.stack([seed_of((key,), 7) for key in "ab"])
        tensor([True, True])
    """
    return random.fold_in(seed, word_of(name_of(path)))
