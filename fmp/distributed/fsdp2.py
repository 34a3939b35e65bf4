"""FSDP2 as a source of gradients: a pure function outside, torch's engine inside.

    params, batch  ->  copy the shards into the module  ->  loss.backward()  ->  loss, gradients

FSDP2 (`fully_shard`) gathers and scatters by hooks of the module and of autograd, with prefetching and overlap. Inside
of torch.func transforms these hooks raise, and `torch.autograd.grad` passes them by, with wrong gradients. So the
module stays the workspace that FSDP2 wants, and its parameters are copied in at each call.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fmp import _compat, tree
from fmp._compat import collectives, fsdp
from fmp.distributed_modules import wrapper_of
from fmp.dtypes import short_name

Params = dict[str, Tensor]


def fsdp2_params(module: nn.Module) -> Params:
    """Copies the parameters of an FSDP2 module.

    Args:
        module: A module after `fully_shard`.

    Returns:
        This rank's shards as DTensors, by dotted name.

    Raises:
        TypeError: If the module is not one of FSDP2.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> module = torch.distributed.fsdp.fully_shard(nn.Linear(3, 2), mesh=mesh)
        >>> fsdp2_params(module)["weight"].placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    _check(module)
    return {name: param.detach().clone() for name, param in _resharded(module).items()}


def fsdp2_value_and_grad(
    module: nn.Module, loss_fn: Callable[..., Any], has_aux: bool = False
) -> Callable[..., tuple[Any, dict[str, Tensor | None]]]:
    """Makes a pure function of parameters that FSDP2 differentiates.

    What it returns may be called in place of `fmp.value_and_grad(loss_fn)`, as the source of gradients for fmp's
    optimizers, which work on DTensors as on tensors:

        run = fsdp2_value_and_grad(module, loss_fn)
        params = fsdp2_params(module)
        loss, grads = run(params, batch)
        updates, state = optimizer.update(grads, state, params)

    The module's parameters have the values of the last call, and the call leaves their `.grad` as it was. The module
    itself must be a function of its parameters: its buffers must stay as they are.

    Args:
        module: A module after `fully_shard`, with any `MixedPrecisionPolicy`.
        loss_fn: `loss_fn(module, *args, **kwargs)` returns the loss of this rank's part of the batch, or a pair of it
            and any auxiliary output if `has_aux`. It must call the module by `module(...)`, or FSDP2 gathers nothing.
        has_aux: Whether `loss_fn` returns a pair. The tensors in its second part are this rank's.

    Returns:
        A function `(params, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`. The loss is the mean over
        all ranks, and so is the gradient: DTensors placed as the parameters, in their dtype. A parameter that does not
        require grad, or that the loss does not depend on, has the gradient None. Those among `ignored_params`, of which
        every rank has all, have plain gradients, averaged here; the loss of every rank must depend on them, or of none.

    Raises:
        TypeError: If the module is not one of FSDP2; when called, if the loss is no real floating-point tensor.
        KeyError: When called, if parameters are missing or unknown.
        ValueError: When called, if a parameter has another shape, dtype or placement than in the module, the loss is
            not a scalar, or the module changed a buffer.
        RuntimeError: When called inside of a torch.func transform, while the module is set to leave gradients
            unreduced or to divide them by another number than that of the ranks, or while it holds some that were left
            unreduced.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> module = torch.distributed.fsdp.fully_shard(nn.Linear(3, 2, bias=False), mesh=mesh)
        >>> run = fsdp2_value_and_grad(module, lambda module, x: module(x).sum())
        >>> loss, grads = run(fsdp2_params(module), torch.ones(1, 3))
        >>> grads["weight"].full_tensor()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
        >>> dist.destroy_process_group()

    References:
        Y. Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, arXiv 2304.11277.
    """
    _check(module)

    @functools.wraps(loss_fn)
    def value_and_grad_fn(params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if _compat.transform_active():
            raise RuntimeError("FSDP2 works by hooks of autograd; call it outside of vmap, grad and other transforms")
        own = _resharded(module)
        _check_reduces(module)
        _check_params(params, own)
        ignored = _ignored(module, own)
        buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
        before = {name: param.grad for name, param in own.items()}
        try:
            with torch.no_grad():
                for name, param in own.items():
                    param.grad = None
                    param.copy_(params[name].detach())
            with torch.enable_grad():
                output = loss_fn(module, *args, **kwargs)
                loss, aux = output if has_aux else (output, None)
                _check_loss(loss)
                loss.backward()
            grads = {name: param.grad for name, param in own.items()}
        except BaseException:
            # FSDP2 would believe itself in the middle of a pass for good.
            if not fsdp.is_idle(module) and fsdp.reset(module):
                fsdp.drop_unreduced_gradients(module)
            raise
        finally:
            for name, param in own.items():
                param.grad = before[name]
        for name, buffer in module.named_buffers():
            if name not in buffers or buffers[name][0] is not buffer or buffers[name][1] != buffer._version:
                raise ValueError(
                    f"the module changed its buffer {name} during the call, which would be hidden state; use layers "
                    "without running statistics, or call module.eval() first"
                )
        together = [name for name in ignored if grads[name] is not None]
        value, *means = _means([loss.detach(), *[cast(Tensor, grads[name]) for name in together]], own)
        grads |= zip(together, means, strict=True)
        aux = tree.map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, aux)
        return (value, aux) if has_aux else value, grads

    return value_and_grad_fn


def _check(module: Any) -> None:
    if not _is_fsdp2(module):
        raise TypeError(
            f"module must be one that torch.distributed.fsdp.fully_shard was called on, got a {type(module).__name__}; "
            "for a plain module there is fmp.value_and_grad, with fmp.distributed.Layout"
        )
    if not fsdp.managed(module):
        raise TypeError("module has no parameter that FSDP2 shares out; use fmp.value_and_grad, with a Layout")


def _is_fsdp2(module: Any) -> bool:
    wrapper = wrapper_of(type(module))
    return wrapper is not None and wrapper.name == "FSDPModule"


def _resharded(module: nn.Module) -> dict[str, Any]:
    """Lists the parameters of a module as shards; after a call without a gradient, FSDP2 leaves them whole."""
    if not (fsdp.is_idle(module) or fsdp.reset(module)):
        raise RuntimeError(
            "an error has cut a pass of the module short, and this version of torch cannot set FSDP2 back; make the "
            "module anew"
        )
    for part in module.modules():
        if _is_fsdp2(part):
            cast(Any, part).reshard()
    return dict(module.named_parameters())


def _check_params(params: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    if params.keys() != own.keys():
        missing, unknown = sorted(own.keys() - params.keys()), sorted(params.keys() - own.keys())
        raise KeyError(
            "params: " + "; ".join([f"missing {name}" for name in missing] + [f"unknown {name}" for name in unknown])
        )
    for name, param in own.items():
        given, wanted = _form(params[name]), _form(param)
        if given != wanted:
            raise ValueError(f"params[{name!r}] is {given}, but {wanted} in the module; see fsdp2_params")


def _form(param: Any) -> str:
    if not isinstance(param, Tensor):
        return tree.describe(param)
    where = f" placed {tuple(param.placements)} on {param.device_mesh}" if isinstance(param, DTensor) else ""
    return f"{short_name(param.dtype)}{list(param.shape)}{where}"


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or not loss.dtype.is_floating_point:
        raise TypeError(f"loss_fn must return a real floating-point scalar, got {tree.describe(loss)}")
    if loss.ndim:
        raise ValueError(f"loss_fn must return a scalar, got {tree.describe(loss)}; reduce it, e.g. .mean()")


def _check_reduces(module: nn.Module) -> None:
    if (why := fsdp.unfinished(module)) is not None:
        raise RuntimeError(
            f"the module is set by {why} to leave gradients unreduced, and so there are none to return; set it back to "
            "True. To accumulate, average the gradients that several calls return, or let loss_fn go through all "
            "microbatches"
        )
    if (found := fsdp.divides_by(module)) is not None:
        divisor, count = found
        raise RuntimeError(
            f"the module is set by set_gradient_divide_factor({divisor}) to return gradients that are not means over "
            f"the {count} ranks; set it to {float(count)}, and multiply what is returned"
        )
    if fsdp.has_unreduced_gradients(module):
        raise RuntimeError(
            "the module holds gradients of a backward pass without gradient sync, which would be added to these; let a "
            "backward pass with gradient sync reduce them, or make the module anew"
        )


def _ignored(module: nn.Module, own: Mapping[str, Tensor]) -> list[str]:
    """Lists the trained parameters whose gradients FSDP2 leaves to each rank."""
    managed = {id(param) for param in fsdp.managed(module)}
    names = [name for name, param in own.items() if param.requires_grad and id(param) not in managed]
    for name in names:
        if isinstance(own[name], DTensor):
            raise TypeError(
                f"{name} is a DTensor among FSDP2's ignored_params, whose gradient nobody here can average; let FSDP2 "
                "share it out, or freeze it with requires_grad_(False)"
            )
    return names


def _means(tensors: list[Tensor], params: Mapping[str, Tensor]) -> list[Tensor]:
    """Averages what each rank has over the mesh on which the parameters lie, in one collective a dimension."""
    mesh = next(param.device_mesh for param in params.values() if isinstance(param, DTensor))
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors], torch.float32)
    found = [tensor.to(dtype).contiguous() for tensor in tensors]
    for dim in range(mesh.ndim):
        found = [each / mesh.size(dim) for each in collectives.all_reduce(found, mesh.get_group(dim).group_name)]
    return [each.to(tensor.dtype) for each, tensor in zip(found, tensors, strict=True)]
