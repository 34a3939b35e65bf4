"""Trains a small byte-level GPT on real English text, in float32, bfloat16 or float16, with one pure train step.

    python examples/train_lm.py                          # O2 in bfloat16: the model in half, masters in float32
    python examples/train_lm.py --half fp16              # O2 in float16, with dynamic loss scaling
    python examples/train_lm.py --master-weights kahan   # two 16-bit numbers for each parameter instead of 16 + 32
    python examples/train_lm.py --opt-level O1           # the model in float32, each op in half or float32
    python examples/train_lm.py --opt-level O0           # float32 throughout
    python examples/train_lm.py --resume out/train_lm    # goes on where a run stopped, bit for bit

The text is the documentation that every CPython carries; `--text` takes any other file. A run leaves a checkpoint, a
picture of loss and loss scale, and a sample of what the model writes.
"""

import argparse
import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import fmp


class Block(nn.Module):
    """A pre-norm transformer block with the attention written out."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        weights = (scores.float() + mask).softmax(-1).to(value.dtype)
        x = x + self.projection((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    mask: Tensor

    def __init__(self, context: int, width: int, heads: int, layers: int):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu(1))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("projection.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x, self.mask[:length, :length])
        return self.head(self.norm(x))


def read_text(path: Path | None) -> Tensor:
    """Returns the training text as bytes, u8[n]."""
    if path is not None:
        data = path.read_bytes()
    else:
        topics = importlib.import_module("pydoc_data.topics").topics
        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sample_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """Returns i64[batch, context + 1]; it depends on nothing but the step, so a resumed run sees the same batches."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
    return text[starts[:, None] + torch.arange(args.context + 1)].long()


def make_policy(args: argparse.Namespace) -> fmp.Policy:
    """Returns the precision policy; nothing else differs between precisions."""
    return fmp.opt_level(
        args.opt_level,
        half_dtype=args.half,
        loss_scale=args.loss_scale,
        keep_norm_fp32=args.keep_norm_fp32,
        master_weights=args.master_weights,
    )


def make_step(model: fmp.Model, policy: fmp.Policy, args: argparse.Namespace) -> fmp.TrainStep:
    """Builds the train step."""

    def loss_fn(params, tokens, *, buffers):
        logits, buffers = model.apply(params, buffers, tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()), buffers

    warm_up = max(1, min(args.warm_up, args.steps // 2))
    peak = args.learning_rate
    rising = fmp.optim.schedules.linear(0.0, peak, warm_up)
    falling = fmp.optim.schedules.linear(peak, 0.1 * peak, max(1, args.steps - warm_up))
    schedule = fmp.optim.schedules.join([rising, falling], [warm_up])
    optimizer = fmp.optim.adamw(schedule, b2=0.99, weight_decay=0.1)
    return fmp.train_step(
        loss_fn,
        optimizer,
        policy=policy,
        clip_norm=1.0,
        accumulate=args.accumulate,
        donate=args.donate,
        compile=args.compile,
    )


@torch.no_grad()
def validation_loss(apply: Callable, state: fmp.TrainState, text: Tensor, args: argparse.Namespace) -> float:
    """Returns the mean loss in nats per byte over the held-out text, in the precision of the training."""
    windows = text[: len(text) // (args.context + 1) * (args.context + 1)].view(-1, args.context + 1).long()
    losses = []
    for tokens in windows.split(args.batch):
        logits, _ = apply(state.params, state.buffers, tokens[:, :-1], train=False)
        losses.append(F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"))
    return torch.cat(losses).mean().item()


@torch.no_grad()
def generate(apply: Callable, state: fmp.TrainState, prompt: str, length: int, args: argparse.Namespace) -> str:
    """Returns the prompt and what the model writes after it, sampled at temperature 0.8."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits, _ = apply(state.params, state.buffers, tokens[:, -args.context :], train=False)
        probabilities = (logits[:, -1].float() / 0.8).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def draw(history: dict[str, list[float]], title: str, path: Path) -> None:
    """Saves a picture of the loss, and of the loss scale with the skipped steps marked."""
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1))
    top.plot(history["step"], history["loss"], linewidth=0.8)
    top.set(ylabel="training loss (nats per byte)")
    top.set_title(title, fontsize=8)
    bottom.step(history["step"], history["loss_scale"], where="post")
    skipped = [step for step, skip in zip(history["step"], history["skipped"], strict=True) if skip]
    bottom.vlines(skipped, 0.5, max(history["loss_scale"]), colors="red", label=f"{len(skipped)} skipped steps")
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="step", ylabel="loss scale")
    if skipped:
        bottom.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line; the precision flags are those of Apex's ImageNet script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O2", help="O0, O1, O2 or O3")
    parser.add_argument(
        "--half",
        default="bf16",
        help="the 16-bit format of O1 to O3: bf16 or fp16; most CPUs are slow in fp16, so take a tiny model there, "
        "--width 64 --heads 4 --layers 2 --context 64",
    )
    parser.add_argument("--loss-scale", help="dynamic, none or a number; the level's default otherwise")
    parser.add_argument("--keep-norm-fp32", help="True or False; the level's default otherwise")
    parser.add_argument(
        "--master-weights", help="f32 or True, remainder, kahan, stochastic, or False; the level's default otherwise"
    )
    parser.add_argument("--steps", type=int, default=600, help="of the whole run; the schedule depends on it")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--text", type=Path, help="a text file to train on")
    parser.add_argument("--out", type=Path, help="folder for checkpoint and picture: out/train_lm, or that of --resume")
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--resume", type=Path, help="folder of a run to go on with, by the same flags")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--donate", action="store_true", help="free the old state during each step")
    parser.add_argument("--compile", action="store_true", help="compile the whole step, once, in about a minute")
    args = parser.parse_args()
    for name in ("steps", "batch", "accumulate", "warm_up", "context", "width", "heads", "layers", "save_every"):
        if not 1 <= getattr(args, name) < 2**31:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 and below 2**31")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if args.resume is not None and not (args.resume / "state.fmp").is_file():
        parser.error(f"--resume: there is no {args.resume / 'state.fmp'}")
    if args.batch % args.accumulate:
        parser.error(f"--batch {args.batch} must be a multiple of --accumulate {args.accumulate}")
    if not 0 < args.learning_rate <= 1e6:
        parser.error("--learning-rate must be above 0 and at most 1e6")
    if not 0 <= args.seed < 2**32:
        parser.error("--seed must be at least 0 and below 2**32")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text: there is no {args.text}")
    try:
        make_policy(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    args.out = args.out or args.resume or Path("out/train_lm")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return args


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    text = read_text(args.text)
    held_out = text[-len(text) // 20 :]
    text = text[: -len(held_out)]
    if len(held_out) <= args.context:
        raise SystemExit(
            f"the text has {len(text) + len(held_out)} bytes; a context of {args.context} needs twenty times that"
        )

    model = fmp.functionalize(GPT(args.context, args.width, args.heads, args.layers))
    policy = make_policy(args)
    step = make_step(model, policy, args)
    state = step.init(model.params, buffers=model.buffers, seed=args.seed)
    if args.resume is not None:
        state = fmp.checkpoint.load(state, args.resume / "state.fmp")

    print(f"policy      {policy}")
    print(f"parameters  {sum(leaf.numel() for leaf in model.params.values()):,}")
    print(f"text        {len(text):,} bytes, {len(held_out):,} held out")
    history: dict[str, list[float]] = {"step": [], "loss": [], "loss_scale": [], "skipped": []}
    start, first = time.perf_counter(), int(state.step + state.skip_count)
    progress = tqdm(range(first, args.steps), initial=first, total=args.steps, desc=args.opt_level, mininterval=0.5)
    for index in progress:
        state, metrics = step(state, sample_batch(text, index, args))
        for name, value in {"step": index, "loss": metrics.loss, "loss_scale": metrics.loss_scale}.items():
            history[name].append(float(value))
        history["skipped"].append(bool(metrics.skipped))
        progress.set_postfix(loss=f"{history['loss'][-1]:.3f}", scale=f"{history['loss_scale'][-1]:g}", refresh=False)
        if (index + 1) % args.save_every == 0 or index + 1 == args.steps:
            fmp.checkpoint.save(state, args.out / "state.fmp")
    seconds = time.perf_counter() - start

    skipped = int(state.skip_count)
    hint = "; the loss scale is far too high" if skipped > 0.5 * args.steps else ""
    print(f"trained     {args.steps - first} steps in {seconds:.0f} s, {skipped} skipped{hint}")
    apply = fmp.autocast(model.apply, policy)
    loss = validation_loss(apply, state, held_out, args)
    print(f"validation  {loss:.4f} nats per byte")
    if not math.isfinite(loss):
        raise SystemExit("the training diverged; take a smaller --learning-rate")
    if history["step"]:
        draw(history, str(policy), args.out / "training.png")
        print(f"picture     {args.out / 'training.png'}")
    print(f"sample      {generate(apply, state, 'The ', 300, args)!r}")


if __name__ == "__main__":
    main()
