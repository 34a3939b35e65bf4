"""What looks like a mistake in how dtypes flow: mixing, float64, casts back and forth, weights cast again and again."""

import weakref
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fmp.dtypes import short_name
from fmp.policy.explanation import Dtypes, distinct
from fmp.policy.grouping import common, family, grouped
from fmp.policy.places import NOWHERE, Arguments, Memory, memory

# These take mixed dtypes by design: norms compute in float32, the others write in the dtype of what they change.
_MIXING = frozenset(["batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm", "copy", "index_put"])


class Event(NamedTuple):
    """An op where it was called."""

    op: str
    where: str


class _Warning(NamedTuple):
    """Something that looks like a mistake.

    Attributes:
        event: The op.
        problem: What is wrong, as the rest of a sentence about it; `{cause}` stands for another op.
        advice: What to do.
        cause: The other op.
    """

    event: Event
    problem: str
    advice: str
    cause: Event | None = None


class _Cast(NamedTuple):
    """A tensor that came out of a cast."""

    version: int | None
    before: torch.dtype
    after: torch.dtype
    event: Event


class _Use(NamedTuple):
    """A tensor from outside that a rule has cast."""

    source: Tensor  # kept alive, or its memory might become another tensor's
    version: int | None


class Hazards:
    """Looks at every op of a call, and collects warnings.

    Args:
        arguments: The arguments of the explained function.
    """

    def __init__(self, arguments: Arguments):
        self._arguments = arguments
        self._expects_float64 = any(tensor.dtype == torch.float64 for tensor in arguments.tensors)
        self._casts: dict[int, _Cast] = {}
        self._uses: dict[tuple[object, ...], _Use] = {}
        self._made: dict[int, list[weakref.ref[Tensor]]] = {}  # by memory, the tensors in it
        self._found: list[_Warning] = []

    def warnings(self) -> tuple[str, ...]:
        """Writes each warning once, with how often it came up; also if only the numbers of layers differ."""
        return tuple(_sentences(alike) for alike in grouped(self._found, _kind))

    def made(self, results: Iterable[Tensor], given: Container[int]) -> None:
        """Takes note of what came into being during the call.

        Args:
            results: What came out of an op.
            given: The memory of what went in, where views of it lie.
        """
        for result in results:
            if (place := memory(result)) is None:
                continue
            if place.storage not in given:
                self._casts.pop(place.storage, None)  # of what was there before
                self._made[place.storage] = [weakref.ref(result)]
            elif alive := self._alive(place):
                self._made[place.storage] = [*alive, weakref.ref(result)]

    def mixed(self, event: Event, inputs: Sequence[Tensor], results: Sequence[Tensor], *, promotes: bool) -> None:
        """Looks at an op without a rule.

        Args:
            event: The op.
            inputs: Its floating-point arguments.
            results: What came out.
            promotes: Whether the policy leaves the promotion of tensors with dimensions to torch, on purpose.
        """
        sized = list(dict.fromkeys(tensor.dtype for tensor in inputs if tensor.ndim))
        loose = list(dict.fromkeys(tensor.dtype for tensor in inputs if not tensor.ndim))
        if event.op in _MIXING or not results:
            return
        out = results[0].dtype
        wider = [dtype for dtype in loose if dtype.itemsize > out.itemsize]
        if len(sized) > 1 and not (promotes and out.itemsize >= max(dtype.itemsize for dtype in sized)):
            self._warn(
                event,
                f"has no rule; it took {distinct(sized, ' and ')}, and gave {short_name(out)}",
                "Give it a rule, such as op_rules.promote(...), or cast its arguments yourself.",
            )
        elif sized and wider:
            self._warn(
                event,
                f"took {distinct(sized)} and a {short_name(wider[0])} tensor without dimensions, and did not promote",
                "If that precision matters, cast the tensor with dimensions first.",
            )

    def wide(self, event: Event, inputs: Sequence[Tensor], ran: Dtypes, results: Iterable[Tensor]) -> None:
        """Looks for float64: one that nobody gave, and one that a rule takes away.

        Args:
            event: The op.
            inputs: Its floating-point arguments, before they were cast.
            ran: The dtypes after.
            results: What came out.
        """
        given = [tensor for tensor in inputs if tensor.dtype == torch.float64]
        if given and torch.float64 not in ran:
            self._warn(
                event, f"casts float64 to {distinct(ran)} by its rule", "op_rules.leave(...) keeps an op as it is."
            )
        if self._expects_float64:
            return
        if any(self._is_from_outside(tensor) for tensor in given):
            self._warn(event, "takes a float64 tensor that is no argument", "Make it float32 where it is created.")
        elif not given and any(result.dtype == torch.float64 for result in results):
            self._warn(event, "gives float64, though none went in", "Pass a dtype, or cast what it is made from.")

    def cast(self, event: Event, source: Tensor, result: Tensor, *, by_rule: bool) -> None:
        """Looks at a cast.

        Args:
            event: The op that is, or for which a rule made, the cast.
            source: The tensor before.
            result: The tensor after.
            by_rule: Whether a rule made it.
        """
        before, after = memory(source), memory(result)
        if before is None or after is None:
            return
        if by_rule:
            self._check_return(event, source, before, result.dtype)
            self._check_again(event, source, before, result.dtype)
        self._casts[after.storage] = _Cast(after.version, source.dtype, result.dtype, event)

    def _check_return(self, event: Event, source: Tensor, place: Memory, dtype: torch.dtype) -> None:
        cast = self._casts.get(place.storage)
        if cast is None or not self._alive(place) or not _unchanged(cast.version, place.version):
            return
        if (cast.before, cast.after) == (dtype, source.dtype):
            there, back = short_name(cast.before), short_name(cast.after)
            self._warn(
                event,
                f"casts back to {there} what {{cause}} has just cast to {back}",
                "Leave out the first cast, or give one of the two ops another rule.",
                cast.event,
            )

    def _check_again(self, event: Event, source: Tensor, place: Memory, dtype: torch.dtype) -> None:
        if isinstance(source, nn.Parameter) or not self._is_from_outside(source):
            return
        key = (place.storage, place.layout, dtype)
        use = self._uses.get(key)
        if use is not None and _unchanged(use.version, place.version):
            self._warn(
                event,
                f"casts {short_name(source.dtype)}{list(source.shape)} to {short_name(dtype)} again, "
                "since that is no argument of the function",
                "Pass it as an argument, which is cast once.",
            )
        self._uses[key] = _Use(source, place.version)

    def _is_from_outside(self, tensor: Tensor) -> bool:
        place = memory(tensor)
        return place is not None and self._arguments.path_of(tensor) is None and not self._alive(place)

    def _alive(self, place: Memory) -> "list[weakref.ref[Tensor]]":
        """Lists what was made during the call, lives, and lies in the same memory."""
        return [made for made in self._made.get(place.storage, []) if made() is not None]

    def _warn(self, event: Event, problem: str, advice: str, cause: Event | None = None) -> None:
        self._found.append(_Warning(event, problem, advice, cause))


def _unchanged(before: int | None, now: int | None) -> bool:
    return before is not None and before == now


def _kind(warning: _Warning) -> _Warning:
    cause = None if warning.cause is None else _family(warning.cause)
    return warning._replace(event=_family(warning.event), cause=cause)


def _family(event: Event) -> Event:
    return event._replace(where=family(event.where))


def _sentences(alike: Sequence[_Warning]) -> str:
    subject = _named([warning.event for warning in alike])
    times = f" ({len(alike)} times)" if len(alike) > 1 else ""
    cause = _named([warning.cause for warning in alike if warning.cause is not None])
    return f"{subject}{times} {alike[0].problem.replace('{cause}', cause)}. {alike[0].advice}"


def _named(events: Sequence[Event]) -> str:
    if not events:
        return ""
    where = common([event.where for event in events])
    return f"'{events[0].op}'" + (f" at {where}" if where != NOWHERE else "")
