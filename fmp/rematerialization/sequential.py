"""`fmp.remat_sequential`: a chain of functions of which segments are recomputed."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex, cast

import torch
from torch import Tensor, nn

from fmp import _compat, tree
from fmp.policy.caster import Caster
from fmp.rematerialization.chain import measure
from fmp.rematerialization.guards import DeterminismCheck
from fmp.rematerialization.saveable import Saveable, nothing
from fmp.rematerialization.segments import Segment, best_way
from fmp.rematerialization.transform import remat

_MOST_PLANS = 64

Functions = tuple[Callable[..., Any], ...]


class ChainPlan(NamedTuple):
    """How a chain is run; `str` shows it.

    Attributes:
        segments: Its segments: the first function, the one after the last, and whether they are recomputed.
        peak_bytes: The predicted peak of forward and backward pass beyond parameters and arguments; None if the
            segments were given.
        recomputed: The predicted share of the forward pass that runs twice; None likewise.
    """

    segments: tuple[Segment, ...]
    peak_bytes: int | None = None
    recomputed: float | None = None

    def __str__(self) -> str:
        lines = [f"{start}:{stop} {'recomputed' if again else 'kept'}" for start, stop, again in self.segments]
        if self.peak_bytes is not None:
            lines.append(f"peak {self.peak_bytes:,} bytes, {self.recomputed:.0%} of the forward pass runs twice")
        return "\n".join(lines)


class Chain(Protocol):
    """What `remat_sequential` returns."""

    def __call__(self, *args: Any) -> Any:
        """Runs the chain."""
        ...

    def plan(self, *args: Any) -> ChainPlan:
        """Says how the chain is run for such arguments."""
        ...


def remat_sequential(
    fns: Sequence[Callable[..., Any]] | nn.Sequential,
    segments: int | Literal["auto"] | Sequence[int] | ChainPlan,
    *,
    saveable: Saveable = nothing,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    memory_budget: float | None = None,
) -> Chain:
    """Composes functions, and computes segments of the chain again for its gradient.

        chain(x) = fns[-1](... fns[1](fns[0](x)))

    Each segment is given to `fmp.remat`: only its input is kept, values and gradients are those of the chain, under
    every transform, and the functions may be closures, partials or modules. The last one of given segments runs as it
    is, because its values are needed again at once.

    With `segments="auto"`, the first call with arguments of some shapes measures what each function allocates, keeps
    and computes. From that follow exactly the segments of least peak memory, and of least recomputation among these;
    small values are kept instead of recomputed. With `memory_budget`, they are the segments of least recomputation
    whose peak is within the budget.

    Functions are measured by running them on fake tensors: that takes no memory, draws no random numbers, and leaves
    buffers and the hooks of modules alone. Those that need values run on copies. Recomputation is counted in bytes and
    operations, not timed, so the segments are the same every time. The peak is that of the forward and backward pass
    with the gradients of all parameters, beyond what was there before. Not in it are the rest of the loss, what kernels
    allocate inside, the state of the random generator that each segment keeps (5 kB), and what `saveable` keeps. Under
    a reverse-mode transform, the backward pass is taken to be recorded as by `torch.func.grad`, for which other
    segments are best. `torch.compile` measures nothing: there, "auto" means about the square root of `len(fns)` even
    segments.

    Args:
        fns: The functions. The first gets the arguments of the call, every other what the one before it returned, as
            its only argument. Of an `nn.Sequential`, these are its children.
        segments: How many, of `len(fns) // segments` functions each, the last one with what remains; or the number of
            functions in each; or "auto"; or the plan of a chain.
        saveable: As for `fmp.remat`.
        preserve_rng_state: As for `fmp.remat`.
        determinism_check: As for `fmp.remat`.
        debug: As for `fmp.remat`.
        memory_budget: With `segments="auto"`, the most bytes that the peak may have.

    Returns:
        The chain, a function of positional arguments. `chain.plan(*args)` tells its segments and their predicted peak,
        for the gradient of all that requires grad; if nothing does, of everything. A chain that is made in each step
        shall not be measured in each step: give it the plan of the first one as `segments`.

    Raises:
        TypeError: If `fns` are not functions, or `segments` is none of the four.
        ValueError: If there are no functions; if there are segments of more or less than all of them; or, when called,
            if no segments are within the budget. The error names the least peak that is possible.
        RematError: As for `fmp.remat`; with "auto", also for functions that would not be recomputed.

    References:
        `torch.utils.checkpoint.checkpoint_sequential`.
        T. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
        O. Beaumont et al., Optimal checkpointing for heterogeneous chains, arXiv 1911.13214. Their `rotor` goes
        further, with segments inside of segments.

    Example:
        >>> def chain_of(params, segments):
        ...     return fmp.remat_sequential([functools.partial(block, w) for w in params], segments)
        >>> def block(w, x):
        ...     return torch.tanh(x @ w)
        >>> params = [torch.ones(shape) / 8 for shape in [(4, 64), (64, 2), (2, 64), (64, 2), (2, 2), (2, 2)]]
        >>> x = torch.ones(1024, 4)
        >>> plan = chain_of(params, "auto").plan(x)
        >>> print(plan)
        0:2 recomputed
        2:6 kept
        peak 795,168 bytes, 49% of the forward pass runs twice
        >>> def loss(params, segments):
        ...     return chain_of(params, segments)(x).sum()
        >>> grads, same = [fmp.grad(loss)(params, segments) for segments in (1, plan)]
        >>> all(map(torch.equal, grads, same))
        True
    """
    functions = _checked_functions(fns)
    given = _given_segments(segments, len(functions), memory_budget)
    options: dict[str, Any] = {"saveable": saveable, "preserve_rng_state": preserve_rng_state}
    options |= {"determinism_check": determinism_check, "debug": debug}
    remat(_in_turn, **options)  # checks them
    plans: dict[Any, ChainPlan] = {}

    def plan(*args: Any) -> ChainPlan:
        if given is not None:
            return given
        if torch.compiler.is_compiling():
            return _even_segments(len(functions), round(math.sqrt(len(functions))))
        key = _key(functions, args)
        if key not in plans:
            while len(plans) >= _MOST_PLANS:
                del plans[next(iter(plans))]
            plans[key] = _measured_plan(functions, args, memory_budget)
        return plans[key]

    def chain(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return _in_turn(functions, *args)
        value = args
        for start, stop, recomputed in plan(*args).segments:
            part = functools.partial(_in_turn, functions[start:stop])
            value = ((remat(part, **options) if recomputed else part)(*value),)
        return value[0]

    cast(Any, chain).plan = plan
    return cast(Chain, chain)


def _in_turn(functions: Functions, *args: Any) -> Any:
    value = functions[0](*args)
    for function in functions[1:]:
        value = function(value)
    return value


def _checked_functions(fns: Any) -> Functions:
    if isinstance(fns, nn.Sequential):
        if type(fns).forward is not nn.Sequential.forward:
            raise TypeError(
                f"fns is a {type(fns).__name__} with a forward method of its own, which is more than its children in "
                "turn; give a list of functions"
            )
        fns = tuple(fns.children())
    if not isinstance(fns, Sequence):
        raise TypeError(f"fns must be a sequence of functions or an nn.Sequential, got {type(fns).__name__}")
    for place, fn in enumerate(fns):
        if not callable(fn):
            raise TypeError(f"fns[{place}] must be a function, got {fn!r}")
    if not fns:
        raise ValueError("fns is empty; a chain has at least one function")
    return tuple(fns)


def _given_segments(segments: Any, count: int, memory_budget: float | None) -> ChainPlan | None:
    """Returns the segments; None if they are to be found."""
    if isinstance(segments, str) and segments == "auto":
        if memory_budget is not None and not isinstance(memory_budget, int | float):
            raise TypeError(f"memory_budget must be a number of bytes, got {memory_budget!r}")
        if memory_budget is not None and math.isnan(memory_budget):
            raise ValueError("memory_budget must be a number of bytes, got nan")
        return None
    if memory_budget is not None:
        raise ValueError(f'memory_budget needs segments="auto", got segments={segments!r}')
    if isinstance(segments, ChainPlan):
        stops = [0, *(segment.stop for segment in segments.segments)]
        if stops[-1] != count:
            raise ValueError(f"segments is the plan of a chain of {stops[-1]} functions, and there are {count}")
        if any(
            part.start != start or part.stop <= start for part, start in zip(segments.segments, stops, strict=False)
        ):
            raise ValueError(f"segments must follow one another without a gap, got the plan\n{segments}")
        return segments
    if isinstance(segments, SupportsIndex) and not isinstance(segments, bool):
        segments = operator.index(segments)
        if not 1 <= segments <= count:
            raise ValueError(f"segments must be from 1 to {count}, the number of functions, got {segments}")
        return _even_segments(count, segments)
    if isinstance(segments, str) or not isinstance(segments, Sequence):
        raise TypeError(
            f'segments must be a number, "auto", the number of functions in each, or a plan, got {segments!r}'
        )
    if any(not isinstance(size, int) or size < 1 for size in segments) or sum(segments) != count:
        raise ValueError(f"segments must be positive numbers of functions, {count} in all, got {list(segments)}")
    return _segments_of(segments)


def _even_segments(count: int, segments: int) -> ChainPlan:
    size = count // segments
    return _segments_of([*[size] * (segments - 1), count - size * (segments - 1)])


def _segments_of(sizes: Sequence[int]) -> ChainPlan:
    stops = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    segments = [Segment(stop - size, stop, stop < stops[-1]) for size, stop in zip(sizes, stops, strict=True)]
    return ChainPlan(tuple(segments))


def _measured_plan(functions: Functions, args: tuple[Any, ...], memory_budget: float | None) -> ChainPlan:
    create_graph = _compat.reverse_mode_active()
    stages, starts = measure(functions, args, create_graph)
    way = best_way(stages, create_graph, memory_budget)
    if memory_budget is not None and way.peak > memory_budget:
        raise ValueError(
            f"memory_budget={memory_budget:,} bytes is too little for this chain, whose least possible peak is "
            f"{way.peak:,} bytes"
        )
    bounds = [*starts, len(functions)]
    segments: list[Segment] = []
    for start, stop, recomputed in way.segments():
        segment = Segment(bounds[start], bounds[stop], recomputed)
        if segments and not recomputed and not segments[-1].recomputed:
            segment = segments.pop()._replace(stop=segment.stop)
        segments.append(segment)
    return ChainPlan(tuple(segments), way.peak, way.cost / max(sum(stage.cost for stage in stages), 1))


def _key(functions: Functions, args: tuple[Any, ...]) -> Any:
    """Returns what the measurements depend on."""
    leaves, spec = tree.flatten(args)
    of_leaves = tuple(
        [
            (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (leaf if isinstance(leaf, bool | str | None) else type(leaf))
            for leaf in leaves
        ]
    )
    of_modules = tuple(
        [
            (module.training, *[parameter.requires_grad for parameter in module.parameters()])
            for module in functions
            if isinstance(module, nn.Module)
        ]
    )
    casts = tuple([(device, torch.get_autocast_dtype(device)) for device in _compat.autocast_devices()])
    modes = tuple([(type(mode), mode.low if isinstance(mode, Caster) else None) for mode in _compat.function_modes()])
    return spec, of_leaves, of_modules, casts, modes, _compat.reverse_mode_active()
