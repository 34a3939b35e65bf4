"""The update of 100 tensors, 4 million parameters together, by fmp and by torch's fused and foreach forms."""

from collections.abc import Callable
from typing import Any

import torch

import fmp

foreach: Any = torch  # does not declare these functions
TENSORS, NUMBERS = 100, 40_000
RATE, BETAS, DECAY = 1e-3, (0.9, 0.99), 0.1


def setup(variant: str) -> Callable[[], None]:
    """Prepares one variant: an algorithm, adamw, sgd or lion, and a library: fmp, fused or foreach; `adamw-fmp`."""
    torch.set_num_threads(1)
    algorithm, _, library = variant.partition("-")
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(NUMBERS, generator=generator) for _ in range(TENSORS)]
    grads = [torch.randn(NUMBERS, generator=generator) for _ in range(TENSORS)]
    if library == "fmp":
        return _fmp(algorithm, params, grads)
    return _lion(params, grads) if algorithm == "lion" else _torch(algorithm, library, params, grads)


def _fmp(algorithm: str, params: list[torch.Tensor], grads: list[torch.Tensor]) -> Callable[[], None]:
    b1, b2 = BETAS
    transformation = {
        "adamw": fmp.optim.adamw(RATE, b1, b2, weight_decay=DECAY),
        "sgd": fmp.optim.sgd(RATE, momentum=b1),
        "lion": fmp.optim.lion(RATE, b1, b2, weight_decay=DECAY),
    }[algorithm]
    state = transformation.init(params)

    def run() -> None:
        nonlocal params, state
        with torch.no_grad():
            updates, state = transformation.update(grads, state, params)
            params = fmp.optim.apply_updates(params, updates)

    return run


def _torch(algorithm: str, form: str, params: list[torch.Tensor], grads: list[torch.Tensor]) -> Callable[[], None]:
    leaves = [param.requires_grad_() for param in params]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad
    flags = {"fused": form == "fused", "foreach": form == "foreach"}
    if algorithm == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(leaves, RATE, BETAS, weight_decay=DECAY, **flags)
    else:
        optimizer = torch.optim.SGD(leaves, RATE, momentum=BETAS[0], **flags)
    return lambda: optimizer.step() and None


def _lion(params: list[torch.Tensor], grads: list[torch.Tensor]) -> Callable[[], None]:
    """Lion in place, by torch's foreach functions; torch has no Lion of its own."""
    moments = [torch.zeros_like(param) for param in params]
    b1, b2 = BETAS

    def run() -> None:
        step = foreach._foreach_lerp(moments, grads, 1.0 - b1)
        foreach._foreach_sign_(step)
        foreach._foreach_mul_(params, 1.0 - RATE * DECAY)
        foreach._foreach_add_(params, step, alpha=-RATE)
        foreach._foreach_lerp_(moments, grads, 1.0 - b2)

    return run
