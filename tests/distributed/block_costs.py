"""What gathered blocks send, keep and compile, measured in the processes of tests/distributed/test_blocks*.py."""

from typing import Any

import torch
from torch import Tensor

import fmp
from fmp import tree
from fmp.distributed.blocks import gathered_block
from fmp.distributed.shards import as_dtensors, local_shards
from tests.distributed.block_model import (
    ROWS,
    batch,
    bytes_sent,
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


def collectives(form: str, blocks: int, saveable: Any = fmp.saveable.nothing) -> tuple[dict[str, int], dict[str, int]]:
    """Counts the collectives of the forward pass, and those of it and the backward pass."""
    at = place()
    loss = loss_with(gathered_block(transformer, at, saveable=saveable))
    params, x = shared(model_params(blocks), at, form), own_rows(batch())
    return counted(lambda: loss(params, x)), counted(lambda: fmp.grad(loss)(params, x))


def peaks(blocks: int, width: int) -> dict[str, int]:
    """The peaks of a forward pass and of a gradient, and the bytes of one block in full."""
    at = place()
    params = shared([{"w": numbers(width, width), "v": numbers(width, width)} for _ in range(blocks)], at)
    x = numbers(2, width)

    def function(params: Any, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ params["w"]) @ params["v"])

    def loss_of(saveable: Any) -> Any:
        block = gathered_block(function, at, saveable=saveable)

        def loss(params: Any, x: Tensor) -> Tensor:
            for each in params:
                x = block(each, x)
            return x.square().mean()

        return loss

    return {
        "forward": fmp.memory.peak(loss_of(fmp.saveable.nothing), params, x),
        "gradient": fmp.memory.peak(fmp.grad(loss_of(fmp.saveable.nothing)), params, x),
        "func.grad": fmp.memory.peak(torch.func.grad(loss_of(fmp.saveable.nothing)), local_shards(params), x),
        "everything": fmp.memory.peak(fmp.grad(loss_of(fmp.saveable.everything)), params, x),
        "block": 2 * 4 * width * width,
    }


def low_precision(name: str) -> tuple[str, float, float]:
    """Gathers in 16 bits; compares with one process that casts, and tells what the gradients are."""
    dtype = getattr(torch, name)
    at = place()
    policy = fmp.Policy(None, dtype, None, keep_full=["norm.*"])
    block = gathered_block(transformer, at, compute=policy)
    params, x = shared(model_params(), at), own_rows(batch()).to(dtype)
    sent: list[str] = []

    def seen(params: Any, x: Tensor) -> Tensor:
        sent.append(tree.describe({key: params[key] for key in ("norm", "qkv", "ids")}))
        return transformer(params, x)

    gathered_block(seen, at, compute=policy)(params["blocks"][0], x)
    one = loss_with(lambda params, x: transformer(policy.cast_to_compute(params), x))
    grads = fmp.grad(loss_with(block))(params, x)
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(grads) if isinstance(leaf, Tensor))
    exact = fmp.grad(loss_with(transformer))(model_params(), batch())
    of_one = fmp.grad(one)(model_params(), batch().to(dtype))
    return sent[0], worst(whole(grads, at), exact), worst(of_one, exact)


def low_precision_bytes(name: str) -> tuple[int, int]:
    """The bytes that this rank sends of float32 parameters that are cast before, and of those that are not."""
    at = place()
    params = shared({"w": numbers(8, 4), "v": numbers(6)}, at)
    half, full = [gathered_block(lambda params: 0, at, compute=compute) for compute in (name, None)]
    return bytes_sent(lambda: half(params)), bytes_sent(lambda: full(params))


def reductions(name: str) -> list[float]:
    """What the mean over ranks of large float16 gradients becomes in some reduce dtype."""
    at = place(getattr(torch, name))
    block = gathered_block(lambda params, x: params["w"] * x, at)
    params = shared({"w": torch.ones(4, dtype=torch.float16)}, at)
    x = torch.full((4,), 40000.0, dtype=torch.float16)
    grads = fmp.grad(lambda params: block(params, x).sum())(params)
    return grads["w"].full_tensor().tolist()


def kept(form: str) -> tuple[float, set[str]]:
    """A policy of one's own that would keep everything, but does not get what is gathered."""
    at = place()
    asked: set[str] = set()

    def saveable(op: Any, args: Any) -> bool:
        asked.add(str(op))
        return True

    loss = loss_with(gathered_block(transformer, at, saveable=saveable))
    params, x = shared(model_params(), at, form), own_rows(batch())
    found = fmp.grad(loss)(params, x)
    return worst(whole(found, at), fmp.grad(loss_with(transformer))(model_params(), batch())), asked


def compressed(form: str) -> dict[str, Any]:
    """Frozen weights travel compressed, and arrive bit for bit; adapters on them are trained."""
    at = place()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**15), 2**15, (64, 64), generator=generator).to(torch.int16)
    weights = {"w": numbers(67, 64, seed=3).bfloat16(), "raw": noise.view(torch.bfloat16)}  # noise stays as it is
    nodes = fmp.df11.compress(weights)
    params = {"down": numbers(67, 3, seed=5), "up": numbers(3, 64, seed=6)}
    sharded = shared(nodes, at, form)
    arrived: list[bool] = []

    def lora(full: Any, x: Tensor) -> Tensor:
        weights_of, adapters = full
        pairs = [(weights_of[name].view(torch.int16), weights[name].view(torch.int16)) for name in weights]
        arrived.extend([torch.equal(left, right) for left, right in pairs])
        return x @ weights_of["w"].float() + x @ adapters["down"] @ adapters["up"]

    def loss_of(block: Any, frozen: Any) -> Any:
        return lambda params, x: block((frozen, params), x).square().mean()

    x = numbers(ROWS, 67)
    expected = fmp.grad(loss_of(lora, weights))(params, x)
    arrived.clear()
    loss = loss_of(gathered_block(lora, at), sharded)
    found = fmp.grad(loss)(shared(params, at, form), own_rows(x))
    sent = bytes_sent(lambda: gathered_block(lambda full, x: x, at)(sharded, x))
    return {
        "error": worst(whole(found, at), expected),
        "equal": all(arrived),
        "is_raw": [nodes[name].is_raw for name in ("w", "raw")],
        "sent": sent,
        "nbytes": sum(node.nbytes for node in nodes.values()),
    }


def compiled(how: str, form: str = "local", backend: str = "aot_eager") -> tuple[float, dict[str, int]]:
    """Gradients where torch.compile sees the blocks, and what a second call sends."""
    at = place()

    def mlp(params: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ params["up"].T) @ params["down"].T * params["gate"]

    def compile(fn: Any) -> Any:
        return torch.compile(fn, backend=backend, fullgraph=True)

    block = gathered_block(mlp, at)
    loss = loss_with(block)

    def step(params: Any, x: Tensor) -> Any:
        return as_dtensors(fmp.grad(loss)(local_shards(params), x), at.mesh)

    run = {
        "torch.func.grad": compile(torch.func.grad(loss)),
        "loss": fmp.grad(compile(loss)),
        "block": fmp.grad(loss_with(compile(block))),
        "function": fmp.grad(loss_with(gathered_block(compile(mlp), at))),
        "step": compile(step),
    }[how]
    model = model_params()
    model["blocks"] = [{name: each[name] for name in ("up", "down", "gate")} for each in model["blocks"]]
    params, x = shared(model, at, form), own_rows(batch())
    found = run(params, x)
    with torch.compiler.set_stance("fail_on_recompile"):
        counts = counted(lambda: run(tree.map(lambda leaf: leaf.clone(), params), x.clone()))
    return worst(whole(found, at), fmp.grad(loss_with(mlp))(model, batch())), counts


def compiled_for_many_sizes() -> float:
    """One compiled block that is given blocks of several sizes."""
    at = place()

    def layer(params: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ params["w"].T) + params["b"]

    def loss(params: Any, x: Tensor, block: Any) -> Tensor:
        for each in params:
            x = block(each, x)
        return x.square().mean()

    sizes = [(7, 9), (5, 7), (3, 5)]
    params = [{"w": numbers(*size), "b": numbers(size[0])} for size in sizes]
    block = torch.compile(gathered_block(layer, at), backend="aot_eager", fullgraph=True)
    found = fmp.grad(loss)(shared(params, at, "local"), own_rows(batch()), block)
    return worst(whole(found, at), fmp.grad(loss)(params, batch(), layer))
