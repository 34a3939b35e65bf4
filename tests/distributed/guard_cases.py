"""What processes must agree on, and what a layout refuses, run by the processes of tests/distributed/test_guards.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fmp
from fmp import optim
from fmp.distributed import Layout, full_params, gathered_block, own_shards
from tests.distributed.layout_cases import ROWS, batches, layout, loss_fn, own, params

Tree = Any


def narrow_sums(size: float, loss_scale: float) -> list[Tensor]:
    """Gradients of 2 * size, and of 3 in float64, that are reduced in float16; every way to reduce them."""
    found = []
    for zero in (0, 1, 3):
        for accumulate in (1, 2):
            blocks = {"blocks": ["w"]} if zero == 3 else {}
            place = Layout(init_device_mesh("cpu", (2,)), zero=zero, reduce_dtype=torch.float16, **blocks)

            def product(params: Tree, x: Tensor) -> Tensor:
                return (params["w"] * x).sum(1).mean()

            run = gathered_block(product, place) if zero == 3 else product

            def loss(params: Tree, x: Tensor, run: Any = run) -> Tensor:
                return size * run(params, x) + 3 * params["double"].sum().float()

            step = fmp.train_step(
                loss,
                optim.sgd(1.0),
                layout=place,
                loss_scale=loss_scale,
                accumulate=accumulate,
            )
            state = step.init({"w": torch.zeros(3), "double": torch.zeros(1, dtype=torch.float64)})
            rows = torch.tensor([1.0, 2.0, 2.0, 3.0])  # 2 in the mean, and another one on each rank
            state, _ = step(state, own(rows.unsqueeze(1).expand(4, 3).contiguous(), place))
            whole = place.full(state.params)
            found += [whole["w"] / -size, whole["double"].float()]
    return found


def message_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals() -> list[str]:
    """Does what is not allowed on two ranks, and returns the messages."""
    rank = distributed.get_rank()
    whole, place, in_blocks = layout(0), layout(1), layout(3)
    assert whole is not None
    assert place is not None
    assert in_blocks is not None
    rows = place.place(params())
    shards = own_shards(params(), place.mesh)
    batch = own(batches(1)[0], place)

    def step_of(
        layout: Layout | None, loss: Any = loss_fn, optimizer: Any = None, **options: Any
    ) -> tuple[fmp.TrainStep, fmp.TrainState]:
        step = fmp.train_step(loss, optimizer or optim.lamb(1e-2), layout=layout, **options)
        return step, step.init(params())

    def run(layout: Layout | None, batch: Tree, loss: Any = loss_fn, **options: Any) -> Any:
        step, state = step_of(layout, loss, **options)
        return step(state, batch)

    def with_aux(aux: Tensor) -> Any:
        return run(place, batch, lambda params, batch: (loss_fn(params, batch), {"aux": aux}), has_aux=True)

    def norm_in_loss(params: Tree, batch: Tree) -> Tensor:
        return fmp.global_norm(params) * batch[0].mean()

    def beside(params: Tree, batch: Tree) -> Tensor:
        return loss_fn(params, batch["xy"])

    step, state = step_of(whole)
    update = {"clip": optim.clip_by_global_norm(1.0), "adafactor": optim.adafactor(1e-2)}
    update |= {"lamb": optim.lamb(1e-2), "larc": optim.larc(1e-2)}
    attempts: list[Callable[[], Any]] = [
        lambda: step.init(rows),
        lambda: step(step_of(place)[1], batch),
        lambda: step(fmp.tree.replace(state, opt_state=step_of(place)[1].opt_state), batch),
        lambda: Layout(place.mesh, zero=3, blocks=["hidden", "typo*"]).place(params()),
        lambda: run(place, fmp.tree.map(lambda leaf: leaf[rank:], batch)),
        lambda: run(place, {"xy": fmp.tree.map(lambda leaf: leaf[rank:], batch), "weights": torch.ones(9)}, beside),
        lambda: with_aux(torch.full((2 + rank, 2), float(rank))),
        lambda: with_aux(torch.ones((2, 3) if rank else (3, 2))),  # of as many bytes
        lambda: with_aux(torch.ones(4, dtype=torch.int32 if rank else torch.float32)),
        lambda: fmp.all_finite(shards),
        lambda: fmp.global_norm(shards),
        lambda: update["clip"].update(shards, (), shards),
        lambda: update["adafactor"].update(shards, update["adafactor"].init(shards), shards),
        lambda: update["lamb"].update(shards, update["lamb"].init(shards), shards),
        lambda: update["larc"].update(shards, update["larc"].init(shards), shards),
        lambda: fmp.train_step(loss_fn, optim.sgd(0.1)).init(shards),
        lambda: step_of(place)[0].init(shards),
        lambda: run(in_blocks, batch, norm_in_loss),
    ]
    return [message_of(attempt) for attempt in attempts]


def full_is_kept() -> list[tuple[Tree, Tree]]:
    """What `full` returned, before and after a donating step that overwrites the parameters."""

    def loss(params: Tree, x: Tensor) -> Tensor:
        return params["w"].sum() * params["gain"] * x.mean()

    found = []
    for zero in (0, 1):
        place = layout(zero)
        assert place is not None
        step = fmp.train_step(loss, optim.adamw(0.1, fused=True), layout=place, donate=True)
        state = step.init({"w": torch.ones(4), "gain": torch.tensor(1.0)})
        full = place.full(state.params)
        before = fmp.tree.map(torch.clone, full)
        step(state, torch.ones(2))
        found.append((before, full))
    return found


def outside() -> str:
    """Makes a layout on two ranks of three."""
    message = message_of(lambda: Layout(DeviceMesh("cpu", torch.tensor([0, 1])), zero=1))
    torch.distributed.barrier()  # nobody leaves while others still connect
    return message


def uneven_but_weighted(zero: int | None) -> Tree:
    """Parts of 5 and of 3 rows, which weights make right."""
    place = layout(zero)
    step = fmp.train_step(
        loss_fn, optim.sgd(0.1), layout=place, microbatch_weight=lambda batch: torch.tensor(float(len(batch[0])))
    )
    rows = slice(None) if place is None else (slice(0, 5), slice(5, ROWS))[place.part]
    state, metrics = step(step.init(params()), fmp.tree.map(lambda leaf: leaf[rows], batches(1)[0]))
    return metrics.loss, state.params if place is None else place.full(state.params)


def buffers_of_idle_ranks(zero: int) -> tuple[Tree, Tree]:
    """On four ranks, of which the last has nothing in its first microbatch, and none has anything in the second."""
    place = layout(zero)

    def loss(params: Tree, batch: Tree, *, buffers: Tree) -> tuple[Tensor, Tree]:
        x, valid = batch
        value = (x * params["w"] * valid).sum() / valid.sum().clamp(min=1.0)
        return value, {"count": buffers["count"] + 1, "seen": buffers["seen"] | True, "mean": buffers["mean"] + 1.0}

    step = fmp.train_step(
        loss, optim.sgd(0.1), accumulate=2, microbatch_weight=lambda batch: batch[1].sum(), layout=place
    )
    buffers = {"count": torch.tensor(0), "seen": torch.tensor(False), "mean": torch.zeros(2)}
    state = step.init({"w": torch.ones(1)}, buffers=buffers)
    valid = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    state, _ = step(state, own((torch.ones(8), valid), place))
    return state.buffers, place.full(state.params) if place is not None else None


def integers() -> tuple[list[Tensor], Tensor]:
    """Adds up whole numbers that float64 cannot hold."""
    place = layout(1)
    rank = distributed.get_rank()
    values = [torch.tensor(2**60 + 1 + rank), torch.tensor(-(2**61) - 1), torch.tensor(100 + rank, dtype=torch.uint8)]

    def loss(params: Tree, batch: Tree) -> tuple[Tensor, Tree]:
        return loss_fn(params, batch), [*values, torch.tensor(2**-30 + rank, dtype=torch.float64)]

    step = fmp.train_step(loss, optim.sgd(0.1), has_aux=True, layout=place)
    _, metrics = step(step.init(params()), own(batches(1)[0], place))
    return metrics.aux[:3], metrics.aux[3]


def factored_moments() -> str:
    """What each of two ranks keeps of Adafactor's moments."""
    place = layout(1)
    assert place is not None
    step = fmp.train_step(loss_fn, optim.adafactor(1e-2), layout=place)
    state = step.init({"matrix": torch.zeros(8, 3), "stack": torch.zeros(4, 3, 5)})
    found = place.opened(state.opt_state)[0]
    return fmp.tree.describe((found.row, found.column))


def odd_strides() -> list[tuple[str, Tree, Tree]]:
    """Sends one row a rank, of tensors of odd strides, or that are not stored as they read; adds what is right."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    columns = torch.arange(5.0 * size).reshape(size, 5)
    whole = {"row": columns[:, 0], "column": columns.T[:2].T[:, :1]}

    def aux_of(batch: Tensor) -> Tree:
        turned = torch.complex(batch[:, 1], batch[:, 2])
        lazy = {"conj": turned.conj(), "neg": turned.conj().imag, "empty": batch[:, :0], "none": batch[:0].T}
        return {**lazy, "first": batch[:, 0], "byte": batch[:, 3].to(torch.float8_e4m3fn)}

    found = []
    for zero in (0, 1):
        place = Layout(init_device_mesh("cpu", (size,)), zero=zero)
        step = fmp.train_step(
            lambda params, batch: ((batch[:, 0] * params["row"]).square().mean(), aux_of(batch)),
            optim.sgd(0.1),
            layout=place,
            has_aux=True,
        )
        state, metrics = step(step.init(whole), columns[rank : rank + 1] + 1)
        rows = [aux_of(columns[each : each + 1] + 1) for each in range(size)]
        expected = fmp.tree.map(lambda *parts: torch.cat([part.clone() for part in parts]), *rows)
        for tree in (metrics.aux, expected):
            tree["byte"] = tree["byte"].float()  # float8 cannot be pickled
        found.append((f"aux, {zero}", metrics.aux, expected))
        rate = 0.2 * (columns[:, 0] + 1).square().mean() / size
        found.append((f"params, {zero}", place.full(state.params)["row"], whole["row"] * (1 - rate)))
    place = Layout(init_device_mesh("cpu", (size,)), zero=3, blocks=["*"])
    found.append(("own_shards", full_params(own_shards(whole, place.mesh), place), whole))
    place.check_alike({"conj": torch.complex(columns, columns)[:1, 0].conj()})
    return found


def two_dtypes(shape: tuple[int, ...]) -> tuple[Tree, Tree]:
    """Steps with a block whose leaves are of two dtypes, on a mesh and on one device; returns both parameters."""
    values = {"narrow": torch.arange(10.0).reshape(5, 2), "wide": torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)}
    rows = torch.arange(40.0).reshape(8, 5) / 40
    place = Layout(init_device_mesh("cpu", shape), zero=3, blocks=["*"])

    def product(params: Tree, x: Tensor) -> Tensor:
        return (x @ params["narrow"]).sum(1, keepdim=True) * params["wide"].float()

    found = []
    for where in (place, None):
        run = gathered_block(product, where)
        step = fmp.train_step(lambda params, x, run=run: run(params, x).square().mean(), optim.sgd(0.1), layout=where)
        state = step.init(values)
        for _ in range(2):
            state, _ = step(state, rows if where is None else own(rows, where))
        found.append(state.params if where is None else where.full(state.params))
    return found[0], found[1]


def after_the_end(folder: str) -> list[str]:
    """Uses what belongs to a process group that has been destroyed, and then to one of fewer ranks."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    messages = []
    places = [Layout(init_device_mesh("cpu", (size,)), zero=zero) for zero in (0, 1)]
    places.append(Layout(init_device_mesh("cpu", (size,)), zero=3, blocks=["w"]))
    run = gathered_block(lambda w, x: x @ w, places[-1])
    shards = own_shards({"w": torch.ones(3, 2)}, places[-1].mesh)
    steps = [fmp.train_step(lambda params, x: (x @ params["w"]).sum(), optim.sgd(0.1), layout=each) for each in places]
    states = [step.init({"w": torch.ones(3, 2)}) for step in steps]

    def attempt() -> None:
        for step, state in zip(steps[:2], states[:2], strict=True):
            messages.append(message_of(lambda step=step, state=state: step(state, torch.ones(1, 3))))
        messages.append(message_of(lambda: run(shards["w"], torch.ones(1, 3))))
        messages.append(message_of(lambda: steps[0].init({"w": torch.ones(3, 2)})))

    distributed.barrier()
    distributed.destroy_process_group()
    attempt()
    distributed.init_process_group("gloo", init_method=f"file://{folder}/{rank}", rank=0, world_size=1)
    attempt()
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", init_method=f"file://{folder}/all", rank=rank, world_size=size)
    return messages


def one_alone() -> list[str]:
    """Work that ends in an error on the last rank only, on none and on all."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    messages = []
    for shape in ((size,), (2, size // 2)):
        place = Layout(init_device_mesh("cpu", shape), zero=1)

        def work(failing: list[int]) -> str:
            if rank in failing:
                raise KeyError("x" * 2000 if rank else "short")
            return f"rank {rank}"

        assert place.together(lambda: work([])) == f"rank {rank}"
        messages += [message_of(lambda: place.together(lambda: work([size - 1]))) for _ in range(2)]
        messages.append(message_of(lambda: place.together(lambda: work([*range(size)]))))
    return messages
