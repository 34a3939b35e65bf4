"""A chain of bf16 blocks with adapters, plain and compressed, and a watch on what is decoded."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad

import fmp
from fmp import tree

Loss = Callable[..., torch.Tensor]

WIDTH, DEPTH = 256, 8
DECODED = WIDTH * WIDTH * 2
GENERATOR = torch.Generator().manual_seed(3)


def bf16(*shape: int, scale: float) -> torch.Tensor:
    return (torch.randn(*shape, generator=GENERATOR) * scale).bfloat16()


BASE = [{"kernel": bf16(WIDTH, WIDTH, scale=WIDTH**-0.5), "bias": bf16(WIDTH, scale=0.1)} for _ in range(DEPTH)]
FROZEN = fmp.df11.compress(BASE)
LORA = [{"down": bf16(WIDTH, 4, scale=0.1), "up": bf16(4, WIDTH, scale=0.1)} for _ in range(DEPTH)]
X = bf16(4, WIDTH, scale=1.0)


def block(weights, x, lora):
    return torch.tanh(x @ weights["kernel"] + weights["bias"] + x @ lora["down"] @ lora["up"])


def loss_of(block: Any) -> Loss:
    def loss(lora, base, x):
        for weights, adapter in zip(base, lora, strict=True):
            x = block(weights, x, adapter)
        return x.float().square().sum()

    return loss


def backward(loss: Loss) -> Callable[..., Any]:
    def gradient(lora, base, x):
        lora = tree.map(lambda leaf: leaf.clone().requires_grad_(), lora)
        loss(lora, base, x).backward()
        return tree.map(lambda leaf: leaf.grad, lora)

    return gradient


PLAIN, FREED, LEAN = loss_of(block), loss_of(fmp.df11.frozen(block)), loss_of(fmp.remat(block))
GRADIENTS = {"backward": backward, "fmp.grad": fmp.grad, "torch.func.grad": grad}


class Decoded:
    """Counts how often weights are decoded, and how many of them are alive."""

    def __init__(self, decode: Callable[..., Any]):
        self.calls = self.live = self.most = 0
        self._decode = decode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        numbers = self._decode(*args, **kwargs)
        self.calls += 1
        self.live += 1
        self.most = max(self.most, self.live)
        weakref.finalize(numbers, self._died)
        return numbers

    def _died(self) -> None:
        self.live -= 1
