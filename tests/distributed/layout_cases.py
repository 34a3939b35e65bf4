"""Train steps that processes run with a layout, and what they report."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fmp
from fmp.distributed import Layout, gathered_block
from fmp.step.build import compiled_advance

Tree = Any
ROWS = 8  # of the global batch; a multiple of 4


def layout(zero: int | None, **options: Any) -> Layout | None:
    """The layout of all ranks; None for the step without one."""
    if zero is None:
        return None
    shape = options.pop("shape", (distributed.get_world_size(),))
    if zero == 3:
        options["blocks"] = ["hidden", "out*"]
    return Layout(init_device_mesh("cpu", shape), zero=zero, **options)


def params() -> dict[str, Any]:
    """Odd sizes, fewer rows than ranks, more entries than are summed at once, and a number."""
    made = torch.Generator().manual_seed(0)
    return {
        "hidden": {"weight": torch.randn(7, 601, generator=made) / 3, "bias": torch.randn(601, generator=made) / 10},
        "out.weight": torch.randn(601, 3, generator=made) / 25,
        "out.bias": torch.zeros(3),
        "norm.few": torch.ones(2, 301),
        "norm.gain": torch.tensor(1.0),
    }


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Global batches."""
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, 7, generator=made), torch.randn(ROWS, 3, generator=made)) for _ in range(count)]


def own(batch: Tree, place: Layout | None) -> Tree:
    """This rank's part of a batch."""
    if place is None:
        return batch
    return fmp.tree.map(lambda leaf: leaf.chunk(place.size)[place.part] if leaf.ndim else leaf, batch)


def hidden(params: Tree, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["weight"] + params["bias"])


def scaled(params: Tree, x: Tensor) -> Tensor:
    return x * params["norm.few"].flatten()[:-1].to(x.dtype) * params["norm.gain"].to(x.dtype)


def out(params: Tree, x: Tensor) -> Tensor:
    return x @ params["out.weight"] + params["out.bias"]


def loss_fn(params: Tree, batch: Tree) -> Tensor:
    x, y = batch
    return (out(params, scaled(params, hidden(params["hidden"], x))) - y).float().square().mean()


def loss_in_blocks(place: Layout, params: Tree, batch: Tree) -> Tensor:
    """The same loss, which gathers parameters layer by layer."""
    x, y = batch
    last = {name: leaf for name, leaf in params.items() if name.startswith("out")}
    x = scaled(params, gathered_block(hidden, place)(params["hidden"], x))
    return (gathered_block(out, place)(last, x) - y).float().square().mean()


def loss_for(place: Layout | None) -> Callable[..., Tensor]:
    return loss_fn if place is None or place.zero != 3 else functools.partial(loss_in_blocks, place)


def train(
    zero: int | None,
    optimizer: Callable[[], Any],
    steps: int = 4,
    how: dict[str, Any] | None = None,
    backend: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains, and returns losses, norms, and the state in full."""
    place = layout(zero, **(how or {}))
    loss = loss_for(place)
    step = fmp.train_step(loss, optimizer(), layout=place, **options)
    if backend is not None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        step = dataclasses.replace(step, advance=compiled_advance(backend=backend))
    state = step.init(params(), seed=5)
    found = follow(step, state, batches(steps), place)
    if backend is not None:
        found["graphs"] = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        torch._dynamo.reset()
    return found


def follow(step: fmp.TrainStep, state: fmp.TrainState, batches: list[Any], place: Layout | None) -> dict[str, Any]:
    """Makes steps."""
    metrics = []
    for batch in batches:
        state, found = step(state, own(batch, place))
        metrics.append(found)
    return {
        "losses": [found.loss for found in metrics],
        "norms": [found.grad_norm for found in metrics],
        "aux": [found.aux for found in metrics],
        "skipped": [found.skipped for found in metrics],
        "scales": [found.loss_scale for found in metrics],
        "state": state if place is None else place.full(state),
        "bytes": sum(
            leaf.nbytes
            for leaf in fmp.tree.leaves(state if place is None else place.opened(state)[0])
            if leaf is not None
        ),
    }


def train_many(zero: int | None, optimizers: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    return {name: train(zero, optimizer, steps=3) for name, optimizer in optimizers.items()}


def whole_numbers() -> list[Tensor]:
    """Batches of which all sums are exact, in any order."""
    made = torch.Generator().manual_seed(2)
    return [torch.randint(-4, 5, (ROWS, 5, 3), generator=made).float() for _ in range(3)]


def exact(zero: int | None, master_form: str) -> dict[str, Any]:
    """Trains by gradients without a rounding error, so that only the masters are rounded."""
    place = layout(zero)
    policy = fmp.opt_level("O2", half_dtype=torch.bfloat16, master_weights=master_form)

    def loss(params: Tree, batch: Tree) -> Tensor:
        return (params["a"].float() * batch).sum((1, 2)).mean() + params["b"].float()[:3].sum() * batch[:, 0, 0].mean()

    step = fmp.train_step(loss, fmp.optim.sgd(2.0**-12, momentum=0.5), policy=policy, layout=place)
    made = torch.Generator().manual_seed(3)
    state = step.init({"a": torch.randn(5, 3, generator=made), "b": torch.randn(4, generator=made)}, seed=9)
    return follow(step, state, whole_numbers(), place)


class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(15.0).reshape(5, 3))
        self.inner = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.weight  # dropout by a half doubles what it keeps: exact
        return torch.nn.functional.dropout1d(x, 0.5)


def noisy(zero: int | None, accumulate: int = 1) -> dict[str, Any]:
    """Trains with dropout of modules, in a recomputation, and with a mask of its own."""
    place = layout(zero)
    model = fmp.functionalize(Noisy())

    def loss(params: Tree, batch: Tensor, *, seed: Tensor) -> tuple[Tensor, Tree]:
        def run(params: Tree, x: Tensor) -> Tensor:
            return model.apply(params, model.buffers, x, seed=seed, train=True)[0]

        mask = fmp.random.keep_mask(fmp.random.fold_in(seed, 1), batch.shape, 0.5)
        x = fmp.remat(run)(params, batch * mask)
        return x.sum((1, 2)).mean(), {"rows": x.detach().sum((1, 2)), "mask": mask}

    step = fmp.train_step(loss, fmp.optim.sgd(2.0**-6), has_aux=True, accumulate=accumulate, layout=place)
    return follow(step, step.init(model.params, seed=11), whole_numbers(), place)


def overflowing(zero: int | None, bad_step: int) -> dict[str, Any]:
    """Trains in float16 on batches of which one has a row that overflows the gradient."""
    place = layout(zero)
    given = batches(4)
    given[bad_step][1][-1] = 3e4  # the last rank's
    loss = loss_for(place)
    step = fmp.train_step(
        loss,
        fmp.optim.adamw(1e-3),
        policy=fmp.opt_level("O2"),
        loss_scale=fmp.DynamicLossScale(init_scale=256.0),
        ema=0.5,
        layout=place,
    )
    return follow(step, step.init(params()), given, place)


def several(zero: int | None) -> dict[str, Any]:
    """Trains two groups by two losses, one of which changes both."""
    place = layout(zero)

    def first(params: Tree, batch: Tree) -> tuple[Tensor, Tensor]:
        return loss_fn(params["a"] | params["b"], batch), batch[0].sum(1)

    def second(params: Tree, batch: Tree) -> Tensor:
        return params["b"]["norm.few"].square().mean() * batch[0].square().mean()

    step = fmp.train_step(
        {"first": first, "second": second},
        {"a": fmp.optim.adamw(1e-2), "b": fmp.optim.chain(fmp.optim.clip_by_global_norm(0.1), fmp.optim.sgd(0.1))},
        uses={"second": ["b"]},
        loss_scale={"first": 8.0, "second": "dynamic"},
        has_aux={"first": True},
        clip_norm=1.0,
        layout=place,
    )
    made = params()
    parts = {"a": {"hidden": made.pop("hidden"), "out.weight": made.pop("out.weight")}, "b": made}
    return follow(step, step.init(parts), batches(3), place)


def sharing(zero: int | None) -> dict[str, Any]:
    """Trains with buffers and all kinds of auxiliary output."""
    place = layout(zero)

    def loss(params: Tree, batch: Tree, *, buffers: Tree) -> tuple[Tensor, Tree, Tree]:
        x, _ = batch
        buffers = {
            "mean": buffers["mean"] * 0.5 + x.mean(0) * 0.5,
            "count": buffers["count"] + 1,
            "fixed": buffers["fixed"],
        }
        aux = {
            "number": x.mean(),
            "half": x.mean().to(torch.bfloat16),
            "hits": (x > 0).sum(),
            "rows": x[:, :2],
            "signs": x[:, 0] > 0,
            "place": "here",
        }
        return loss_fn(params, batch), buffers, aux

    step = fmp.train_step(loss, fmp.optim.adamw(1e-2), has_aux=True, layout=place)
    buffers = {"mean": torch.zeros(7), "count": torch.tensor(0), "fixed": torch.full((3,), 0.1)}
    state = step.init(params(), buffers=buffers)
    return follow(step, state, batches(2), place)


def weighted(zero: int | None, per_rank: int) -> dict[str, Any]:
    """Trains on microbatches of which some tokens do not count, so many microbatches a rank."""
    place = layout(zero)

    def loss(params: Tree, batch: Tree) -> Tensor:
        x, y, valid = batch
        errors = (out(params, scaled(params, hidden(params["hidden"], x))) - y).square().mean(1)
        return (errors * valid).sum() / valid.sum()

    step = fmp.train_step(
        loss, fmp.optim.adamw(1e-2), accumulate=per_rank, microbatch_weight=lambda batch: batch[2].sum(), layout=place
    )
    valid = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    given = [(*batch, valid) for batch in batches(3)]
    return follow(step, step.init(params()), given, place)


class Collectives(TorchDispatchMode):
    """Lists the collectives that run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.names.append(func.name().removeprefix("_c10d_functional::"))
        return func(*args, **(kwargs or {}))


def collectives(zero: int, **options: Any) -> list[str]:
    """Lists the collectives of one step."""
    place = layout(zero)
    step = fmp.train_step(loss_fn, fmp.optim.adamw(1e-3), clip_norm=1.0, layout=place, **options)
    made = params()
    made["norm.gain"] = made["norm.gain"].reshape(1)  # without numbers, which are reduced by themselves
    state = step.init(made)
    with Collectives() as seen:
        step(state, own(batches(1)[0], place))
    return seen.names


def refusals() -> list[str]:
    """Does what is not allowed, and returns the messages."""
    rank = distributed.get_rank()
    place = layout(1)
    assert place is not None
    step = fmp.train_step(loss_fn, fmp.optim.adamw(1e-3), layout=place)
    state = step.init(params())
    other = params()
    other["out.bias"] = other["out.bias"] + rank
    shorter = params()
    shorter["out.bias"] = shorter["out.bias"][: 3 - rank]
    batch = batches(1)[0]
    alone = fmp.train_step(loss_fn, fmp.optim.adamw(1e-3))
    boolean = fmp.train_step(
        lambda params, batch: (loss_fn(params, batch), torch.tensor(True)),
        fmp.optim.sgd(0.1),
        has_aux=True,
        layout=place,
    )
    attempts: list[Callable[[], Any]] = [
        lambda: step.init(other),
        lambda: step.init(shorter),
        lambda: step.init(params(), seed=rank),
        lambda: torch.func.vmap(step, in_dims=(None, 0))(state, fmp.tree.map(lambda leaf: leaf.unsqueeze(0), batch)),
        lambda: step.init({"w": torch.ones(2, device="meta")}),
        lambda: boolean(boolean.init(params()), batch),
        lambda: Layout(place.mesh, zero=2),
        lambda: Layout(place.mesh, zero=3),
        lambda: Layout(place.mesh, zero=1, blocks=["a"]),
        lambda: Layout(place.mesh, reduce_dtype=torch.int32),
        lambda: Layout("cpu"),  # pyright: ignore[reportArgumentType]
        lambda: fmp.train_step(loss_fn, fmp.optim.sgd(0.1), layout=place.mesh),  # pyright: ignore[reportArgumentType]
        lambda: fmp.train_step(
            loss_fn, fmp.optim.sgd(0.1), microbatch_weight=lambda batch: batch[0].sum(), layout=layout(3)
        ),
        lambda: alone(state, batch),
        lambda: alone(place.full(state), batch),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except (TypeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("no error")
    return messages


def extended(zero: int | None) -> dict[str, Any]:
    """Adds a parameter in the middle of training."""
    place = layout(zero)

    def loss(params: Tree, batch: Tree) -> Tensor:
        added = params["more"].square().mean() if "more" in params else 0.0
        return loss_fn(params, batch) + added

    step = fmp.train_step(loss, fmp.optim.adamw(1e-2), ema=0.9, layout=place)
    state, _ = step(step.init(params()), own(batches(1)[0], place))
    state = step.extend(state, {"more": torch.arange(10.0).reshape(5, 2)})
    return follow(step, state, batches(2), place)


def donated(zero: int | None) -> list[str]:
    """Gives a state away, and says what using it again does; the loss before it may fail without harm."""
    place = layout(zero)
    step = fmp.train_step(loss_fn, fmp.optim.adamw(1e-2, fused=True), donate=True, layout=place)
    state = step.init(params())
    found = []
    try:
        step(state, (torch.ones(1),))
    except ValueError:
        found.append(f"kept {int(state.step)}")
    step(state, own(batches(1)[0], place))
    try:
        step(state, own(batches(1)[0], place))
    except fmp.errors.DonatedStateError:
        found.append("gone")
    return found


def saved(path: str) -> bool:
    """Saves and loads the replicated state on every rank, bit for bit."""
    place = layout(0)
    step = fmp.train_step(loss_fn, fmp.optim.adamw(1e-2), layout=place)
    state, _ = step(step.init(params()), own(batches(1)[0], place))
    mine = f"{path}-{distributed.get_rank()}"
    fmp.checkpoint.save(state, mine)
    again = fmp.checkpoint.load(step.init(params()), mine)
    pairs = zip(fmp.tree.leaves(state), fmp.tree.leaves(again), strict=True)
    return all(left is right is None or torch.equal(left, right) for left, right in pairs)
