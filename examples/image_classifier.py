"""Trains a small ResNet on handwritten digits, by the command line of Apex's ImageNet script.

    python examples/image_classifier.py                                   # O1 in bfloat16
    python examples/image_classifier.py --opt-level O2 --loss-scale dynamic
    python examples/image_classifier.py --opt-level O3 --keep-batchnorm-fp32 True
    python examples/image_classifier.py --resume out/image_classifier/checkpoint.fmp             # goes on, bit for bit
    python examples/image_classifier.py --resume out/image_classifier/checkpoint.fmp --evaluate
    python examples/image_classifier.py --compare                         # every level and format, and a table

Nothing but the policy differs between opt levels. The digits are 5,000 of MNIST: 4,000 to train, the rest to test.

Half is bfloat16 unless `--half f16` asks for float16: CPUs have no fast float16 convolution, above all none for the
backward pass. Where it is asked for, oneDNN is switched off, whose float16 convolutions are the slowest of all.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mnist import read_mnist
from torch import Tensor, nn
from tqdm import tqdm

import fmp

TEST = 100  # images of each digit that are held out
COMPARED = [("O0", "f32"), *((level, half) for level in ("O1", "O2", "O3") for half in ("bf16", "f16"))]


class Block(nn.Module):
    """Two convolutions around a shortcut, as in He et al. 2015."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + residual)


class ResNet(nn.Module):
    """A residual network of eight layers for images [n, 1, 28, 28]."""

    def __init__(self, width: int):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Data(NamedTuple):
    """Images f32[n, 1, 28, 28] with mean 0 and variance 1, and labels i64[n]."""

    images: Tensor
    labels: Tensor


class Score(NamedTuple):
    """Percentages of images whose digit is the first guess, or among the first five; and the mean loss."""

    prec1: float
    prec5: float
    loss: float


class Average:
    """The last value and the mean of all, as Apex's script prints them."""

    def __init__(self):
        self.last, self.total, self.count = 0.0, 0.0, 0

    def add(self, value: float) -> None:
        self.last, self.total, self.count = value, self.total + value, self.count + 1

    def __str__(self) -> str:
        return f"{self.last:.3f} ({self.total / self.count:.3f})"


def read_data() -> tuple[Data, Data]:
    """Returns the digits to train and to test with."""
    images, labels = read_mnist()
    images = (images[:, None].float() / 255 - 0.1307) / 0.3081
    held_out = torch.arange(len(labels)) % 500 < TEST  # 500 of each digit follow each other
    return Data(images[~held_out], labels[~held_out]), Data(images[held_out], labels[held_out])


def batches_of(data: Data, epoch: int, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the batches of an epoch, each image moved by up to two pixels.

    They depend on seed and epoch only, so a resumed run sees the same.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
    padded = F.pad(data.images, (2, 2, 2, 2), value=float(data.images.min()))
    order = torch.randperm(len(data.labels), generator=generator)
    for chosen in order.split(args.batch_size):
        if len(chosen) == args.batch_size:
            down, right = torch.randint(5, (2, len(chosen), 1), generator=generator) + torch.arange(28)
            yield padded[chosen[:, None, None], 0, down[:, :, None], right[:, None, :]][:, None], data.labels[chosen]


def correct(logits: Tensor, labels: Tensor, guesses: int) -> Tensor:
    """Returns how many labels are among the first guesses, f32[]."""
    return (logits.topk(guesses, dim=-1).indices == labels[:, None]).sum().float()


def make_policy(level: str, half: str, args: argparse.Namespace) -> fmp.Policy:
    """Returns the precision policy; the arguments are those of `amp.initialize`."""
    return fmp.opt_level(
        level,
        half_dtype="f16" if half == "f32" else half,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )


def make_step(model: fmp.Model, policy: fmp.Policy, steps: int, args: argparse.Namespace) -> fmp.TrainStep:
    """Builds the train step for a run of so many steps."""

    def loss_fn(params, batch, *, buffers):
        images, labels = batch
        logits, buffers = model.apply(params, buffers, images, train=True)
        loss = F.cross_entropy(logits.float(), labels)
        return loss, buffers, {"prec1": correct(logits, labels, 1), "prec5": correct(logits, labels, 5)}

    warm_up = min(steps // args.epochs, steps // 2)
    schedule = fmp.optim.schedules.warmup_cosine_decay(0.0, args.lr, warm_up, steps)
    optimizer = fmp.optim.sgd(schedule, momentum=args.momentum, weight_decay=args.weight_decay)
    return fmp.train_step(loss_fn, optimizer, policy=policy, has_aux=True)


def train_epoch(
    step: fmp.TrainStep,
    state: fmp.TrainState,
    data: Data,
    epoch: int,
    args: argparse.Namespace,
    report: Callable[[str], None],
) -> fmp.TrainState:
    """Trains one epoch and reports every few steps."""
    seconds, speed, loss, prec1, prec5 = (Average() for _ in range(5))
    start = time.perf_counter()
    for index, batch in enumerate(batches_of(data, epoch, args), start=1):
        state, metrics = step(state, batch)
        loss.add(metrics.loss.item())
        prec1.add(100 * metrics.aux["prec1"].item() / args.batch_size)
        prec5.add(100 * metrics.aux["prec5"].item() / args.batch_size)
        now = time.perf_counter()
        seconds.add(now - start)
        speed.add(args.batch_size / (now - start))
        start = now
        if index % args.print_freq == 0:
            report(
                f"Epoch: [{epoch}][{index}/{len(data.labels) // args.batch_size}]  Time {seconds}  Speed {speed}  "
                f"Loss {loss}  Prec@1 {prec1}  Prec@5 {prec5}  Scale {metrics.loss_scale.item():g}  "
                f"Skipped {state.skip_count.item()}"
            )
    return state


@torch.no_grad()
def evaluate(model: fmp.Model, policy: fmp.Policy, state: fmp.TrainState, data: Data) -> Score:
    """Scores a model in the precision of its training."""
    apply = fmp.autocast(model.apply, policy)
    batches = data.images.split(250)
    logits = torch.cat([apply(state.params, state.buffers, images, train=False)[0] for images in batches])
    prec1, prec5 = (100 * correct(logits, data.labels, guesses).item() / len(data.labels) for guesses in (1, 5))
    return Score(prec1, prec5, F.cross_entropy(logits, data.labels).item())


def choose_kernels(half: str) -> None:
    # oneDNN computes the backward pass of a float16 convolution by a reference loop, the slowest way there is.
    torch.backends.mkldnn.enabled = half != "f16"


def make_model(args: argparse.Namespace) -> fmp.Model:
    torch.manual_seed(args.seed)
    return fmp.functionalize(ResNet(args.width))


def train(args: argparse.Namespace) -> None:
    """Trains, resumes or evaluates one model."""
    data, test = read_data()
    model = make_model(args)
    step = make_step(model, args.policy, args.epochs * (len(data.labels) // args.batch_size), args)
    state, first, best = step.init(model.params, buffers=model.buffers, seed=args.seed), 0, 0.0
    choose_kernels("f32" if args.opt_level == "O0" else args.half)
    print(f"=> {args.policy}")
    if args.resume is not None:
        like = {"state": state, "epoch": 0, "best": 0.0}
        try:
            restored = fmp.checkpoint.load(like, args.resume)
        except fmp.errors.CheckpointError as error:
            raise SystemExit(f"--resume: {error}") from None
        state, first, best = restored["state"], restored["epoch"], restored["best"]
        print(f"=> loaded {args.resume} (epoch {first})")

    if not args.evaluate:
        for epoch in range(first, args.epochs):
            state = train_epoch(step, state, data, epoch, args, print)
            score = evaluate(model, args.policy, state, test)
            best = max(best, score.prec1)
            print(f" * Prec@1 {score.prec1:.3f} Prec@5 {score.prec5:.3f} Loss {score.loss:.4f} Best {best:.3f}")
            fmp.checkpoint.save({"state": state, "epoch": epoch + 1, "best": best}, args.output / "checkpoint.fmp")
    score = evaluate(model, args.policy, state, test)
    print(f"##Top-1 {score.prec1:.3f}\n##Top-5 {score.prec5:.3f}\n##Loss  {score.loss:.4f}")


def compare(args: argparse.Namespace) -> None:
    """Trains the same model, from the same values and on the same batches, at every opt level."""
    data, test = read_data()
    model = make_model(args)
    progress = tqdm(total=len(COMPARED) * args.epochs, mininterval=0.5)
    rows = []
    for level, half in COMPARED:
        progress.set_description(f"{level} {half}")
        choose_kernels(half)
        policy = make_policy(level, half, args)
        step = make_step(model, policy, args.epochs * (len(data.labels) // args.batch_size), args)
        state = step.init(model.params, buffers=model.buffers, seed=args.seed)
        start = time.perf_counter()
        for epoch in range(args.epochs):
            state = train_epoch(step, state, data, epoch, args, lambda line: None)
            progress.update()
        seconds = time.perf_counter() - start
        score = evaluate(model, policy, state, test)
        rows.append((level, half, score, state.loss_scale.loss_scale.item(), state.skip_count.item(), seconds))
    progress.close()

    print("level  half   Prec@1  to O0   Prec@5    loss  loss scale  skipped  seconds")
    reference = rows[0][2].prec1
    for level, half, score, scale, skipped, seconds in rows:
        print(
            f"{level:5s}  {half:4s}  {score.prec1:7.2f} {score.prec1 - reference:+6.2f}  {score.prec5:7.2f} "
            f"{score.loss:7.4f}  {scale:10g}  {skipped:7d}  {seconds:7.1f}"
        )


def at_least(
    kind: Callable[[str], float], low: float, *, open: bool = False, below: float = math.inf
) -> Callable[[str], float]:
    """Returns a reader of finite numbers of a kind, from `low` on, or above it, and below another one."""

    def read(text: str) -> float:
        number = kind(text)
        if not low <= number < below or (open and number == low):
            upper = "finite" if below == math.inf else f"below {below:g}"
            raise argparse.ArgumentTypeError(
                f"must be {'above' if open else 'at least'} {low:g} and {upper}, got {text}"
            )
        return number

    read.__name__ = kind.__name__  # for argparse, which says what else it could not read
    return read


def parse_arguments() -> argparse.Namespace:
    """Reads the command line; flags and short forms are those of Apex's ImageNet script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--epochs", type=at_least(int, 1), default=15, help="of the whole run; the schedule depends on it"
    )
    parser.add_argument("-b", "--batch-size", type=at_least(int, 2), default=64)
    parser.add_argument("--lr", "--learning-rate", type=at_least(float, 0, open=True), default=0.1, help="at its peak")
    parser.add_argument("--momentum", type=at_least(float, 0, below=1), default=0.9)
    parser.add_argument("--weight-decay", "--wd", type=at_least(float, 0), default=1e-4)
    parser.add_argument("-p", "--print-freq", type=at_least(int, 1), default=10, help="steps from line to line")
    parser.add_argument("--resume", type=Path, metavar="PATH", help="a checkpoint to go on from, by the same flags")
    parser.add_argument("-e", "--evaluate", action="store_true", help="score the model and stop")
    parser.add_argument(
        "--deterministic", action="store_true", help="refuse operations that torch cannot repeat exactly"
    )
    parser.add_argument("--opt-level", default="O1", help="O0, O1, O2 or O3")
    parser.add_argument("--keep-batchnorm-fp32", metavar="BOOL", help="True or False; the level's default otherwise")
    parser.add_argument("--loss-scale", help="dynamic, none or a number; the level's default otherwise")
    parser.add_argument("--half", choices=("bf16", "f16"), default="bf16", help="the 16-bit format of O1 to O3")
    parser.add_argument("--compare", action="store_true", help="train at every level, each by its defaults")
    parser.add_argument("--width", type=at_least(int, 1), default=8, help="channels of the first block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out/image_classifier"), help="folder for the checkpoint")
    args = parser.parse_args()
    if args.batch_size > 4000:
        parser.error(f"argument -b/--batch-size: must be at most 4000, the number of images, got {args.batch_size}")
    if args.resume is not None and not args.resume.is_file():
        parser.error(f"argument --resume: there is no {args.resume}")
    for name in ("resume", "evaluate", "keep_batchnorm_fp32", "loss_scale"):
        if args.compare and getattr(args, name):
            parser.error(f"--compare trains every level anew by its defaults; leave out --{name.replace('_', '-')}")
    if not 0 <= args.seed < 2**32:
        parser.error(f"argument --seed: must be at least 0 and below 2**32, got {args.seed}")
    try:
        args.policy = make_policy(args.opt_level, args.half, args)
        if not (args.evaluate or args.compare):
            args.output.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments()
    torch.use_deterministic_algorithms(args.deterministic)
    if args.compare:
        compare(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
