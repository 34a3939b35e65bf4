"""Peak memory of a gradient: fmp.value_and_grad against torch.autograd.grad and torch.func.grad."""

from collections.abc import Callable, Mapping

import torch

import fmp
from tests.memory import peak_bytes

LAYERS, WIDTH, BATCH = 16, 256, 2048


def peaks() -> Mapping[str, float]:
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
