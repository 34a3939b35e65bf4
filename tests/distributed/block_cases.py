"""What the processes of tests/distributed/test_blocks.py run, each on its rows of one batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fmp
from fmp import tree
from fmp.distributed.blocks import gathered_block
from fmp.distributed.shards import LocalShard, as_dtensors, local_shards
from tests.distributed.block_model import (
    WIDTH,
    batch,
    block_params,
    by_transform,
    counted,
    loss_with,
    model_params,
    numbers,
    own_rows,
    place,
    shared,
    transformer,
    whole,
    worst,
)


def gradients(form: str = "dtensor", by: str = "fmp", hybrid: bool = False) -> float:
    at = place(hybrid=hybrid)
    loss = loss_with(gathered_block(transformer, at))
    params = shared(model_params(), at, form)
    expected = fmp.grad(loss_with(transformer))(model_params(), batch())
    if by == "fmp":
        found = fmp.grad(loss)(params, own_rows(batch()))
    else:
        found = by_transform(by, loss, params, own_rows(batch()))
    return worst(whole(found, at), expected)


def second_derivatives() -> tuple[float, float]:
    """Hessian-vector products, by reverse over reverse and by forward over reverse."""
    at = place()
    x = own_rows(batch())
    names = ("up", "down")
    params = {name: block_params(0)[name] for name in names}
    tangent = {name: numbers(*params[name].shape, seed=7) for name in names}

    def mlp(params: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ params["up"].T) @ params["down"].T

    def of(block: Any, x: Tensor) -> Any:
        return lambda params: block(params, block(params, x)).square().mean()

    def product(loss: Any, params: Any, tangent: Any) -> Any:
        return torch.func.grad(lambda p: sum_of(torch.func.grad(loss)(p), tangent))(params)

    def sum_of(a: Any, b: Any) -> Any:
        return sum((left * right).sum() for left, right in zip(tree.leaves(a), tree.leaves(b), strict=True))

    expected = torch.func.grad(lambda p: sum_of(torch.func.grad(of(mlp, batch()))(p), tangent))(params)
    sharded, moved = local_shards(shared(params, at)), local_shards(shared(tangent, at))
    loss = of(gathered_block(mlp, at), x)
    reverse = torch.func.grad(lambda p: sum_of(torch.func.grad(loss)(p), moved))(sharded)
    forward = torch.func.jvp(torch.func.grad(loss), (sharded,), (moved,))[1]
    return worst(whole(reverse, at), expected), worst(whole(forward, at), expected)


def per_sample() -> float:
    at = place()
    params = {"up": block_params(0)["up"], "down": block_params(0)["down"]}

    def mlp(params: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ params["up"].T) @ params["down"].T

    def loss_of(block: Any) -> Any:
        return lambda params, x: block(params, x).square().mean()

    found = torch.func.vmap(torch.func.grad(loss_of(gathered_block(mlp, at))), (None, 0))(
        local_shards(shared(params, at)), own_rows(batch())
    )
    samples = torch.func.vmap(torch.func.grad(loss_of(mlp)), (None, 0))(params, batch())
    expected = tree.map(lambda leaf: leaf.unflatten(0, (dist.get_world_size(), -1)).mean(0), samples)
    parts = []
    for name in params:
        mine = found[name].local
        rows = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(rows, mine)
        parts.append(worst(torch.cat(rows, 1), expected[name]))
    return max(parts)


def tied_and_frozen(form: str) -> dict[str, Any]:
    """One weight at two places, one that is not differentiated, one that no block uses, and one block called twice."""
    at = place()
    tied = numbers(WIDTH, WIDTH, seed=1)
    params = {"first": {"in": tied, "out": tied, "unused": numbers(5)}, "last": {"head": tied, "gate": numbers(3)}}
    frozen = {"base": numbers(WIDTH, WIDTH, seed=2)}

    def first(params: Any, frozen: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ params["in"]) @ params["out"].T + x @ frozen["base"]

    def last(params: Any, x: Tensor) -> Tensor:
        return (x @ params["head"]) * params["gate"].sum()

    def loss_of(first: Any, last: Any, frozen: Any) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            x = first(params["first"], frozen, x)
            return last(params["last"], first(params["first"], frozen, x)).square().mean()

        return loss

    def retied(params: Any) -> Any:
        shard = params["first"]["in"]
        return {"first": params["first"] | {"out": shard}, "last": params["last"] | {"head": shard}}

    blocks = gathered_block(lambda p, x: first(p[0], p[1], x), at), gathered_block(last, at)
    loss = loss_of(lambda p, f, x: blocks[0]((p, f), x), blocks[1], shared(frozen, at, form))
    expected = fmp.grad(loss_of(first, last, frozen))(params, batch())
    sharded = retied(shared(params, at, form))
    found = fmp.grad(loss)(sharded, own_rows(batch()))
    counts = counted(lambda: fmp.grad(loss)(sharded, own_rows(batch())))
    transformed = by_transform("grad", loss, shared(params, at, form), own_rows(batch()))
    error = max(worst(whole(each, at), expected) for each in (found, transformed))
    return {"error": error, "counts": counts}


def nested(form: str) -> float:
    """Gathered blocks inside of remat, inside of remat_sequential, and inside of one another."""
    at = place()
    block = gathered_block(transformer, at)

    def pair(params: Any, x: Tensor) -> Tensor:
        return block(params[1], block(params[0], x))

    def loss_of(pair: Any) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            return (fmp.remat(pair)(params["blocks"], x).square() * params["temperature"]).mean()

        return loss

    def plain(params: Any, x: Tensor) -> Tensor:
        return transformer(params[1], transformer(params[0], x))

    params, x = shared(model_params(), at, form), own_rows(batch())
    expected = fmp.grad(loss_of(plain))(model_params(), batch())
    found = [
        fmp.grad(loss_of(pair))(params, x),
        by_transform("grad", loss_of(pair), params, x),
        fmp.grad(loss_of(gathered_block(lambda full, x: transformer(full[1], transformer(full[0], x)), at)))(params, x),
    ]
    return max(worst(whole(each, at), expected) for each in found)


def not_finite() -> list[bool]:
    """A loss that is not finite on one rank only is so for all, and nobody waits."""
    at = place()
    loss = loss_with(gathered_block(transformer, at))
    x = own_rows(batch()).clone()
    if dist.get_rank() == 0:
        x[0, 0, 0] = float("nan")
    grads = as_dtensors(fmp.grad(loss)(shared(model_params(), at), x), at.mesh)
    return [bool(torch.isfinite(block["up"].full_tensor()).all()) for block in grads["blocks"]]


def other_forms() -> dict[str, Any]:
    """Leaves of other dtypes and sizes arrive as they were, and are differentiated where they can be."""
    at = place()
    params = {
        "double": numbers(5, 2).double(),
        "complex": torch.complex(numbers(3, 2), numbers(3, 2, seed=1)),
        "flags": torch.arange(7) % 3 == 0,
        "small": torch.arange(6).to(torch.int16),
        "float8": numbers(4).to(torch.float8_e4m3fn),
        "one row": numbers(1, 3),
        "no rows": torch.empty(0, 3),
        "no columns": torch.empty(4, 0),
        "number": torch.tensor(2.0),
        "nothing": None,
        "text": "text",
    }
    placed = {
        name: LocalShard(params[name][: 4 // dist.get_world_size()], params[name].shape) for name in ["no columns"]
    }
    sharded = {**shared(params, at, "local"), **placed}
    same: list[bool] = []

    def look(full: Any) -> Any:
        pairs = [(full[name], leaf) for name, leaf in params.items()]
        same.extend([torch.equal(a.flatten(), b.flatten()) if isinstance(b, Tensor) else a is b for a, b in pairs])
        return (full["double"].square().sum() + full["one row"].sum() + full["complex"].abs().square().sum()).float()

    grads = as_dtensors(fmp.grad(gathered_block(look, at))(sharded), at.mesh)
    double, complex_, row = [grads[name].full_tensor() for name in ("double", "complex", "one row")]
    return {
        "same": all(same) and bool(same),
        "grads": [
            torch.allclose(double, 2 * params["double"], rtol=1e-12),
            torch.allclose(complex_, 2 * params["complex"]),
            torch.equal(row, torch.ones(1, 3)),
        ],
    }


def under_op_rules() -> float:
    """A policy that casts op by op around the loss reaches into the block, and not into the gather."""
    at = place()
    policy = fmp.opt_level("O1", half_dtype=torch.bfloat16)
    found = fmp.grad(fmp.autocast(loss_with(gathered_block(transformer, at)), policy))(
        shared(model_params(), at), own_rows(batch())
    )
    exact = fmp.grad(loss_with(transformer))(model_params(), batch())
    return worst(whole(found, at), exact)


def refused(which: str) -> str:
    at = place()
    block = gathered_block(lambda params, x: x @ params["w"], at)
    w, x = numbers(4, 4), numbers(2, 4)
    half = dist.get_world_size() // 2
    params = {
        "replicated": lambda: distribute_tensor(w, at.mesh, [Replicate()]),
        "columns": lambda: distribute_tensor(w, at.mesh, [Shard(1)]),
        "mesh": lambda: distribute_tensor(w, init_device_mesh("cpu", (half, 2)), [Replicate(), Shard(0)]),
        "rows": lambda: LocalShard(w, w.shape),
        "number": lambda: LocalShard(torch.ones(()), torch.Size([])),
        "compiled": lambda: distribute_tensor(w, at.mesh, [Shard(0)]),
    }[which]()
    run = torch.compile(block, backend="eager", fullgraph=True) if which == "compiled" else block
    try:
        run({"w": params}, x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def rows_of_jacobians() -> dict[str, Any]:
    """Many cotangents at once: by vmap of a pullback they are mapped, by is_grads_batched refused."""
    at = place()
    w, x = numbers(3, 2), numbers(4, 3)
    block = gathered_block(lambda params, x: torch.tanh(x @ params["w"]), at)
    sharded = shared({"w": w}, at, "local")
    found = torch.func.jacrev(lambda params: block(params, own_rows(x)).mean(0))(sharded)
    expected = torch.func.jacrev(lambda w: torch.tanh(x @ w).mean(0))(w)
    local: Any = sharded["w"].local.requires_grad_()
    out = block({"w": LocalShard(local, w.shape)}, own_rows(x))
    try:
        torch.autograd.grad(out, local, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)
        message = "nothing"
    except RuntimeError as error:
        message = str(error)
    return {"rows": found["w"].local.detach(), "expected": expected, "message": message}


def drawn() -> float:
    """What a block draws, it draws again when it is recomputed."""
    at = place()

    def dropped(params: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x @ params["w"], 0.5)

    params, x = {"w": numbers(9, 9)}, own_rows(batch())
    block = gathered_block(dropped, at)
    torch.manual_seed(0)
    found = fmp.grad(lambda params: block(params, x).square().mean())(shared(params, at))
    torch.manual_seed(0)
    own = fmp.grad(lambda params: dropped(params, x).square().mean())(params)
    return worst(whole(found, at), whole(own, at))
