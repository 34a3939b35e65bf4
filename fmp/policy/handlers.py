"""How a caster runs each torch function: by its rule, by entering its Python body, or in a way of its own."""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmp import _compat
from fmp._composite import body, custom_function, inside, override_checks
from fmp.dtypes import full_precision, short_name
from fmp.errors import BannedOpError
from fmp.policy import op_rules, oplists
from fmp.policy.op_rules import OpRules, Rule
from fmp.policy.spellings import spellings

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Any, Args, Kwargs], Any]  # (caster, func, args, kwargs) -> what func returns
Changing = Callable[[Any, Any, Any, Args, Kwargs], Any]  # (caster, func, what it writes into, args, kwargs) -> likewise

_FULL = torch.float32
_SEQUENCES = (list, tuple)
_PREFIXES = ("linalg_", "special_", "fft_")  # torch.linalg.norm is linalg_norm

# torch computes a number divided by a tensor as a product with the reciprocal, which is an op of its own.
_ENTERED = (Tensor.__rdiv__,)
_NORMS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)
# What gives away the memory of a tensor, or writes into it, behind the back of torch's count of changes.
_OPEN_MEMORY = (
    Tensor.data.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.data.__set__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.__cuda_array_interface__.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr),
    *(Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage),
    *(function for name, function in vars(torch).items() if name.startswith("_fused_") and name.endswith("_")),
)


# How to run each torch function that some rule concerns, for the op rules that were met so far; and those of the
# handlers that torch.compile has met. It cannot look up a Python function in a dictionary, but it can read an attribute
# whose name is a constant.
TABLES: dict[str, Mapping[Any, Handler]] = {}
_TRACED = types.SimpleNamespace()


@_compat.constant_while_tracing
def table_of(*parts: Any) -> str:
    """Names the table of handlers for the op rules that have these fields."""
    return _made(*parts)


def traced(table: str, func: Any) -> Handler | None:
    """Looks a function up in a table while torch.compile traces."""
    name = _traced_name(table, func)
    return None if name is None else getattr(_TRACED, name)


@_compat.constant_while_tracing
def _traced_name(table: str, func: Any) -> str | None:
    handler = TABLES[table].get(func)
    if handler is None:
        return None
    name = f"handler_{id(handler)}"
    setattr(_TRACED, name, handler)
    return name


@functools.cache
def _made(*parts: Any) -> str:
    name = f"table_{len(TABLES)}"
    TABLES[name] = _handlers(OpRules(*parts))
    return name


def _handlers(rules: OpRules) -> Mapping[Any, Handler]:
    by_name = op_rules.table(rules)
    left = {func for name, _ in rules.changes if name not in by_name for func in spellings(name).plain}
    special: dict[Any, Handler] = {
        **{composite: _entered(composite) for composite in _reaching(by_name) if composite not in left},
        **dict.fromkeys(_NORMS, _norm),
        torch.ops.higher_order.custom_function_call: _custom_function,
        Tensor.unflatten: _unflatten,
    }
    ruled: dict[Any, Handler] = {}
    for name, rule in by_name.items():
        found = spellings(name)
        changing = _changing(name, rule) if rules.casts_in_place else _as_it_is
        handler = _banned(name, rule) if rule.kind == "banned" else _HANDLERS[rule.kind](changing)
        ruled |= {func: _by_flag(func, handler, changing) for func in found.plain}
        ruled |= {func: functools.partial(_in_place, changing) for func in found.in_place}
    if F.interpolate in special:
        special[F.interpolate] = _interpolate(by_name)
    if rules.casts_in_place and "pow" in by_name and by_name["pow"].kind == "full":
        ruled[Tensor.__ipow__] = functools.partial(_ipow, ruled[Tensor.__ipow__])
    last = {composite: _entered(composite) for composite in _ENTERED} | dict.fromkeys(_OPEN_MEMORY, _forget)
    return special | ruled | last


def _low(changing: Changing) -> Handler:
    def low(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if not kwargs and _all_have(caster.low, args):
            return func(*args)
        if kwargs.get("out") is not None:
            return _into_out(changing, caster, func, args, kwargs)
        return _cast_all(caster, caster.low, func, args, kwargs)

    return low


def _full(changing: Changing) -> Handler:
    def full(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if not kwargs and _all_have(_FULL, args):
            return func(*args)
        if kwargs.get("out") is not None:
            return _into_out(changing, caster, func, args, kwargs)
        if _all_have(_FULL, args) and _all_have(_FULL, kwargs.values()):
            return func(*args, **kwargs)
        if kwargs.get("dtype") is not None or any(type(arg) is torch.dtype for arg in args):
            return func(*args, **kwargs)
        return _cast_all(caster, _FULL, func, args, kwargs)

    return full


def _promote(changing: Changing) -> Handler:
    def promote(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if not kwargs and args:
            first = args[0]
            if len(args) == 2 and type(first) is type(args[1]) is Tensor and first.dtype is args[1].dtype:
                return func(*args)  # most calls are like `x + y`
            first = first[0] if isinstance(first, _SEQUENCES) and first else first
            if isinstance(first, Tensor) and _all_have(first.dtype, args):
                return func(*args)
        if kwargs.get("out") is not None:
            return _into_out(changing, caster, func, args, kwargs)
        floats = list(_floats(caster, (*args, *kwargs.values())))
        # A number that became a float64 tensor does not make float64 of everything that it meets.
        found = {tensor.dtype if tensor.ndim or tensor.dtype != torch.float64 else torch.float32 for tensor in floats}
        # torch promotes no 8-bit format, and says so.
        if len(found) < 2 or any(dtype.itemsize == 1 for dtype in found):
            return func(*args, **kwargs)
        return _cast_all(caster, functools.reduce(torch.promote_types, found), func, args, kwargs)

    return promote


_HANDLERS: Mapping[str, Callable[[Changing], Handler]] = {"low": _low, "full": _full, "promote": _promote}


def _banned(name: str, rule: Rule) -> Handler:
    def banned(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        narrow = [tensor.dtype for tensor in _floats(caster, [*args, *kwargs.values()]) if tensor.dtype.itemsize < 4]
        if (rule.always or narrow) and not caster.is_suspended():
            given = f" on {short_name(narrow[0])}" if narrow else ""
            raise BannedOpError(f"{name}{given} is banned: {rule.why}")
        return func(*args, **kwargs)

    return banned


def _into_out(changing: Changing, caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs a call that writes into `out=`."""
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    return changing(caster, functools.partial(func, out=kwargs["out"]), kwargs["out"], args, rest)


def _by_flag(func: Any, handler: Handler, changing: Changing) -> Handler:
    """Tells calls of a function of torch.nn.functional with `inplace=True` from those without, if it has the flag."""
    code = func.__code__ if isinstance(func, types.FunctionType) else None
    if code is None or "inplace" not in code.co_varnames[: code.co_argcount]:
        return handler
    place = code.co_varnames.index("inplace")

    def by_flag(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        flag = args[place] if len(args) > place else kwargs.get("inplace", False)
        return _in_place(changing, caster, func, args, kwargs) if flag else handler(caster, func, args, kwargs)

    return by_flag


def _in_place(changing: Changing, caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if args:
        return changing(caster, functools.partial(func, args[0]), args[0], args[1:], kwargs)
    rest = {name: value for name, value in kwargs.items() if name != "input"}
    return changing(caster, functools.partial(func, kwargs["input"]), kwargs["input"], (), rest)


def _changing(name: str, rule: Rule) -> Changing:
    """Runs a function that writes into a tensor: that one keeps its dtype, and the rest is cast to it."""

    def changing(caster: Any, func: Any, target: Any, args: Args, kwargs: Kwargs) -> Any:
        written = next(_floats(caster, [target]), None)
        if written is None:  # a comparison, say
            return func(*args, **kwargs)
        dtype = written.dtype
        if rule.kind in ("full", "banned") and dtype.itemsize < 4 and not caster.is_suspended():
            raise BannedOpError(
                f"{name} cannot write into a tensor of {short_name(dtype)}: it belongs in float32 ({rule.why}); use "
                "the form that returns a new tensor, or make the tensor float32"
            )
        return _cast_all(caster, dtype, func, args, kwargs)

    return changing


def _as_it_is(caster: Any, func: Any, target: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(*args, **kwargs)


def _entered(composite: Any) -> Handler:
    """Runs the body of a Python function with the caster on, so that each op in it is decided on its own."""
    function = body(composite)

    def entered(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        return inside(function, caster, *args, **kwargs)

    return entered


def _custom_function(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return custom_function(caster, *args, **kwargs)


def _norm(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs a norm layer that returns the dtype of its input, which may be narrower than weights and statistics.

    Eagerly torch does that by itself, computing in float32; mapped or compiled, it fails or returns float32.
    """
    values = [*args, *kwargs.values()]
    floats = list(_floats(caster, values))
    given = floats[0].dtype if floats else torch.float32
    wide = full_precision(given)
    if wide == given or not (torch.compiler.is_compiling() or _compat.transform_active()):
        return func(*args, **kwargs)
    input = args[0] if args else kwargs["input"]
    rest = args[1:] if args else ()
    named = {name: value for name, value in kwargs.items() if name != "input"}
    return func(input.to(wide), *rest, **named).to(given)


def _unflatten(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    # Inside any mode, torch.compile cannot trace the method. The function is the same.
    return torch.unflatten(*args, **kwargs)


def _interpolate(by_name: Mapping[str, Rule]) -> Handler:
    """Runs F.interpolate by the rule of the op that it will call, which torch.compile does not show to a mode."""
    entered = _entered(F.interpolate)
    signature = inspect.signature(F.interpolate)

    def interpolate(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        mode, dimensions = given.arguments["mode"], given.arguments["input"].ndim - 2
        name = {"nearest": "upsample_nearest", "nearest-exact": "_upsample_nearest_exact"}.get(mode, f"upsample_{mode}")
        name = f"{name}{dimensions}d"
        rule = by_name.get(f"_{name}_aa" if given.arguments["antialias"] else name)
        handler = _HANDLERS[rule.kind](_as_it_is) if rule and rule.kind in _HANDLERS else entered
        return handler(caster, func, args, kwargs)

    return interpolate


def _ipow(in_place: Handler, caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs `x **= y`, which makes a new tensor if `x` cannot hold float32, as it does under Apex."""
    narrow = any(tensor.dtype.itemsize < 4 for tensor in _floats(caster, args[:1]))
    return _full(_as_it_is)(caster, torch.pow, args, kwargs) if narrow else in_place(caster, func, args, kwargs)


def _forget(caster: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    caster.forget()
    return func(*args, **kwargs)


def _all_have(dtype: torch.dtype, values: Iterable[Any]) -> bool:
    """Says, as fast as Python can, that no tensor among the arguments needs a cast."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is not dtype:
                return False
        elif isinstance(value, _SEQUENCES) and not _all_have(dtype, value):
            return False
    return True


def _cast_all(caster: Any, dtype: torch.dtype, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if caster.is_suspended():
        return func(*args, **kwargs)
    args = tuple([caster.cast(arg, dtype) for arg in args])
    return func(*args, **{name: caster.cast(value, dtype) for name, value in kwargs.items()})


def _floats(caster: Any, values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments of a function that rules apply to."""
    for value in values:
        if isinstance(value, Tensor):
            if caster.casts(value):
                yield value
        elif isinstance(value, _SEQUENCES):
            yield from _floats(caster, value)


def _reaching(by_name: Mapping[str, Rule]) -> list[types.FunctionType]:
    """Finds the Python functions of torch that have no rule and call an op that has one."""
    names = {alias for name in by_name for alias in (name, *oplists.ALIASES.get(name, ()))}
    names |= {name.partition("_")[2] for name in names if name.startswith(_PREFIXES)}
    composites = _composites()
    reached: dict[types.FunctionType, None] = {}
    while found := [f for f, called in composites.items() if f not in reached and names & called]:
        reached |= dict.fromkeys(found)
        names |= {function.__name__ for function in found}
    return list(reached)


@functools.cache
def _composites() -> Mapping[types.FunctionType, frozenset[str]]:
    """Lists the Python functions of torch that a mode is shown as one call, with the names that they use."""
    owners = (F, torch.functional, Tensor)
    functions = [value for owner in owners for value in vars(owner).values() if isinstance(value, types.FunctionType)]
    shown = [function for function in functions if override_checks(function)]
    return {function: _called(inspect.unwrap(function)) for function in shown}


def _called(function: Any) -> frozenset[str]:
    """Names what a function uses; for one in C, that is itself."""
    return frozenset(function.__code__.co_names if hasattr(function, "__code__") else (function.__name__,))
