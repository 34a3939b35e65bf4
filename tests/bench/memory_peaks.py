"""Peak memory: of a gradient, by library, and of an optimizer step, with and without donation."""

from collections.abc import Callable

import torch

import fmp
from tests.memory import peak_bytes

LAYERS, WIDTH, BATCH = 16, 256, 2048


def gradient_peaks() -> dict[str, float]:
    """Returns the peak live MiB of one gradient of a 16-layer network, by library."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.randn(BATCH, WIDTH, generator=generator)

    def loss_fn(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x.square().sum()

    def by_autograd(weights: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        return torch.autograd.grad(loss_fn(leaves, x), leaves)

    contenders: dict[str, Callable[..., object]] = {
        "torch.autograd.grad": by_autograd,
        "fmp.value_and_grad": fmp.value_and_grad(loss_fn),
        "torch.func.grad": torch.func.grad(loss_fn),
    }
    return {name: peak_bytes(lambda fn=fn: fn(weights, x)) / 2**20 for name, fn in contenders.items()}


def step_peak(donate: bool) -> float:
    """Returns the peak live bytes a parameter of an AdamW step at O2 in bfloat16, state included."""
    params = {str(index): torch.ones(512, 512) for index in range(16)}

    def loss_fn(params: dict[str, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([(leaf.float() * scale).sum() for leaf in params.values()]).sum()

    policy = fmp.opt_level("O2", half_dtype=torch.bfloat16)
    step = fmp.train_step(loss_fn, fmp.optim.adamw(1e-3), policy=policy, donate=donate)

    def run() -> None:
        state = step.init(params)
        state, _ = step(state, torch.tensor(1.0))

    return peak_bytes(run) / sum(leaf.numel() for leaf in params.values())
