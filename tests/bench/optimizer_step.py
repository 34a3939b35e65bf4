"""The update of 100 tensors, 4 million parameters together, by fmp and by torch's fused and foreach forms.

A pure update writes to new memory, so that the old parameters and moments stay; what torch's kernel takes for that, on
copies, is measured too.
"""

from collections.abc import Callable
from typing import Any

import torch

import fmp

kernels: Any = torch  # does not declare these functions
TENSORS, NUMBERS = 100, 40_000
RATE, BETAS, DECAY = 1e-3, (0.9, 0.99), 0.1


def setup(variant: str) -> Callable[[], None]:
    """Prepares one variant, such as `adamw-fmp`.

    Args:
        variant: An algorithm, adamw, sgd or lion; and `fmp`, `fmp_fused` or `fmp_donated`, or torch's `fused`,
            `copied` (fused on copies) or `foreach`.
    """
    torch.set_num_threads(1)
    algorithm, _, library = variant.partition("-")
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(NUMBERS, generator=generator) for _ in range(TENSORS)]
    grads = [torch.randn(NUMBERS, generator=generator) for _ in range(TENSORS)]
    if library == "fmp":
        return _fmp(algorithm, params, grads)
    if library.startswith("fmp"):
        return _fmp_fused(algorithm, params, grads, donate=library == "fmp_donated")
    if library == "copied":
        return _copied(algorithm, params, grads)
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


def _fmp_fused(
    algorithm: str, params: list[torch.Tensor], grads: list[torch.Tensor], *, donate: bool
) -> Callable[[], None]:
    b1, b2 = BETAS
    transformation = {
        "adamw": fmp.optim.adamw(RATE, b1, b2, weight_decay=DECAY, fused=True),
        "sgd": fmp.optim.sgd(RATE, momentum=b1, fused=True),
    }[algorithm]
    assert transformation.fused is not None
    update, state = transformation.fused, transformation.init(params)

    def run() -> None:
        nonlocal params, state
        with torch.no_grad():
            params, _, state = update(grads, state, params, donate=donate)

    return run


def _copied(algorithm: str, params: list[torch.Tensor], grads: list[torch.Tensor]) -> Callable[[], None]:
    """Copies parameters and moments, and runs torch's kernel on the copies."""
    state = [params, *([torch.zeros_like(param) for param in params] for _ in range(1 + (algorithm == "adamw")))]
    count = 0

    def run() -> None:
        nonlocal state, count
        state = [[leaf.clone() for leaf in leaves] for leaves in state]
        count += 1
        if algorithm == "sgd":
            options = {"weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
            kernels._fused_sgd_(state[0], grads, state[1], lr=RATE, momentum=BETAS[0], maximize=False, **options)
        else:
            counts = [torch.tensor(float(count)) for _ in params]
            options = {"beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY, "eps": 1e-8, "amsgrad": False}
            kernels._fused_adamw_(state[0], grads, *state[1:], [], counts, lr=RATE, maximize=False, **options)

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
        step = kernels._foreach_lerp(moments, grads, 1.0 - b1)
        kernels._foreach_sign_(step)
        kernels._foreach_mul_(params, 1.0 - RATE * DECAY)
        kernels._foreach_add_(params, step, alpha=-RATE)
        kernels._foreach_lerp_(moments, grads, 1.0 - b2)

    return run
