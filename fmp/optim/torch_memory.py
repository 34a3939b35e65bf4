"""What a torch optimizer remembers besides the state of its parameters, which no pure function could hand on."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

# What `torch.optim.Optimizer` itself has: what is asked for elsewhere, hooks, names for the profiler.
_OF_TORCH = ("state", "param_groups", "defaults", "_optimizer_", "_zero_grad_", "_patched_", "_warned_")


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Makes one step, and refuses what the optimizer would remember outside of its parameters' state.

    Seen are options in the parameter groups, state under other keys than parameters, attributes, and what tensors and
    containers among these hold. Not seen are attributes of other objects and of classes, globals, and random
    generators.

    Args:
        optimizer: The optimizer, with gradients in place.

    Raises:
        ValueError: If a step changes anything but parameters and what is kept for each of them.

    Example:
        >>> class Slower(torch.optim.SGD):
        ...     def step(self, closure=None):
        ...         super().step(closure)
        ...         self.param_groups[0]["lr"] *= 0.5
        >>> param = torch.ones(1)
        >>> param.grad = torch.ones(1)
        >>> take_step(Slower([param], lr=1.0))
        Traceback (most recent call last):
        ValueError: a step of Slower changes param_groups[0]["lr"], which is no part of the state, so that ...
    """
    alive: dict[int, Any] = {}
    before = _remembered(optimizer, alive)
    optimizer.step()
    after = _remembered(optimizer, {})
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise ValueError(
            f"a step of {type(optimizer).__name__} changes {', '.join(changed)}, which is no part of the state, so "
            "that the next step would not know of it; use a class that keeps all it remembers in `self.state[param]`"
        )


def _remembered(optimizer: torch.optim.Optimizer, seen: dict[int, Any]) -> dict[str, Any]:
    """Finds by name what an optimizer has besides the state of its parameters, as marks that tell of any change."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    slots = [slot for param in params for slot in optimizer.state.get(param, {}).values()]
    # What the step is there to change, wherever else the optimizer may refer to it.
    seen |= {id(each): each for each in (optimizer.state, *params, *[param.grad for param in params], *slots)}
    ours = {id(param) for param in params}
    named = {f"self.state[{key!r}]": slot for key, slot in optimizer.state.items() if id(key) not in ours}
    for index, group in enumerate(optimizer.param_groups):
        named |= {f'param_groups[{index}]["{name}"]': option for name, option in group.items() if name != "params"}
    named |= {f"self.{name}": value for name, value in vars(optimizer).items() if not name.startswith(_OF_TORCH)}
    return {name: _mark(value, seen) for name, value in named.items()}


def _mark(value: Any, seen: dict[int, Any]) -> Any:
    """Makes something that is equal as long as a value, and all that it holds, stays as it is."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return type(value), value if value == value else None  # NaN
    if id(value) in seen:
        return None
    seen[id(value)] = value  # alive, so that no other object gets its id
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, Mapping):
        return id(value), tuple((_mark(key, seen), _mark(each, seen)) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return id(value), tuple(_mark(each, seen) for each in value)
    if isinstance(value, torch.optim.Optimizer):
        return _mark(value.state, seen), _mark(value.param_groups, seen)
    return id(value)
