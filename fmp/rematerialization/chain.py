"""Measures what the stages of a chain need, for `fmp.rematerialization.segments`.

Each stage runs a few times, forward and backward, on fake tensors. They have shapes and no memory, draw no random
numbers, and stand in for parameters and buffers as well. A ledger adds up the bytes that would be live. What cannot run
on fake tensors, because it needs values, runs on copies of the real ones.

Constants that a stage makes are real, since it may keep them: a mask in a cache, say. Where a stage keeps what depends
on its input, attributes of modules and containers get back what they held before. Elsewhere a fake tensor would stay,
so it runs on copies of the real ones as well, or raises.

Everything happens in a thread of its own. There, no transform of torch.func is in progress, no dispatch mode is on, and
saved-tensor hooks are allowed, whatever surrounds the caller.
"""

import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from fmp import _compat, tree
from fmp.ambient import Ambient, random_state, set_random_state
from fmp.errors import RematError
from fmp.live_fakes import Fakes
from fmp.live_memory import uncompiled
from fmp.rematerialization.capture import Capture
from fmp.rematerialization.guards import check_not_written, versions
from fmp.rematerialization.ledger import Ledger, new_bytes, tensors_of
from fmp.rematerialization.operators import memory_of
from fmp.rematerialization.region import differentiable
from fmp.rematerialization.segments import Stage

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Measured(NamedTuple):
    """What the stages of a chain need, and which functions they are.

    Attributes:
        stages: What each needs.
        starts: The first function of each.
    """

    stages: list[Stage]
    starts: list[int]


class Value(NamedTuple):
    """What passes from one stage to the next.

    Attributes:
        leaves: Its leaves.
        spec: Its structure.
        sizes: The bytes that each leaf adds; 0 for what shares memory with an operand of the chain or another leaf.
    """

    leaves: list[Any]
    spec: Any
    sizes: list[int]


class Flow(NamedTuple):
    """What is known of the leaves of a value on the way through the chain.

    Attributes:
        tracked: Whether each requires grad.
        saved: Whether the backward pass of the stage that returned it needs each.
    """

    tracked: list[bool]
    saved: list[bool]


def measure(fns: Sequence[Callable[..., Any]], args: tuple[Any, ...], create_graph: bool) -> Measured:
    """Measures the stages of a chain.

    A function that returns a view of its argument, or changes it in place, is no stage of its own: a cut before it has
    no use, or no right.

    Args:
        fns: The functions; each gets what the one before it returns.
        args: The arguments of the first. Under a transform, the shapes are those that the functions see.
        create_graph: Whether the backward pass is recorded.

    Returns:
        What the stages need.

    Raises:
        RematError: If a function changes what it was given, or needs values under a transform.
    """
    capture = Capture((tuple(fns), args))
    ambient = Ambient()
    operands = [*capture.tensors, *ambient.seeds]

    fakes = Fakes(allow_non_fake_inputs=True)

    def on_fake_tensors() -> Measured:
        with fakes:
            stand_ins = [_fake(tensor) for tensor in operands]
        return _measured(capture, ambient, stand_ins, operands, create_graph)

    def on_copies() -> Measured:
        copies = [tensor.detach().clone() for tensor in operands]
        return _measured(capture, ambient, copies, operands, create_graph)

    random = random_state(capture.tensors, capture.generators)
    with ThreadPoolExecutor(1) as thread, _unhooked(fns), uncompiled():
        try:
            measured, failure = thread.submit(on_fake_tensors).result(), None
        except RematError:
            raise
        except Exception as error:
            measured, failure = None, error
            _forget_frames(error)
        finally:
            capture.snapshot.restore()
            set_random_state(random)
            fakes.allow_non_fake_inputs = False
        if measured is not None and not fakes.alive():
            return measured
        if any(map(_compat.wrapped_by_transform, operands)):
            _refuse_kept(fakes)
            raise RematError(
                f"remat_sequential: a chain is measured on tensors without values, where it raises {failure!r}; give "
                "the segments, or call its plan(...) outside of all transforms before, where there are values"
            ) from failure
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the other thread has a stream of its own
        try:
            return thread.submit(on_copies).result()
        finally:
            capture.snapshot.restore()
            set_random_state(random)
            _refuse_kept(fakes)


def _refuse_kept(fakes: Fakes) -> None:
    """Refuses a chain that has kept a fake tensor, which would be read later.

    Raises:
        RematError: If there is one.
    """
    if kept := fakes.alive():
        raise RematError(
            f"remat_sequential: a function keeps a tensor that depends on its input, {tree.describe(kept[0])}, "
            "elsewhere than in its result, such as in a functools.lru_cache or an attribute of an object. Measured for "
            'segments="auto", it has kept one without values there: clear it, and give the segments, or keep it in an '
            "attribute of a module, a dictionary or a list that the function reaches, which gets back what it held"
        )


def _forget_frames(error: BaseException | None) -> None:
    """Frees what the frames of an error hold; a log may hold the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _measured(
    capture: Capture, ambient: Ambient, copies: Sequence[Tensor], operands: Sequence[Tensor], create_graph: bool
) -> Measured:
    # A transform may track any tensor that it has wrapped. Where nothing is tracked yet, everything will be.
    tracked = [operand.requires_grad or _compat.wrapped_by_transform(operand) for operand in operands]
    for copied, track in zip(copies, tracked, strict=True):
        copied.requires_grad_((track or not any(tracked)) and differentiable(copied))
    before = versions(copies)
    with ambient.entered(copies[capture.count :], copies), capture.swapped(copies):
        fns, args = capture.rebuilt(copies)
        starts, values = _boundaries(fns, args, {memory_of(tensor) for tensor in copies})
        check_not_written(before[: capture.count], copies[: capture.count], capture)
        arguments = {id(leaf) for leaf in tree.leaves(args)}
        parameters = [tensor for tensor in copies if tensor.requires_grad and id(tensor) not in arguments]
        flow = Flow(
            tracked=[isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree.leaves(args)],
            saved=[False] * len(tree.leaves(args)),
        )
        stages: list[Stage] = []
        for source, target, start, stop in zip(values[:-1], values[1:], starts, [*starts[1:], len(fns)], strict=True):
            run = _composed(fns[start:stop], spread=start == 0)
            stage, flow = _stage(run, source, target, flow, parameters, create_graph)
            stages.append(stage)
    return Measured(stages, starts)


def _boundaries(
    fns: Sequence[Callable[..., Any]], args: tuple[Any, ...], known: set[int]
) -> tuple[list[int], list[Value]]:
    """Runs a chain; returns where its stages start, and the values before, between and after them."""
    starts, values, current = [0], [_value(args, known)], args
    with torch.no_grad():
        for place, fn in enumerate(fns):
            given = tensors_of(current)
            before = versions(given)
            result = fn(*current) if place == 0 else fn(current)
            shared = {memory_of(tensor) for tensor in tensors_of(result)} <= {memory_of(tensor) for tensor in given}
            if place > 0:
                if shared or versions(given) != before:
                    values.pop()
                else:
                    starts.append(place)
            values.append(_value(result, known))
            current = result
    return starts, values


def _stage(
    run: Callable[..., Any],
    source: Value,
    target: Value,
    flow: Flow,
    parameters: Sequence[Tensor],
    create_graph: bool,
) -> tuple[Stage, Flow]:
    """Measures a stage.

    Args:
        run: The functions of the stage.
        source: Its input.
        target: Its output.
        flow: What is known of its input.
        parameters: What gets a gradient besides the input.
        create_graph: Whether the backward pass is recorded.

    Returns:
        What it needs, and what is known of its output.
    """
    with Ledger() as ledger:
        with torch.no_grad():
            given = _copies(source.leaves)
            start = ledger.restart()
            result = run(tree.unflatten(source.spec, given))
            forward, cost = ledger.most - start, ledger.cost
            del given, result

        given = _variables(source.leaves, flow.tracked)[1]
        saved: set[int] = set()
        with saved_tensors_hooks(lambda tensor: _noted(tensor, saved), lambda tensor: tensor):
            leaves = tree.leaves(run(tree.unflatten(source.spec, given)))
        needs_input, needs_output = [
            [isinstance(leaf, Tensor) and memory_of(leaf) in saved for leaf in part] for part in (given, leaves)
        ]
        del given, leaves

        variables, given = _variables(source.leaves, flow.tracked)
        start = ledger.restart()
        leaves = tree.leaves(run(tree.unflatten(source.spec, given)))
        recorded = ledger.most - start
        tracked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        made = new_bytes(leaves, map(memory_of, tensors_of(given)))
        residuals = ledger.live - start - sum(made)

        roots = _chosen(leaves, tracked)
        edges = [get_gradient_edge(leaf) for leaf in roots]
        cotangents = [torch.ones_like(leaf).requires_grad_(create_graph) for leaf in roots]
        del leaves, roots
        floor = start + residuals + sum(_chosen(made, needs_output))
        inputs = _chosen(variables, flow.tracked)
        ledger.restart()
        grads: Any = ()
        if edges:
            grads = torch.autograd.grad(
                edges, [*inputs, *parameters], cotangents, create_graph=create_graph, allow_unused=True
            )
        backward = max(ledger.most - floor, 0)
        del cotangents
        of_inputs, of_parameters = sum(new_bytes(grads[: len(inputs)])), sum(new_bytes(grads[len(inputs) :]))
        tape = max(ledger.live - floor - of_inputs - of_parameters, 0)
    needed = [here or before for here, before in zip(needs_input, flow.saved, strict=True)]
    stage = Stage(
        held_input=sum(source.sizes),
        saved_input=sum(_chosen(source.sizes, needed)),
        residuals=residuals,
        saved_output=sum(_chosen(target.sizes, needs_output)),
        output=sum(_chosen(target.sizes, tracked)),
        forward=forward,
        recorded=recorded,
        backward=backward,
        gradients=of_parameters,
        tape=tape,
        cost=cost,
    )
    return stage, Flow(tracked, needs_output)


def _composed(fns: Sequence[Callable[..., Any]], spread: bool) -> Callable[..., Any]:
    def run(value: Any) -> Any:
        value = fns[0](*value) if spread else fns[0](value)
        for fn in fns[1:]:
            value = fn(value)
        return value

    return run


def _value(value: Any, known: set[int]) -> Value:
    leaves, spec = tree.flatten(value)
    return Value(leaves, spec, new_bytes(leaves, known))


def _copies(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _variables(leaves: Sequence[Any], tracked: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Copies leaves as variables of autograd; returns them, and what a function may change in place instead."""
    variables = [leaf.requires_grad_() if track else leaf for leaf, track in zip(_copies(leaves), tracked, strict=True)]
    return variables, [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in variables]


def _noted(tensor: Tensor, saved: set[int]) -> Tensor:
    saved.add(memory_of(tensor))
    return tensor.detach()


def _chosen(values: Sequence[Any], choices: Sequence[bool]) -> list[Any]:
    return [value for value, choice in zip(values, choices, strict=True) if choice]


@contextmanager
def _unhooked(fns: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Leaves out the hooks of modules, which may note what they see."""
    with ExitStack() as stack:
        for module in {part: None for fn in fns if isinstance(fn, nn.Module) for part in fn.modules()}:
            attributes = vars(module)
            hooks = {name: attributes[name] for name in _HOOKS if name in attributes}
            stack.callback(attributes.update, hooks)
            attributes.update({name: OrderedDict() for name in hooks})
        yield
