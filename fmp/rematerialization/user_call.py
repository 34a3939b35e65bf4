"""A call of the user's function as a region: operands in their places, surroundings restored, checks around."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fmp import tree
from fmp.ambient import Ambient
from fmp.rematerialization.capture import Capture
from fmp.rematerialization.guards import Determinism, Guard, check_not_recorded, check_not_written, versions
from fmp.rematerialization.recording import Kept
from fmp.rematerialization.region import Region


class UserCall(Region):
    """A call of the user's function.

    Args:
        capture: The function, its arguments and keyword arguments, as one value.
        ambient: What surrounds the call.
        determinism: Compares the results.
        kept: The values inside that are kept instead of recomputed.
        levels: The kinds of the transforms in progress.
    """

    def __init__(
        self,
        capture: Capture,
        ambient: Ambient,
        determinism: Determinism,
        kept: Kept | None = None,
        levels: tuple[Any, ...] = (),
    ):
        super().__init__(levels)
        self.draws: list[int] = []
        self._capture = capture
        self._ambient = ambient
        self._determinism = determinism
        self._kept = kept

    def first(self, *operands: Tensor) -> Any:
        """Calls the function where a torch.autograd.Function runs it: below all transforms, without function modes."""
        before = versions(operands)
        # Autograd records nothing for detached operands. What it records all the same is a tensor that is no operand.
        detached = [operand.detach() for operand in operands]
        with torch.enable_grad(), self._ambient.entered(self._seeds(detached), detached, Guard()) as forks:
            result = self.call(detached) if self._kept is None else self._kept.first(self.call, detached)
            self.draws = self._ambient.drawn(forks)
        check_not_written(before, operands, self._capture)
        check_not_recorded(result)
        self._determinism.note(result)
        original = {id(new): operand for new, operand in zip(detached, operands, strict=True)}
        return tree.map(lambda leaf: original.get(id(leaf), leaf), result)

    def again(self, *operands: Tensor) -> Any:
        """Calls the function once more, with everything around it as it was."""
        restored = self._ambient.drawing_again(), self._ambient.entered(self._seeds(operands), operands)
        with restored[0], restored[1], self._kept.again() if self._kept else nullcontext():
            result = self.call(operands)
        self._determinism.compare(result)
        return result

    def call(self, operands: Sequence[Tensor]) -> Any:
        """Calls the function with other tensors in place of those that it reaches."""
        with self._capture.swapped(operands):
            function, args, kwargs = self._capture.rebuilt(operands)
            return function(*args, **kwargs)

    def _seeds(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        return operands[self._capture.count :]
