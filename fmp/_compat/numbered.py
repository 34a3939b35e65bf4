"""How a graph of torch.compile names what it cannot hold: it holds tensors and numbers, so by a number."""

import operator
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Numbered(Generic[T]):
    """Values and their numbers, which stay as long as the process does, as graphs may."""

    def __init__(self) -> None:
        self._values: list[T] = []

    def number_of(self, value: T, is_same: Callable[[T, T], bool] = operator.eq) -> int:
        """Returns the number of a value; those that are the same share one. Not for the tracer to look into."""
        for number, known in enumerate(self._values):
            if is_same(known, value):
                return number
        self._values.append(value)
        return len(self._values) - 1

    def __getitem__(self, number: int) -> T:
        """Returns the value of a number."""
        return self._values[number]
