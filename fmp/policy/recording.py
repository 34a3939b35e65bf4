"""Records which op ran in which precision: a mode around the casters that sees what they are shown and what they do."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmp import tree
from fmp._composite import custom_function
from fmp.dtypes import is_castable
from fmp.policy import op_rules
from fmp.policy.caster import Caster
from fmp.policy.explanation import BY_HAND, ENTERED, INSIDE, NO_POLICY, NO_RULE, Dtypes, Row, merged
from fmp.policy.grouping import common
from fmp.policy.handlers import Args, Handler, Kwargs
from fmp.policy.hazards import Event, Hazards
from fmp.policy.moving import CASTS, is_view, memories, only_moves
from fmp.policy.op_rules import OpRules, Rule
from fmp.policy.places import Arguments, Memory, place_of_call
from fmp.policy.regions import RegionWatcher
from fmp.policy.spellings import name_of


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


@dataclass
class _Region:
    """A call of a decorated function.

    Attributes:
        event: The function.
        decorator: Such as `"fmp.low_precision"`.
        is_running: Whether the function itself is being called right now, not the casts before.
    """

    event: Event
    decorator: str
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


class Recorder(RegionWatcher):
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
        self._rows: list[Row | None] = []
        self._calls: list[_Call] = []
        self._regions: list[_Region] = []
        self._shown: list[Caster] = []  # those that were shown the call that is on its way, and did not handle it

    def rows(self) -> tuple[Row, ...]:
        """Returns what was recorded so far."""
        return merged(row for row in self._rows if row is not None)

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
        event = Event(name, place.where)
        floating = _floating(inputs)
        places = memories(inputs)
        call = _Call(caster, event)
        row = self._next_row()

        def run(*args: Any, **kwargs: Any) -> Any:
            call.ran = _dtypes(_floating(list(_tensors((args, kwargs)))))
            call.is_running = True
            try:
                return called(*args, **kwargs)
            finally:
                call.is_running = False

        self._calls.append(call)
        try:
            output = handler(caster, run, args, kwargs)
        except Exception:
            why = rule.why if rule is not None else ENTERED if call.ran is None else NO_RULE
            self._fill(row, event, rule, why, floating, call.ran or (), [])
            raise
        finally:
            self._calls.pop()
        results = list(_tensors(output))
        if call.ran is None:
            if not is_view(places, inputs, results):
                self._fill(row, event, None, ENTERED, floating, (), results)
            return output
        self._notice(event, floating, call.ran, results, places)
        if rule is not None or not (place.is_ours or is_view(places, inputs, results)):
            self._fill(row, event, rule, NO_RULE if rule is None else rule.why, floating, call.ran, results)
        return output

    def region(
        self, fn: Callable[..., Any], rule: Rule, handler: Handler, caster: Caster, args: Args, kwargs: Kwargs
    ) -> Any:
        """Runs a decorated function, and records it."""
        event = Event(function_name(fn), place_of_call(self._outermost).where)
        floating = _floating(tree.leaves((args, kwargs)))
        ran: Dtypes = ()
        results: list[Tensor] = []
        region = _Region(event, rule.why)
        row = self._next_row()

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran
            ran = _dtypes(_floating(tree.leaves((args, kwargs))))
            region.is_running = True
            return fn(*args, **kwargs)

        self._regions.append(region)
        try:
            output = handler(caster, run, args, kwargs)
            results = [leaf for leaf in tree.leaves(output) if isinstance(leaf, Tensor)]
            return output
        finally:
            self._regions.pop()
            self._fill(row, event, rule, rule.why, floating, ran, results, is_region=True)

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
        places = memories(inputs)
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
        event = Event("to" if func in CASTS else _named(func, (), None)[0], place.where)
        floating = _floating(inputs)
        if place.is_cast or place.is_ours:
            self._notice_made(places, results)
            self._notice_cast(func, self._cause(handled) or event, inputs, results, by_rule=place.is_cast)
            return
        self._notice(event, floating, _dtypes(floating), results, places)
        self._notice_cast(func, event, inputs, results, by_rule=False)
        if is_view(places, inputs, results) or getattr(func, "__module__", "") == "torch.autograd":
            return
        if func not in CASTS:
            self.hazards.mixed(event, floating, _floating(results), promotes=_promotes(shown))
        why = self._why(shown)
        if func in CASTS and why == NO_RULE:
            why = BY_HAND
        self._fill(self._next_row(), event, None, why, floating, _dtypes(floating), results)

    def _cause(self, handled: _Call | None) -> Event | None:
        """Finds for what arguments are being cast."""
        if self._regions and not self._regions[-1].is_running:
            return self._regions[-1].event
        return None if handled is None else handled.event

    def _why(self, shown: list[Caster]) -> str:
        """Says why an op has no rule."""
        if any(not caster.covers for caster in shown):
            return NO_RULE
        by = self._regions[-1].decorator if self._regions else "another policy"
        return f"{INSIDE}{by}" if shown else NO_POLICY

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
        if func in CASTS and len(results) == 1 and is_castable(inputs[0]) and inputs[0].dtype != results[0].dtype:
            self.hazards.cast(event, inputs[0], results[0], by_rule=by_rule)

    def _next_row(self) -> int:
        """Keeps a place among the rows for a call, before what it calls."""
        self._rows.append(None)
        return len(self._rows) - 1

    def _fill(
        self,
        index: int,
        event: Event,
        rule: Rule | None,
        why: str,
        inputs: list[Tensor],
        ran: Dtypes,
        results: list[Tensor],
        *,
        is_region: bool = False,
    ) -> None:
        before, out = _dtypes(inputs), _dtypes(results)
        floating = {*before, *_dtypes(_floating(results))}
        if not floating or (rule is None and results and only_moves(event.op, floating)):
            return
        kind = "-" if rule is None else rule.kind
        paths = self._arguments
        # The arguments of a decorated function have no order that tells a weight.
        operand = common(paths.operands(inputs)) if is_region else paths.operand(inputs)
        self._rows[index] = Row(event.op, kind, why, before, ran, out, event.where, operand)


def function_name(fn: Any) -> str:
    """Names a function as a reader knows it: without the functions around it, with the class of a method."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    if inspect.isfunction(fn) or inspect.ismethod(fn):
        return fn.__qualname__.rpartition("<locals>.")[2]
    return str(getattr(fn, "__name__", type(fn).__name__))


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


def _dtypes(tensors: list[Tensor]) -> Dtypes:
    return tuple([tensor.dtype for tensor in tensors])


def _named(func: Any, args: Args, rules: OpRules | None) -> tuple[str, Rule | None]:
    """Finds the name and the rule of what a mode is shown."""
    if func is torch.ops.higher_order.custom_function_call and args:
        return args[0].__name__, None
    try:
        name = name_of(func)
    except TypeError:
        return getattr(func, "__name__", type(func).__name__), None
    return name, None if rules is None else op_rules.table(rules).get(name)


def _promotes(shown: list[Caster]) -> bool:
    return any(caster.rules.base == "torch" for caster in shown if not caster.covers)
