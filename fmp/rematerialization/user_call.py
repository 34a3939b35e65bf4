"""A call of the user's function as a region: operands in their places, surroundings restored, checks around."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fmp import _compat, tree
from fmp.ambient import Ambient
from fmp.errors import RematError
from fmp.rematerialization.capture import Capture
from fmp.rematerialization.early_stop import Attempt, Unread
from fmp.rematerialization.guards import Determinism, Guard, check_not_recorded, check_not_written, versions
from fmp.rematerialization.op_trace import OpTrace, compared
from fmp.rematerialization.recording import Kept
from fmp.rematerialization.region import Region, first_in_a_vjp, tracked
from fmp.rematerialization.saveable import nothing


class UserCall(Region):
    """A call of the user's function.

    Args:
        capture: The function, its arguments and keyword arguments, as one value.
        ambient: What surrounds the call.
        determinism: Compares the results.
        kept: The values inside that are kept instead of recomputed.
        unread: The values inside that may be left out of a recomputation.
        levels: The kinds of the transforms in progress.
        debug: Whether to write down the operators of both passes, for the error if the results differ.
    """

    def __init__(
        self,
        capture: Capture,
        ambient: Ambient,
        determinism: Determinism,
        kept: Kept | None = None,
        unread: Unread | None = None,
        levels: tuple[Any, ...] = (),
        debug: bool = False,
    ):
        super().__init__(levels)
        self.draws: list[int] = []
        self._capture = capture
        self._ambient = ambient
        self._determinism = determinism
        self._kept = Kept(nothing) if debug and kept is None else kept
        self._unread = unread
        self.tracked = tracked(capture.tensors)
        self._trace = OpTrace() if debug else None

    def first(self, *operands: Tensor) -> Any:
        """Calls the function where a torch.autograd.Function runs it: below all transforms, without function modes."""
        before = versions(operands)
        # Autograd records nothing for detached operands. What it records all the same is a tensor that is no operand.
        detached = [operand.detach() for operand in operands]
        guard = Guard(len(self.levels))
        try:
            with torch.enable_grad(), self._ambient.entered(self._seeds(operands), detached, guard) as forks:
                result = first_in_a_vjp(self._recorded_call, detached, self.tracked, len(self.levels))
                self.draws = self._ambient.drawn(forks)
        except RuntimeError:
            check_not_written(before, operands, self._capture)  # says which
            raise
        check_not_written(before, operands, self._capture)
        check_not_recorded(result)
        # Mappings in progress here stand for those of the call; at other places, what they wrap means something else.
        if all(kind == _compat.VMAP for kind in self.levels[: len(_compat.transforms())]):
            guard.release()
        if guard.has_met_opaque:
            self._unread = None
        elif self._unread:
            self._unread.settle(result)
        self._determinism.note(result)
        self._capture.snapshot.settle()
        original = {id(new): operand for new, operand in zip(detached, operands, strict=True)}
        return tree.map(lambda leaf: original.get(id(leaf), leaf), result)

    def again(self, *operands: Tensor) -> Any:
        """Calls the function once more, with everything around it as it was."""
        return self._again(operands, self._kept.again() if self._kept else nullcontext())

    def attempt(self) -> Attempt | None:
        """Returns what leaves out of one recomputation the values that no gradient needs; None if none are known."""
        return self._unread.attempt() if self._unread else None

    def again_in(self, attempt: Attempt, *operands: Tensor) -> Any:
        """Calls the function once more, without values that no gradient needs."""
        return self._again(operands, attempt)

    def _again(self, operands: Sequence[Tensor], mode: AbstractContextManager[Any]) -> Any:
        restored = self._ambient.drawing_again(), self._ambient.entered(self._seeds(operands), operands)
        trace = OpTrace() if self._trace and not _compat.forward_mode_active() else None  # not of ops on tangents
        try:
            with restored[0], restored[1], mode:
                result = self.call(operands) if trace is None else self._traced_call(trace, operands)
            self._determinism.compare(result)
        except RematError as error:
            if trace is None or self._trace is None:
                raise
            raise RematError(f"{error}\n{compared(self._trace, trace)}") from error
        return result

    def call(self, operands: Sequence[Tensor]) -> Any:
        """Calls the function with other tensors in place of those that it reaches."""
        result = self._capture.called(operands, check_effects=self.plan is None)
        left = self._capture.take_left()
        return (result, left) if left else result

    def _recorded_call(self, operands: Sequence[Tensor]) -> Any:
        recorded = self._kept or self._unread
        with recorded.recording() if recorded else nullcontext():
            return self.call(operands) if self._trace is None else self._traced_call(self._trace, operands)

    def _traced_call(self, trace: OpTrace, operands: Sequence[Tensor]) -> Any:
        with trace:
            return self.call(operands)

    def _seeds(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        return operands[self._capture.count :]
