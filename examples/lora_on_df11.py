"""A language model learns English, is stored in 10.6 bits a weight, and learns Python's language by LoRA adapters.

    python examples/lora_on_df11.py                # a table, and the picture out/lora_on_df11/losses.png
    python examples/lora_on_df11.py --width 768    # larger weights, smaller share of everything else

A small byte-level GPT is trained on the documentation of Python. Then its weights are rounded to bfloat16 and frozen,
and two thin matrices beside each linear layer are trained on source code, until the loss on unseen code has fallen from
2.47 to 2.18 nats per byte. With remat, most of the memory of such a run is frozen weights. `fmp.df11.wrap` stores them
in two thirds of it without loss, and decodes each where an operator reads it, in the backward pass again. What weights
and a step take, and the time of the fastest step, on one thread of a shared CPU:

    bf16         20.8 + 57.7 = 78.5 MiB  120 ms
    df11         13.8 + 57.7 = 71.5 MiB  175 ms  each weight is decoded twice
    bf16, remat  20.8 + 15.5 = 36.3 MiB  214 ms
    df11, remat  13.8 + 15.5 = 29.3 MiB  319 ms  three times

The proof: losses and adapters of all four runs are equal, bit for bit. A compressed weight is that weight, not one
near it; so there is nothing to tune, and no accuracy to look at. The price is time, which does not grow with the batch.
"""

import argparse
import asyncio
import copy
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from train_lm import GPT, read_text, sample_batch

import fmp

MIB = 2.0**20


class LoRA(nn.Module):
    """A linear layer and a trained product of two thin matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


class Remat(nn.Module):
    """A block that keeps nothing but its input for the backward pass."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return fmp.remat(self.block)(x, mask)


def read_code() -> Tensor:
    """Returns the source code of the package asyncio, which every Python carries, as bytes, u8[n]."""
    paths = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def next_byte_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def pretrain(gpt: GPT, text: Tensor, args: argparse.Namespace) -> float:
    """Trains all weights of the module, and rounds them to bf16. Returns the last loss."""
    model = fmp.functionalize(gpt)

    def loss_fn(params, tokens, *, buffers):
        logits, buffers = model.apply(params, buffers, tokens[:, :-1])
        return next_byte_loss(logits, tokens), buffers

    warm_up = max(1, args.pretrain_steps // 10)
    rising = fmp.optim.schedules.linear(0.0, args.learning_rate, warm_up)
    falling = fmp.optim.schedules.linear(args.learning_rate, 0.1 * args.learning_rate, args.pretrain_steps)
    optimizer = fmp.optim.adamw(fmp.optim.schedules.join([rising, falling], [warm_up]), b2=0.99, weight_decay=0.1)
    policy = fmp.opt_level("O2", half_dtype="bf16")
    step = fmp.train_step(loss_fn, optimizer, policy=policy, clip_norm=1.0, donate=True)
    state, loss = step.init(model.params, buffers=model.buffers), math.nan
    args = argparse.Namespace(**{**vars(args), "batch": args.pretrain_batch})
    progress = tqdm(range(args.pretrain_steps), desc="all weights, on documentation", mininterval=0.5)
    for index in progress:
        state, metrics = step(state, sample_batch(text, index, args))
        loss = metrics.loss.item()
        progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
    gpt.load_state_dict({**gpt.state_dict(), **state.params})
    gpt.bfloat16()
    return loss


def with_adapters(base: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Returns a copy with frozen weights, and an adapter around each linear layer: the same ones for every base."""
    torch.manual_seed(args.seed)
    copied = copy.deepcopy(base).requires_grad_(False)
    for path, layer in list(copied.named_modules()):
        if isinstance(layer, nn.Linear):
            copied.set_submodule(path, LoRA(layer, args.rank))
    return copied


def with_remat(module: Any) -> nn.Module:
    """Returns a copy whose blocks are recomputed in the backward pass."""
    copied = copy.deepcopy(module)
    copied.blocks = nn.ModuleList(map(Remat, copied.blocks))
    return copied


class Run:
    """One training of adapters: step, state and what is noted on the way.

    Attributes:
        weights: The bytes of the frozen weights, as they are stored.
        peak: The most bytes that are live at once in a step, beyond weights, adapters and their state.
        seconds: The fastest step.
        losses: The loss of each step.
    """

    def __init__(self, module: nn.Module, tokens: Tensor, args: argparse.Namespace):
        model = fmp.functionalize(module)
        trained = {name for name, param in module.named_parameters() if param.requires_grad}
        self.frozen = {name: param for name, param in model.params.items() if name not in trained}

        def loss_fn(adapters, tokens, *, buffers, frozen):
            logits, buffers = model.apply({**frozen, **adapters}, buffers, tokens[:, :-1])
            return next_byte_loss(logits, tokens), buffers

        policy = fmp.opt_level("O2", half_dtype="bf16")
        self.step = fmp.train_step(loss_fn, fmp.optim.adam(args.adapter_rate), policy=policy, clip_norm=1.0)
        self.state = self.step.init({name: model.params[name] for name in trained}, buffers=model.buffers)
        self.weights = sum(stored_bytes(weight) for weight in self.frozen.values())
        self.peak = fmp.memory.peak(self.step, self.state, tokens, frozen=self.frozen)
        self.seconds = math.inf
        self.losses: list[float] = []

    def advance(self, tokens: Tensor) -> None:
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, tokens, frozen=self.frozen)
        self.losses.append(metrics.loss.item())
        self.seconds = min(self.seconds, time.perf_counter() - start)

    def loss(self, tokens: Tensor) -> float:
        """Returns the loss of a step that is not taken: it changes nothing, and gives a state that nobody uses."""
        return self.step(self.state, tokens, frozen=self.frozen)[1].loss.item()

    def has_bits_of(self, other: "Run") -> bool:
        pairs = zip(fmp.tree.leaves(self.state), fmp.tree.leaves(other.state), strict=True)
        return self.losses == other.losses and all(a is b or torch.equal(a, b) for a, b in pairs)


def stored_bytes(weight: Tensor) -> int:
    return weight.node.nbytes if isinstance(weight, fmp.df11.FrozenWeight) else weight.nbytes


class Row(NamedTuple):
    """What is printed of a run; memory in MiB, the time in milliseconds."""

    weights: float
    step: float
    together: float
    time: float
    loss: float
    same: bool


def make_row(run: Run, first: Run) -> Row:
    weights, step = run.weights / MIB, run.peak / MIB
    return Row(weights, step, weights + step, run.seconds * 1e3, run.losses[-1], run.has_bits_of(first))


def make_bases(gpt: GPT) -> dict[str, nn.Module]:
    """Returns the module as it is, and with compressed weights."""
    return {"bf16": gpt, "df11": fmp.df11.wrap(gpt)}


def train_adapters(runs: dict[str, Run], text: Tensor, args: argparse.Namespace) -> None:
    """Advances all runs side by side, so that a busy machine slows them all."""
    progress = tqdm(range(args.steps), desc="adapters, on source code", mininterval=0.5)
    for index in progress:
        for run in runs.values():
            run.advance(sample_batch(text, index, args))
        progress.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)


def draw(runs: dict[str, Run], rows: dict[str, Row], path: Path) -> None:
    """Saves a picture: the two losses, drawn over each other, and what lies in memory."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(runs["bf16"].losses, color="tab:blue", linewidth=3, alpha=0.5, label="bf16 weights")
    left.plot(runs["df11"].losses, color="black", linewidth=1, linestyle="--", label="compressed weights")
    left.set(xlabel="step", ylabel="loss on source code (nats per byte)")
    left.legend()
    names, weights, steps = list(rows), [row.weights for row in rows.values()], [row.step for row in rows.values()]
    right.bar_label(
        right.barh(names, weights, color="tab:blue", label="frozen weights"), fmt="%.0f", label_type="center"
    )
    right.bar_label(
        right.barh(names, steps, left=weights, color="tab:orange", label="peak of a step"),
        fmt="%.0f",
        label_type="center",
    )
    right.invert_yaxis()
    right.set_xlabel("MiB")
    right.legend()
    figure.suptitle("LoRA on bf16 weights and on compressed ones: the same bits")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain-steps", type=int, default=400, help="steps of all weights")
    parser.add_argument("--pretrain-batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of all weights")
    parser.add_argument("--steps", type=int, default=60, help="steps of the adapters")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--adapter-rate", type=float, default=3e-3, help="the learning rate of the adapters")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/lora_on_df11"), help="folder for the picture")
    args = parser.parse_args()
    for name in ("pretrain_steps", "pretrain_batch", "steps", "batch", "rank", "context", "width", "heads", "layers"):
        if not 1 <= getattr(args, name) < 2**31:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 and below 2**31")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if args.width < 64:
        parser.error("--width must be at least 64; smaller matrices are not worth compressing")
    for name in ("learning_rate", "adapter_rate"):
        if not 0 < getattr(args, name) <= 1e6:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and at most 1e6")
    if not 0 <= args.seed < 2**32:
        parser.error("--seed must be at least 0 and below 2**32")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return args


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    documentation, code = read_text(None), read_code()
    held_out, code = code[-len(code) // 20 :], code[: -len(code) // 20]
    if min(len(documentation), len(held_out)) <= args.context:
        raise SystemExit(f"--context {args.context}: the shortest text has {len(held_out):,} bytes; take fewer")
    gpt = GPT(args.context, args.width, args.heads, args.layers)
    loss = pretrain(gpt, documentation, args)
    numbers = sum(param.numel() for param in gpt.parameters())
    print(f"weights     {numbers:,}, all trained on documentation: loss {loss:.4f}")

    modules = {name: with_adapters(base, args) for name, base in make_bases(gpt).items()}
    modules |= {f"{name}, remat": with_remat(module) for name, module in modules.items()}
    runs = {name: Run(module, sample_batch(code, 0, args), args) for name, module in modules.items()}
    first, unseen = runs["bf16"], sample_batch(held_out, 0, argparse.Namespace(**{**vars(args), "batch": 32}))
    before = first.loss(unseen)
    train_adapters(runs, code, args)
    after = first.loss(unseen)
    if not (math.isfinite(before) and math.isfinite(after)):
        raise SystemExit("the training diverged; take a smaller --learning-rate or --adapter-rate")
    numbers = sum(leaf.numel() for leaf in first.state.params.values())
    print(
        f"adapters    {numbers:,}, trained on source code: loss {before:.4f} before, {after:.4f} after, on unseen code"
    )

    rows = {name: make_row(run, first) for name, run in runs.items()}
    print("variant      weights MiB  step MiB  together  ms a step    loss  same bits")
    for name, row in rows.items():
        print(
            f"{name:12s} {row.weights:11.1f} {row.step:9.1f} {row.together:9.1f} {row.time:10.0f} {row.loss:7.4f}  "
            f"{'yes' if row.same else 'no'}"
        )
    draw(runs, rows, args.out / "losses.png")
    print(f"picture     {args.out / 'losses.png'}")
    different = [name for name, row in rows.items() if not row.same]
    print(f"proof       runs that end in other bits than the first: {len(different)}")
    if different:
        raise SystemExit(f"these runs end in other bits than the first: {'; '.join(different)}")


if __name__ == "__main__":
    main()
