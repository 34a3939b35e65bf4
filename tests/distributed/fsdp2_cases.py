"""What the processes of tests/distributed/test_fsdp2.py and test_refusals.py run."""

import copy
import functools
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fmp
from fmp._compat import fsdp
from fmp.distributed import fsdp2_params, fsdp2_value_and_grad

WIDTH = 7


class Net(nn.Module):
    def __init__(self, with_statistics: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)) for _ in "ab")
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(WIDTH) if with_statistics else nn.LayerNorm(WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(self.frozen(x))


def plain(with_statistics: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(with_statistics)


def sharded(policy: MixedPrecisionPolicy | None = None, with_statistics: bool = False) -> Net:
    net = plain(with_statistics)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    return net


def batch(step: int = 0, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def own_rows(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return pair[0].chunk(size)[rank], pair[1].chunk(size)[rank]


def loss_fn(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (module(batch[0]) - batch[1]).square().mean()


def with_aux(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    out = module(batch[0])
    return (out - batch[1]).square().mean(), {"mean": out.mean(), "rows": len(out)}


def steps(count: int) -> tuple[list[float], dict[str, Tensor]]:
    """Trains on FSDP2's gradients; returns the losses, and the full parameters at the end."""
    module = sharded()
    run = fsdp2_value_and_grad(module, loss_fn)
    params = fsdp2_params(module)
    optimizer = fmp.optim.adamw(1e-2, weight_decay=0.1)
    state, losses = optimizer.init(params), []
    for step in range(count):
        loss, grads = run(params, own_rows(batch(step)))
        updates, state = optimizer.update(grads, state, params)
        params = fmp.optim.apply_updates(params, updates)
        losses.append(loss.item())
    return losses, {name: full(param) for name, param in params.items()}


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor()


def purity() -> dict[str, Any]:
    module = sharded()
    run = fsdp2_value_and_grad(module, with_aux, has_aux=True)
    params = fsdp2_params(module)
    before = {name: param.to_local().clone() for name, param in params.items()}  # pyright: ignore[reportAttributeAccessIssue]
    (first, aux), grads = run(params, own_rows(batch()))
    others = {name: param + 1 for name, param in params.items()}
    run(others, own_rows(batch()))
    with torch.no_grad():
        module(own_rows(batch())[0])  # leaves the parameters whole
    (again, _), grads_again = run(params, own_rows(batch()))
    trained = [name for name, grad in grads.items() if grad is not None]
    return {
        "same loss": bool(first == again),
        "same gradients": all(torch.equal(local(grads[name]), local(grads_again[name])) for name in trained),
        "inputs unchanged": all(torch.equal(local(params[name]), before[name]) for name in params),
        "no grad left": all(param.grad is None for param in module.parameters()),
        "none": sorted({name.split(".")[0] for name, grad in grads.items() if grad is None}),
        "placed": all(grads[name].placements == params[name].placements for name in trained),  # pyright: ignore
        "aux": (aux["rows"], aux["mean"].requires_grad),
        "detached": not first.requires_grad,
    }


def local(tensor: Any) -> Tensor:
    return tensor.to_local()


def ignored() -> tuple[list[str], float, str]:
    """Trains a module of which FSDP2 leaves two parameters out; which gradients are plain, and how far they are off."""
    net = plain()
    left_out = {net.norm.weight, net.blocks[1][0].weight}  # pyright: ignore[reportIndexIssue]
    left_out |= set(net.unused.parameters())
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params=left_out)
    _, grads = fsdp2_value_and_grad(net, loss_fn)(fsdp2_params(net), own_rows(batch()))
    one = plain()
    loss_fn(one, batch()).backward()
    expected = {name: param.grad for name, param in one.named_parameters() if param.grad is not None}
    found = {name: grad for name, grad in grads.items() if grad is not None}
    assert found.keys() == expected.keys()
    kept = [name for name, grad in found.items() if not isinstance(grad, DTensor)]
    worst = max(float((whole(found[name]) - grad).abs().max()) for name, grad in expected.items())
    everything = plain()
    fully_shard(everything, ignored_params=set(everything.parameters()))
    return kept, worst, message_of(lambda: fsdp2_params(everything))


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def without_sync() -> list[str]:
    """Sets a module to leave gradients unreduced, in all ways that there are, and after a backward pass that did."""
    module = sharded()
    params, data = fsdp2_params(module), own_rows(batch())
    run = fsdp2_value_and_grad(module, loss_fn)
    part: Any = module.blocks[1]
    found = []
    for change in (
        part.set_requires_gradient_sync,
        part.set_requires_all_reduce,
        cast(Any, module).set_is_last_backward,
    ):
        change(False)
        found.append(message_of(lambda: run(params, data)))
        change(True)
    part.set_requires_gradient_sync(False)
    loss_fn(module, data).backward()
    part.set_requires_gradient_sync(True)
    found.append(message_of(lambda: run(params, data)))
    loss_fn(module, data).backward()
    found.append(message_of(lambda: run(params, data)))
    return found


def other_divisors() -> list[str]:
    """Sets a module to divide sums of gradients by other numbers, the last of which is the number of ranks."""
    module = sharded()
    params, data, count = fsdp2_params(module), own_rows(batch()), dist.get_world_size()
    run = fsdp2_value_and_grad(module, loss_fn)
    found = []
    for part in (module, module.blocks[1]):
        for factor in (count + 1.0, float(count)):
            cast(Any, part).set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds
            cast(Any, part).set_gradient_divide_factor(factor)
            found.append(message_of(lambda: run(params, data)))
    return found


def cut_short() -> list[bool]:
    """Raises in the middle of a pass, forward and backward; says whether the next call has the bits of the first."""
    module = sharded()
    params, data = fsdp2_params(module), own_rows(batch())
    at = ""

    def raises(*_: Any) -> None:
        raise KeyError(at)

    def with_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        hooked = cast(Any, module).blocks[1][0]
        if at == "backward":
            handle = hooked.register_forward_hook(lambda module, args, out: out.register_hook(raises) and None)
        else:
            handle = hooked.register_forward_pre_hook(raises if at == "forward" else lambda *_: None)
        try:
            loss = loss_fn(module, batch)
        finally:
            handle.remove()
        if at == "loss":
            raises()
        return loss

    run = fsdp2_value_and_grad(module, with_error)
    first = run(params, data)
    found = []
    for at in ("forward", "forward", "backward", "loss", "backward", "forward"):
        found.append(message_of(lambda: run(params, data)) == f"KeyError: '{at}'")
        at = ""
        again = run(params, data)
        found.append(same_gradients(first, again))
    # Outside of the call, too.
    at = "forward"
    found.append(message_of(lambda: with_error(module, data)) == "KeyError: 'forward'")
    at = ""
    found.append(fsdp2_params(module).keys() == params.keys())
    found.append(same_gradients(first, run(params, data)))
    return found


def same_gradients(first: Any, again: Any) -> bool:
    pairs = [(first[1][name], again[1][name]) for name in first[1]]
    return bool(first[0] == again[0]) and all(torch.equal(local(a), local(b)) for a, b in pairs if a is not None)


def no_way_back() -> list[str]:
    """Raises in the middle of a pass where torch cannot set a module back."""
    module = sharded()
    params, data = fsdp2_params(module), own_rows(batch())
    run = fsdp2_value_and_grad(module, loss_fn)

    def raises(*_: Any) -> None:
        raise IndexError

    handle = module.frozen.register_forward_pre_hook(raises)
    with mock.patch.object(fsdp, "reset", return_value=False):
        found = [message_of(lambda: run(params, data))]
        handle.remove()
        return [*found, message_of(lambda: run(params, data)), message_of(lambda: fsdp2_params(module))]


def low_precision() -> tuple[str, float]:
    """Computes in bf16, reduces in f32; returns the gradients' dtypes, and how far they are from exact ones."""
    module = sharded(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    _, grads = fsdp2_value_and_grad(module, lambda m, b: loss_fn(m, b).float())(fsdp2_params(module), own_rows(batch()))
    net = plain()
    loss_fn(net, batch()).backward()
    trained = {name: param.grad for name, param in net.named_parameters() if param.grad is not None}
    dtypes = {str(grads[name].dtype) for name in trained}  # pyright: ignore[reportOptionalMemberAccess]
    worst = max(float((full(grads[name]) - grad).abs().max() / grad.abs().max()) for name, grad in trained.items())
    return ", ".join(dtypes), worst


def errors() -> dict[str, str]:
    module = sharded()
    params = fsdp2_params(module)
    data = own_rows(batch())
    run = fsdp2_value_and_grad(module, loss_fn)
    replicated = {name: full(param) for name, param in params.items()}
    statistics = sharded(with_statistics=True)
    calls = {
        "plain": lambda: fsdp2_value_and_grad(plain(), loss_fn),
        "missing": lambda: run({}, data),
        "replicated": lambda: run(replicated, data),
        "double": lambda: run({name: param.double() for name, param in params.items()}, data),
        "vector": lambda: fsdp2_value_and_grad(module, lambda m, b: m(b[0]).mean(0))(params, data),
        "integer": lambda: fsdp2_value_and_grad(module, lambda m, b: m(b[0]).argmax())(params, data),
        "statistics": lambda: fsdp2_value_and_grad(statistics, loss_fn)(fsdp2_params(statistics), data),
        "transform": lambda: torch.func.grad(lambda x: run(params, (x, data[1]))[0])(data[0]),
    }
    return {name: message_of(call) for name, call in calls.items()}


def message_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrapped(kind: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = plain()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "fsdp2":
        fully_shard(net, mesh=mesh)
        return net
    if kind == "replicate by ddp":
        return replicate_by_ddp(net)
    replicate_by_fsdp(net, mesh=mesh)
    return net


def refusals(kind: str) -> dict[str, str]:
    """What each entry point says of a module that is wrapped, alone and as a part of another."""
    module, x = wrapped(kind), own_rows(batch())[0]
    outer = nn.Sequential(nn.Identity(), module)

    def in_transform() -> Any:
        return torch.func.grad(lambda x: fmp.remat(outer)(x).sum())(x)

    return {
        "functionalize": message_of(lambda: fmp.functionalize(module)),
        "functionalize a part": message_of(lambda: fmp.functionalize(outer)),
        "wrap": message_of(lambda: fmp.df11.wrap(outer, min_numel=1)),
        "plan": message_of(lambda: fmp.memory.plan(module)),
        "remat": message_of(lambda: fmp.remat(outer)(x)),
        "remat in a transform": message_of(in_transform),
    }


def rematerialized_ddp() -> float:
    """Under plain autograd, remat around DDP is right, so it is let through."""
    module, net = wrapped("ddp"), plain()
    run: Any = fmp.remat(module)
    loss_fn(run, own_rows(batch())).backward()
    loss_fn(net, batch()).backward()
    pairs = zip(module.parameters(), net.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs if b.grad is not None and a.grad is not None)


def remat_inside_of_fsdp2() -> float:
    """remat around a part that FSDP2 gathers as a part of another is right."""
    net = plain()
    for block in net.blocks:
        block.forward = functools.partial(fmp.remat(inside), block)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    loss_fn(net, own_rows(batch())).backward()
    one = plain()
    loss_fn(one, batch()).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(net.parameters(), one.parameters(), strict=True) if b.grad is not None]
    return max(float((full(a) - b).abs().max()) for a, b in pairs)


def inside(block: Any, x: Tensor) -> Tensor:
    for layer in block:
        x = layer(x)
    return x


def single(count: int) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in this process, without any of it."""
    net = plain()
    params = {name: param.detach().clone() for name, param in net.named_parameters()}
    trained = {name for name, param in net.named_parameters() if param.requires_grad and "unused" not in name}
    optimizer = fmp.optim.adamw(1e-2, weight_decay=0.1)
    state, losses = optimizer.init(params), []
    for step in range(count):
        inputs, targets = batch(step)

        def loss(params: dict[str, Tensor], inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            return (torch.func.functional_call(copy.deepcopy(net), params, (inputs,)) - targets).square().mean()

        value, grads = fmp.value_and_grad(loss)(params)
        grads = {name: grad if name in trained else None for name, grad in grads.items()}
        updates, state = optimizer.update(grads, state, params)
        params = fmp.optim.apply_updates(params, updates)
        losses.append(value.item())
    return losses, params
