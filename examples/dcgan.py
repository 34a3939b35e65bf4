"""Trains a DCGAN on handwritten digits in mixed precision: two models, two optimizers, three losses, three scalers.

    python examples/dcgan.py                                      # O2 in bfloat16; the picture is out/dcgan/digits.png
    python examples/dcgan.py --opt-level O1                       # the models in float32, each op in half or float32
    python examples/dcgan.py --half f16 --width 8 --epochs 8      # loss scales that rise, overflow and fall

It does what Apex's DCGAN example did. The discriminator learns from two losses, on real and on generated images, each
under a loss scale of its own; then the generator learns from a third, which the discriminator judges with the weights
it has just got. An overflow in any of the three skips the update of one model only. All of it is one pure function from
state and batch to state and metrics; the models, masters, moments, BatchNorm statistics and all three loss scales are
leaves of that state.

Half is bfloat16 unless `--half f16` asks for float16: CPUs have no fast float16 convolution, above all none for the
backward pass. Where it is asked for, oneDNN is switched off, whose float16 convolutions are the slowest of all.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from mnist import read_mnist
from torch import Tensor, nn
from tqdm import tqdm

import fmp

NOISE = 64  # dimensions of the noise that an image is made of
SIDE = 8  # images along each side of a grid in the picture


class Generator(nn.Sequential):
    """Turns noise [n, NOISE, 1, 1] into images [n, 1, 32, 32] within [-1, 1]."""

    def __init__(self, width: int):
        super().__init__()
        self.up1 = nn.ConvTranspose2d(NOISE, 4 * width, 4, bias=False)
        self.norm1 = nn.BatchNorm2d(4 * width)
        self.relu1 = nn.ReLU()
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.relu2 = nn.ReLU()
        self.up3 = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.relu3 = nn.ReLU()
        self.up4 = nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1, bias=False)
        self.tanh = nn.Tanh()


class Discriminator(nn.Sequential):
    """Turns images [n, 1, 32, 32] into logits [n]; positive ones say that an image is real."""

    def __init__(self, width: int):
        super().__init__()
        self.down1 = nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False)
        self.relu1 = nn.LeakyReLU(0.2)
        self.down2 = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.relu2 = nn.LeakyReLU(0.2)
        self.down3 = nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.relu3 = nn.LeakyReLU(0.2)
        self.down4 = nn.Conv2d(4 * width, 1, 4, bias=False)
        self.flatten = nn.Flatten(0)


@fmp.tree.dataclass
class GanState:
    """The states of both trainings. Each has the buffers of both models; those of the generator's are the newest."""

    discriminator: fmp.TrainState
    generator: fmp.TrainState


@fmp.tree.dataclass
class GanMetrics:
    """What a step reports: losses, mean probabilities of "real" and loss scales by loss, skipped updates by model."""

    loss: dict[str, Tensor]
    probability: dict[str, Tensor]
    loss_scale: dict[str, Tensor]
    skipped: dict[str, Tensor]


Batch = dict[str, Tensor]  # "real": images [n, 1, 32, 32]; "noise": [n, NOISE, 1, 1]
GanStep = Callable[[GanState, Batch], tuple[GanState, GanMetrics]]


def make_gan(
    models: dict[str, fmp.Model], *, policy: fmp.Policy, loss_scale: Any, learning_rate: float, seed: int
) -> tuple[GanState, GanStep]:
    """Returns the first state, and the pure step that trains both models in turns."""

    def generate(params, buffers, noise):
        images, new = models["generator"].apply(params["generator"], buffers["generator"], noise, train=True)
        return images, {**buffers, "generator": new}

    def judge(params, buffers, images, wanted):
        logits, new = models["discriminator"].apply(
            params["discriminator"], buffers["discriminator"], images, train=True
        )
        logits = logits.float()
        loss = F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, wanted))
        return loss, {**buffers, "discriminator": new}, logits.sigmoid().mean()

    def real_loss(params, batch, *, buffers):
        return judge(params, buffers, batch["real"], 1.0)

    def fake_loss(params, batch, *, buffers, frozen):
        # The statistics of the generator move once a step, in its own loss.
        images, _ = generate(frozen, buffers, batch["noise"])
        return judge(params, buffers, images, 0.0)

    def generator_loss(params, batch, *, buffers, frozen):
        images, buffers = generate(params, buffers, batch["noise"])
        return judge(frozen, buffers, images, 1.0)

    train_discriminator = fmp.train_step(
        {"real": real_loss, "fake": fake_loss},
        {"discriminator": fmp.optim.adam(learning_rate, b1=0.5)},
        policy=policy,
        loss_scale={"real": loss_scale, "fake": loss_scale},
        has_aux=True,
    )
    train_generator = fmp.train_step(
        {"generator": generator_loss},
        {"generator": fmp.optim.adam(learning_rate, b1=0.5)},
        policy=policy,
        loss_scale={"generator": loss_scale},
        has_aux=True,
    )
    buffers = {name: model.buffers for name, model in models.items()}
    start = GanState(
        train_discriminator.init({"discriminator": models["discriminator"].params}, buffers=buffers, seed=seed),
        train_generator.init({"generator": models["generator"].params}, buffers=buffers, seed=seed),
    )

    def step(state: GanState, batch: Batch) -> tuple[GanState, GanMetrics]:
        discriminator = fmp.tree.replace(state.discriminator, buffers=state.generator.buffers)
        discriminator, of_discriminator = train_discriminator(discriminator, batch, frozen=state.generator.params)
        generator = fmp.tree.replace(state.generator, buffers=discriminator.buffers)
        generator, of_generator = train_generator(generator, batch, frozen=discriminator.params)
        metrics = GanMetrics(
            loss={**of_discriminator.loss, **of_generator.loss},
            probability={**of_discriminator.aux, **of_generator.aux},
            loss_scale={**of_discriminator.loss_scale, **of_generator.loss_scale},
            skipped={**of_discriminator.skipped, **of_generator.skipped},
        )
        return GanState(discriminator, generator), metrics

    return start, step


def make_models(width: int, seed: int) -> dict[str, fmp.Model]:
    """Returns both models, initialized as in the DCGAN paper: normal with a standard deviation of 0.02."""
    torch.manual_seed(seed)
    modules = {"discriminator": Discriminator(width), "generator": Generator(width)}
    for module in modules.values():
        for name, parameter in module.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.02)
    return {name: fmp.functionalize(module) for name, module in modules.items()}


def read_images() -> Tensor:
    """Returns the digits as f32[5000, 1, 32, 32] within [-1, 1]."""
    images, _ = read_mnist()
    return F.pad(images[:, None].float() / 127.5 - 1.0, (2, 2, 2, 2), value=-1.0)


def make_noise(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, NOISE, 1, 1, generator=generator)


def batches_of(images: Tensor, epoch: int, args: argparse.Namespace) -> Iterator[Batch]:
    """Yields the batches of an epoch; they depend on seed and epoch only."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
    order = torch.randperm(len(images), generator=generator)
    for chosen in order.split(args.batch_size):
        if len(chosen) == args.batch_size:
            yield {"real": images[chosen], "noise": make_noise(args.batch_size, generator)}


HEADER = (
    f"{'':5s}  {'loss':^24s}  {'called real':^24s}  {'loss scale':^18s}  {'skipped':^7s}\n"
    "epoch      real    fake     gen.     real    fake     gen.    real  fake  gen.    D   G"
)


def row(epoch: int, history: list[GanMetrics]) -> str:
    """Returns a line of the table: means of losses and probabilities, last scales, and sums of skipped updates."""
    losses = ("real", "fake", "generator")
    mean = {name: torch.stack([metrics.loss[name] for metrics in history]).mean() for name in losses}
    called_real = {name: torch.stack([metrics.probability[name] for metrics in history]).mean() for name in losses}
    scales = {name: f"2^{history[-1].loss_scale[name].log2():g}" for name in losses}
    skips = [sum(int(metrics.skipped[name]) for metrics in history) for name in ("discriminator", "generator")]
    return (
        f"{epoch:5d}  "
        + "".join(f"{mean[name]:8.3f}" for name in losses)
        + " "
        + "".join(f"{called_real[name]:8.3f}" for name in losses)
        + "  "
        + "".join(f"{scales[name]:>6s}" for name in losses)
        + f"  {skips[0]:3d} {skips[1]:3d}"
    )


@torch.no_grad()
def draw(models: dict[str, fmp.Model], policy: fmp.Policy, state: GanState, real: Tensor, path: Path) -> None:
    """Saves generated images on the left and real ones on the right, at twice their size."""
    apply = fmp.autocast(models["generator"].apply, policy)
    noise = make_noise(SIDE * SIDE, torch.Generator().manual_seed(0))
    params, buffers = state.generator.params["generator"], state.generator.buffers["generator"]
    generated, _ = apply(params, buffers, noise, train=False)

    def grid(images: Tensor) -> Tensor:
        return images.view(SIDE, SIDE, 32, 32).transpose(1, 2).reshape(SIDE * 32, SIDE * 32)

    picture = torch.cat([grid(generated), torch.ones(SIDE * 32, 8), grid(real)], dim=1)
    picture = picture.repeat_interleave(2, 0).repeat_interleave(2, 1)
    plt.imsave(path, picture.numpy(), cmap="gray", vmin=-1.0, vmax=1.0)


def positive(text: str) -> float:
    """Reads a positive, finite number from the command line."""
    number = float(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive, finite number, got {text}")
    return number


def count(text: str) -> int:
    """Reads a positive whole number from the command line."""
    number = int(text)
    if not 0 < number < 2**31:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O2", help="O0, O1, O2 or O3")
    parser.add_argument("--half", choices=("bf16", "f16"), default="bf16", help="the 16-bit format of O1 to O3")
    parser.add_argument(
        "--loss-scale",
        default="dynamic",
        help="of each loss: dynamic, none or a number; bf16 and O0 do not need one, but do not mind",
    )
    parser.add_argument(
        "--growth-interval", type=count, default=200, help="good steps in a row that double a dynamic loss scale"
    )
    parser.add_argument("--epochs", type=count, default=25)
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--width", type=count, default=32, help="channels of the layers next to the image")
    parser.add_argument("--learning-rate", type=positive, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out/dcgan"), help="folder for picture and final state")
    args = parser.parse_args()
    if args.batch_size > 5000:
        parser.error(f"--batch-size must be at most 5000, the number of images, got {args.batch_size}")
    if args.batch_size < 2:
        parser.error("--batch-size must be at least 2: a BatchNorm needs something to average over")
    if not 0 <= args.seed < 2**32:
        parser.error(f"argument --seed: must be at least 0 and below 2**32, got {args.seed}")
    try:
        args.policy = fmp.opt_level(args.opt_level, half_dtype=args.half)
        args.scaler = fmp.loss_scale(args.loss_scale)
        args.output.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    if isinstance(args.scaler, fmp.DynamicLossScale):
        args.scaler = fmp.DynamicLossScale(growth_interval=args.growth_interval)
    return args


def main() -> None:
    args = parse_arguments()
    # oneDNN computes the backward pass of a float16 convolution by a reference loop, the slowest way there is.
    torch.backends.mkldnn.enabled = args.half != "f16" or args.opt_level == "O0"
    images = read_images()
    models = make_models(args.width, args.seed)
    state, step = make_gan(
        models, policy=args.policy, loss_scale=args.scaler, learning_rate=args.learning_rate, seed=args.seed
    )
    for name, model in models.items():
        print(f"{name:14s}{sum(leaf.numel() for leaf in model.params.values()):,} parameters")
    print(f"{'policy':14s}{args.policy}")
    print(HEADER)

    start = time.perf_counter()
    progress = tqdm(total=args.epochs * (len(images) // args.batch_size), desc=args.opt_level, mininterval=0.5)
    for epoch in range(args.epochs):
        history = []
        for batch in batches_of(images, epoch, args):
            state, metrics = step(state, batch)
            history.append(metrics)
            progress.update()
        progress.write(row(epoch, history))
    progress.close()
    print(f"trained       {args.epochs} epochs in {time.perf_counter() - start:.0f} s")
    draw(models, args.policy, state, images[:: len(images) // SIDE**2][: SIDE**2], args.output / "digits.png")
    print(f"picture       {args.output / 'digits.png'}: generated digits on the left, real ones on the right")
    fmp.checkpoint.save(state, args.output / "state.fmp")


if __name__ == "__main__":
    main()
