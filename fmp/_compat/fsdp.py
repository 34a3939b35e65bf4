"""What FSDP2 keeps about a module, and has no public function to ask for."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def unfinished(module: nn.Module) -> str | None:
    """Says why a backward pass of a module would not leave all gradients reduced; None if it would.

    Args:
        module: One after `fully_shard`.
    """
    for state in _states(module):
        if not state._state_ctx.is_last_backward:
            return "set_is_last_backward(False)"
        for group in _groups(state):
            if not group.reduce_grads:
                return "set_requires_gradient_sync(False)"
            if not group.all_reduce_grads:
                return "set_requires_all_reduce(False)"
    return None


def has_unreduced_gradients(module: nn.Module) -> bool:
    """Says whether gradients of earlier backward passes wait to be added to those of the next one."""
    groups = [group for state in _states(module) for group in _groups(state)]
    params = [param for group in groups for param in group.fsdp_params]
    waiting = [param.unsharded_accumulated_grad for param in params]
    waiting += [param.unsharded_param.grad for param in params if hasattr(param, "_unsharded_param")]
    waiting += [group._partial_reduce_output for group in groups]
    return any(gradient is not None for gradient in waiting)


def managed(module: nn.Module) -> list[Tensor]:
    """Lists the parameters whose gradients FSDP2 reduces, as they are while they are shared out."""
    return [param.sharded_param for state in _states(module) for group in _groups(state) for param in group.fsdp_params]


def _states(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if hasattr(part, "_get_fsdp_state"):
            yield part._get_fsdp_state()  # pyright: ignore[reportCallIssue]


def _groups(state: Any) -> list[Any]:
    # In earlier versions of torch a module has one group at most.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
