"""Recomputation where torch.compile traces: torch.utils.checkpoint marks what the compiler shall compute again.

    Dynamo          traces the function once, into a part of its own
    AOTAutograd     runs that part operator by operator; a policy says of each whether its result is kept
    partitioner     copies what is not kept into the backward graph, with the random numbers of the forward graph

A backend without AOTAutograd, such as "eager", runs `torch.utils.checkpoint` as the graph runs, but does not let it
preserve the random state: what its two passes are given here does.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fmp import _compat
from fmp.ambient import Ambient, random_state
from fmp.rematerialization.naming import name_in_graph
from fmp.rematerialization.saveable import Names, Nothing, Saveable

Passes = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
# Of these it is known that they draw the same numbers again.
_DRAW_AGAIN = ("inductor", "aot_eager")


def traced(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    saveable: Saveable,
    passes: Callable[[], Passes],
) -> Any:
    """Calls a function while torch.compile traces, so that the compiled backward pass recomputes it.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        saveable: What to keep.
        passes: A partial of `passes_of`, made before, as torch.compile wants it.
    """
    modes = _compat.function_modes()
    before = _compat.allow_side_effects_in_checkpoint(True)

    def run(*args: Any) -> Any:
        _compat.allow_side_effects_in_checkpoint(before)
        # The modes around are off in a part of its own.
        for mode in modes:
            _compat.push_function_mode(mode)
        try:
            return fn(*args, **kwargs)
        finally:
            for _ in modes:
                _compat.pop_function_mode()

    if isinstance(saveable, Nothing) and _compat.compiler_name() in _DRAW_AGAIN:
        return checkpoint(run, *args, use_reentrant=False)
    return checkpoint(run, *args, use_reentrant=False, context_fn=passes)


def passes_of(saveable: Saveable) -> Passes:
    """Makes what is entered around the two passes of a call."""
    first, again = create_selective_checkpoint_contexts(functools.partial(_decide, saveable))
    return first, again if _compat.making_a_graph() else _DrawingAgain(again)


class _DrawingAgain(AbstractContextManager[None]):
    """Restores the random state of now whenever it is entered, around another context."""

    def __init__(self, inner: AbstractContextManager[Any]):
        self._ambient, self._inner, self._stack = Ambient(random_state()), inner, ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._ambient.drawing_again())
        self._stack.enter_context(self._inner)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _decide(saveable: Saveable, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Says whether what an operator returned is kept."""
    if isinstance(saveable, Names):
        name = name_in_graph(op)
        kept = name is not None and saveable.keeps(name)
        if kept and _compat.making_a_graph():
            _compat.tag_maker("recompute", CheckpointPolicy.MUST_SAVE)
            kept = False  # not the view that bears the name, but what it shows
    else:
        kept = saveable(op, args)
    if kept and not _compat.making_a_graph() and torch.Tag.nondeterministic_seeded in op.tags:
        kept = False  # left out, it would not draw, and the ops after it would draw its numbers
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
