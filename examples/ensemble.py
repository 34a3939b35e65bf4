"""Trains eight networks at once in float16, each with a dynamic loss scale of its own: one train step under vmap.

    python examples/ensemble.py              # a table, and the picture out/ensemble/scales.png
    python examples/ensemble.py --steps 1000

All members learn the same function, but the data of each is in another unit, from 1/64 to 256. Gradients grow with the
square of the unit, so no loss scale fits all: at first the members with large units overflow and skip steps until their
scale has come down, while the others train on and their scales rise.

The proof: the same training without vmap, member after member in a Python loop, ends in the same states, every leaf of
them. On CPUs whose float16 matrix products sum a batch of matrices in the order of a single one, the difference is
exactly 0; elsewhere the example accepts 1%, as rounding errors of float16 grow along a training.
"""

import argparse
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.func import vmap
from tqdm import tqdm

import fmp

UNITS = 4.0 ** torch.arange(-3, 5)  # one a member; powers of two, so that a unit as such costs no digit
MEMBERS = len(UNITS)
WIDTH, BATCH = 16, 32
TOLERANCE = 0.01

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor, Tensor]


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Returns the mean squared error of one member in its own unit, f32[]."""
    x, y, unit = batch
    hidden = torch.tanh(x @ params["first.weight"] + params["first.bias"])
    hidden = torch.tanh(hidden @ params["second.weight"] + params["second.bias"])
    predicted = (hidden @ params["out.weight"]).squeeze(-1) * unit
    return (predicted.float() - y.float()).square().mean()


def make_params(seed: int) -> Params:
    """Returns the float32 parameters of all members, along dimension 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "first.weight": torch.randn(MEMBERS, 4, WIDTH, generator=generator) * 0.5,
        "first.bias": torch.zeros(MEMBERS, WIDTH),
        "second.weight": torch.randn(MEMBERS, WIDTH, WIDTH, generator=generator) / WIDTH**0.5,
        "second.bias": torch.zeros(MEMBERS, WIDTH),
        "out.weight": torch.randn(MEMBERS, WIDTH, 1, generator=generator) / WIDTH**0.5,
    }


def make_batch(seed: int, index: int) -> Batch:
    """Returns inputs f32[members, batch, 4], targets in each member's unit f32[members, batch], units f32[members]."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    x = torch.randn(MEMBERS, BATCH, 4, generator=generator)
    y = torch.sin(2 * x[..., 0]) * x[..., 1]
    return x, y * UNITS[:, None], UNITS


def member(tree: fmp.TrainState | Params | Batch, index: int):
    """Takes one member out of a tree of all."""
    return fmp.tree.map(lambda leaf: None if leaf is None else leaf[index], tree)


def train_by_vmap(step: fmp.TrainStep, params: Params, batches: list[Batch]) -> tuple[fmp.TrainState, Tensor, Tensor]:
    """Trains all members at once; returns their states, losses f32[steps, members] and scales f32[steps, members]."""
    states = vmap(step.init)(params)
    losses, scales = [], []
    for batch in tqdm(batches, desc="vmap", mininterval=0.5):
        states, metrics = vmap(step)(states, batch)
        losses.append(metrics.loss)
        scales.append(metrics.loss_scale)
    return states, torch.stack(losses), torch.stack(scales)


def train_by_loop(step: fmp.TrainStep, params: Params, batches: list[Batch]) -> list[fmp.TrainState]:
    """Trains one member after the other; returns their states."""
    states = [step.init(member(params, index)) for index in range(MEMBERS)]
    progress = tqdm(total=MEMBERS * len(batches), desc="loop", mininterval=0.5)
    for index in range(MEMBERS):
        for batch in batches:
            states[index], _ = step(states[index], member(batch, index))
            progress.update()
    progress.close()
    return states


def difference(left: fmp.TrainState, right: fmp.TrainState) -> float:
    """Returns the largest difference between two states, in units of the largest entry of its leaf."""

    def of_leaf(a: Tensor, b: Tensor) -> Tensor:
        # The scale and the counts are leaves as well: one step skipped by only one of the two would show here.
        gap, largest = (a.double() - b.double()).abs().max(), b.double().abs().max()
        return torch.where(gap == 0, 0.0, gap / largest)

    pairs = zip(fmp.tree.leaves(left), fmp.tree.leaves(right), strict=True)
    return torch.stack([of_leaf(a, b) for a, b in pairs if a is not None]).max().item()  # NaN if there is one


def draw(scales: Tensor, path: Path) -> None:
    """Saves a picture of the loss scales, f32[steps, members]."""
    figure, axes = plt.subplots(figsize=(9, 5))
    for index, power in enumerate(UNITS.log2().tolist()):
        color = plt.get_cmap("viridis")(index / (MEMBERS - 1))
        axes.step(range(len(scales)), scales[:, index], where="post", color=color, label=f"unit $2^{{{power:g}}}$")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale", title="One vmapped step, eight dynamic loss scales (float16)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/ensemble"), help="folder for the picture")
    args = parser.parse_args()
    if not 1 <= args.steps < 2**31:
        parser.error("--steps must be at least 1 and below 2**31")
    if not 0 <= args.seed < 2**32:
        parser.error("--seed must be at least 0 and below 2**32")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return args


def main() -> None:
    args = parse_arguments()
    step = fmp.train_step(
        loss_fn,
        fmp.optim.adam(1e-2),
        policy=fmp.opt_level("O2", half_dtype=torch.float16),
        loss_scale=fmp.DynamicLossScale(growth_interval=10),
    )
    params = make_params(args.seed)
    batches = [make_batch(args.seed, index) for index in range(args.steps)]
    vmap(step)(vmap(step.init)(params), batches[0])  # the first call loads parts of torch; it is no part of the timing

    start = time.perf_counter()
    states, losses, scales = train_by_vmap(step, params, batches)
    middle = time.perf_counter()
    alone = train_by_loop(step, params, batches)
    end = time.perf_counter()

    errors = losses[-max(1, args.steps // 10) :].mean(0) / UNITS.square()
    differences = torch.tensor([difference(member(states, index), alone[index]) for index in range(MEMBERS)])
    print("member      unit  loss/unit^2   scale  skipped  difference to the loop")
    for index in range(MEMBERS):
        print(
            f"{index:6d} {UNITS[index]:9g} {errors[index]:12.4f}  "
            f"{f'2^{states.loss_scale.loss_scale[index].log2():.0f}':>6s} {states.skip_count[index]:8d}  "
            f"{differences[index]:g}"
        )
    draw(scales, args.out / "scales.png")
    print(f"picture     {args.out / 'scales.png'}")
    by_vmap, by_loop = (seconds / args.steps * 1e3 for seconds in (middle - start, end - middle))
    print(f"speed       vmap {by_vmap:.2f} ms a step, loop {by_loop:.2f} ms: {by_loop / by_vmap:.1f} times as fast")
    print(f"proof       largest difference between vmap and loop: {differences.max():g}")
    assert differences.max() <= TOLERANCE, "vmap and loop differ"


if __name__ == "__main__":
    main()
