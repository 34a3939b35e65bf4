"""torch.compile: what it is to leave alone, what it takes for constant, and the graph that it makes."""

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame as _eval_frame  # pyright: ignore[reportMissingModuleSource]

T = TypeVar("T")

_VERSION: Any = torch.__version__
_dispatch_mode: Any = cast(Any, torch._C)._get_dispatch_mode
_PROXY: Any = cast(Any, torch._C)._TorchDispatchModeKey.PROXY
_SIDE_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def constant_while_tracing(fn: T) -> T:
    """Marks a function whose result torch.compile may take for a constant.

    `torch.compiler.assume_constant_result` does the same, but loads the whole compiler to do it.
    """
    fn._dynamo_marked_constant = True  # pyright: ignore[reportAttributeAccessIssue]
    return fn


_SKIPPED = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def never_traced(fn: T) -> T:
    """Hides a function, and what it calls, from torch.compile: it runs as it is, below compiled code, too.

    `torch.compiler.disable` does the same, but loads the whole compiler to do it.
    """
    _eval_frame.set_code_exec_strategy(cast(Any, fn).__code__, _SKIPPED)
    return fn


def compiled_on_its_own(fn: T) -> T:
    """Copies a function, so that torch.compile counts its compilations apart from those of other copies.

    torch.compile allows a code object a few compilations. All functions that a transformation returns would share them.
    """
    if torch.compiler.is_compiling():
        return fn
    function: Any = fn
    code, closure = function.__code__.replace(), function.__closure__
    copied = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return cast(T, copied)


def is_compiled(fn: Any) -> bool:
    """Says whether a function came from torch.compile."""
    return hasattr(fn, "_torchdynamo_orig_callable")


def original(fn: Any) -> Any:
    """Returns the function that torch.compile was given for one that it returned."""
    return fn._torchdynamo_orig_callable


@constant_while_tracing
def allow_side_effects_in_checkpoint(allowed: bool) -> bool:
    """Sets whether torch.compile lets a checkpointed function have side effects: once, as the forward pass has them.

    Such are the function modes that it enters, and the count of what a mode has drawn.

    Returns:
        What it was before.
    """
    config: Any = sys.modules["torch._dynamo.config"]
    before = getattr(config, _SIDE_EFFECTS, False)
    if hasattr(config, _SIDE_EFFECTS):
        setattr(config, _SIDE_EFFECTS, allowed)
    return before


@constant_while_tracing
def compiler_name() -> str | None:
    """Returns the name of the backend for which torch.compile traces; None if it has none."""
    translator: Any = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator
    backend = translator.current_tx().output.compiler_fn
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", None)


def described_by(fn: Callable[..., Any]) -> list[str]:
    """Lists what `functools.wraps` copies; before torch 2.13, the tracer fails on what a built-in function lacks."""
    return [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(fn, name)]


def can_tell_tensors_apart() -> bool:
    """Says whether `id` can be asked of tensors that were made here; while torch.compile traces, since torch 2.13."""
    return _VERSION >= (2, 13) or not torch.compiler.is_compiling()


@contextmanager
def as_compiling() -> Iterator[None]:
    """Lets `torch.compiler.is_compiling` be true in what runs below the tracer, as torch itself does since 2.13."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def making_a_graph() -> bool:
    """Says whether the operators that run here are put into a graph."""
    return _dispatch_mode(_PROXY) is not None


def tag_maker(key: str, value: Any) -> None:
    """Tags the operator that made what the last operator has taken, which may be a view, in the graph being made."""
    mode: Any = _dispatch_mode(_PROXY)
    if mode is None:
        return
    node = next(iter(reversed(mode.tracer.graph.nodes))).args[0]
    while getattr(node, "op", None) == "call_function":
        schema = getattr(node.target, "_schema", None)  # what picks one of several results has none
        if schema is not None and not any(argument.alias_info for argument in schema.arguments):
            for made in (node, *[user for user in node.users if user.target is operator.getitem]):
                made.meta[key] = value
            return
        node = node.args[0]
