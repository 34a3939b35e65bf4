"""Autograd: what a graph keeps, in which order, and whether it is asked for many gradients at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from fmp._compat.compiler import _VERSION

_begin_mapping: Any = cast(Any, torch._C)._vmapmode_increment_nesting
_end_mapping: Any = cast(Any, torch._C)._vmapmode_decrement_nesting
_autograd: Any = cast(Any, torch._C)._autograd


def check_inference_mode() -> None:
    """Refuses to differentiate in inference mode where torch would return zeros.

    Raises:
        RuntimeError: In inference mode, with a torch older than 2.13.
    """
    if torch.is_inference_mode_enabled() and _VERSION < (2, 13):
        raise RuntimeError(
            f"torch {torch.__version__} gives zero gradients in inference mode; use torch.no_grad() or torch 2.13"
        )


# Of a tensor of zeros that has no memory, as forward mode makes them for tangents.
is_zero_tensor: Any = cast(Any, torch.Tensor)._is_zerotensor


def gradients_are_batched() -> bool:
    """Says whether autograd pulls back many cotangents at once (`is_grads_batched`)."""
    return _depth_of_batched_gradients() > 0


@contextmanager
def without_batched_gradients() -> Iterator[None]:
    """Suspends the mapping by which autograd pulls back many cotangents at once (`is_grads_batched`)."""
    depth = _depth_of_batched_gradients()
    for _ in range(depth):
        _end_mapping()
    try:
        yield
    finally:
        for _ in range(depth):
            _begin_mapping()


def saved_tensors_hooks_allowed() -> bool:
    """Says whether saved-tensor hooks may be set here."""
    return _autograd._saved_tensors_hooks_is_enabled()


def saved_tensors_are_hooked() -> bool:
    """Says whether saved-tensor hooks are set here."""
    return _autograd._top_saved_tensors_default_hooks(False) is not None


def refuses_saved_tensor_hooks(error: BaseException) -> bool:
    """Says whether an error is that of a transform of torch.func, which does not run below saved-tensor hooks."""
    return "support saved tensor hooks" in str(error)


@contextmanager
def counting_changes() -> Iterator[None]:
    """Lets a view that a dispatch mode makes count its changes together with the tensor that it shows."""
    with cast(Any, torch._C)._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        yield


def recorded_at(node: Any) -> int:
    """Returns the place of a node of autograd in the order in which they were recorded."""
    return node._sequence_nr()


def saved_data(node: Any) -> Iterator[Any]:
    """Yields what a node of autograd saves, packed as it is; to unpack it might recompute it."""
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            value = getattr(node, attribute)
            for raw in value if isinstance(value, list | tuple) else (value,):
                yield raw.data


def _depth_of_batched_gradients() -> int:
    _begin_mapping()
    return _end_mapping()
