"""Steps and calls of rematerialized blocks, by fmp and by torch.utils.checkpoint, with and without recomputation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fmp

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 12, 256, 4, 128, 8
Weights = dict[str, Tensor]
Block = Callable[..., Any]


def transformer_block(x: Tensor, weights: Weights) -> Tensor:
    """Attention and a feed-forward layer, each after a norm and around a residual connection."""
    batch, length, width = x.shape
    y = F.layer_norm(x, (width,), weights["norm1"])
    q, k, v = (y @ weights["qkv"]).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2) * (width // HEADS) ** -0.5).softmax(-1)
    x = x + (scores @ v).transpose(1, 2).reshape(batch, length, width) @ weights["out"]
    y = F.layer_norm(x, (width,), weights["norm2"])
    return x + F.gelu(y @ weights["up"]) @ weights["down"]


def make_weights(layers: int = LAYERS, width: int = WIDTH) -> list[Weights]:
    """Makes the weights of a stack of blocks."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / rows**0.5

    return [
        {
            "norm1": torch.ones(width),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width),
            "norm2": torch.ones(width),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width),
        }
        for _ in range(layers)
    ]


def make_batch(size: int = BATCH) -> Tensor:
    """Makes a batch."""
    return torch.randn(size, CONTEXT, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(block: Block) -> Callable[[Sequence[Weights], Tensor], Tensor]:
    """Makes the loss of a stack of blocks."""

    def loss(stack: Sequence[Weights], x: Tensor) -> Tensor:
        for weights in stack:
            x = block(x, weights)
        return x.square().mean()

    return loss


def checkpointed(x: Tensor, weights: Weights) -> Tensor:
    """The block under torch.utils.checkpoint."""
    return checkpoint(transformer_block, x, weights, use_reentrant=False)


def tiny_block(x: Tensor, w: Tensor) -> Tensor:
    """A block that does next to nothing, to time the call itself."""
    return torch.tanh(x @ w)


def autograd_step(block: Block) -> Callable[[], Any]:
    """Makes a gradient of the stack by torch.autograd.grad."""
    stack, x, loss = make_weights(), make_batch(), loss_of(block)

    leaves = fmp.tree.leaves(stack)
    for leaf in leaves:
        leaf.requires_grad_()
    return lambda: torch.autograd.grad(loss(stack, x), leaves)


def func_step(block: Block) -> Callable[[], Any]:
    """Makes a gradient of the stack by torch.func.grad."""
    stack, x, gradient = make_weights(), make_batch(), torch.func.grad(loss_of(block))
    return lambda: gradient(stack, x)


def tiny_step(block: Block) -> Callable[[], Any]:
    """Makes a gradient of sixteen tiny blocks, a hundred times, by torch.autograd.grad."""
    x, w = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)

    def step() -> Any:
        for _ in range(100):
            y = x
            for _ in range(16):
                y = block(y, w)
            torch.autograd.grad(y.sum(), w)

    return step


def _without_early_stop(step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with set_checkpoint_early_stop(False):
            return step()

    return run


VARIANTS: dict[str, Callable[[], Callable[[], Any]]] = {
    "autograd": lambda: autograd_step(transformer_block),
    "autograd-fmp": lambda: autograd_step(fmp.remat(transformer_block)),
    "autograd-torch": lambda: autograd_step(checkpointed),
    "autograd-torch-whole": lambda: _without_early_stop(autograd_step(checkpointed)),
    "func": lambda: func_step(transformer_block),
    "func-fmp": lambda: func_step(fmp.remat(transformer_block)),
    "tiny-fmp": lambda: tiny_step(fmp.remat(tiny_block)),
    "tiny-torch": lambda: tiny_step(lambda x, w: checkpoint(tiny_block, x, w, use_reentrant=False)),
}


def setup(variant: str) -> Callable[[], Any]:
    """Prepares one of the variants."""
    torch.set_num_threads(1)
    return VARIANTS[variant]()
