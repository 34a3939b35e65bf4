"""Functions of one's own under O1: decorators that cast the arguments of a call, and rules for functions of torch."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from fmp import _compat, tree
from fmp.compat.casting import SessionCaster
from fmp.compat.current import current
from fmp.policy import OpRules
from fmp.policy.caster import Caster, active_caster, casters, check_function

Fn = TypeVar("Fn", bound=Callable[..., Any])
Kind = Literal["low", "full", "promote"]


class Registry:
    """The functions that were registered since the last session that cast."""

    def __init__(self):
        self._entries: list[tuple[Kind, Any]] = []

    def add(self, kind: Kind, module: Any, name: str) -> None:
        """Registers the function `module.name`.

        Raises:
            ValueError: If there is no such function.
            TypeError: If it is no function of torch.
            RuntimeError: If a session that casts has begun.
        """
        if current.session is not None and current.session.casting is not None:
            raise RuntimeError(f"amp.initialize has read the registrations already; register {name} before")
        if not hasattr(module, name):
            owner = getattr(module, "__name__", repr(module))
            raise ValueError(f"no function named {name} in {owner}; check the spelling of name={name!r}")
        op = getattr(module, name)
        OpRules().leave(op)  # raises for what no rule can be found for
        self._entries.append((kind, op))

    def take(self) -> list[tuple[Kind, Any]]:
        """Returns what was registered, and forgets it."""
        entries, self._entries = self._entries, []
        return entries


def session_rules(entries: list[tuple[Kind, Any]]) -> OpRules:
    """Makes the op rules of a session: Apex's, whose refusal says what a script can do about it, and the registered.

    Example:
        >>> session_rules([]).rule("binary_cross_entropy").kind
        'banned'
        >>> session_rules([("full", torch.nn.functional.binary_cross_entropy)]).rule("binary_cross_entropy").kind
        'full'
    """
    rules = OpRules.apex().banned(torch.nn.functional.binary_cross_entropy, _INSTEAD)
    for kind, op in entries:
        rules = getattr(rules, kind)(op)
    return rules


# A script cannot give op rules, which is what the refusal advises elsewhere.
_INSTEAD = (
    "it needs full-precision input; use binary_cross_entropy_with_logits, or before amp.initialize call "
    'amp.register_float_function(torch.nn.functional, "binary_cross_entropy"), or put `with amp.disable_casts():` '
    "around it and give it float32"
)

registry = Registry()


def register_half_function(module: Any, name: str) -> None:
    """Makes `module.name`, a function of torch, run in half in the next session that casts (O1).

    Args:
        module: The module or class that has the function: `torch`, `torch.nn.functional`, `torch.Tensor`.
        name: Its name there.

    Raises:
        ValueError: If there is no such function.
        TypeError: If it is no function of torch; use `half_function` on it.
        RuntimeError: If a session that casts has begun.

    Example:
        >>> from fmp.compat import amp
        >>> amp.register_half_function(torch, "sigmoid")
        >>> model = amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", half_dtype="bf16", verbosity=0)
        >>> torch.sigmoid(torch.zeros(1))
        tensor([0.5000], dtype=torch.bfloat16)
        >>> amp.shutdown()
    """
    registry.add("low", module, name)


def register_float_function(module: Any, name: str) -> None:
    """Makes `module.name` run in float32, see `register_half_function`; also what makes a banned function allowed.

    Example:
        >>> from fmp.compat import amp
        >>> amp.register_float_function(torch, "mm")
        >>> model = amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", half_dtype="bf16", verbosity=0)
        >>> torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
        torch.float32
        >>> amp.shutdown()
    """
    registry.add("full", module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Makes `module.name` run in the widest dtype among its arguments, see `register_half_function`.

    Example:
        >>> from fmp.compat import amp
        >>> amp.register_promote_function(torch, "mm")
        >>> model = amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", half_dtype="bf16", verbosity=0)
        >>> torch.mm(torch.ones(1, 1).bfloat16(), torch.ones(1, 1)).dtype
        torch.float32
        >>> amp.shutdown()
    """
    registry.add("promote", module, name)


def half_function(fn: Fn) -> Fn:
    """Casts the floating-point tensors in the arguments of a function to half, while O1 is on around the call.

    Args:
        fn: The function. What it calls is cast by the rules, as anywhere under O1.

    Returns:
        A function with the same arguments, which is `fn` itself while amp is off.

    Example:
        >>> from fmp.compat import amp
        >>> @amp.half_function
        ... def dtypes(*tensors):
        ...     return [tensor.dtype for tensor in tensors]
        >>> dtypes(torch.ones(1))
        [torch.float32]
        >>> model = amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", half_dtype=torch.bfloat16, verbosity=0)
        >>> dtypes(torch.ones(1))
        [torch.bfloat16]
        >>> amp.shutdown()
    """
    return _casting("half_function", fn, lambda caster, found: caster.low)


def float_function(fn: Fn) -> Fn:
    """Casts the floating-point tensors in the arguments of a function to float32, see `half_function`.

    Example:
        >>> from fmp.compat import amp
        >>> model = amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", half_dtype="bf16", verbosity=0)
        >>> amp.float_function(lambda x: x.dtype)(torch.ones(1).bfloat16())
        torch.float32
        >>> amp.shutdown()
    """
    return _casting("float_function", fn, lambda caster, found: torch.float32)


def promote_function(fn: Fn) -> Fn:
    """Casts the floating-point tensors in the arguments of a function to the widest of them, see `half_function`.

    Example:
        >>> from fmp.compat import amp
        >>> model = amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", half_dtype="bf16", verbosity=0)
        >>> amp.promote_function(lambda x, y: x.dtype)(torch.ones(1).bfloat16(), torch.ones(1))
        torch.float32
        >>> amp.shutdown()
    """
    return _casting("promote_function", fn, lambda caster, found: functools.reduce(torch.promote_types, found))


def _casting(name: str, fn: Fn, dtype_of: Callable[[Caster, list[torch.dtype]], torch.dtype]) -> Fn:
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(_casting(name, fn.__func__, dtype_of))  # pyright: ignore[reportReturnType]
    check_function(f"amp.{name}", fn)

    @functools.wraps(fn, _compat.described_by(fn), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        for caster in casters():
            if isinstance(caster, SessionCaster):
                caster.resume_after_failure()
        caster = active_caster()
        if caster is None:
            return fn(*args, **kwargs)
        found = [leaf.dtype for leaf in tree.leaves((args, kwargs)) if caster.casts(leaf)]
        if found:
            dtype = dtype_of(caster, found)
            args, kwargs = tree.map(lambda leaf: caster.cast(leaf, dtype), (args, kwargs))
        return fn(*args, **kwargs)

    return run  # pyright: ignore[reportReturnType]
