"""A fine-tuning step of adapters on twelve frozen transformer blocks, by how their weights are stored."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fmp

DEPTH, WIDTH, HEADS, RANK, ROWS, LENGTH = 12, 256, 4, 8, 8, 128
HALF = torch.bfloat16
VARIANTS = ("bf16", "remat", "frozen", "wrapped", "wrapped-ahead")


class Block(nn.Module):
    """A transformer block; adapters are added to what goes into attention and out of the network."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, adapter: dict[str, torch.Tensor]) -> torch.Tensor:
        y = self.attention_norm(x)
        qkv = self.qkv(y) + y @ adapter["down"] @ adapter["up"]
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        return x + self.down(F.gelu(self.up(self.network_norm(x))))


def weights_nbytes(variant: str) -> int:
    """Counts the bytes of the frozen weights as a variant stores them."""
    params = nn.ModuleList(Block() for _ in range(DEPTH)).to(HALF).state_dict()
    if variant not in ("bf16", "remat"):
        params = fmp.df11.compress(params)
    return sum(leaf.nbytes for leaf in fmp.tree.leaves(params))


def block_nbytes() -> int:
    """Counts the bytes of one decoded block."""
    return sum(param.nbytes for param in Block().to(HALF).parameters())


def setup(variant: str) -> Callable[[], None]:
    """Prepares one variant.

    Args:
        variant: One of `VARIANTS`.
    """
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(DEPTH)).to(HALF).requires_grad_(False)
    adapters = [
        {"down": torch.randn(WIDTH, RANK, dtype=HALF) / WIDTH, "up": torch.zeros(RANK, 3 * WIDTH, dtype=HALF)}
        for _ in range(DEPTH)
    ]
    x, target = torch.randn(2, ROWS, LENGTH, WIDTH).to(HALF)
    call, base = _blocks(variant, blocks)

    def loss(adapters: Any, batch: Any, *, frozen: Any = None) -> torch.Tensor:
        x, target = batch
        for weights, adapter in zip(frozen or base, adapters, strict=True):
            x = call(weights, x, adapter)
        return (x - target).float().square().mean()

    step = fmp.train_step(loss, fmp.optim.adam(1e-3))
    frozen = base if variant in ("bf16", "remat", "frozen") else None
    state = step.init(adapters)
    context = contextlib.ExitStack()
    if variant == "wrapped-ahead":
        torch.set_num_threads(1)  # the other one decodes
        context.enter_context(fmp.df11.decode_ahead())

    def run(_: Any = context) -> None:  # which lasts as long as this function
        nonlocal state
        state, _ = step(state, (x, target), frozen=frozen)

    return run


def peak_nbytes(variant: str) -> int:
    """Counts the most bytes that are live at once in a step, beyond those that are before it."""
    return fmp.memory.peak(setup(variant))


def _blocks(variant: str, blocks: nn.ModuleList) -> tuple[Callable[..., torch.Tensor], list[Any]]:
    """Returns how a block is called, and what each block is given for weights."""
    if variant.startswith("wrapped"):
        small: Any = fmp.df11.wrap(blocks)
        return lambda block, x, adapter: block(x, adapter), list(small)
    skeleton = Block().to("meta")

    def by_function(weights: Any, x: torch.Tensor, adapter: Any) -> torch.Tensor:
        return torch.func.functional_call(skeleton, weights, (x, adapter))

    weights = [block.state_dict() for block in blocks]
    if variant == "frozen":
        return fmp.df11.frozen(by_function), fmp.df11.compress(weights)
    return (fmp.remat(by_function) if variant == "remat" else by_function), weights
