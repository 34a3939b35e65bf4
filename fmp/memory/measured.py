"""`fmp.memory.measure_step`: the bytes that are live after each op of a train step, by kind, on fake tensors.

Every storage has a life, from the op that returned it to its death, and a kind. What the step is given has its kind
from the start. Of the others:

    made by a cast of a parameter before or in the forward pass   compute
    made by a cast of the batch before it                         batch
    made in the forward or backward pass                          activations, or
        made by the backward pass, alive when it ends             gradients
    made of gradients before the update                           gradients
    part of the new state                                         params, masters, moments, ...
    else                                                          other
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fmp._compat import running_node
from fmp.held import Held
from fmp.live_memory import Memory, Watch, storages, uncompiled
from fmp.memory.holders import held
from fmp.memory.measured_arguments import check_arguments
from fmp.memory.stand_ins import looks_at_values, stand_ins
from fmp.memory.units import in_unit
from fmp.optim import GradientTransformation
from fmp.optim.fused import Request, run_fused
from fmp.step import TrainState, TrainStep

Tree = Any

LIVE_KINDS = (
    "params",
    "compute",
    "masters",
    "moments",
    "average",
    "buffers",
    "batch",
    "gradients",
    "activations",
    "other",
)
_CAST: Any = torch.ops.aten._to_copy.default


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What was live after each op of a step; `str` makes a table of its peak.

    Attributes:
        ops: The names of the ops; the first entry, `"start"`, is before any.
        phases: For each, what the step was doing: `"start"`, `"prepare"`, `"forward"`, `"backward"` or `"update"`. A
            gradient that the loss function takes itself is of the forward pass.
        live: The live bytes after each, by kind.
    """

    ops: tuple[str, ...]
    phases: tuple[str, ...]
    live: Mapping[str, tuple[int, ...]]

    @property
    def totals(self) -> tuple[int, ...]:
        """The live bytes after each op."""
        return tuple(map(sum, zip(*self.live.values(), strict=True)))

    @property
    def peak(self) -> int:
        """The most bytes that were live at once, the state and the batch included."""
        return max(self.totals)

    @property
    def peak_index(self) -> int:
        """The number of the op after which the peak was reached first."""
        return self.totals.index(self.peak)

    @property
    def at_peak(self) -> dict[str, int]:
        """The live bytes at the peak, by kind."""
        return {kind: values[self.peak_index] for kind, values in self.live.items()}

    def table(self, unit: str = "MB") -> str:
        """Writes a table of what is live at the start and at the peak, and the most of each kind.

        Args:
            unit: `"GB"`, `"GiB"`, `"MB"`, ..., see `fmp.memory.units.UNITS`.
        """
        rows: list[tuple[str, ...]] = [("kind", f"start, {unit}", "at the peak", "most")]
        for kind, values in self.live.items():
            if any(values):
                rows.append((kind, *[in_unit(size, unit) for size in (values[0], self.at_peak[kind], max(values))]))
        rows.append(("total", *[in_unit(size, unit) for size in (self.totals[0], self.peak, self.peak)]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{row[0]:<{widths[0]}}  " + "  ".join(map(str.rjust, row[1:], widths[1:])) for row in rows]
        where = f"the peak is after op {self.peak_index} of {len(self.ops) - 1}, {self.ops[self.peak_index]}"
        return "\n".join([*lines, f"{where}, in the {self.phases[self.peak_index]}"])

    def __str__(self) -> str:
        return self.table()


def measure_step(step: TrainStep, params: Tree, batch: Tree, *, buffers: Tree = None, frozen: Tree = None) -> Timeline:
    """Runs one step on fake tensors, and takes down the live bytes after each op.

    Nothing is allocated or changed, so a model too large for the machine can be measured, made under
    `torch.device("meta")`. Counted are storages by their lifetimes, as by `fmp.memory.peak`, and with them the state,
    the batch, and other tensors that the step uses: what the parameters given here take is not part of it, as the state
    holds copies. The old state lives until the end unless the step donates it.

    Not counted is what `fmp.memory.peak` with fake tensors does not count, either. A compiled step runs as if it were
    not compiled.

    Args:
        step: The step.
        params: The parameters that `step.init` takes. The state is made of them here.
        batch: The batch.
        buffers: The buffers that `step.init` takes, if the loss takes them.
        frozen: What the loss takes besides.

    Returns:
        The timeline.

    Raises:
        TypeError: If `step` is no train step, or `params` a state or a model.
        ValueError: If buffers are missing or not taken; and as `fmp.memory.peak` with fake tensors; so if something
            looks at values, as `fmp.optim.from_torch` does when its state begins.

    Example:
        >>> def loss_fn(w, x):
        ...     return (x @ w).float().square().mean()
        >>> step = fmp.train_step(loss_fn, fmp.optim.adamw(1e-3), policy=fmp.opt_level("O2"))
        >>> with torch.device("meta"):
        ...     w, x = torch.empty(2**20, 2**10), torch.empty(64, 2**20)
        >>> timeline = measure_step(step, w, x)
        >>> [timeline.live[kind][0] // w.numel() for kind in ("params", "masters", "moments")]
        [2, 4, 8]
        >>> timeline.phases[timeline.peak_index]
        'update'
    """
    check_arguments(step, params, buffers)
    config = step.config
    fns = {name: loss.fn for name, loss in config.losses.items()}
    parts = (fns, dict(config.optimizers), dict(config.scalers), config.microbatch_weight)
    with stand_ins(_run, (step, parts, params, batch, buffers, frozen), {}) as (run, args, _):
        return run(*args)


@dataclasses.dataclass
class _Life:
    """The life of a storage: its kind, and how its size changed before which samples."""

    kind: str
    nbytes: int = 0
    changes: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def become(self, nbytes: int, sample: int) -> None:
        if nbytes != self.nbytes:
            self.changes.append((sample, nbytes - self.nbytes))
            self.nbytes = nbytes


class _LifeWatch(Watch):
    """A watch that takes down the life of each storage."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: list[_Life] = []
        self.ops: list[str] = []
        self.phases: list[str] = []
        self.phase = "prepare"
        self._kind = "other"  # of what is born now
        self._candidates: list[_Life] = []  # born in a backward pass: what is alive at its end is a gradient

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator, and takes down what lives after it."""
        # The loss function may take gradients, too.
        backward = running_node() is not None and self.phase != "forward"
        if not backward:
            for life in self._candidates:
                life.kind = "gradients" if life.nbytes else life.kind
            self._candidates = []
        self._kind = self._kind_of_result(func, (*args, *(kwargs or {}).values()), backward)
        born = len(self.lives)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if output is not NotImplemented and _places((output,)):
            self._candidates += [life for life in self.lives[born:] if backward and life.kind == "activations"]
            self.sample(str(func).removeprefix("aten."), "backward" if backward else self.phase)
        self._kind = "other"
        return output

    def sample(self, op: str, phase: str) -> None:
        """Ends what happened since the last sample."""
        self.ops.append(op)
        self.phases.append(phase)

    def claim(self, value: Tree, kind: str) -> None:
        """Gives the storages of a tree a kind."""
        for tensor in held(value):
            for storage in storages(tensor):
                self._see(storage, is_new=True).origin.kind = kind

    def claim_state(self, state: TrainState) -> None:
        """Gives the storages of a state their kinds."""
        self.claim((state.step, state.seed, state.skip_count, state.loss_scale), "other")
        for kind, part in {
            "params": state.params,
            "masters": state.master,
            "moments": state.opt_state,
            "average": state.ema,
            "buffers": state.buffers,
        }.items():
            self.claim(part, kind)

    def marked(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a loss function that says when it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.phase = "forward"
            try:
                return fn(*args, **kwargs)
            finally:
                self.phase = "backward"

        return run

    def marked_optimizer(self, optimizer: GradientTransformation) -> GradientTransformation:
        """Makes an optimizer that says when it begins. It holds on to nothing, so that what dies on the way does."""

        def update(grads: Tree, state: Tree, params: Tree) -> Any:
            self.phase = "update"
            given = Held(grads=grads, state=state, params=params)
            del grads, state, params
            return optimizer.update(given.take("grads"), given.take("state"), given.take("params"))

        def fused(grads: Tree, state: Tree, params: Tree, *, cast_dtype: Any = None, **request: Any) -> Any:
            self.phase = "update"
            given = Held(grads=grads, state=state, params=params)
            del grads, state, params
            return run_fused(cast(Any, optimizer.fused), given, Request(**request), cast_dtype)

        return optimizer._replace(update=update, fused=None if optimizer.fused is None else fused)

    def timeline(self) -> Timeline:
        """Adds the lives up."""
        changes = {kind: [0] * (len(self.ops) + 1) for kind in LIVE_KINDS}
        for life in self.lives:
            for sample, change in life.changes:
                changes[life.kind][sample] += change
        live = {kind: tuple(itertools.accumulate(values[:-1])) for kind, values in changes.items()}
        return Timeline(tuple(self.ops), tuple(self.phases), live)

    def _kind_of_result(self, func: Any, inputs: tuple[Any, ...], backward: bool) -> str:
        kinds = {self.memories[place].origin.kind for place in _places(inputs) if place in self.memories}
        within = backward or self.phase == "forward"
        if func is _CAST and "params" in kinds and (within or self.phase == "prepare"):
            return "compute"
        if within:
            return "activations"
        if func is _CAST and "batch" in kinds:
            return "batch"
        return "gradients" if "gradients" in kinds and self.phase != "update" else "other"

    def _see(self, storage: torch.UntypedStorage, is_new: bool) -> Memory:
        memory = super()._see(storage, is_new)
        if memory.origin is None:
            memory.origin = _Life(self._kind if is_new else "other")
            self.lives.append(memory.origin)
        # What was there before the step was there from the first sample on.
        memory.origin.become(memory.nbytes, len(self.ops) if memory.is_new else 0)
        return memory

    def _forget(self, address: int) -> Callable[[Any], None]:
        forget = super()._forget(address)

        def end(reference: Any) -> None:
            memory = self.memories.get(address)
            if memory is not None and memory.origin is not None:
                memory.origin.become(0, len(self.ops))
            forget(reference)

        return end


def _run(step: TrainStep, parts: Any, params: Tree, batch: Tree, buffers: Tree, frozen: Tree) -> Timeline:
    fns, optimizers, scalers, microbatch_weight = parts
    watch = _LifeWatch()
    losses = {name: dataclasses.replace(loss, fn=watch.marked(fns[name])) for name, loss in step.config.losses.items()}
    config = dataclasses.replace(
        step.config,
        losses=losses,
        optimizers={key: watch.marked_optimizer(tx) for key, tx in optimizers.items()},
        scalers=scalers,
        microbatch_weight=microbatch_weight,
    )
    step = dataclasses.replace(step, config=config)
    with _naming("the optimizer", "one of fmp.optim, such as fmp.optim.adamw, can be measured"):
        state = step.init(params, buffers=buffers)
    watch.claim(batch, "batch")
    watch.claim(frozen, "params")
    watch.claim_state(state)
    watch.sample("start", "start")
    with uncompiled(), watch, _naming("the step", "use torch.where in the loss function, or measure a real step"):
        result = step(state, batch, frozen=frozen)
    watch.claim_state(result[0])
    return watch.timeline()


@contextlib.contextmanager
def _naming(what: str, advice: str) -> Iterator[None]:
    """Says who it was that looked at values."""
    try:
        yield
    except RuntimeError as error:
        if not (op := looks_at_values(error)):
            raise
        raise ValueError(
            f"measure_step: {what} looks at the values of tensors ({op}; `.item()`, `bool` and masks as indices do "
            f"so), and fake tensors have none; {advice}"
        ) from error


def _places(values: Any) -> list[int]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found += [storage._cdata for storage in storages(value)]
        elif isinstance(value, list | tuple):
            found += _places(value)
    return found
