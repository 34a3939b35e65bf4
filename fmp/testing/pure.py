"""check_pure: whether a function is one, as a train step and its parts must be."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from fmp.testing.bits import (
    assert_apart,
    assert_apart_from,
    assert_close,
    assert_same_bits,
    autograd_marks,
    snapshot,
    tensors,
    versions,
    with_tensors,
)
from fmp.testing.global_state import global_state, restored
from fmp.testing.invariants import Broken, run_laws

Tree = Any


@dataclass(frozen=True)
class Call:
    """A function, and the arguments to call it with."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Makes the call."""
        return self.fn(*self.args)


def check_pure(
    fn: Callable[..., Any],
    *args: Any,
    may_alias: bool = False,
    vmap: bool = False,
    invariants: Collection[str] | None = None,
) -> None:
    """Checks that a function is pure: it depends on its arguments only, and does nothing but return its results.

    Afterwards the random number generators (torch's of the CPU, Python's and numpy's), grad mode, autocast and default
    dtype are as before, even if the function changed them.

    Args:
        fn: The function. Its results are compared leaf by leaf, so they must be trees of tensors and plain values.
        *args: Its arguments: trees of tensors, numpy arrays and whatever else it takes. Objects that are neither are
            not looked into.
        may_alias: Whether results may share memory with arguments or with each other.
        vmap: Whether it must also work under `torch.func.vmap`.
        invariants: Names of the invariants to check, as `INVARIANTS["check_pure"]` has them; None for all.

    Raises:
        AssertionError: If an invariant is broken; the message names it, the leaf and the values.
        ValueError: If `invariants` has an unknown name, or `vmap` is asked for and there is no tensor among the
            arguments.

    Example:
        >>> check_pure(lambda x: x * 2, torch.ones(2), vmap=True)
        >>> check_pure(lambda x: x.mul_(2), torch.ones(2))
        Traceback (most recent call last):
        AssertionError: check_pure: inputs_stay_unchanged is broken. ...
    """
    if vmap and not tensors(args):
        raise ValueError("vmap=True needs a tensor among the arguments")
    off = [*ALIASING_LAWS] * may_alias + [vmap_gives_each_member_the_same] * (not vmap)
    run_laws("check_pure", LAWS, Call(fn, args), only=invariants, off=off)


def inputs_stay_unchanged(call: Call) -> None:
    """The arguments have the same bits, structure, version counters, requires_grad and .grad after the call."""
    before, counts, marks = snapshot(call.args), versions(call.args), autograd_marks(call.args)
    call()
    assert_same_bits(call.args, before, "an argument")
    for path, count in versions(call.args).items():
        if count != counts[path]:
            raise Broken("the argument was written to in place, though with the values it had", path)
    for path, (requires_grad, grad) in autograd_marks(call.args).items():
        expected, old_grad = marks[path]
        if requires_grad != expected:
            raise Broken(f"requires_grad of the argument went from {expected} to {requires_grad}", path)
        assert_same_bits({path: grad}, {path: old_grad}, "the .grad of the argument")


def same_call_gives_the_same_bits(call: Call) -> None:
    """A second call with the same arguments returns the same bits."""
    first = snapshot(call())
    assert_same_bits(call(), first, "the result of a second call")


def global_state_stays(call: Call) -> None:
    """Generators of random numbers, grad and inference mode, autocast, default dtype and device are as before."""
    before = global_state()
    call()
    after = global_state()
    for name, value in before.items():
        if value != after[name]:
            change = "has advanced" if isinstance(value, bytes) else f"went from {value} to {after[name]}"
            raise Broken(f"{name} {change}")


def outputs_do_not_alias_inputs(call: Call) -> None:
    """No result shares memory with an argument."""
    assert_apart_from(call(), call.args, "a result")


def outputs_do_not_alias_each_other(call: Call) -> None:
    """No two results share memory."""
    assert_apart(call(), "a result")


def vmap_gives_each_member_the_same(call: Call) -> None:
    """Under torch.func.vmap, copies of the arguments give copies of the results, up to rounding, and stay unchanged."""
    expected = tensors(call())
    stacked = [torch.stack([leaf.detach()] * 2) for leaf in tensors(call.args)]
    before = snapshot(stacked)
    found = torch.func.vmap(lambda *flat: tensors(call.fn(*with_tensors(call.args, flat))))(*stacked)
    assert_same_bits(stacked, before, "a mapped argument")
    for member in range(2):
        assert_close([leaf[member] for leaf in found], [leaf.detach() for leaf in expected], "a mapped result")


ALIASING_LAWS = (outputs_do_not_alias_inputs, outputs_do_not_alias_each_other)
FUNCTION_LAWS = (inputs_stay_unchanged, same_call_gives_the_same_bits, global_state_stays)
LAWS = (*FUNCTION_LAWS, *ALIASING_LAWS, vmap_gives_each_member_the_same)


def assert_function(fn: Callable[..., Any], *args: Any) -> None:
    """Raises `Broken` unless a call changes neither its arguments nor global state, and repeats bit for bit."""
    for law in FUNCTION_LAWS:
        with restored():
            law(Call(fn, args))
