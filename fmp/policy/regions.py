"""Functions of one's own as ops: decorators that cast the arguments of a whole function."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fmp import _compat, tree
from fmp.policy.caster import Caster, Watcher, active_caster, check_function, covered
from fmp.policy.handlers import Args, Handler, Kwargs
from fmp.policy.op_rules import Rule

Fn = TypeVar("Fn", bound=Callable[..., Any])


def low_precision(fn: Fn) -> Fn:
    """Makes a function count as one op that runs in low precision.

    Inside `fmp.autocast` with op rules, the floating-point tensors in its arguments are cast to the policy's compute
    dtype, and the torch functions that it calls are not cast any more. Tensors that the function closes over are not
    cast; pass them as arguments. Elsewhere it runs as it is: under a policy without op rules, such as O2 and O3, which
    casts parameters and batch and no ops, the decorator does nothing; write the cast into the function there.

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
    return _as_op(fn, Rule("low", "fmp.low_precision"), lambda caster, dtypes: caster.low)


def full_precision(fn: Fn) -> Fn:
    """Makes a function count as one op that runs in float32; see `low_precision`.

    Under a policy without op rules, such as O2 and O3, it does nothing: write `.float()` before the op that needs
    float32 there, and `.to(h.dtype)` behind it.

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
    return _as_op(fn, Rule("full", "fmp.full_precision"), lambda caster, dtypes: torch.float32)


def promote(fn: Fn) -> Fn:
    """Makes a function count as one op that runs in the widest dtype among its arguments; see `low_precision`.

    Under a policy without op rules, such as O2 and O3, it does nothing.

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
    return _as_op(fn, Rule("promote", "fmp.promote"), lambda caster, dtypes: _widest(dtypes))


class RegionWatcher(Watcher):
    """A watcher that is told of decorated functions, too."""

    def region(
        self, fn: Callable[..., Any], rule: Rule, handler: Handler, caster: Caster, args: Args, kwargs: Kwargs
    ) -> Any:
        """Runs a decorated function by its handler, `handler(caster, fn, args, kwargs)`."""
        raise NotImplementedError


def _widest(dtypes: list[torch.dtype]) -> torch.dtype | None:
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _as_op(fn: Fn, rule: Rule, dtype_of: Callable[[Caster, list[torch.dtype]], torch.dtype | None]) -> Fn:
    check_function(rule.why, fn)

    def handle(caster: Caster, called: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        dtype = dtype_of(caster, [leaf.dtype for leaf in tree.leaves((args, kwargs)) if caster.casts(leaf)])
        if dtype is not None:
            args, kwargs = tree.map(lambda leaf: caster.cast(leaf, dtype), (args, kwargs))
        with covered():
            return called(*args, **kwargs)

    @functools.wraps(fn, _compat.described_by(fn), updated=())
    @_compat.compiled_on_its_own
    def run(*args: Any, **kwargs: Any) -> Any:
        caster = active_caster()
        if caster is None:
            return fn(*args, **kwargs)
        watchers = [mode for mode in _compat.function_modes() if isinstance(mode, RegionWatcher)]
        if watchers:
            return watchers[-1].region(fn, rule, handle, caster, args, kwargs)
        return handle(caster, fn, args, kwargs)

    return run  # pyright: ignore[reportReturnType]
