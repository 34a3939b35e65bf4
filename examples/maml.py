"""Meta-learns a starting point by MAML: optimizers as pure functions, differentiated through, vmapped over the tasks.

    python examples/maml.py                     # a table, and the picture out/maml/sinusoid.png
    python examples/maml.py --steps 20000       # closer to the 70000 of the paper

A task is a sinusoid of its own amplitude and phase, of which a network sees ten points (Finn, Abbeel and Levine,
Model-Agnostic Meta-Learning, ICML 2017, section 5.1). The inner loop adapts the network to them by some steps of
`fmp.optim.sgd`; the meta-loss is what the adapted network gets wrong on ten other points. An optimizer of fmp is a pair
of pure functions, so that is an ordinary function of the starting point: `vmap` takes it over the tasks, and
`fmp.train_step`, with `fmp.optim.adam`, minimizes it. The rival in the table is pre-trained jointly on all tasks, by
the same step with no inner loop, and then adapted at the best of several rates.

The proof: the meta-gradient by `fmp.value_and_grad` equals that of a Python loop over the tasks, with the inner steps
written by hand and `torch.autograd.grad(create_graph=True)`, within 1e-5 of its largest entry.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.func import vmap
from tqdm import tqdm

import fmp

TASKS, SHOTS, WIDTH = 25, 10, 40
TOLERANCE = 1e-5
RATES = (0.01, 0.003, 0.001, 0.0003)  # for the pre-trained network

Params = dict[str, Tensor]
Points = tuple[Tensor, Tensor]
Batch = tuple[Points, Points]


def network(params: Params, x: Tensor) -> Tensor:
    """Returns f32[n] for x f32[n]."""
    hidden = torch.relu(x[:, None] * params["first.weight"] + params["first.bias"])
    hidden = torch.relu(hidden @ params["second.weight"] + params["second.bias"])
    return hidden @ params["out.weight"] + params["out.bias"]


def loss_fn(params: Params, points: Points) -> Tensor:
    x, y = points
    return (network(params, x) - y).square().mean()


def adapt(params: Params, support: Points, *, inner: fmp.optim.GradientTransformation, inner_steps: int) -> Params:
    """Returns the parameters after some steps on one task; differentiable in all that it is given."""
    state = inner.init(params)
    for _ in range(inner_steps):
        grads = fmp.grad(loss_fn)(params, support)
        updates, state = inner.update(grads, state, params)
        params = fmp.optim.apply_updates(params, updates)
    return params


def meta_loss(params: Params, batch: Batch, *, inner: fmp.optim.GradientTransformation, inner_steps: int) -> Tensor:
    """Returns the mean loss of the adapted networks, over tasks along dimension 0 of support and query points."""

    def of_task(support: Points, query: Points) -> Tensor:
        return loss_fn(adapt(params, support, inner=inner, inner_steps=inner_steps), query)

    return vmap(of_task)(*batch).mean()


def meta_gradient_by_hand(params: Params, batch: Batch, *, learning_rate: float, inner_steps: int) -> Params:
    """Returns the gradient of `meta_loss` for gradient descent, without fmp and without vmap."""
    start = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    (support_x, support_y), (query_x, query_y) = batch
    losses = []
    for task in range(len(support_x)):
        adapted = start
        for _ in range(inner_steps):
            loss = loss_fn(adapted, (support_x[task], support_y[task]))
            grads = torch.autograd.grad(loss, list(adapted.values()), create_graph=True)
            adapted = {
                name: leaf - learning_rate * grad for (name, leaf), grad in zip(adapted.items(), grads, strict=True)
            }
        losses.append(loss_fn(adapted, (query_x[task], query_y[task])))
    grads = torch.autograd.grad(torch.stack(losses).mean(), list(start.values()))
    return dict(zip(start, grads, strict=True))


def difference(left: Params, right: Params) -> Tensor:
    """Returns the largest difference between two trees, in units of the largest entry of the second, f32[]."""
    gaps = [(left[name] - right[name]).abs().max() for name in right]
    return torch.stack(gaps).max() / torch.stack([leaf.abs().max() for leaf in right.values()]).max()


def make_params(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        "first.weight": torch.randn(WIDTH, generator=generator),
        "first.bias": torch.randn(WIDTH, generator=generator),
        "second.weight": torch.randn(WIDTH, WIDTH, generator=generator) * (2 / WIDTH) ** 0.5,
        "second.bias": torch.zeros(WIDTH),
        "out.weight": torch.randn(WIDTH, generator=generator) / WIDTH**0.5,
        "out.bias": torch.zeros(()),
    }


def make_tasks(seed: int, index: int, tasks: int = TASKS) -> Batch:
    """Returns support and query points, both x and y f32[tasks, shots], of random sinusoids."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    amplitude = 0.1 + 4.9 * torch.rand(tasks, 1, generator=generator)
    phase = math.pi * torch.rand(tasks, 1, generator=generator)
    x = 10 * torch.rand(2, tasks, SHOTS, generator=generator) - 5
    y = amplitude * torch.sin(x - phase)
    return (x[0], y[0]), (x[1], y[1])


def train(args: argparse.Namespace, inner: fmp.optim.GradientTransformation, inner_steps: int, name: str) -> Params:
    """Minimizes the meta-loss; with no inner steps, the loss on all tasks together."""
    step = fmp.train_step(partial(meta_loss, inner=inner, inner_steps=inner_steps), fmp.optim.adam(args.learning_rate))
    state = step.init(make_params(args.seed))
    for index in tqdm(range(args.steps), desc=name, mininterval=0.5):
        state, _ = step(state, make_tasks(args.seed, index))
    if not fmp.all_finite(state.params):
        raise SystemExit(f"{name}: the training diverged; take a smaller --inner-rate or --learning-rate")
    return state.params


def best_rate(params: Params, tasks: Batch) -> float:
    """Returns the inner learning rate after ten steps of which the loss is smallest."""
    return min(RATES, key=lambda rate: meta_loss(params, tasks, inner=fmp.optim.sgd(rate), inner_steps=10).item())


def draw(networks: dict[str, tuple[Params, fmp.optim.GradientTransformation]], path: Path) -> None:
    """Saves a picture of both networks on one task, before and after adapting to it."""
    grid = torch.linspace(-5, 5, 200)
    x = torch.tensor([-4.6, -3.9, -3.1, -2.4, -1.8, -1.1, -0.7, -0.4, 0.3, 0.8])  # none on the right half
    support = x, 4 * torch.sin(x - 1)
    figure, row = plt.subplots(1, len(networks), sharey=True, figsize=(10, 4))
    for axes, (name, (params, inner)) in zip(row, networks.items(), strict=True):
        axes.plot(grid, 4 * torch.sin(grid - 1), color="black", label="the task")
        axes.plot(*support, "k^", label="ten points of it")
        for steps, style in ((0, ":"), (1, "--"), (10, "-")):
            adapted = adapt(params, support, inner=inner, inner_steps=steps)
            axes.plot(grid, network(adapted, grid), style, color="tab:red", label=f"k = {steps} steps")
        axes.set(title=name, xlabel="x")
    row[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000, help="of the outer loop")
    parser.add_argument("--inner-steps", type=int, default=1, help="that the outer loop looks through")
    parser.add_argument("--inner-rate", type=float, default=0.01, help="learning rate of the inner loop")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the outer loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/maml"), help="folder for the picture")
    args = parser.parse_args()
    for name in ("steps", "inner_steps"):
        if not 1 <= getattr(args, name) < 2**31:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 and below 2**31")
    for name in ("inner_rate", "learning_rate"):
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
    inner = fmp.optim.sgd(args.inner_rate)
    start = train(args, inner, args.inner_steps, "MAML")
    rival = train(args, inner, 0, "pre-trained")
    rate = best_rate(rival, make_tasks(args.seed, args.steps, tasks=500))
    networks = {
        f"MAML, rate {args.inner_rate:g}": (start, inner),
        f"pre-trained, rate {rate:g}": (rival, fmp.optim.sgd(rate)),
    }

    unseen = make_tasks(args.seed, args.steps + 1, tasks=500)
    print("loss on 500 new tasks after k inner steps")
    print("    k" + "".join(f"{name:>26s}" for name in networks))
    for steps in (0, 1, 2, 5, 10):
        losses = [meta_loss(params, unseen, inner=tx, inner_steps=steps).item() for params, tx in networks.values()]
        print(f"{steps:5d}" + "".join(f"{loss:26.3f}" for loss in losses))
    draw(networks, args.out / "sinusoid.png")
    print(f"picture     {args.out / 'sinusoid.png'}")

    batch = make_tasks(args.seed, args.steps + 2)
    differences = []
    for inner_steps in (1, 5):
        transformed = fmp.value_and_grad(partial(meta_loss, inner=inner, inner_steps=inner_steps))
        _, ours = transformed(start, batch)
        if not fmp.all_finite(ours):
            raise SystemExit(f"the inner loop diverges within {inner_steps} steps; take a smaller --inner-rate")
        by_hand = meta_gradient_by_hand(start, batch, learning_rate=args.inner_rate, inner_steps=inner_steps)
        differences.append(difference(ours, by_hand))
        print(f"checked     meta-gradient through {inner_steps} inner steps: differs by {differences[-1]:.2g}")
    largest = torch.stack(differences).max()
    print(f"proof       largest difference between vmap and loop: {largest:.2g}")
    assert largest <= TOLERANCE, "vmap and loop differ"


if __name__ == "__main__":
    main()
