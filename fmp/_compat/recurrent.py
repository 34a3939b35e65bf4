"""How `nn.RNN` and the like keep their weights: once more in a list, which torch's kernels are given."""

import weakref
from typing import Any

from torch import nn

# The attributes that hold them, and what tells whether they still are the module's own.
FLAT_WEIGHTS = frozenset(("_flat_weights", "_flat_weight_refs"))


def first_weight(layer: nn.RNNBase) -> Any:
    """Returns the first weight in the list."""
    return layer._flat_weights[0]


def forget_weights(layer: nn.RNNBase) -> None:
    """Lets go of the tensors of a call. The next one sees that these references are not to its own."""
    layer._flat_weights = [None] * len(layer._flat_weights)
    elsewhere: Any = weakref.ref(layer)
    layer._flat_weight_refs = [elsewhere] * len(layer._flat_weights)


def leave_in_place() -> None:
    """Stands for `RNNBase.flatten_parameters`, which would move the caller's tensors in memory."""
