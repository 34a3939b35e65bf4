"""Records which op ran in which precision: a mode around the casters that sees what they are shown and what they do."""

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmp._composite import custom_function
from fmp.dtypes import is_castable
from fmp.policy import op_rules
from fmp.policy.caster import Caster, Watcher
from fmp.policy.explanation import ENTERED, NO_POLICY, NO_RULE, Dtypes, Row
from fmp.policy.handlers import Args, Handler, Kwargs
from fmp.policy.hazards import Event, Hazards
from fmp.policy.op_rules import OpRules, Rule
from fmp.policy.places import Arguments, Memory, Place, memory, place_of_call
from fmp.policy.spellings import name_of

_CASTS = frozenset([Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as])


@dataclass
class _Call:
    """A call that a caster handles.

    Attributes:
        caster: The caster.
        event: The op.
        ran: The dtypes of the op's arguments once they are cast; None if the op itself was never called.
        is_running: Whether the op itself is being called right now, not the casts before.
    """

    caster: Caster
    event: Event
    ran: Dtypes | None = None
    is_running: bool = False


class _Handlers(Mapping[Any, Handler]):
    """Stands for the handlers of a caster, and tells the recorder what the caster is shown and does."""

    def __init__(self, recorder: "Recorder", caster: Caster, handlers: Mapping[Any, Handler]):
        self._recorder = recorder
        self._caster = caster
        self._handlers = handlers

    def get(self, func: Any, default: Any = None) -> Any:
        self._recorder.shown(self._caster)
        handler = self._handlers.get(func)
        return default if handler is None else functools.partial(self._recorder.handle, func, handler)

    def __getitem__(self, func: Any) -> Handler:
        return self._handlers[func]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)


class Recorder(Watcher):
    """Records every op. What casters inside of it let through, or call themselves, comes by here.

    Args:
        arguments: The arguments of the explained function.
        outermost: The code of the function that calls it.

    Attributes:
        policies: The op rules, with their low precision, of the policies that were active inside.
        hazards: What collects the warnings.
    """

    def __init__(self, arguments: Arguments, outermost: types.CodeType):
        super().__init__()
        self._outermost = outermost
        self.policies: dict[tuple[OpRules, torch.dtype], None] = {}
        self.hazards = Hazards(arguments)
        self._arguments = arguments
        self._rows: dict[Row, int] = {}
        self._calls: list[_Call] = []
        self._shown: list[Caster] = []  # those that were shown the call that is on its way, and did not handle it

    def rows(self) -> tuple[Row, ...]:
        """Returns what was recorded so far."""
        return tuple(replace(row, count=count) for row, count in self._rows.items())

    def watch(self, caster: Caster, handlers: Mapping[Any, Handler]) -> Mapping[Any, Handler]:
        """Returns handlers that record what they do."""
        self.policies[caster.rules, caster.low] = None
        return _Handlers(self, caster, handlers)

    def shown(self, caster: Caster) -> None:
        """Takes note that a caster is about to decide on a call."""
        self._shown.append(caster)

    def handle(self, func: Any, handler: Handler, caster: Caster, called: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs a function as the caster does, and records it."""
        self._shown.clear()
        name, rule = _named(func, args, caster.rules)
        place = place_of_call(self._outermost)
        inputs = list(_tensors((args, kwargs)))
        event = Event(name, self._arguments.path_among(inputs) or place.name)
        before = _floating(inputs)
        places = _memories(inputs)
        call = _Call(caster, event)

        def run(*args: Any, **kwargs: Any) -> Any:
            call.ran = tuple([tensor.dtype for tensor in _floating(list(_tensors((args, kwargs))))])
            call.is_running = True
            try:
                return called(*args, **kwargs)
            finally:
                call.is_running = False

        self._calls.append(call)
        results: list[Tensor] = []
        try:
            output = handler(caster, run, args, kwargs)
            results = list(_tensors(output))
        except Exception:
            why = rule.why if rule is not None else ENTERED if call.ran is None else NO_RULE
            self._add(event, rule, why, before, call.ran or (), results)
            raise
        finally:
            self._calls.pop()
        if call.ran is None:
            if not _is_view(places, inputs, results):
                self._add(event, None, ENTERED, before, (), results)
            return output
        self._notice(event, before, call.ran, results, places)
        if rule is not None or not (place.is_ours or _is_view(places, inputs, results)):
            self._add(event, rule, NO_RULE if rule is None else rule.why, before, call.ran, results)
        return output

    def __torch_function__(self, func: Any, classes: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Runs one torch function."""
        kwargs = kwargs or {}
        shown, self._shown = self._shown, []
        handled = self._calls[-1] if self._calls else None
        if func is torch.ops.higher_order.custom_function_call:
            return custom_function(self, *args, **kwargs)
        if handled is not None and handled.is_running:
            return func(*args, **kwargs)
        inputs = list(_tensors((args, kwargs)))
        places = _memories(inputs)
        try:
            output = func(*args, **kwargs)
        except Exception:
            self._unruled(func, shown, handled, inputs, [], places)
            raise
        results = list(_tensors(output))
        if not any(is_castable(result) for result in results):
            return output
        if handled is not None and handled.caster not in shown:  # the caster is off, so this is its own
            self._notice_made(places, results)
            self._notice_cast(func, handled.event, inputs, results, by_rule=True)
        else:
            self._unruled(func, shown, handled, inputs, results, places)
        return output

    def _unruled(
        self,
        func: Any,
        shown: list[Caster],
        handled: _Call | None,
        inputs: list[Tensor],
        results: list[Tensor],
        places: list[Memory | None],
    ) -> None:
        """Takes note of an op that runs on what it is given."""
        place = place_of_call(self._outermost)
        event = Event(_named(func, (), None)[0], self._arguments.path_among(inputs) or place.name)
        floating = _floating(inputs)
        dtypes = tuple([tensor.dtype for tensor in floating])
        if place.is_cast or place.is_ours:
            by = handled.event.op if handled is not None else place.region or event.op
            self._notice_made(places, results)
            self._notice_cast(func, event._replace(op=by), inputs, results, by_rule=place.is_cast)
            return
        self._notice(event, floating, dtypes, results, places)
        self._notice_cast(func, event, inputs, results, by_rule=False)
        if _is_view(places, inputs, results) or getattr(func, "__module__", "") == "torch.autograd":
            return
        if func not in _CASTS:
            self.hazards.mixed(event, floating, _floating(results), promotes=_promotes(shown))
        self._add(event, None, _why(shown, place), floating, dtypes, results)

    def _notice(
        self, event: Event, inputs: list[Tensor], ran: Dtypes, results: list[Tensor], places: list[Memory | None]
    ) -> None:
        self.hazards.wide(event, inputs, ran, results)
        self._notice_made(places, results)

    def _notice_made(self, places: list[Memory | None], results: list[Tensor]) -> None:
        self.hazards.made(results, {place.storage for place in places if place is not None})

    def _notice_cast(
        self, func: Any, event: Event, inputs: list[Tensor], results: list[Tensor], *, by_rule: bool
    ) -> None:
        if func in _CASTS and len(results) == 1 and is_castable(inputs[0]) and inputs[0].dtype != results[0].dtype:
            self.hazards.cast(event, inputs[0], results[0], by_rule=by_rule)

    def _add(
        self, event: Event, rule: Rule | None, why: str, inputs: list[Tensor], ran: Dtypes, results: list[Tensor]
    ) -> None:
        before = tuple([tensor.dtype for tensor in inputs])
        out = tuple([result.dtype for result in results])
        if before or any(dtype.is_floating_point for dtype in out):
            row = Row(event.op, "-" if rule is None else rule.kind, why, before, ran, out, event.where)
            self._rows[row] = self._rows.get(row, 0) + 1


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _floating(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if is_castable(tensor)]


def _memories(tensors: list[Tensor]) -> list[Memory | None]:
    return [memory(tensor) for tensor in tensors]


def _is_view(places: list[Memory | None], inputs: list[Tensor], results: list[Tensor]) -> bool:
    """Says whether a call computed nothing: what came out lies in the memory of an argument, which has not changed."""
    if not results:
        return False
    given = {place.storage for place in places if place is not None}
    results_in = {None if place is None else place.storage for place in _memories(results)}
    dtypes = {tensor.dtype for tensor in inputs}
    return results_in <= given and all(result.dtype in dtypes for result in results) and places == _memories(inputs)


def _named(func: Any, args: Args, rules: OpRules | None) -> tuple[str, Rule | None]:
    """Finds the name and the rule of what a mode is shown."""
    if func is torch.ops.higher_order.custom_function_call and args:
        return args[0].__name__, None
    try:
        name = name_of(func)
    except TypeError:
        return getattr(func, "__name__", type(func).__name__), None
    return name, None if rules is None else op_rules.table(rules).get(name)


def _why(shown: list[Caster], place: Place) -> str:
    if any(not caster.covers for caster in shown):
        return NO_RULE
    return f"inside {place.region or 'another policy'}" if shown else NO_POLICY


def _promotes(shown: list[Caster]) -> bool:
    return any(caster.rules.base == "torch" for caster in shown if not caster.covers)
