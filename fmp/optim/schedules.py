"""Schedules: the value of a hyper-parameter as a pure function of the number of updates made so far.

A schedule takes the count, i32[], and returns f32[]. The first update asks it at 0. A plain int will do for the count.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fmp.foreign_names import unknown_name
from fmp.optim import checks
from fmp.optim.base import Schedule

T = TypeVar("T")

_LARGEST = torch.finfo(torch.float32).max


def constant(value: float) -> Schedule:
    """Makes a schedule that always has the same value.

    Args:
        value: The value.

    Returns:
        The schedule.

    Raises:
        TypeError: If `value` has another type.
        ValueError: If `value` is negative or not finite.

    Example:
        >>> constant(0.5)(torch.tensor(7))
        tensor(0.5000)
    """
    checks.number("value", value)
    return lambda count: torch.full_like(_counted(count), value, dtype=torch.float32)


def linear(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """Makes a schedule that goes from one value to another in a straight line, and stays there.

    Args:
        init_value: The value up to `transition_begin`.
        end_value: The value from `transition_begin + transition_steps` on, exactly.
        transition_steps: The number of steps from one to the other, at least 1.
        transition_begin: The last count with the initial value.

    Returns:
        The schedule.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is negative or not finite, or a number of steps is too small.

    Example:
        >>> schedule = linear(1.0, 0.0, transition_steps=4)
        >>> [schedule(torch.tensor(count)).item() for count in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
    """
    checks.number("init_value", init_value)
    checks.number("end_value", end_value)
    checks.steps("transition_steps", transition_steps, low=1)
    checks.steps("transition_begin", transition_begin, low=0)

    def schedule(count: torch.Tensor | int) -> torch.Tensor:
        since = _since(count, transition_begin)
        progress = since.to(torch.float32) / transition_steps
        start, end = torch.full_like(progress, init_value), torch.full_like(progress, end_value)
        # A quotient that should be 1 may be rounded.
        return torch.where(since < transition_steps, torch.lerp(start, end, progress.clamp(max=1.0)), end)

    return schedule


def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """Makes a schedule that is multiplied by the same factor over and over.

        value = init_value * decay_rate ** ((count - transition_begin) / transition_steps)

    Args:
        init_value: The value up to `transition_begin`.
        transition_steps: The number of steps in which the value changes by `decay_rate`, at least 1.
        decay_rate: The factor; above 0.
        transition_begin: The last count with the initial value.
        staircase: Whether the value stays constant for `transition_steps`, then jumps.
        end_value: Where to stop: a lower bound if `decay_rate` is below 1, else an upper bound.

    Returns:
        The schedule.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is negative or not finite, `decay_rate` is 0, or a number of steps is too small.

    Example:
        >>> schedule = exponential_decay(1.0, transition_steps=2, decay_rate=0.25, end_value=0.1)
        >>> [round(schedule(torch.tensor(count)).item(), 6) for count in (0, 1, 2, 9)]
        [1.0, 0.5, 0.25, 0.1]
    """
    checks.number("init_value", init_value)
    checks.number("decay_rate", decay_rate)
    checks.steps("transition_steps", transition_steps, low=1)
    checks.steps("transition_begin", transition_begin, low=0)
    if decay_rate == 0:
        raise ValueError("decay_rate must be above 0, got 0")
    checks.flag("staircase", staircase)
    if end_value is not None:
        checks.number("end_value", end_value)

    def schedule(count: torch.Tensor | int) -> torch.Tensor:
        since = _since(count, transition_begin)
        exponent = since // transition_steps if staircase else since.to(torch.float32) / transition_steps
        # The root of the factor, twice, and kept finite: 0 * inf would be NaN.
        root = torch.exp(exponent.to(torch.float32) * (0.5 * math.log(decay_rate))).clamp(max=_LARGEST)
        value = init_value * root * root
        if end_value is None:
            return value
        return value.clamp(min=end_value) if decay_rate < 1 else value.clamp(max=end_value)

    return schedule


def cosine_decay(init_value: float, decay_steps: int, end_value: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Makes a schedule that goes from one value to another along half a cosine, and stays there.

        value = end_value + (init_value - end_value) * ((1 + cos(pi * count / decay_steps)) / 2) ** exponent

    Args:
        init_value: The value at 0.
        decay_steps: The number of steps from one value to the other, at least 1.
        end_value: The value from `decay_steps` on, exactly.
        exponent: The power that the cosine is raised to; above 1, the value falls earlier.

    Returns:
        The schedule.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is negative or not finite, or `decay_steps` is below 1.

    References:
        Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5, without restarts.

    Example:
        >>> schedule = cosine_decay(1.0, decay_steps=4)
        >>> [round(schedule(torch.tensor(count)).item(), 6) for count in (0, 1, 2, 4, 9)]
        [1.0, 0.853553, 0.5, 0.0, 0.0]
    """
    checks.number("init_value", init_value)
    checks.steps("decay_steps", decay_steps, low=1)
    checks.number("end_value", end_value)
    checks.number("exponent", exponent)

    def schedule(count: torch.Tensor | int) -> torch.Tensor:
        remaining = (decay_steps - _since(count, 0)).clamp(min=0)
        # (1 + cos(x)) / 2, without the cancellation that would cost the last steps their digits.
        share = torch.sin(remaining.to(torch.float32) / decay_steps * (math.pi / 2)).square() ** exponent
        start, end = torch.full_like(share, init_value), torch.full_like(share, end_value)
        return torch.where(remaining > 0, torch.lerp(end, start, share), end)

    return schedule


def warmup_cosine_decay(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """Makes a schedule that rises in a straight line, then falls along half a cosine.

    Args:
        init_value: The value at 0.
        peak_value: The value at `warmup_steps`, exactly.
        warmup_steps: The number of steps to the peak; 0 begins there.
        decay_steps: The count at which the end is reached, the warm-up included.
        end_value: The value from `decay_steps` on, exactly.
        exponent: The power that the cosine is raised to.

    Returns:
        The schedule.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is negative or not finite, or `decay_steps` is not above `warmup_steps`.

    Example:
        >>> schedule = warmup_cosine_decay(0.0, 1.0, warmup_steps=2, decay_steps=6, end_value=0.5)
        >>> [round(schedule(torch.tensor(count)).item(), 6) for count in (0, 1, 2, 4, 6, 9)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.5]
    """
    checks.number("peak_value", peak_value)
    _check_warmup(warmup_steps, decay_steps)
    falling = cosine_decay(peak_value, decay_steps - warmup_steps, end_value, exponent)
    return _after_warmup(init_value, peak_value, warmup_steps, falling)


def warmup_linear_decay(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0
) -> Schedule:
    """Makes a schedule that rises in a straight line, then falls in another.

    Args:
        init_value: The value at 0.
        peak_value: The value at `warmup_steps`, exactly.
        warmup_steps: The number of steps to the peak; 0 begins there.
        decay_steps: The count at which the end is reached, the warm-up included.
        end_value: The value from `decay_steps` on, exactly.

    Returns:
        The schedule.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is negative or not finite, or `decay_steps` is not above `warmup_steps`.

    Example:
        >>> schedule = warmup_linear_decay(0.0, 1.0, warmup_steps=2, decay_steps=6)
        >>> [schedule(torch.tensor(count)).item() for count in (0, 1, 2, 4, 6, 9)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    checks.number("peak_value", peak_value)
    _check_warmup(warmup_steps, decay_steps)
    return _after_warmup(
        init_value, peak_value, warmup_steps, linear(peak_value, end_value, decay_steps - warmup_steps)
    )


def piecewise_constant(values: Iterable[float], boundaries: Iterable[int]) -> Schedule:
    """Makes a schedule that jumps from one value to the next.

    Args:
        values: The values, one more than there are boundaries.
        boundaries: The counts at which the next value begins, in rising order.

    Returns:
        The schedule.

    Raises:
        TypeError: If values or boundaries are no sequence of numbers.
        ValueError: If a value is negative or not finite, or boundaries do not rise or are not one fewer than values.

    Example:
        >>> schedule = piecewise_constant([1.0, 0.5, 0.25], boundaries=[10, 20])
        >>> [schedule(torch.tensor(count)).item() for count in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
    """
    values, boundaries = _checked_pieces("values", values, boundaries)
    return join([constant(value) for value in values], boundaries)


def join(schedules: Iterable[Schedule], boundaries: Iterable[int]) -> Schedule:
    """Makes one schedule of several that follow each other; each counts from 0 where it begins.

    Args:
        schedules: The schedules, one more than there are boundaries.
        boundaries: The counts at which the next schedule begins, in rising order.

    Returns:
        The schedule.

    Raises:
        ValueError: If boundaries do not rise, or are not one fewer than schedules.
        TypeError: If a schedule is not a function, or boundaries are no sequence of ints.

    Example:
        >>> schedule = join([linear(0.0, 1.0, 2), constant(0.5)], boundaries=[4])
        >>> [schedule(torch.tensor(count)).item() for count in (0, 1, 3, 4)]
        [0.0, 0.5, 1.0, 0.5]
    """
    parts, begins = _checked_pieces("schedules", schedules, boundaries)
    for index, part in enumerate(parts):
        if not callable(part):
            raise TypeError(f"schedules[{index}] is {part!r}, not a function of the count; use constant({part!r})")
    first, *later = parts

    def schedule(count: torch.Tensor | int) -> torch.Tensor:
        count = _counted(count)
        value = first(count)
        for begin, part in zip(begins, later, strict=True):
            value = torch.where(count.long() < begin, value, part(_since(count, begin).to(count.dtype)))
        return value

    return schedule


def _counted(count: torch.Tensor | int) -> torch.Tensor:
    if isinstance(count, torch.Tensor):
        return count
    checks.steps("count", count, low=0)
    return torch.tensor(count)


def _since(count: torch.Tensor | int, begin: int) -> torch.Tensor:
    # In int32, a beginning from 2**31 on would wrap around.
    return (_counted(count).long() - begin).clamp(min=0)


def _after_warmup(init_value: float, peak_value: float, warmup_steps: int, falling: Schedule) -> Schedule:
    checks.number("init_value", init_value)
    if warmup_steps == 0:
        return falling
    return join([linear(init_value, peak_value, warmup_steps), falling], [warmup_steps])


def _check_warmup(warmup_steps: int, decay_steps: int) -> None:
    checks.steps("warmup_steps", warmup_steps, low=0)
    checks.steps("decay_steps", decay_steps, low=1)
    if decay_steps <= warmup_steps:
        raise ValueError(
            f"decay_steps includes the warm-up and must be above warmup_steps={warmup_steps}, got {decay_steps}"
        )


def _checked_pieces(name: str, pieces: Iterable[T], boundaries: Iterable[int]) -> tuple[tuple[T, ...], tuple[int, ...]]:
    parts, begins = checks.items(name, pieces), checks.items("boundaries", boundaries)
    if len(parts) != len(begins) + 1:
        raise ValueError(f"{name} must be one more than boundaries, got {len(parts)} and {len(begins)}")
    for index, begin in enumerate(begins):
        checks.steps(f"boundaries[{index}]", begin, low=begins[index - 1] + 1 if index else 1)
    return parts, begins


if not TYPE_CHECKING:  # a type checker is to see which names there are

    def __getattr__(name: str) -> Any:
        known = [each for each, value in globals().items() if getattr(value, "__module__", None) == __name__]
        raise unknown_name(__name__, name, known)
