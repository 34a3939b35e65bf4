"""Names for values inside of a rematerialized function, by which a policy keeps them."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import traceback

from fmp.rematerialization.recording import name_value

_KEY = "fmp.checkpoint_name"


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Gives a value a name, by which the policies of `fmp.saveable` can keep it.

    What is kept is what the op returned that computed `x`, or that computed what `x` is a view of. That op is left out
    of the recomputation; the ones before it are not, unless nothing needs them and they are kept themselves.
    `torch.compile` leaves out whatever nothing needs.

    Args:
        x: Any tensor.
        name: The name; several values may have the same.

    Returns:
        The tensor itself; a view of it while torch.compile traces.

    Raises:
        TypeError: If `x` is not a tensor, or `name` is not a string.

    Example:
        >>> def attend(x, w):
        ...     scores = fmp.checkpoint_name(x @ w, "scores")
        ...     return scores.softmax(-1).square().sum()
        >>> x, w = torch.ones(2, 3), torch.ones(3, 4)
        >>> lean = fmp.remat(attend, saveable=fmp.saveable.only_names("scores"))
        >>> torch.equal(fmp.grad(lean)(x, w), fmp.grad(attend)(x, w))
        True
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"checkpoint_name names a tensor, got {type(x).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"checkpoint_name needs a string as the name, got {name!r}")
    if not is_compiling():
        name_value(x, name)
        return x
    with traceback.annotate({_KEY: name}):
        return torch.ops.aten.alias(x)


def name_in_graph(op: Any) -> str | None:
    """Returns the name that an operator of a graph gives its operand, while the graph is run to compile it."""
    if op is not torch.ops.aten.alias.default:
        return None
    return traceback.current_meta.get("custom", {}).get(_KEY)
