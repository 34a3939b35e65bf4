"""A mode that knows which of the fake tensors it made are still alive."""

import gc
import weakref
from typing import Any

from torch import Tensor

from fmp._compat import FakeTensor, FakeTensorMode


class Fakes(FakeTensorMode):
    """Makes fake tensors, and lists those that something holds on to.

    A function that keeps a tensor where nobody looks, such as in a `functools.lru_cache`, keeps a fake one. Every later
    call would raise.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and takes note of what it returns."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for each in result if isinstance(result, list | tuple) else (result,):
            if isinstance(each, FakeTensor):
                self._made.append(weakref.ref(each))
        return result

    def alive(self) -> list[Tensor]:
        """Lists the tensors that are alive."""
        if self._alive():
            gc.collect()  # a cycle is not held by anything
        return self._alive()

    def _alive(self) -> list[Tensor]:
        return list({id(tensor): tensor for made in self._made if (tensor := made()) is not None}.values())
