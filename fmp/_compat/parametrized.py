"""The cache of torch.nn.utils.parametrize."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.utils import parametrize


def parametrizations_are_cached() -> bool:
    """Says whether `torch.nn.utils.parametrize.cached` is around the caller."""
    return parametrize._cache_enabled > 0


@contextmanager
def parametrization_cache(is_on: bool) -> Iterator[None]:
    """Gives parametrized modules an empty cache, or none; afterwards they have the one that they had."""
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = int(is_on), {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before
