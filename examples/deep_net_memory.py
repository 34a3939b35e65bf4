"""Trains one deep network under six arrangements of what is kept for the backward pass: memory against time.

    python examples/deep_net_memory.py             # a table, and the picture out/deep_net_memory/memory.png
    python examples/deep_net_memory.py --depth 48

The network reads digits through 24 residual blocks on smaller and smaller maps: an early block fills four times the
memory of a late one, for as many multiplications. What is live at once in a step, beyond state and batch, and the time
of the fastest step, on one thread of a shared CPU:

    everything  80 MiB   73 ms  no remat: each block keeps eleven times the memory of its input
    dots        45 MiB  114 ms  all layers recomputed except for their matrix products
    nothing     13 MiB  101 ms  all layers recomputed, each from its input
    sqrt(n)     27 MiB   97 ms  five even segments: the first holds nothing but large maps, and sets the peak
    auto        12 MiB   97 ms  the segments of least peak: short ones where maps are large
    halfway     46 MiB   84 ms  the least recomputation within a budget, halfway from `auto` to `everything`

So ask for "auto", with a budget if there is one. `halfway` takes the memory of `dots` and is the fastest after
`everything`: it recomputes the early blocks, which free most for their work. `dots` halves the memory, but its records
of single operators cost more time than products as small as these.

The proof: losses and states of all arrangements are equal, bit for bit. Remat changes when a value is computed, not
what it is.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from mnist import read_mnist
from torch import Tensor, nn
from tqdm import tqdm

import fmp

WIDTHS = (16, 32, 64)
MIB = 2.0**20

Params = list[dict[str, Tensor]]
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Params, Batch], Tensor]
Functions = list[Callable[[Tensor], Tensor]]
Arrange = Callable[[Functions], Callable[[Tensor], Tensor]]


class Block(nn.Module):
    """A residual block on maps [batch, height, width, channels], as in ConvNeXt."""

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.contract(F.gelu(self.expand(self.norm(mixed))))


class Halve(nn.Module):
    """Halves height and width of a map: each 2 x 2 patch becomes one pixel with another number of channels."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.project = nn.Linear(4 * width, out)
        self.norm = nn.LayerNorm(out)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        patches = x.view(batch, height // 2, 2, width // 2, 2, channels).transpose(2, 3).flatten(3)
        return self.norm(self.project(patches))


class Head(nn.Module):
    """Returns logits, [batch, 10], from maps of 4 x 4 pixels."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(4 * 4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x).flatten(1))


def make_layers(depth: int) -> list[fmp.Model]:
    """Returns the layers for images f32[batch, 32, 32, 1]: maps of 16 x 16, 8 x 8 and 4 x 4 pixels."""
    layers: list[nn.Module] = []
    for stage, (width, out) in enumerate(zip((1, *WIDTHS[:-1]), WIDTHS, strict=True)):
        layers.append(Halve(width, out))
        layers.extend(Block(out) for _ in range((depth + len(WIDTHS) - 1 - stage) // len(WIDTHS)))
    return [fmp.functionalize(layer) for layer in (*layers, Head(WIDTHS[-1]))]


def run_layer(layer: fmp.Model, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return layer.apply(params, {}, x)[0]


def make_functions(layers: list[fmp.Model], params: Params) -> Functions:
    """Returns the network as functions to call one after the other, each with its parameters."""
    return [functools.partial(run_layer, *pair) for pair in zip(layers, params, strict=True)]


def one_after_the_other(functions: Functions) -> Callable[[Tensor], Tensor]:
    return lambda x: functools.reduce(lambda value, function: function(value), functions, x)


def make_loss(layers: list[fmp.Model], arrange: Arrange) -> Loss:
    """Returns the loss as a pure function of parameters and a batch."""

    def loss_fn(params: Params, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(arrange(make_functions(layers, params))(images), labels)

    return loss_fn


def make_arrangements(layers: list[fmp.Model], params: Params, batch: Batch) -> dict[str, Arrange]:
    """Returns the arrangements by name. Those of "auto" are planned here, once, for batches like this one."""
    count = len(layers)
    variables = fmp.tree.map(lambda leaf: leaf.detach().requires_grad_(), params)  # the images need no gradient
    functions = make_functions(layers, variables)
    auto = fmp.remat_sequential(functions, "auto").plan(batch[0])
    least = auto.peak_bytes or 0
    most = fmp.memory.peak(fmp.grad(make_loss(layers, one_after_the_other)), params, batch, fake=True)
    budget = max(least, (least + most) // 2)
    halfway = fmp.remat_sequential(functions, "auto", memory_budget=budget).plan(batch[0])
    for name, plan in {"auto": auto, "halfway": halfway}.items():
        parts = [f"[{start}:{stop}]" if recomputed else f"{start}:{stop}" for start, stop, recomputed in plan.segments]
        print(f"{name:11s} {' '.join(parts)}: {plan.recomputed:.0%} of the forward pass, in brackets, runs twice")
    return {
        "everything": one_after_the_other,
        "dots": lambda functions: fmp.remat_sequential(functions, count, saveable=fmp.saveable.dots),
        "nothing": lambda functions: fmp.remat_sequential(functions, count),
        "sqrt(n)": lambda functions: fmp.remat_sequential(functions, round(math.sqrt(count))),
        "auto": lambda functions: fmp.remat_sequential(functions, auto),
        "halfway": lambda functions: fmp.remat_sequential(functions, halfway),
    }


def sample_batch(images: Tensor, labels: Tensor, step: int, args: argparse.Namespace) -> Batch:
    """Returns images f32[batch, 32, 32, 1] and labels i64[batch]."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    chosen = torch.randint(len(images), (args.batch_size,), generator=generator)
    return F.pad(images[chosen].float() / 255, (2, 2, 2, 2)).unsqueeze(-1), labels[chosen]


class Row(NamedTuple):
    """What one arrangement costs.

    Attributes:
        peak: The most bytes that are live at once in a step, beyond state and batch.
        kept: The bytes that wait for the backward pass.
        seconds: The fastest step.
        loss: The last loss.
        same: Whether losses and state have the bits of the first arrangement.
    """

    peak: int
    kept: int
    seconds: float
    loss: float
    same: bool


def train(losses: dict[str, Loss], params: Params, batches: list[Batch]) -> dict[str, Row]:
    """Trains under all arrangements side by side, so that a busy machine slows them all."""
    steps = {name: fmp.train_step(loss_fn, fmp.optim.adamw(1e-3)) for name, loss_fn in losses.items()}
    states = {name: step.init(params) for name, step in steps.items()}
    peaks = {name: fmp.memory.peak(step, states[name], batches[0]) for name, step in steps.items()}
    kept = {
        name: fmp.memory.saved_residuals(lambda p, fn=loss_fn: fn(p, batches[0]), params).total_bytes
        for name, loss_fn in losses.items()
    }

    history: dict[str, list[Tensor]] = {name: [] for name in steps}
    seconds = dict.fromkeys(steps, math.inf)
    progress = tqdm(total=len(steps) * len(batches), desc="training", mininterval=0.5)
    for batch in batches:
        for name, step in steps.items():
            start = time.perf_counter()
            states[name], metrics = step(states[name], batch)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
            history[name].append(metrics.loss)
            progress.update()
    progress.close()

    def bits(name: str) -> list[Tensor]:
        return [leaf for leaf in (*fmp.tree.leaves(states[name]), *history[name]) if leaf is not None]

    first = next(iter(steps))
    return {
        name: Row(
            peaks[name],
            kept[name],
            seconds[name],
            history[name][-1].item(),
            all(map(torch.equal, bits(name), bits(first))),
        )
        for name in steps
    }


def draw(rows: dict[str, Row], path: Path) -> None:
    """Saves a bar chart of peak memory and time."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    names, positions = list(rows), range(len(rows))
    for axes, values, label, form in (
        (left, [row.peak / MIB for row in rows.values()], "peak memory of a step (MiB)", "%.0f"),
        (right, [row.seconds * 1e3 for row in rows.values()], "fastest step (ms)", "%.0f"),
    ):
        bars = axes.barh(positions, values, color=[plt.get_cmap("viridis")(index / len(rows)) for index in positions])
        axes.bar_label(bars, fmt=form, padding=3)
        axes.set_xlim(0, max(values) * 1.15)
        axes.set_xlabel(label)
    left.set_yticks(positions, names)
    left.invert_yaxis()
    left.set_ylabel("kept for the backward pass")
    figure.suptitle("The same training, bit for bit")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--depth", type=int, default=24, help="number of blocks, spread evenly over three sizes of map")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/deep_net_memory"), help="folder for the picture")
    args = parser.parse_args()
    for name in ("steps", "depth", "batch_size"):
        if not 1 <= getattr(args, name) < 2**31:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 and below 2**31")
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
    images, labels = read_mnist()
    batches = [sample_batch(images, labels, index, args) for index in range(args.steps)]
    layers = make_layers(args.depth)
    params = [layer.params for layer in layers]
    arrangements = make_arrangements(layers, params, batches[0])
    rows = train({name: make_loss(layers, arrange) for name, arrange in arrangements.items()}, params, batches)

    print("arrangement  peak MiB  kept MiB  ms a step    loss  same bits")
    for name, row in rows.items():
        print(
            f"{name:11s} {row.peak / MIB:9.1f} {row.kept / MIB:9.1f} {row.seconds * 1e3:10.0f} {row.loss:7.4f}  "
            f"{'yes' if row.same else 'no'}"
        )
    draw(rows, args.out / "memory.png")
    print(f"picture     {args.out / 'memory.png'}")
    different = [name for name, row in rows.items() if not row.same]
    print(f"proof       arrangements that end in other bits than the first: {len(different)}")
    if different:
        raise SystemExit(f"these arrangements end in other bits than the first: {', '.join(different)}")


if __name__ == "__main__":
    main()
