"""A program: a model, a precision, a train step's options and what is around it, drawn at random and built."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

import fmp
from fmp import tree
from tests.soak import models
from tests.soak.optimizers import BY_NAME, NOT_MAPPED

Tensor = torch.Tensor
Tree = Any

HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
MEMBERS = 2
GROUPS = ("body", "head")


@dataclasses.dataclass(frozen=True)
class Program:
    """All choices, as plain values: its repr makes it again.

    Attributes:
        seed: Of parameters, batches and the state.
        layers: Kinds of `models.LAYERS`, the first perhaps an embedding.
        is_tied: Whether the head's weight is the embedding's table.
        rows: Rows of a microbatch.
        level: The opt level.
        half: The 16-bit format.
        master: The form of masters in O2, or in O3 False.
        scaler: None, a number, or the arguments of a dynamic one: init_scale, growth_factor, backoff_factor,
            growth_interval.
        optimizers: A row of the battery; two if each group of parameters has its own.
        second_loss: The groups that a second loss uses, if there is one.
        is_narrow: Whether the losses are computed in the dtype of the model's output.
        shrink: What the losses are multiplied by; small gradients are what loss scaling is for.
        clip: The largest norm.
        ema: The decay of the average of the parameters.
        accumulate: How many microbatches there are.
        donate: Whether the state is donated.
        remat: `"none"`, `"whole"`, `"block"` or `"sequential"`.
        has_buffers: Whether the loss keeps a running mean.
        around: `"plain"`, `"vmap"` or `"compile"`.
        steps: How many steps are made.
        poison: The step whose batch has an inf in it, and the number of the member; of those programs only that skip.
    """

    seed: int
    layers: tuple[str, ...]
    is_tied: bool
    rows: int
    level: str
    half: str
    master: str | bool
    scaler: float | tuple[float, float, float, int] | None
    optimizers: tuple[str, ...]
    second_loss: tuple[str, ...]
    is_narrow: bool
    shrink: float
    clip: float | None
    ema: float | None
    accumulate: int
    donate: bool
    remat: str
    has_buffers: bool
    around: str
    steps: int
    poison: tuple[int, int] | None

    @property
    def has_words(self) -> bool:
        """Whether the inputs are words."""
        return self.layers[0] == "embedding"

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that is computed in."""
        return torch.float32 if self.level == "O0" else HALVES[self.half]

    @property
    def members(self) -> int:
        """How many states there are."""
        return MEMBERS if self.around == "vmap" else 1

    @property
    def groups(self) -> tuple[str, ...]:
        """The parameters that have an optimizer of their own; one empty name for all together."""
        return GROUPS if len(self.optimizers) > 1 else ("",)

    @property
    def losses(self) -> dict[str, tuple[str, ...]]:
        """The names of the losses, and the groups that each changes."""
        first: dict[str, tuple[str, ...]] = {"first": GROUPS}
        return {**first, "second": self.second_loss} if self.second_loss else first

    @property
    def policy(self) -> fmp.Policy:
        """The precision policy."""
        options: dict[str, Any] = {}
        if self.level in ("O2", "O3"):
            options["master_weights"] = self.master
        if self.has_buffers and self.level in ("O2", "O3"):
            options["keep_full"] = "running"
        return fmp.opt_level(self.level, HALVES[self.half], loss_scale="none", **options)

    def params(self, member: int) -> Tree:
        """The parameters that a member starts from."""
        return models.make_params(self.layers, is_tied=self.is_tied, seed=self.seed + 1000 * member)

    def batch(self, step: int, member: int) -> dict[str, Tensor]:
        """The batch of one step of a member."""
        rows = self.rows * self.accumulate
        batch = models.make_batch(rows=rows, has_words=self.has_words, seed=self.seed + 1000 * member + 17 * step + 1)
        if self.poison == (step, member):
            batch["gain"][rows // 2] = torch.inf
        return batch

    def loss(self, name: str, remat: str | None = None) -> Callable[..., Any]:
        """Makes a loss function; in float64, it is the oracle of itself."""
        remat = self.remat if remat is None else remat
        kind = "absolute" if name == "second" else "square"

        def loss_fn(params: Tree, batch: Tree, *, seed: Tensor) -> tuple[Tensor, Tree]:
            out = models.apply(self.layers, params, batch["x"], seed, remat, self.is_tied)
            losses = models.row_losses(out, batch["y"], kind, is_narrow=self.is_narrow)
            gain = batch["gain"].to(losses.dtype)
            return (losses * gain).mean() * self.shrink, {"seed": seed, "out": out}

        def with_buffers(params: Tree, batch: Tree, *, seed: Tensor, buffers: Tree) -> tuple[Tensor, Tree, Tree]:
            loss, aux = loss_fn(params, batch, seed=seed)
            out = aux["out"].detach().mean((0, 1)).to(buffers["running"].dtype) * batch["gain"].mean().float()
            return loss, {"running": 0.5 * buffers["running"] + 0.5 * out}, aux

        return with_buffers if self.has_buffers else loss_fn

    def buffers(self) -> Tree:
        """The buffers of the first state."""
        return {"running": torch.zeros(models.WORDS if self.has_words else models.WIDTH)} if self.has_buffers else None

    def step(self, *, donate: bool = False, remat: str | None = None, probe: bool = False) -> fmp.TrainStep:
        """Makes the train step; as a probe, one that keeps the gradients in place of the optimizers' states."""
        losses: Any = {name: self.loss(name, remat) for name in self.losses}
        made: Any = {
            group: spy() if probe else BY_NAME[row].make()
            for group, row in zip(self.groups, self.optimizers, strict=True)
        }
        several = bool(self.second_loss)
        uses = {name: list(groups) for name, groups in self.losses.items()}
        return fmp.train_step(
            losses if several else losses["first"],
            made if len(self.groups) > 1 else made[""],
            policy=self.policy,
            loss_scale=self.make_scaler(),
            accumulate=self.accumulate,
            clip_norm=None if probe else self.clip,
            ema=self.ema,
            has_aux=True,
            skip_nonfinite=False if probe else None,
            uses=uses if several and len(self.groups) > 1 else None,
            donate=donate,
        )

    def make_scaler(self) -> Any:
        """Makes the loss scaler."""
        if isinstance(self.scaler, tuple):
            return fmp.DynamicLossScale(*self.scaler[:3], growth_interval=self.scaler[3])
        return self.scaler


def spy() -> fmp.optim.GradientTransformation:
    """An optimizer that changes nothing and keeps the gradients as its state."""
    return fmp.optim.GradientTransformation(
        init=lambda params: tree.map(lambda leaf: torch.zeros(leaf.shape), params),
        update=lambda grads, state, params: (tree.map(lambda leaf: None, grads), grads),
    )


def of_groups(program: Program, value: Any) -> Mapping[str, Any]:
    """A part of a state or of the metrics by group, where there may be one."""
    return value if len(program.groups) > 1 else {"": value}


def of_losses(program: Program, value: Any) -> Mapping[str, Any]:
    """The same by loss."""
    return value if program.second_loss else {"first": value}


@st.composite
def programs(draw: st.DrawFn, arounds: tuple[str, ...] = ("plain", "plain", "vmap")) -> Program:
    """Draws a program; `arounds` has what may be around the step, as often as it is to be drawn."""
    layers = tuple(draw(st.lists(st.sampled_from(models.LAYERS), min_size=1, max_size=5)))
    # The optimizers' masks want a weight and a bias in each group.
    layers = layers if set(layers) & set(models.HAVE_WEIGHT_AND_BIAS) else (*layers, "linear")
    has_words = draw(st.booleans())
    level = draw(st.sampled_from(["O0", "O1", "O2", "O2", "O3"]))
    half = draw(st.sampled_from(sorted(HALVES)))
    forms = ["f32", "kahan", "stochastic", *(["remainder"] if half == "bf16" else [])]
    scaler = draw(
        st.none()
        | st.sampled_from([1.0, 128.0, 3.0, 2.0**12])
        | st.tuples(
            st.sampled_from([1.0, 2.0**10, 2.0**16, 2.0**20]),
            st.sampled_from([2.0, 1.7, 8.0]),
            st.sampled_from([0.5, 0.3, 0.125]),
            st.integers(1, 3),
        )
    )
    around = draw(st.sampled_from(arounds))
    # A second loss that leaves a group out needs optimizers for each.
    has_second = draw(st.integers(0, 3)) == 0
    names = st.sampled_from([name for name in BY_NAME if around == "plain" or name not in NOT_MAPPED])
    is_split = draw(st.booleans())
    steps = draw(st.integers(1, 5))
    return Program(
        seed=draw(st.integers(0, 999)),
        layers=("embedding", *layers) if has_words else layers,
        is_tied=has_words and not is_split and draw(st.booleans()),
        rows=draw(st.integers(1, 4)),
        level=level,
        half=half,
        master=draw(st.sampled_from(forms)) if level == "O2" else False,
        scaler=scaler,
        optimizers=(draw(names), draw(names)) if is_split else (draw(names),),
        second_loss=draw(st.sampled_from([("head",), ("body",), GROUPS]))
        if has_second and is_split
        else (GROUPS if has_second else ()),
        is_narrow=draw(st.integers(0, 3)) == 0,
        shrink=draw(st.sampled_from([1.0, 1.0, 2.0**-14])),
        clip=draw(st.none() | st.sampled_from([0.05, 1.0, 50.0])),
        ema=draw(st.none() | st.sampled_from([0.5, 0.99])),
        accumulate=draw(st.sampled_from([1, 1, 2, 3])),
        donate=draw(st.booleans()),
        remat=draw(st.sampled_from(["none", "whole", "block", "sequential"])),
        has_buffers=draw(st.booleans()),
        around=around,
        steps=steps,
        poison=None
        if scaler is None
        else draw(st.none() | st.tuples(st.integers(0, steps - 1), st.integers(0, MEMBERS - 1))),
    )
