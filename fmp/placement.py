"""Where the state of a train step lies: what the step asks of a layout, and the answers of a single process.

A step computes with plain tensors: this process's parts of the parameters and of what is kept beside them, and its part
of the batch. What it takes from other processes, and what it shares with them, goes through here:

    params, forms = opened(state.params)
    loss, grads   = value_and_grad(loss_fn)(gather(params, forms), batch)
    grads         = reduce(grads, forms)                  # the mean over the batches of all
    loss, flags   = totals(...)                           # the same everywhere
    state         = closed(update(...), forms)

`fmp.distributed.Layout` answers for many processes. In a single one everything is as it is.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch

from fmp import reductions, tree

Tree = Any
Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
Tensor = torch.Tensor


@runtime_checkable
class Placement(Protocol):
    """What a train step asks of the place where its state lies.

    A tree of parts has a plain tensor for each leaf: the part of it that this process holds. Its forms say of each part
    in which place of which tensor it lies; `opened` makes both, and they mean nothing to the step.
    """

    @property
    def is_shared(self) -> bool:
        """Whether other processes take part."""
        ...

    @property
    def reduces_in_loss(self) -> bool:
        """Whether gradients are averaged over processes while a loss is differentiated, at least some of them."""
        ...

    def check_alike(self, values: Tree) -> None:
        """Raises a `ValueError` unless all processes have the same values."""
        ...

    def place(self, values: Tree) -> Tree:
        """Copies what every process has in full to where it shall lie."""
        ...

    def opened(self, values: Tree) -> tuple[Tree, Tree]:
        """Takes the parts out of a placed tree, without a copy, and describes their forms."""
        ...

    def closed(self, parts: Tree, forms: Tree) -> Tree:
        """Makes a placed tree of parts."""
        ...

    def initial(self, init: Callable[[Tree], Tree], params: Tree) -> Tree:
        """Makes the state of an optimizer for placed parameters."""
        ...

    def offsets(self, forms: Tree) -> Tree:
        """Says at which flat index of the whole tensor each part begins; None if all begin at 0."""
        ...

    def gather(self, params: Tree, forms: Tree) -> Tree:
        """Makes of parts what the loss sees."""
        ...

    def drawing(self) -> AbstractContextManager[Any]:
        """Lets random numbers be drawn for this process's part of the batch."""
        ...

    def reduce(self, grads: Tree, forms: Tree) -> Tree:
        """Averages gradients by what `gather` made over all processes, in float32 or wider, and returns the parts."""
        ...

    def measure(self, grads: Tree, forms: Tree) -> tuple[Tensor, Tensor]:
        """Returns this process's share, f64[], of the sum of squares, and whether its parts are finite, bool[]."""
        ...

    def totals(self, sums: Sequence[Tensor], means: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Adds up some tensors over all processes, and averages others, all at once and each in its own dtype."""
        ...

    def concatenated(self, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Concatenates each tensor with those of the other processes."""
        ...

    def transform(
        self,
        update: Update,
        grads: Tree,
        state: Tree,
        params: Tree,
        forms: tuple[Tree, Tree],
    ) -> tuple[Tree, Tree]:
        """Runs the `update` of an optimizer, in which entries may depend on others, on parts.

        Args:
            update: `update(grads, state, params) -> (updates, state)`.
            grads: The gradients.
            state: The optimizer's state.
            params: The parameters.
            forms: Those of the parameters, and those of the state.
        """
        ...


class Single:
    """A process of its own, with the whole state and the whole batch."""

    is_shared = False
    reduces_in_loss = False

    def check_alike(self, values: Tree) -> None:
        """Has nobody to compare with."""

    def place(self, values: Tree) -> Tree:
        """Copies."""
        return tree.map(lambda leaf: None if leaf is None else leaf.to(leaf.device, copy=True), values)

    def opened(self, values: Tree) -> tuple[Tree, Tree]:
        """Returns the values as they are."""
        return values, None

    def closed(self, parts: Tree, forms: Tree) -> Tree:
        """Returns the values as they are."""
        return parts

    def initial(self, init: Callable[[Tree], Tree], params: Tree) -> Tree:
        """Calls the function."""
        return init(params)

    def offsets(self, forms: Tree) -> Tree:
        """Returns None: every tensor is whole."""
        return None

    def gather(self, params: Tree, forms: Tree) -> Tree:
        """Returns the parameters as they are."""
        return params

    def drawing(self) -> AbstractContextManager[Any]:
        """Changes nothing."""
        return nullcontext()

    def reduce(self, grads: Tree, forms: Tree) -> Tree:
        """Returns the gradients as they are."""
        return grads

    def measure(self, grads: Tree, forms: Tree) -> tuple[Tensor, Tensor]:
        """Returns the sum of squares, and whether all is finite."""
        norm, finite = reductions.measure(grads)
        return norm.to(torch.float64).square(), finite

    def totals(self, sums: Sequence[Tensor], means: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the tensors as they are."""
        return list(sums), list(means)

    def concatenated(self, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Returns the tensors as they are."""
        return list(tensors)

    def transform(
        self,
        update: Update,
        grads: Tree,
        state: Tree,
        params: Tree,
        forms: tuple[Tree, Tree],
    ) -> tuple[Tree, Tree]:
        """Calls the function."""
        return update(grads, state, params)
