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


def divides_by(module: nn.Module) -> tuple[float, int] | None:
    """Says by what a backward pass of a module divides sums of gradients, if not by the number of what it adds up.

    Args:
        module: One after `fully_shard`.

    Returns:
        The divisor, and the number of ranks whose gradients are added up; None if the results are means.
    """
    for group in [group for state in _states(module) for group in _groups(state)]:
        mesh = group.mesh_info
        count = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
        if group.gradient_divide_factor not in (None, count):
            return group.gradient_divide_factor, count
    return None


def is_idle(module: nn.Module) -> bool:
    """Says whether no pass of a module is under way, or has been cut short by an error."""
    states = [*_states(module)]
    parts = [*states, *[group for state in states for group in _groups(state)]]
    return all(part._training_state.name == "IDLE" for part in parts)


def reset(module: nn.Module) -> bool:
    """Sets a module back to before a pass that an error has cut short; False if this version of torch cannot."""
    roots = {id(root): root for state in _states(module) for root in state._state_ctx.all_states if root._is_root}
    if not all(hasattr(root, "_reset_iter_state") for root in roots.values()):
        return False
    for root in roots.values():
        root._reset_iter_state()
    return is_idle(module)


def drop_unreduced_gradients(module: nn.Module) -> None:
    """Forgets the gradients of a backward pass that did not come to reducing them."""
    for param in [param for state in _states(module) for group in _groups(state) for param in group.fsdp_params]:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param.unsharded_param.grad = None


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
