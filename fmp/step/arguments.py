"""Checks of what `fmp.train_step` is given."""

from collections.abc import Mapping, Sequence
from typing import Any

from fmp.placement import Placement, Single
from fmp.step.config import ONLY


def by_loss(argument: str, value: Any, names: list[str], default: Any) -> list[tuple[str, Any]]:
    """Gives an argument to each loss.

    Args:
        argument: Its name, for messages.
        value: One value for all losses, or a dictionary from losses to values.
        names: The losses.
        default: The value of a loss that the dictionary leaves out.

    Returns:
        Each loss with its value.

    Raises:
        KeyError: If the dictionary names other losses, or there is only one.
    """
    if not isinstance(value, Mapping):
        return [(name, value) for name in names]
    if names == [ONLY]:
        raise KeyError(f"{argument} is a dictionary, but there is one loss_fn; give the value itself")
    if unknown := value.keys() - set(names):
        raise KeyError(f"{argument} names the losses {sorted(unknown)}; loss_fn names {sorted(names)}")
    return [(name, value.get(name, default)) for name in names]


def checked_uses(
    uses: Mapping[str, Sequence[str]] | None, names: list[str], keys: list[str]
) -> Mapping[str, tuple[str, ...]]:
    """Completes `uses`: the optimizer keys of each loss, all of them by default.

    Args:
        uses: What was given.
        names: The losses.
        keys: The optimizers.

    Raises:
        TypeError: If `uses` is no dictionary, or has no list of keys for a loss.
        KeyError: If it names a loss or an optimizer that does not exist, or no loss uses an optimizer.
    """
    if uses is None:
        return {name: tuple(keys) for name in names}
    if not isinstance(uses, Mapping):
        raise TypeError(f"uses must be a dictionary from a loss to its optimizer keys, got {uses!r}")
    if unknown := uses.keys() - set(names):
        raise KeyError(f"uses names the losses {sorted(unknown)}; loss_fn names {sorted(names)}")
    uses = {name: uses.get(name, keys) for name in names}
    for name, used in uses.items():
        if isinstance(used, str) or not used:
            raise TypeError(f"uses[{name!r}] must be a list of at least one optimizer key, got {used!r}")
        if unknown := set(used) - set(keys):
            raise KeyError(f"uses[{name!r}] names {sorted(unknown)}; the optimizers are {sorted(keys)}")
    if unused := set(keys) - {key for used in uses.values() for key in used}:
        raise KeyError(f"no loss uses the optimizers {sorted(unused)}; take them out or name them in `uses`")
    return {name: tuple(used) for name, used in uses.items()}


def check_names(argument: str, mapping: Mapping[str, Any], named: bool) -> None:
    """Checks the keys of a dictionary that a user gave; `named` says whether there was one.

    Raises:
        ValueError: If there is no key, or one that is no string or an empty one.
    """
    if named and (not mapping or not all(isinstance(name, str) and name for name in mapping)):
        raise ValueError(f"{argument} must have non-empty strings as keys, got {list(mapping)}")


def checked_count(accumulate: Any) -> int:
    """Checks a number of microbatches.

    Raises:
        ValueError: If it is no int, or below 1.
    """
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number of microbatches, at least 1, got {accumulate!r}")
    return accumulate


def checked_flag(argument: str, value: Any) -> bool:
    """Checks a bool.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r}")
    return value


def checked_number(argument: str, value: Any, low: float, high: float) -> float:
    """Checks a number, from `low` to below `high`.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{argument} must be a number, got {value!r}")
    if not low <= value < high:
        raise ValueError(f"{argument} must be at least {low} and below {high}, got {value}")
    return float(value)


def checked_layout(layout: Any, microbatch_weight: Any) -> Placement:
    """Checks a layout; None stands for a single process.

    Raises:
        TypeError: If it is no `Placement`.
        ValueError: If it averages gradients before they could be weighted, and there is a `microbatch_weight`.
    """
    if layout is None:
        return Single()
    if isinstance(layout, type) or not isinstance(layout, Placement):
        raise TypeError(
            f"layout must be a fmp.distributed.Layout, such as Layout(mesh, zero=1), or None, got {layout!r}"
        )
    if layout.reduces_in_loss and microbatch_weight is not None:
        raise ValueError(
            "microbatch_weight cannot be used with zero=3: a block's gradients are averaged over ranks before they "
            "could be weighted; weight the loss inside of loss_fn, or use zero=1"
        )
    return layout


def at(key: str) -> str:
    """Writes a key as it is written behind the name of a dictionary; nothing for the key of the only entry."""
    return f"[{key!r}]" if key else ""
