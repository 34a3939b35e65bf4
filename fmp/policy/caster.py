"""Casting op by op: a mode that sees every torch function and casts its arguments by the rules of a policy.

    mm(x, w)            low      ->  mm(x.to(half), w.to(half))
    softmax(x)          full     ->  softmax(x.to(f32))
    add(x, y)           promote  ->  add(x.to(widest), y.to(widest))
    relu(x)             no rule  ->  relu(x)

Unlike `torch.autocast` it works above autograd and the transforms of torch.func, and so means the same under all of
them. docs/casting.md says for each op what happens and why.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from fmp import _compat, tree
from fmp._composite import CastingMode
from fmp.dtypes import is_castable, short_name
from fmp.policy.cast_cache import CastCache
from fmp.policy.fields import as_flag
from fmp.policy.handlers import TABLES, Args, Handler, Kwargs, table_of, traced
from fmp.policy.op_rules import OpRules
from fmp.policy.policy import Policy

Tree = Any


def autocast(fn: Callable[..., Any], policy: Policy, *, enabled: bool | str = True) -> Callable[..., Any]:
    """Transforms a function into one that runs in the precision that a policy says.

    With `policy.op_rules`, arguments are left alone and each torch function inside casts its own: to the policy's
    compute dtype for what the rules call low, to float32 for what they call full, to the widest argument for what they
    promote. Without op rules, the floating-point leaves of the arguments are cast to the compute dtype, each argument
    by the policy's `keep_full` names. Either way the floating-point leaves of the result are cast to the output dtype.

    Inside, `torch.autocast` from outside is off, and code under `torch.autocast(..., enabled=False)` is not cast.

    The dtypes are the same eagerly, under every torch.func transform and under `torch.compile`. A weight that is used
    many times is cast once in a call. Inside a function that was transformed with one policy, another one replaces it
    until it returns; `fmp.Policy(None, None, None)` switches casting off.

    Casting ends when the function returns: a backward pass runs in the dtypes of the forward pass. What
    `torch.utils.checkpoint` recomputes later is not cast: it raises, and with use_reentrant=True it goes unnoticed. Put
    autocast inside of the checkpointed function.

    Args:
        fn: Any function, or an `nn.Module`.
        policy: The policy.
        enabled: False, or "False" from a command line, returns `fn` itself.

    Returns:
        A function with `fn`'s arguments.

    Raises:
        TypeError: If `policy` is not a policy, or `fn` cannot be called.
        ValueError: If `fn` is an `nn.Module` whose parameters a policy without op rules would have to cast.
        BannedOpError: When called, if `fn` uses an op that the rules refuse, or changes a 16-bit tensor in place by an
            op that belongs in full precision.

    References:
        NVIDIA Apex's O1, https://nvidia.github.io/apex/amp.html; torch.autocast.

    Example:
        >>> policy = fmp.opt_level("O1", half_dtype=torch.bfloat16)
        >>> seen = []
        >>> def attend(x, w):
        ...     scores = x @ w
        ...     weights = scores.softmax(-1)
        ...     seen.extend([scores.dtype, weights.dtype])
        ...     return weights @ x
        >>> autocast(attend, policy)(torch.ones(2, 2), torch.ones(2, 2)).dtype, seen
        (torch.float32, [torch.bfloat16, torch.float32])
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy, got {policy!r}; see fmp.opt_level and fmp.Policy.parse")
    check_function("autocast", fn)
    if not as_flag("enabled", enabled):
        return fn
    if isinstance(fn, nn.Module) and policy.op_rules is None:
        _check_module(fn, policy)

    @functools.wraps(fn, _compat.described_by(fn), updated=())
    @_compat.compiled_on_its_own
    def cast_fn(*args: Any, **kwargs: Any) -> Any:
        if policy.op_rules is None:
            args = tuple([policy.cast_to_compute(arg) for arg in args])
            kwargs = {name: policy.cast_to_compute(arg) for name, arg in kwargs.items()}
        with casting(policy, args, kwargs):
            output = fn(*args, **kwargs)
        return policy.cast_to_output(output)

    return cast_fn


def check_function(name: str, fn: Any) -> None:
    """Refuses what is no function, and functions whose body runs after they have returned.

    Raises:
        TypeError: If `fn` is one of these.
    """
    if not callable(fn):
        raise TypeError(f"{name} transforms a function, got {fn!r}")
    for kind, is_one in _LATER.items():
        if is_one(fn):
            raise TypeError(
                f"{name}: {getattr(fn, '__name__', fn)} is {kind} function, whose body runs when it has returned, and "
                f"casting has ended; use {name} on what it calls"
            )


_LATER = {
    "a coroutine": inspect.iscoroutinefunction,
    "a generator": inspect.isgeneratorfunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
}


def _check_module(module: nn.Module, policy: Policy) -> None:
    """Refuses to cast the inputs of a module, which without op rules are all that is cast, and not its parameters."""
    dtypes = {param.dtype for param in module.parameters() if is_castable(param)}
    if dtypes and policy.compute_dtype is not None and policy.compute_dtype not in dtypes:
        raise ValueError(
            f"{type(module).__name__} has parameters in {', '.join(map(short_name, dtypes))}, which are no arguments; "
            f"a policy without op rules that computes in {short_name(policy.compute_dtype)} does not cast them; use "
            "fmp.autocast(fmp.functionalize(module).apply, policy), or a policy with op rules, such as O1"
        )


@contextmanager
def casting(policy: Policy, *arguments: Tree) -> Iterator[None]:
    """Casts op by op inside, if the policy has op rules; an outer policy, and `torch.autocast`, are off in any case.

    Args:
        policy: The policy.
        *arguments: Trees of tensors that are there before and after, such as parameters. Each is cast once.
    """
    with ExitStack() as stack:
        for device in _compat.autocast_devices():
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(covered())
        if policy.op_rules is not None and policy.compute_dtype is not None:
            stack.enter_context(Caster(policy.op_rules, policy.compute_dtype, arguments))
        yield


@contextmanager
def covered() -> Iterator[None]:
    """Switches the casting around the caller off, and on again afterwards."""
    outer = casters()
    for caster in outer:
        caster.covers += 1
    try:
        yield
    finally:
        for caster in outer:
            caster.covers -= 1


def casters() -> list["Caster"]:
    """Lists the casters around the caller, the innermost last."""
    return [mode for mode in _compat.function_modes() if isinstance(mode, Caster)]


def active_caster() -> "Caster | None":
    """Returns the innermost caster that casts what the caller does; None if there is none."""
    active = [caster for caster in casters() if not caster.covers and not caster.is_suspended()]
    return active[-1] if active else None


class Watcher(TorchFunctionMode):
    """A mode that looks on while the casters inside of it work; `fmp.explain` is one."""

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Runs one torch function."""
        return func(*args, **(kwargs or {}))

    def watch(self, caster: "Caster", handlers: Mapping[Any, Handler]) -> Mapping[Any, Handler]:
        """Returns what the caster shall use as its handlers; only their `get(func)` is called."""
        raise NotImplementedError


class Caster(CastingMode):
    """Casts the arguments of every torch function called inside.

    Args:
        rules: The rules.
        low: The dtype of low precision.
        arguments: See `casting`.

    Attributes:
        rules: The rules.
        low: The dtype of low precision.
        covers: How many policies inside of this one are active; it casts nothing unless that is zero.
    """

    def __init__(self, rules: OpRules, low: torch.dtype, arguments: Tree = None):
        super().__init__()
        self.rules = rules
        self.low = low
        self.covers = 0
        self._casts_float64 = rules.casts_float64
        self._table = table_of(rules.base, rules.changes)
        self._depth = _compat.autocast_depth()
        # After a graph break, the rest runs eagerly with what was made while tracing.
        self._cache: CastCache | None = None
        self._watched: Mapping[Any, Handler] | None = None
        if not is_compiling():
            self._cache = CastCache([leaf for leaf in tree.leaves(arguments) if isinstance(leaf, Tensor)])
            for mode in _compat.function_modes():
                if isinstance(mode, Watcher):
                    self._watched = mode.watch(self, TABLES[self._table])

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Runs one torch function."""
        handler = traced(self._table, func) if is_compiling() else (self._watched or TABLES[self._table]).get(func)
        if handler is None or self.covers:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(self, func, args, kwargs or {})

    def run_as(self, func: Any, substitute: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Casts the arguments as those of `func`, and runs the substitute on them without casting inside."""
        handler = traced(self._table, func) if is_compiling() else (self._watched or TABLES[self._table]).get(func)
        if handler is None or self.covers:
            return substitute(*args, **kwargs)

        def uncast(*args: Any, **kwargs: Any) -> Any:
            with covered():
                return substitute(*args, **kwargs)

        return handler(self, uncast, args, kwargs)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Casts the floating-point tensors in an argument of a torch function: a tensor, or lists of them."""
        if isinstance(value, Tensor):
            return self._to(value, dtype) if value.dtype != dtype and self.casts(value) else value
        if isinstance(value, list | tuple):
            items = [self.cast(item, dtype) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def casts(self, value: Any) -> bool:
        """Says whether a value is a tensor that rules apply to."""
        return is_castable(value) and (self._casts_float64 or value.dtype != torch.float64)

    def is_suspended(self) -> bool:
        """Says whether code inside switched casting off by `torch.autocast(..., enabled=False)`."""
        return _compat.autocast_depth() > self._depth and not _compat.autocast_devices()

    def forget(self) -> None:
        """Takes note that others may write to the memory of tensors from now on."""
        self._cache = None

    def renew(self) -> None:
        """Lets go of the casts made so far."""
        if self._cache is not None:
            self._cache = CastCache(())

    def _to(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        # The compiler itself finds casts that occur twice.
        return tensor.to(dtype) if is_compiling() or self._cache is None else self._cache.cast(tensor, dtype)
