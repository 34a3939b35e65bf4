"""An optimizer under test, and the trees to test it on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmp import tree
from fmp.dtypes import is_castable
from fmp.optim import GradientTransformation
from fmp.testing.bits import snapshot

Tree = Any


@dataclass(frozen=True)
class Case:
    """An optimizer under test, and what to test it on; random numbers come from a generator of its own."""

    tx: GradientTransformation
    like: Tree
    dtypes: Sequence[torch.dtype]
    examples: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator("cpu").manual_seed(0))

    def params(self, dtype: torch.dtype = torch.float32) -> Tree:
        """Returns a copy of the parameters in a dtype."""
        return tree.cast(snapshot(self.like), dtype)

    def grads(self, like: Tree, dtype: torch.dtype | None = None) -> Tree:
        """Returns normal gradients for a tree: None for what cannot be trained."""

        def grad(leaf: Any) -> torch.Tensor | None:
            if not is_castable(leaf):
                return None
            drawn = torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64, device="cpu")
            return drawn.to(leaf.device, dtype or leaf.dtype)

        return tree.map(grad, like)

    def advanced(self, params: Tree, steps: int = 1) -> Tree:
        """Returns the state after some updates, so that moments are not zero."""
        state = self.tx.init(params)
        for _ in range(steps):
            _, state = self.tx.update(self.grads(params), state, params)
        return state


def default_params() -> Tree:
    """Makes small parameters of all kinds: nested, 0-dim, empty, an integer one, and none."""
    return {
        "layer": {"weight": torch.tensor([[0.5, -1.0], [2.0, 0.25], [-0.75, 1.5]]), "bias": torch.tensor([0.1, -0.3])},
        "scale": torch.tensor(1.25),
        "empty": torch.zeros(0, 2),
        "ids": torch.arange(3),
        "hole": None,
    }
