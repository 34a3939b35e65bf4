"""Strict promotion for tests: arithmetic that mixes floating-point dtypes by accident raises."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

# Named without the underscores of in-place and operator spellings, and without the `r` of reflected ones.
_NAMES = """
    add sub mul div subtract multiply divide true_divide floordiv remainder fmod pow float_power
    addcmul addcdiv lerp where maximum minimum fmax fmin clamp atan2 hypot cat stack
"""
_ARITHMETIC = frozenset(_NAMES.split())
_WATCHED = (
    _ARITHMETIC
    | {f"{name}_" for name in _ARITHMETIC}
    | {f"__{prefix}{name}__" for name in _ARITHMETIC for prefix in ("", "r", "i")}
    | {"rsub"}
)


class MixedDtypesError(AssertionError):
    """An operation mixed floating-point dtypes. (A TypeError would be swallowed by Python's operators.)"""


class StrictPromotion(TorchFunctionMode):
    """Raises when arithmetic mixes floating-point dtypes in one of the two ways that are accidents.

    Two tensors with dimensions and different dtypes: torch silently upcasts one. Or a tensor with dimensions and a
    wider 0-dim tensor: torch silently computes in the narrow dtype. A narrower 0-dim operand, Python numbers,
    comparisons and casts are fine.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Checks one call, then makes it."""
        if getattr(func, "__name__", None) in _WATCHED:
            _check(func.__name__, list(_floating((*args, *(kwargs or {}).values()))))
        return func(*args, **(kwargs or {}))


@contextmanager
def unwatched() -> Iterator[None]:
    """Takes the guard off the stack of modes and puts it back afterwards; other modes stay."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    others = [mode for mode in modes if not isinstance(mode, StrictPromotion)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


def compile_unwatched(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `torch.compile` so that compiled functions run without the guard, which Dynamo would trace into them."""

    @functools.wraps(compile)
    def wrapped(model: Any = None, **options: Any) -> Any:
        compiled = compile(model, **options)
        if model is None or isinstance(model, torch.nn.Module):
            return compiled

        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            with unwatched():
                return compiled(*args, **kwargs)

        return run

    return wrapped


def _floating(args: Iterable[Any]) -> Iterable[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.dtype.is_floating_point:
                yield arg
        elif isinstance(arg, list | tuple):
            yield from _floating(arg)


def _check(name: str, operands: list[torch.Tensor]) -> None:
    sized = {operand.dtype for operand in operands if operand.ndim}
    if not sized:
        return
    first = next(iter(sized))
    loose = {operand.dtype for operand in operands if not operand.ndim}
    if len(sized) > 1 or any(torch.promote_types(first, dtype) != first for dtype in loose):
        found = ", ".join(f"{operand.dtype}{list(operand.shape)}".removeprefix("torch.") for operand in operands)
        raise MixedDtypesError(f"{name} mixes floating-point dtypes: {found}; cast explicitly")
