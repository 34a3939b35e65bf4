"""Work that all ranks do together and that ends alike on all of them: one failing rank fails them all, none hangs."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fmp.errors import CheckpointError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def rank_and_size(group: Group) -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks; a process without a group is alone."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def together(group: Group, work: Callable[[], T]) -> T:
    """Does a piece of work on every rank, and goes on only if all of them could do it.

    Args:
        group: The process group, or None for a process that is alone.
        work: Called once.

    Returns:
        What this rank's call returned.

    Raises:
        Exception: What `work` raised, if it raised the same on all ranks.
        CheckpointError: If it raised on some of them only, or differently; the message names the ranks. Also if a rank
            cannot be reached.

    Example:
        >>> together(None, lambda: 3)
        3
    """
    result = []
    _exchange(group, lambda: result.append(work()))
    return result[0]


def gathered(group: Group, work: Callable[[], T]) -> list[T]:
    """Does the same as `together`, and returns what all ranks' calls returned, in the order of the ranks.

    Example:
        >>> gathered(None, lambda: 3)
        [3]
    """
    return _exchange(group, work)


def on_the_first(group: Group, work: Callable[[], T]) -> T:
    """Does a piece of work on rank 0 only, and returns its result on all ranks.

    Raises:
        CheckpointError: If it raised; a process that is alone, or rank 0 of one, raises what it raised.

    Example:
        >>> on_the_first(None, lambda: 3)
        3
    """
    rank, _ = rank_and_size(group)
    result = _exchange(group, lambda: work() if rank == 0 else None)[0]
    return result  # pyright: ignore[reportReturnType]  # rank 0 called it


def _exchange(group: Group, work: Callable[[], T]) -> list[T]:
    result, own = None, None
    try:
        result = work()
    except BaseException as error:
        own = error
    outcome = result, _text(own)
    outcomes = [outcome] if group is None else _all_gather(group, outcome)
    failures = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
    # An interrupt stays one, and whoever failed just as all others did keeps the error.
    if own is not None and (not isinstance(own, Exception) or [*failures.values()] == [_text(own)] * len(outcomes)):
        raise own
    if failures:
        raise CheckpointError(describe_failures(failures, len(outcomes))) from own
    return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType]  # nobody failed


def describe_failures(failures: dict[int, str], size: int) -> str:
    """Writes what went wrong on which ranks.

    Example:
        >>> describe_failures({1: "OSError: no space left"}, 4)
        'on rank 1 of 4: OSError: no space left'
    """
    by_text: dict[str, list[str]] = {}
    for rank, text in failures.items():
        by_text.setdefault(text, []).append(str(rank))
    return "; ".join(
        f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} of {size}: {text}"
        for text, ranks in by_text.items()
    )


def _all_gather(group: dist.ProcessGroup, value: T) -> list[T]:
    values: list[T | None] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise CheckpointError(f"another rank cannot be reached; it has probably ended: {error}") from error
    return values  # pyright: ignore[reportReturnType]  # all are filled


def _text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
