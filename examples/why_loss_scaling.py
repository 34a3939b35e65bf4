"""Shows how float16 loses small gradients, and what static, dynamic and per-loss scaling change: a table and a page.

    python examples/why_loss_scaling.py            # the page is out/why_loss_scaling/page.png
    python examples/why_loss_scaling.py --steps 1000

One network learns two things about handwritten digits: to read them, by a loss that is summed over the batch, and to
paint them again, by a loss that is averaged over all pixels and has a small weight, as auxiliary losses do. Their
gradients lie some thirty powers of two apart, and float16 has forty, with all digits in thirty of them.

    unscaled    all gradients of the painter round to zero: it never learns, and nothing says so
    static      a constant factor, as large as the reader's gradients allow at first: some come through
    dynamic     the factor follows the reader's gradients as they shrink: most come through
    per loss    each loss has a factor of its own: all come through, and the painter learns as in float32

The painter's error after 400 steps, float32 giving 0.0289: unscaled 0.2334 (no better than at the start), static
0.0610, dynamic 0.0350, per loss 0.0295. The reader learns in all of them, so the sum of both losses looks well in all.

The histograms show the gradients of the activations, as the Mixed Precision Training paper does (arXiv 1710.03740):
what is lost there is lost for the weights of all layers before.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator, NullLocator
from mnist import read_mnist
from torch import Tensor
from tqdm import tqdm

import fmp
from fmp.numerics.plots.figure import BLUE, GREEN, INK, ORANGE, RED, new_figure, tidy

SIDE, WIDTH, CODE = 14, 64, 32
BATCH = 128
PARTS = {"read": ("encoder", "reader"), "paint": ("encoder", "painter")}
RUNS: tuple[str, ...] = ("float32", "unscaled", "static", "dynamic", "per loss")
COLORS: dict[str, str] = dict(zip(RUNS, (INK, RED, ORANGE, BLUE, GREEN), strict=True))
FORMATS = ("f16", "bf16", "f8e5m2", "f8e4m3")

Params = dict[str, dict]
Batch = tuple[Tensor, Tensor]
LossFn = Callable[..., Tensor]


def dense(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ params["weight"] + params["bias"]


def encode(params: Params, x: Tensor, nudges: dict) -> Tensor:
    hidden = torch.tanh(dense(params["encoder"]["first"], x) + nudges.get("first", 0.0))
    return torch.tanh(dense(params["encoder"]["second"], hidden) + nudges.get("code", 0.0))


def read_loss(params: Params, batch: Batch, nudges: dict | None = None) -> Tensor:
    """Returns the cross entropy of the digits, summed over the batch, f32[]; nudges are added to the activations."""
    images, digits = batch
    nudges = nudges or {}
    logits = dense(params["reader"], encode(params, images, nudges)) + nudges.get("logits", 0.0)
    return F.cross_entropy(logits.float(), digits, reduction="sum")


def paint_loss(params: Params, batch: Batch, nudges: dict | None = None) -> Tensor:
    """Returns the squared error of the painted digits, averaged over all pixels, f32[]."""
    images, _ = batch
    nudges = nudges or {}
    hidden = torch.tanh(dense(params["painter"]["first"], encode(params, images, nudges)) + nudges.get("stroke", 0.0))
    painted = dense(params["painter"]["second"], hidden) + nudges.get("pixels", 0.0)
    return (painted.float().sigmoid() - images.float()).square().mean()


def weighted(loss_fn: LossFn, weight: float) -> LossFn:
    return lambda params, batch, nudges=None: weight * loss_fn(params, batch, nudges)


def make_params(seed: int) -> Params:
    """Returns the parameters in float32: weights [inputs, outputs] of variance 1 / inputs, and biases of zero."""
    generator = torch.Generator().manual_seed(seed)

    def layer(inputs: int, outputs: int) -> dict[str, Tensor]:
        weight = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
        return {"weight": weight, "bias": torch.zeros(outputs)}

    return {
        "encoder": {"first": layer(SIDE**2, WIDTH), "second": layer(WIDTH, CODE)},
        "reader": layer(CODE, 10),
        "painter": {"first": layer(CODE, WIDTH), "second": layer(WIDTH, SIDE**2)},
    }


def make_batches(seed: int, steps: int) -> list[Batch]:
    """Returns images f32[batch, pixels] from 0 to 1, and digits i64[batch], for each step."""
    images, digits = read_mnist()
    images = F.avg_pool2d(images[:, None].float() / 255, 2).flatten(1)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(images), (steps, BATCH), generator=generator)
    return [(images[rows], digits[rows]) for rows in chosen]


def activation_gradients(loss_fn: LossFn, params: Params, batch: Batch) -> dict[str, Tensor]:
    """Returns the gradients with respect to what each layer gives, before its activation; in float32."""
    widths = {"first": WIDTH, "code": CODE, "logits": 10, "stroke": WIDTH, "pixels": SIDE**2}
    nudges = {name: torch.zeros(BATCH, width) for name, width in widths.items()}
    return fmp.grad(loss_fn, argnums=2)(params, batch, nudges)


def lost_in_float16(loss_fn: LossFn, params: Params, batch: Batch, scale: Tensor) -> float:
    """Returns the fraction of the nonzero gradients of all weights that are zero after backpropagation in float16."""
    low = fmp.cast((params, batch), torch.float16)
    true = fmp.tree.leaves(fmp.grad(loss_fn)(params, batch))
    found = fmp.tree.leaves(fmp.grad(lambda *args: scale * loss_fn(*args))(*low))
    nonzero = sum(int((leaf != 0).sum()) for leaf in true)
    lost = sum(int(((leaf != 0) & (half == 0)).sum()) for leaf, half in zip(true, found, strict=True))
    return lost / max(1, nonzero)


class History(NamedTuple):
    """What a run noted, an entry a step; `lost` less often.

    Attributes:
        losses: Of reader (for each image) and painter (without its weight), f32[steps, 2].
        scales: The loss scales of reader and painter, f32[steps, 2].
        lost: Steps, and the fraction of the painter's gradients that the run loses there.
        skipped: Skipped steps: of the reader, and of the painter.
    """

    losses: Tensor
    scales: Tensor
    lost: list[tuple[int, float]]
    skipped: tuple[int, int]


def make_step(name: str, losses: dict[str, LossFn], static: float, args: argparse.Namespace) -> fmp.TrainStep:
    """Makes the train step of a run. All differ in the policy and the loss scale only."""

    def optimizer() -> fmp.optim.GradientTransformation:
        return fmp.optim.adam(args.learning_rate, eps=1e-15)  # the usual 1e-8 is larger than the painter's gradients

    def total(params: Params, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        parts = {name: loss_fn(params, batch) for name, loss_fn in losses.items()}
        return parts["read"] + parts["paint"], parts

    policy = fmp.opt_level("O0" if name == "float32" else "O2", half_dtype=torch.float16)
    dynamic = fmp.DynamicLossScale(growth_interval=args.growth_interval)
    if name == "per loss":
        optimizers = {part: optimizer() for part in ("encoder", "reader", "painter")}
        return fmp.train_step(
            losses, optimizers, policy=policy, loss_scale={"read": dynamic, "paint": dynamic}, uses=PARTS
        )
    scales = {"float32": fmp.NoOpLossScale(), "unscaled": fmp.NoOpLossScale(), "dynamic": dynamic}
    scale = scales.get(name, fmp.StaticLossScale(static))
    return fmp.train_step(total, optimizer(), policy=policy, loss_scale=scale, has_aux=True)


def train(
    name: str, losses: dict[str, LossFn], batches: list[Batch], static: float, args: argparse.Namespace, progress: tqdm
) -> History:
    """Trains by one of the five ways."""
    step = make_step(name, losses, static, args)
    state = step.init(make_params(args.seed))
    rows, scales, lost = [], [], []
    for index, batch in enumerate(batches):
        if name != "float32" and index % max(1, args.steps // 25) == 0:
            params = fmp.master.merge(state.params, state.master)
            scale = state.loss_scale["paint"] if name == "per loss" else state.loss_scale
            lost.append((index, lost_in_float16(losses["paint"], params, batch, scale.loss_scale)))
        state, metrics = step(state, batch)
        parts: Any = metrics.loss if name == "per loss" else metrics.aux
        both: Any = metrics.loss_scale if name == "per loss" else dict.fromkeys(PARTS, metrics.loss_scale)
        rows.append(torch.stack([parts["read"] / BATCH, parts["paint"] / args.paint_weight]))
        scales.append(torch.stack([both["read"], both["paint"]]))
        progress.update()
    skips = state.skip_count
    skipped = (int(skips["reader"]), int(skips["painter"])) if name == "per loss" else (int(skips), int(skips))
    return History(torch.stack(rows), torch.stack(scales), lost, skipped)


def smooth(losses: Tensor, steps: int = 10) -> Tensor:
    """Averages each loss with those of the steps before, f32[n]."""
    padded = torch.cat([losses[:1].expand(steps - 1), losses])
    return padded.unfold(0, steps, 1).mean(1)


def draw(path: Path, gradients: dict[str, dict[str, Tensor]], scale: float, histories: dict[str, History]) -> None:
    """Saves the page: two histograms, the losses, the scales, and how much of the painter's gradients is lost."""
    page = new_figure(11.0, 15.0)
    parts: Any = page.subfigures(3, 1, height_ratios=(4.6, 4.6, 5.6))
    top, middle, bottom = parts
    for part, name, title in (
        (top, "paint", "Painter: gradients of the activations, before training"),
        (middle, "read", "Reader: the scale that would save the painter's gradients makes its own overflow"),
    ):
        histogram = fmp.numerics.histogram(gradients[name])
        fmp.numerics.plot_exponents(histogram, scale=scale, formats=FORMATS, title=title, into=part)

    (paint, read), (scales, lost) = bottom.subplots(2, 2)
    for name, history in histories.items():
        steps = range(len(history.losses))
        look = {"color": COLORS[name], "linewidth": 1.5}
        # Otherwise float32 would hide behind the run that equals it.
        dashes = {"linestyle": "--", "zorder": 5} if name == "float32" else {}
        paint.plot(steps, smooth(history.losses[:, 1]), label=name, **look, **dashes)
        read.plot(steps, smooth(history.losses[:, 0]), **look, **dashes)
        if history.lost:
            lost.plot(*zip(*((step, 100 * share) for step, share in history.lost), strict=True), **look)
        if name == "per loss":
            scales.step(steps, history.scales[:, 1], where="post", label="per loss: painter", **look)
            scales.step(steps, history.scales[:, 0], where="post", label="per loss: reader", **look, linestyle=":")
        elif name != "float32":
            scales.step(steps, history.scales[:, 0], where="post", label=name, **look)
    for axes in (paint, read):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    scales.set_yscale("log", base=2)
    tidy(paint, "Painter: squared error of a pixel", xlabel="step")
    tidy(read, "Reader: cross entropy", xlabel="step")
    tidy(scales, "Loss scale", xlabel="step")
    tidy(lost, "Gradients of the painter's weights lost in float16, %", xlabel="step")
    paint.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="center right", bbox_to_anchor=(1.0, 0.7))
    scales.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="center right", bbox_to_anchor=(1.0, 0.28))
    page.savefig(path, dpi=120)


def print_formats(gradients: dict[str, dict[str, Tensor]], scale: float) -> None:
    """Prints what a cast of the activations' gradients would lose, in percent, as they are and scaled."""
    print(
        f"gradients  format   zero%  subnormal  overflow   times 2^{math.log2(scale):.0f}: zero%  subnormal  overflow"
    )
    for name, grads in gradients.items():
        for dtype in FORMATS:
            before, after = (fmp.numerics.loss_in(grads, dtype, factor) for factor in (1.0, scale))
            numbers = [
                100 * part for loss in (before, after) for part in (loss.underflow, loss.subnormal, loss.overflow)
            ]
            print("{:10s} {:7s} {:5.1f} {:10.1f} {:9.1f} {:19.1f} {:10.1f} {:9.1f}".format(name, dtype, *numbers))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--paint-weight", type=float, default=1e-6, help="the weight of the painter's loss")
    parser.add_argument("--growth-interval", type=int, default=20, help="good steps until a dynamic scale doubles")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/why_loss_scaling"), help="folder for the page")
    args = parser.parse_args()
    for name in ("steps", "growth_interval"):
        if not 1 <= getattr(args, name) < 2**31:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 and below 2**31")
    for name in ("learning_rate", "paint_weight"):
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
    losses = {"read": read_loss, "paint": weighted(paint_loss, args.paint_weight)}
    batches = make_batches(args.seed, args.steps)
    params = make_params(args.seed)
    gradients = {name: activation_gradients(losses[name], params, batches[0]) for name in ("paint", "read")}
    scale = fmp.numerics.suggest_scale(gradients["paint"], torch.float16).item()
    print_formats(gradients, scale)

    weights = {name: fmp.grad(loss_fn)(params, batches[0]) for name, loss_fn in losses.items()}
    static = fmp.numerics.suggest_scale((gradients, weights), torch.float16, margin=1).item()
    with tqdm(total=len(RUNS) * args.steps, desc="five runs", mininterval=0.5) as progress:
        histories = {name: train(name, losses, batches, static, args, progress) for name in RUNS}
    last = max(1, args.steps // 10)
    means = {name: history.losses[-last:].mean(0) for name, history in histories.items()}
    if not fmp.all_finite(means):
        raise SystemExit("the training diverged; take a smaller --learning-rate")

    print(
        "run        scale: reader  painter  skipped  gradients lost: first    last  loss: reader  painter  to float32"
    )
    for name, history in histories.items():
        reader, painter = (f"2^{power:.0f}" for power in history.scales[-1].log2().tolist())
        skipped = "+".join(map(str, sorted(set(history.skipped))))
        first, final = (f"{100 * history.lost[index][1]:.1f}%" if history.lost else "-" for index in (0, -1))
        reads, paints = means[name].tolist()
        print(
            f"{name:10s} {reader:>13s} {painter:>8s} {skipped:>8s} {first:>22s} {final:>7s} {reads:13.4f} {paints:8.4f}"
            f" {paints / means['float32'][1]:10.2f}x"
        )
    draw(args.out / "page.png", gradients, scale, histories)
    print(f"picture   {args.out / 'page.png'}")


if __name__ == "__main__":
    main()
