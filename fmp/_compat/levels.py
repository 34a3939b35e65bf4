"""The levels of torch.func transforms: which are active, and what a tensor is below, above and after them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch._functorch.vmap import restore_vmap
from torch.autograd import forward_ad

from fmp._compat.compiler import _VERSION, constant_while_tracing
from fmp._compat.graph import without_batched_gradients

_functorch: Any = cast(Any, torch._C)._functorch
_is_wrapped: Any = _functorch.is_functorch_wrapped_tensor


def transform_active() -> bool:
    """Says whether a torch.func transform, or forward-mode differentiation, is in progress around the caller."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def transform_level() -> int | None:
    """Returns the level of the innermost torch.func transform around the caller; None without one."""
    return _functorch.maybe_current_level()


def forward_mode_active() -> bool:
    """Says whether forward-mode differentiation is in progress around the caller."""
    return forward_ad._current_level >= 0


def wrapped_by_transform(tensor: torch.Tensor) -> bool:
    """Says whether a tensor belongs to a torch.func transform, so that its own flags do not tell what tracks it."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def reverse_mode_active() -> bool:
    """Says whether a reverse-mode transform (`torch.func.grad`, `vjp`, ...) is in progress around the caller."""
    return any(level.key() == _functorch.TransformType.Grad for level in _functorch.get_interpreter_stack() or ())


def differentiated_outside(value: torch.Tensor) -> bool:
    """Says whether anything outside a finished vjp can still differentiate its value.

    That is so when a reverse-mode transform is active around the caller, or when the tensor below all functorch
    wrappers belongs to an ordinary autograd graph.

    Args:
        value: The value that `torch.func.vjp` returned.
    """
    if reverse_mode_active():
        return True
    while _functorch.is_functorch_wrapped_tensor(value):
        value = _functorch.get_unwrapped(value)
    return value.requires_grad


def transforms() -> tuple[Any, ...]:
    """Lists the kinds of the torch.func transforms in progress around the caller, the outermost first."""
    return tuple([level.key() for level in _functorch.get_interpreter_stack() or ()])


VMAP: Any = _functorch.TransformType.Vmap
JVP: Any = _functorch.TransformType.Jvp
_NO_VALUES = torch.empty(0)


class Mapping(NamedTuple):
    """A `vmap` in progress.

    Attributes:
        level: Which transform it is, from 0.
        mark: A tensor that ends together with it.
    """

    level: int
    mark: torch.Tensor


def mappings() -> tuple[Mapping, ...]:
    """Takes note of the `vmap`s in progress around the caller, the outermost first."""
    levels = [level for level, kind in enumerate(transforms()) if kind == VMAP]
    return tuple([Mapping(level, _functorch._wrap_for_grad(_NO_VALUES, level + 1)) for level in levels])


def levels_of(noted: Sequence[Mapping]) -> list[int]:
    """Finds out which of the transforms in progress, from 0, are the `vmap`s that were in progress at another time.

    Args:
        noted: What `mappings` returned then. Where that was inside of the vmap rule of a torch.autograd.Function, these
            have ended, and torch has begun others in their place before it called the backward pass.
    """
    are_over = list(map(has_ended, noted))
    begun = iter(range(len(transforms()) - sum(are_over), len(transforms())))
    return [next(begun) if is_over else mapping.level for mapping, is_over in zip(noted, are_over, strict=True)]


def has_ended(mapping: Mapping) -> bool:
    """Says whether a `vmap` is in progress no more."""
    return _functorch.is_dead_tensor_wrapper(mapping.mark)


def mapped_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Finds the `vmap`s that map over any of some tensors: which transforms, from 0, and how many members they have."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        while _is_wrapped(tensor):
            dim, level = _functorch.maybe_get_bdim(tensor), _functorch.maybe_get_level(tensor)
            is_batched, tensor = _functorch.is_batchedtensor(tensor), _functorch.get_unwrapped(tensor)
            if is_batched:
                sizes[level - 1] = tensor.shape[dim]
    return sizes


def repeated(tensor: torch.Tensor, level: int, count: int) -> torch.Tensor:
    """Lets a tensor be one that a `vmap` maps over, with the same values for each of its members."""
    ones = below_transforms(torch.ones(count, dtype=tensor.dtype, device=tensor.device))
    return tensor * _functorch._add_batch_dim(ones, 0, level + 1)


def for_one_member(tensor: torch.Tensor, level: int, count: int) -> torch.Tensor:
    """Lets a tensor be one that a `vmap` maps over: its first member has the values, and the others zeros."""
    is_first = below_transforms(torch.arange(count, device=tensor.device) == 0)
    return torch.where(_functorch._add_batch_dim(is_first, 0, level + 1), tensor, torch.zeros_like(tensor))


def mapped_as_it_falls(
    function: Callable[..., Any], dims: tuple[int | None, ...], size: int, randomness: str
) -> Callable[..., tuple[Any, Any]]:
    """Maps a function like `torch.func.vmap`, but gives no dimension to a result that does not depend on the mapping.

    Args:
        function: It takes and returns tensors, a tuple of them.
        dims: For each of its arguments the dimension over which it is mapped; None for one that is the same each time.
        size: The number of members.
        randomness: As for `torch.func.vmap`.

    Returns:
        A function that returns the results, and for each the dimension of the members; None for one without.
    """
    return restore_vmap(function, dims, size, randomness)


@constant_while_tracing
def tracing_a_transform() -> bool:
    """Says whether a torch.func transform is in progress, while torch.compile traces."""
    return transform_active()


def unwrap_if_dead(tensor: torch.Tensor) -> torch.Tensor:
    """Takes the wrappers of finished torch.func transforms off a tensor."""
    return _functorch.unwrap_if_dead(tensor)


def ended_twice(tensor: torch.Tensor) -> bool:
    """Says whether a tensor bears the wrappers of two finished transforms, of which torch can take off only one."""
    is_dead: Any = _functorch.is_dead_tensor_wrapper
    return is_dead(tensor) and is_dead(_functorch.get_unwrapped(tensor))


def unwrap_in_place(tensor: torch.Tensor) -> None:
    """Takes the wrappers of finished transforms off a tensor, for whoever holds it."""
    inner = tensor
    while _functorch.is_dead_tensor_wrapper(inner):
        inner = _functorch.get_unwrapped(inner)
    cast(Any, torch._C)._swap_tensor_impl(tensor, inner.detach())


def below_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor below all wrappers of torch.func."""
    while _is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def differentiated(tensor: torch.Tensor) -> bool:
    """Says whether autograd, or a reverse-mode transform at any level around the caller, tracks a tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def level_of(tensor: torch.Tensor) -> int:
    """Returns which of the transforms in progress has wrapped a tensor last, from 1; less for none or an ended one."""
    return _functorch.maybe_get_level(tensor)


def belongs_to_ended_level(tensor: torch.Tensor, kinds: tuple[Any, ...]) -> bool:
    """Says whether a tensor carries the wrapper of a transform that is not among those in progress.

    Args:
        tensor: Any tensor.
        kinds: What `transforms` returns here.
    """
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return False
    level = _functorch.maybe_get_level(tensor)
    if level < 1:
        return False  # its transform has returned: the wrapper means nothing any more
    return level > len(kinds) or (kinds[level - 1] == VMAP) != _functorch.is_batchedtensor(tensor)


def count_true(mask: torch.Tensor) -> torch.Tensor:
    """Counts the true entries, i64[], in the fastest way that torch maps: `count_nonzero` only since torch 2.13."""
    is_mapped = _VERSION < (2, 13) and tracing_a_transform()
    return mask.sum() if is_mapped else mask.count_nonzero()


@contextmanager
def levels_up_to(count: int) -> Iterator[None]:
    """Begins transforms that change nothing, until so many are in progress; ends them afterwards."""
    missing = max(count - len(transforms()), 0)
    for _ in range(missing):
        _functorch._grad_increment_nesting()
    try:
        yield
    finally:
        for _ in range(missing):
            _functorch._grad_decrement_nesting()


@contextmanager
def without_transforms() -> Iterator[None]:
    """Suspends all torch.func transforms in progress, and the mapping of batched gradients."""
    stack: list[Any] = []
    while _functorch.peek_interpreter_stack() is not None:
        stack.append(_functorch.pop_dynamic_layer_stack())
    try:
        with without_batched_gradients():
            yield
    finally:
        while stack:
            _functorch.push_dynamic_layer_stack(stack.pop())


def wrapped_above(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """Makes a tensor one of all transforms in progress but the first so many, as it is if it is their argument.

    Args:
        tensor: Any tensor.
        level: How many transforms are left out; the others must be of reverse mode.
    """
    for above in range(level + 1, len(transforms()) + 1):
        tensor = _functorch._wrap_for_grad(tensor, above)
    return tensor


def unwrapped_to(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """Takes off a tensor the wrappers of all transforms that are not among the first so many."""
    while _functorch.is_functorch_wrapped_tensor(tensor) and not 0 < _functorch.maybe_get_level(tensor) <= level:
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
