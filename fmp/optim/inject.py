"""inject_hyperparams: hyper-parameters as state, to be watched, logged and changed while training."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from fmp import _compat, members, tree
from fmp.optim.base import GradientTransformation, check_transformation, scheduled, zero_count

Tree = Any


@tree.dataclass
class InjectHyperparamsState:
    """The state of `inject_hyperparams`.

    Attributes:
        count: i32[], the number of updates made.
        hyperparams: f32[] each, by name: the values that the last update used; before the first, those it will use.
        inner: The state of the optimizer itself.
    """

    count: torch.Tensor
    hyperparams: dict[str, torch.Tensor]
    inner: Tree


def inject_hyperparams(
    factory: Callable[..., GradientTransformation], *, static: Collection[str] = ("mask", "labels")
) -> Callable[..., GradientTransformation]:
    """Wraps an optimizer's factory so that its hyper-parameters become leaves of the state.

    Every keyword argument that is given becomes one: a number or 0-dim tensor stays until someone changes it, a
    schedule is asked anew at each update. Arguments that are left out keep their defaults and are not in the state.
    Bools, None, strings and containers go to the factory as they are.

    Args:
        factory: Makes the optimizer; called in every update, with 0-dim tensors for the numbers.
        static: Names of arguments that go to the factory as they are, though they are numbers or functions.

    Returns:
        A function of the factory's keyword arguments that returns the optimizer; its state is an
        `InjectHyperparamsState`.

    Raises:
        TypeError: If `factory` is not a function, or `static` holds something other than names. When the returned
            function is called: if an argument comes without its name, or the factory does not return a
            `GradientTransformation`.
        ValueError: As the factory does (when the returned function is called).

    Example:
        >>> import fmp.optim as optim
        >>> tx = optim.inject_hyperparams(optim.sgd)(learning_rate=0.5)
        >>> params = {"w": torch.ones(1)}
        >>> state = tx.init(params)
        >>> state = tree.replace(state, hyperparams={"learning_rate": torch.tensor(0.25)})
        >>> tx.update(params, state, params)[0]
        {'w': tensor([-0.2500])}
    """
    if isinstance(factory, GradientTransformation) or not callable(factory):
        raise TypeError(f"factory must be a function that makes an optimizer, such as fmp.optim.adam, got {factory!r}")
    names = frozenset([static] if isinstance(static, str) else static)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"static must be names of arguments, got {static!r}")

    def make(*unnamed: Any, **kwargs: Any) -> GradientTransformation:
        if unnamed:
            raise TypeError(
                "an injected optimizer takes its arguments by name, which are their names in the state, such as "
                f"inject_hyperparams({getattr(factory, '__name__', 'factory')})(learning_rate=...)"
            )
        dynamic = {name: value for name, value in kwargs.items() if name not in names and _is_hyperparam(value)}
        fixed = {name: value for name, value in kwargs.items() if name not in dynamic}
        schedules = {name: value for name, value in dynamic.items() if callable(value)}
        constants = {name: value for name, value in dynamic.items() if name not in schedules}
        # Made once with the plain numbers, so that the factory can refuse them now.
        made = factory(**fixed, **constants, **_asked(schedules, zero_count(None)))
        check_transformation("what factory returns", made)

        @_compat.compiled_on_its_own
        def init(params: Tree) -> InjectHyperparamsState:
            count = zero_count(params)
            hyperparams = {name: _scalar(value, count.device) for name, value in constants.items()}
            hyperparams = members.apart(hyperparams | _asked(schedules, count), params)
            return InjectHyperparamsState(count, hyperparams, factory(**fixed, **hyperparams).init(params))

        @_compat.compiled_on_its_own
        def update(grads: Tree, state: InjectHyperparamsState, params: Tree) -> tuple[Tree, InjectHyperparamsState]:
            hyperparams = {**state.hyperparams, **_asked(schedules, state.count)}
            updates, inner = factory(**fixed, **hyperparams).update(grads, state.inner, params)
            return updates, InjectHyperparamsState(state.count + 1, hyperparams, inner)

        return GradientTransformation(init, update)

    return make


def _is_hyperparam(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float | torch.Tensor) or callable(value)


def _scalar(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=torch.float32, copy=True)
    return torch.tensor(value, dtype=torch.float32, device=device)


def _asked(schedules: dict[str, Callable[[torch.Tensor], Any]], count: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {name: scheduled(each, count) for name, each in schedules.items()}
    return {
        name: value.to(torch.float32)
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.float32, device=count.device)
        for name, value in found.items()
    }
