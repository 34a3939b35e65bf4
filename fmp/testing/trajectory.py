"""A loss scaler under test, and where it gets to over many steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fmp import tree
from fmp.scaling import LossScale
from fmp.testing.bits import tensors
from fmp.testing.invariants import Broken


@dataclass(frozen=True)
class Case:
    """A scaler under test, and how hard to test it."""

    make: Callable[[], LossScale]
    examples: int
    steps: int
    hysteresis: int

    @cached_property
    def rising(self) -> list[LossScale]:
        """The scaler after each of many finite steps in a row, until nothing changes any more."""
        return list(walk(self.make(), [True] * self.steps))

    @cached_property
    def falling(self) -> list[LossScale]:
        """The same for non-finite steps."""
        return list(walk(self.make(), [False] * self.steps))

    @cached_property
    def states(self) -> list[LossScale]:
        """A few different states: the first, the next ones, and those at the ends."""
        found = [self.make(), *self.rising[:1], *self.falling[:1], self.rising[-1], self.falling[-1]]
        return [*found, self.rising[-1].adjust(verdict(False))]

    @cached_property
    def reached(self) -> list[LossScale]:
        """The same states; the first one alone if `adjust` raises, which is not for every law to tell."""
        try:
            return self.states
        except Exception:
            return [self.make()]


def walk(scaler: LossScale, history: Sequence[bool]) -> Iterator[LossScale]:
    """Adjusts a scaler step by step; stops where a step changes nothing, since equal verdicts then never would.

    Args:
        scaler: The first one.
        history: The verdicts.

    Yields:
        The scaler after each step.
    """
    constant = len(set(history)) == 1
    for finite in history:
        before, scaler = scaler, scaler.adjust(verdict(finite))
        yield scaler
        if constant and _unchanged(before, scaler):
            return


def verdict(finite: bool) -> torch.Tensor:
    """Makes what `adjust` takes: bool[]."""
    return torch.tensor(finite)


def scale_of(scaler: LossScale) -> float:
    """Returns the factor of a scaler; raises `Broken` if it, or its inverse, is not positive and finite."""
    one = torch.ones((), dtype=torch.float32)
    scale, inverse = float(scaler.scale(one)), float(scaler.unscale({"g": one})["g"])
    if not (0.0 < scale < math.inf and 0.0 < inverse < math.inf):
        raise Broken(f"the scale is {scale} and its inverse {inverse}, in {scaler!r}")
    return scale


def _unchanged(before: LossScale, after: LossScale) -> bool:
    pairs = zip(tensors(before), tensors(after), strict=True)
    return tree.structure(before) == tree.structure(after) and all(torch.equal(old, new) for old, new in pairs)
