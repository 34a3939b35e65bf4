"""Functions of one's own as ops: decorators that cast the arguments of a whole function."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fmp import _compat, tree
from fmp.policy.caster import Caster, casters, covered

Fn = TypeVar("Fn", bound=Callable[..., Any])


def low_precision(fn: Fn) -> Fn:
    """Makes a function count as one op that runs in low precision.

    Inside `fmp.autocast` with op rules, the floating-point tensors in its arguments are cast to the policy's compute
    dtype, and the torch functions that it calls are not cast any more. Elsewhere it runs as it is. Tensors that the
    function closes over are not cast; pass them as arguments.

    Args:
        fn: Any function of trees.

    Returns:
        The function.

    Example:
        >>> @low_precision
        ... def attend(query, key):
        ...     return (query @ key).softmax(-1).dtype
        >>> policy = fmp.opt_level("O1", half_dtype=torch.bfloat16)
        >>> fmp.autocast(attend, policy)(torch.ones(2, 2), torch.ones(2, 2))
        torch.bfloat16
        >>> attend(torch.ones(2, 2), torch.ones(2, 2))
        torch.float32
    """
    return _as_op(fn, lambda caster, dtypes: caster.low)


def full_precision(fn: Fn) -> Fn:
    """Makes a function count as one op that runs in float32; see `low_precision`.

    Args:
        fn: Any function of trees.

    Returns:
        The function.

    Example:
        >>> @full_precision
        ... def distance(x, y):
        ...     return (x @ y).dtype
        >>> policy = fmp.opt_level("O1", half_dtype=torch.bfloat16)
        >>> fmp.autocast(distance, policy)(torch.ones(2, 2), torch.ones(2, 2))
        torch.float32
    """
    return _as_op(fn, lambda caster, dtypes: torch.float32)


def promote(fn: Fn) -> Fn:
    """Makes a function count as one op that runs in the widest dtype among its arguments; see `low_precision`.

    Args:
        fn: Any function of trees.

    Returns:
        The function.

    Example:
        >>> @promote
        ... def mix(x, y):
        ...     return torch.lerp(x, y, 0.5).dtype
        >>> policy = fmp.opt_level("O1", half_dtype=torch.bfloat16)
        >>> fmp.autocast(mix, policy)(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2))
        torch.float32
    """
    return _as_op(fn, lambda caster, dtypes: functools.reduce(torch.promote_types, dtypes) if dtypes else None)


def _as_op(fn: Fn, dtype_of: Callable[[Caster, list[torch.dtype]], torch.dtype | None]) -> Fn:
    if not callable(fn):
        raise TypeError(f"expected a function to decorate, got {fn!r}")

    @functools.wraps(fn, updated=())
    @_compat.compiled_on_its_own
    def run(*args: Any, **kwargs: Any) -> Any:
        active = [caster for caster in casters() if not caster.covers]
        if not active:
            return fn(*args, **kwargs)
        caster = active[-1]
        dtype = dtype_of(caster, [leaf.dtype for leaf in tree.leaves((args, kwargs)) if caster.casts(leaf)])
        if dtype is not None:
            args, kwargs = tree.map(lambda leaf: caster.cast(leaf, dtype), (args, kwargs))
        with covered():
            return fn(*args, **kwargs)

    return run  # pyright: ignore[reportReturnType]
