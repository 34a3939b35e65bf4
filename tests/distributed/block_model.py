"""A small transformer, its parameters shared out over processes, and what the tests of gathered blocks ask of it."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from fmp import tree
from fmp.distributed.shards import as_dtensors, own_shards

WIDTH, HEADS, ROWS, WORDS = 9, 3, 4, 5  # no dimension is a multiple of 2 or 4


@dataclasses.dataclass(frozen=True)
class Place:
    """What a block needs of a layout."""

    mesh: DeviceMesh
    reduce_dtype: torch.dtype = torch.float32


def place(reduce_dtype: torch.dtype = torch.float32, hybrid: bool = False) -> Place:
    size = dist.get_world_size()
    shape, names = ((2, size // 2), ("replicas", "shards")) if hybrid else ((size,), ("shards",))
    return Place(init_device_mesh("cpu", shape, mesh_dim_names=names), reduce_dtype)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) / 3


def block_params(seed: int) -> dict[str, Any]:
    return {
        "norm": {"scale": 1 + numbers(WIDTH, seed=seed), "shift": numbers(WIDTH, seed=seed + 1)},
        "qkv": numbers(3 * WIDTH, WIDTH, seed=seed + 2),
        "up": numbers(2 * WIDTH + 1, WIDTH, seed=seed + 3),
        "down": numbers(WIDTH, 2 * WIDTH + 1, seed=seed + 4),
        "gate": numbers(1, seed=seed + 5),
        "ids": torch.arange(WIDTH),
        "name": "a block",
    }


def model_params(count: int = 2) -> dict[str, Any]:
    return {"blocks": [block_params(10 * index) for index in range(count)], "temperature": torch.tensor(1.5)}


def batch(rows: int = ROWS) -> Tensor:
    return numbers(rows, WORDS, WIDTH, seed=99)


def own_rows(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def transformer(params: dict[str, Any], x: Tensor) -> Tensor:
    h = layer_norm(x, (WIDTH,), params["norm"]["scale"].to(x.dtype), params["norm"]["shift"].to(x.dtype))
    h = h[..., params["ids"]] @ params["qkv"].T
    q, k, v = h.unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
    x = x + scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
    return x + params["gate"] * (torch.nn.functional.gelu(x @ params["up"].T) @ params["down"].T)


def loss_with(block: Any) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        for each in params["blocks"]:
            x = block(each, x)
        return (x.float().square() * params["temperature"]).mean()

    return loss


def shared(params: Any, at: Place, form: str = "dtensor") -> Any:
    """Shares out what has a first dimension."""
    local = own_shards(params, at.mesh)
    return local if form == "local" else as_dtensors(local, at.mesh)


def whole(grads: Any, at: Place) -> Any:
    """The full gradients, as one process would have them; those of what every rank has are averaged."""

    def full(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, DTensor):
            return leaf.full_tensor()
        leaf = leaf.clone()
        dist.all_reduce(leaf)
        return leaf / dist.get_world_size()

    return tree.map(full, as_dtensors(grads, at.mesh))


def worst(found: Any, expected: Any) -> float:
    """The largest difference of two trees, relative to the largest number of each leaf."""
    assert tree.structure(found) == tree.structure(expected)
    pairs = [
        (a.double(), b.double())
        for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True)
        if isinstance(b, Tensor) and b.is_floating_point()
    ]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def by_transform(by: str, loss: Any, params: Any, x: Tensor) -> Any:
    leaves, spec = tree.flatten(params)
    at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def of(*variables: Tensor) -> Tensor:
        filled = list(leaves)
        for index, variable in zip(at, variables, strict=True):
            filled[index] = variable
        return loss(tree.unflatten(spec, filled), x)

    chosen = [leaves[index] for index in at]
    if by == "grad":
        grads = torch.func.grad(of, argnums=tuple(range(len(at))))(*chosen)
    elif by == "vjp":
        vjp: Any = torch.func.vjp
        value, pull = vjp(of, *chosen)
        grads = pull(torch.ones_like(value))
    else:
        raise ValueError(by)
    found: list[Any] = [None] * len(leaves)
    for index, grad in zip(at, grads, strict=True):
        found[index] = grad
    return tree.unflatten(spec, found)


def counted(call: Any) -> dict[str, int]:
    """Counts the collectives that a call hands to the process group."""
    with torch.profiler.profile() as profile:
        call()
    return {
        event.key.removeprefix("c10d::"): event.count
        for event in profile.key_averages()
        if event.key.startswith("c10d::")
    }


def bytes_sent(call: Any) -> int:
    """Counts the bytes that this rank hands to `all_gather`."""
    sent = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal sent
            if func is torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default:
                sent += sum(tensor.nbytes for tensor in args[0])
            return func(*args, **(kwargs or {}))

    with Count():
        call()
    return sent
