"""Which values inside of a rematerialized function are kept for the backward pass; the others are computed again.

Each is a function `(op, args) -> bool` of an operator such as `torch.ops.aten.mm.default` and its arguments, and any
function of this kind will do. The names are those of `jax.checkpoint_policies`.

What an operator returns is kept in addition to the operands of the function. Keeping is not always cheaper than no
remat at all: autograd itself keeps only what its formulas need, and of `tanh(x @ w)` that is not the product.

References:
    J. Bradbury et al., JAX, `jax.checkpoint_policies`.

Example:
    >>> def mlp(x, w):
    ...     return torch.tanh(x @ w).sum()
    >>> x, w = torch.ones(2, 3), torch.ones(3, 4)
    >>> for saveable in [fmp.saveable.nothing, fmp.saveable.dots, lambda op, args: op is torch.ops.aten.tanh.default]:
    ...     grads = fmp.grad(fmp.remat(mlp, saveable=saveable), argnums=1)(x, w)
    ...     assert torch.equal(grads, fmp.grad(mlp, argnums=1)(x, w))
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "any_except_names",
    "dots",
    "dots_with_no_batch_dims",
    "everything",
    "nothing",
    "offload_names",
    "only_names",
]

Saveable = Callable[[Any, tuple[Any, ...]], bool]

_aten: Any = torch.ops.aten
_PRODUCTS = frozenset(
    getattr(_aten, name).default
    for name in ("mm", "addmm", "mv", "addmv", "dot", "vdot", "_scaled_mm")
    if hasattr(_aten, name)
)
_BATCHED = frozenset(
    getattr(_aten, name).default
    for name in (
        *("bmm", "baddbmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
    if hasattr(_aten, name)
)


@dataclasses.dataclass(frozen=True)
class Nothing:
    """Keeps nothing: the whole function is computed again."""

    def __call__(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Says no."""
        return False


@dataclasses.dataclass(frozen=True)
class Everything:
    """Keeps what autograd would keep: as if there were no remat."""

    def __call__(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Says yes."""
        return True


@dataclasses.dataclass(frozen=True)
class Dots:
    """Keeps the results of matrix products.

    Attributes:
        batched: Whether those of batched ones are among them, and fused attention.
    """

    batched: bool

    def __call__(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Says whether an operator is such a product."""
        return op in _PRODUCTS or (self.batched and op in _BATCHED)


@dataclasses.dataclass(frozen=True)
class Names:
    """Keeps values by the names that `fmp.checkpoint_name` gives them.

    Attributes:
        names: The names.
        but: Whether all named values are kept except for these.
        offload: Whether they are kept in the memory of the host.
    """

    names: frozenset[str]
    but: bool = False
    offload: bool = False

    def __call__(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Says no: an operator has no name."""
        return False

    def keeps(self, name: str) -> bool:
        """Says whether values of a name are kept."""
        return (name in self.names) != self.but


nothing = Nothing()
"""Keeps nothing but the operands: the whole function is computed again."""

everything = Everything()
"""Keeps what autograd would keep, as without remat."""

dots = Dots(batched=True)
"""Keeps the results of matrix products and of fused attention."""

dots_with_no_batch_dims = Dots(batched=False)
"""Keeps the results of products without batch dimensions: those of linear layers, not those of attention."""


def only_names(*names: str) -> Names:
    """Keeps the values that have one of these names.

    Args:
        *names: As given to `fmp.checkpoint_name`.

    Returns:
        The policy.

    Raises:
        TypeError: If one is not a string.

    Example:
        >>> only_names("scores") == only_names("scores")
        True
    """
    return Names(_checked("only_names", names))


def any_except_names(*names: str) -> Names:
    """Keeps the values that have a name, unless it is one of these; what has no name is computed again.

    Args:
        *names: As given to `fmp.checkpoint_name`.

    Returns:
        The policy.

    Raises:
        TypeError: If one is not a string.

    Example:
        >>> kept = any_except_names("logits")
        >>> kept.keeps("scores"), kept.keeps("logits")
        (True, False)
    """
    return Names(_checked("any_except_names", names), but=True)


def offload_names(*names: str) -> Names:
    """Keeps the values that have one of these names in pinned memory of the host; what is there already stays.

    Args:
        *names: As given to `fmp.checkpoint_name`.

    Returns:
        The policy.

    Raises:
        TypeError: If one is not a string.

    Example:
        >>> offload_names("hidden").offload
        True
    """
    return Names(_checked("offload_names", names), offload=True)


def check_saveable(saveable: Any) -> None:
    """Refuses what cannot be a policy.

    Raises:
        TypeError: If it is not a function, or is one that makes policies.
    """
    if saveable in (only_names, any_except_names, offload_names):
        raise TypeError(f"saveable={saveable.__name__} makes a policy; call it with names")
    if not callable(saveable):
        raise TypeError(f"saveable must be one of fmp.saveable or a function (op, args) -> bool, got {saveable!r}")


def _checked(function: str, names: tuple[Any, ...]) -> frozenset[str]:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{function} takes names, each a string, got {name!r}")
    return frozenset(names)
