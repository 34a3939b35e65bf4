"""Where the state of a train step lies: what the step asks of a layout, and the answers of a single process.

A step computes with plain tensors: this process's parts of the parameters and of what is kept beside them, and its part
of the batch. What it takes from other processes, and what it shares with them, goes through here:

    params, wholes = opened(state.params)
    loss, grads    = value_and_grad(loss_fn)(gather(params, wholes), batch)
    grads          = reduce(grads, wholes)                # the mean over the batches of all
    loss, flags    = totals(...)                          # the same everywhere
    state          = closed(update(...), wholes)

`fmp.distributed.Layout` answers for many processes. In a single one everything is as it is.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from fmp import reductions, tree

Tree = Any
T = TypeVar("T")
Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
Tensor = torch.Tensor


@runtime_checkable
class Placement(Protocol):
    """What a train step asks of the place where its state lies.

    A tree of parts has a plain tensor for each leaf: the part of it that this process holds. A tree of wholes says what
    each is a part of. `opened` makes the parts and their wholes; the step only hands the wholes on.
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

    def together(self, work: Callable[[], T]) -> T:
        """Does a piece of work without the other processes, and raises in all of them if it raises in one."""
        ...

    def place(self, values: Tree) -> Tree:
        """Copies what every process has in full to where it shall lie."""
        ...

    def opened(self, values: Tree) -> tuple[Tree, Tree]:
        """Takes the parts out of a placed tree, without a copy, and describes their wholes."""
        ...

    def closed(self, parts: Tree, wholes: Tree) -> Tree:
        """Makes a placed tree of parts."""
        ...

    def initial(self, init: Callable[[Tree], Tree], params: Tree) -> Tree:
        """Makes the state of an optimizer for placed parameters."""
        ...

    def offsets(self, wholes: Tree) -> Tree:
        """Says at which flat index of the whole tensor each part begins; None if all begin at 0."""
        ...

    def gather(self, params: Tree, wholes: Tree) -> Tree:
        """Makes of parts what the loss sees."""
        ...

    def drawing(self) -> AbstractContextManager[Any]:
        """Lets random numbers be drawn for this process's part of the batch."""
        ...

    def reduce(self, grads: Tree, wholes: Tree) -> Tree:
        """Averages gradients by what `gather` made over all processes, in float32 or wider, and returns the parts."""
        ...

    def measure(self, grads: Tree, wholes: Tree) -> tuple[Tensor, Tensor]:
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
        wholes: tuple[Tree, Tree],
    ) -> tuple[Tree, Tree]:
        """Runs the `update` of an optimizer, in which entries may depend on others, on parts.

        Args:
            update: `update(grads, state, params) -> (updates, state)`.
            grads: The gradients.
            state: The optimizer's state.
            params: The parameters.
            wholes: Those of the parameters, and those of the state.
        """
        ...


class Single:
    """A process of its own: its parts are the wholes, so nothing is exchanged. `Placement` says what each method is."""

    is_shared = False
    reduces_in_loss = False

    def check_alike(self, values: Tree) -> None:
        """Passes: there is no other process to differ from."""

    def together(self, work: Callable[[], T]) -> T:
        """Does the work: there is no other process to tell."""
        return work()

    def place(self, values: Tree) -> Tree:
        """Copies, since the state that is made must share no memory with what the user gave."""
        return tree.map(lambda leaf: None if leaf is None else leaf.to(leaf.device, copy=True), values)

    def opened(self, values: Tree) -> tuple[Tree, Tree]:
        """Returns the values, which are the parts, and None: each part is its own whole."""
        return values, None

    def closed(self, parts: Tree, wholes: Tree) -> Tree:
        """Returns the parts, which are plain tensors in the state as well."""
        return parts

    def initial(self, init: Callable[[Tree], Tree], params: Tree) -> Tree:
        """Calls the function on plain tensors, which is all that an optimizer knows of."""
        return init(params)

    def offsets(self, wholes: Tree) -> Tree:
        """Returns None: every part begins where its whole does."""
        return None

    def gather(self, params: Tree, wholes: Tree) -> Tree:
        """Returns the parameters, which the loss can see as they are."""
        return params

    def drawing(self) -> AbstractContextManager[Any]:
        """Changes nothing: the batch of this process is the whole batch."""
        return nullcontext()

    def reduce(self, grads: Tree, wholes: Tree) -> Tree:
        """Returns the gradients: those of the whole batch are their own mean."""
        return grads

    def measure(self, grads: Tree, wholes: Tree) -> tuple[Tensor, Tensor]:
        """Returns the whole sum of squares, as this process has the only share of it."""
        norm, finite = reductions.measure(grads)
        return norm.to(torch.float64).square(), finite

    def totals(self, sums: Sequence[Tensor], means: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the tensors: there is nothing to add."""
        return list(sums), list(means)

    def concatenated(self, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Returns the tensors: there is nothing to put behind them."""
        return list(tensors)

    def transform(
        self,
        update: Update,
        grads: Tree,
        state: Tree,
        params: Tree,
        wholes: tuple[Tree, Tree],
    ) -> tuple[Tree, Tree]:
        """Calls the function: every entry that another depends on is here."""
        return update(grads, state, params)
