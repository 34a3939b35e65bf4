"""Trains with differential privacy (DP-SGD) under op-by-op bfloat16: per-sample gradients, clipped, summed, noised.

    python examples/private_gradients.py
    python examples/private_gradients.py --steps 2000 --max-norm 0.5

A step draws a random lot of the data, takes the gradient of every sample in it on its own (`vmap` of `fmp.grad`), clips
each to a norm, sums them, and adds Gaussian noise (Abadi et al., Deep Learning with Differential Privacy, CCS 2016).
No sample can move the sum by more than the norm, so noise of that size hides each of them. The forward pass runs under
`fmp.autocast` with the rules of O1: products in bfloat16, the loss and all gradients of the parameters in float32.
Nothing in it knows of batches, and one more `vmap` trains all noise levels of the table side by side.

The noise is `fmp.random.normal`, a pure function of the seed: the same seed gives the same run, bit for bit. That is
what research wants and what a secret must not have; for a real release take the noise from a secure generator.

The proof: the per-sample gradients and their clipped sum equal those of a Python loop over the samples, with
`torch.autograd.grad` and the clipping written out. Where a CPU sums the products of a batch in another order than those
of a single sample, a bfloat16 may round the other way; so the example accepts, relative to the norm of each sample's
gradient, 5%: one bfloat16 digit of a large logit. Elsewhere the difference is that of float32 sums.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from tqdm import tqdm

import fmp

NOISE_MULTIPLIERS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
SAMPLES, SAMPLING_RATE = 1000, 0.1
WIDTH = 32
DELTA = 1e-4  # of the (epsilon, delta) guarantee; below 1 / SAMPLES
TOLERANCE = 0.05

Params = dict[str, Tensor]


def loss_fn(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Returns the loss of one sample, from x f32[2] and y i64[]; or the mean over some, f32[n, 2] and i64[n]."""
    return F.cross_entropy(logits_fn(params, x), y)


def logits_fn(params: Params, x: Tensor) -> Tensor:
    """Returns the logits of a network with one hidden layer, [..., 2]."""
    hidden = torch.tanh(x @ params["hidden.weight"] + params["hidden.bias"])
    return hidden @ params["out.weight"] + params["out.bias"]


POLICY = fmp.opt_level("O1", half_dtype=torch.bfloat16)
mixed_loss = fmp.autocast(loss_fn, POLICY)
mixed_logits = fmp.autocast(logits_fn, POLICY)
per_sample_gradients = vmap(fmp.grad(mixed_loss), in_dims=(None, 0, 0))


def clipped_sum(grads: Params, max_norm: float) -> Params:
    """Clips each sample's gradient to a norm, over all parameters together, and sums them; dimension 0 is samples."""
    clipped = vmap(lambda grad: fmp.optim.clip_to_norm(grad, fmp.global_norm(grad), max_norm))(grads)
    return fmp.tree.map(lambda leaf: leaf.sum(0), clipped)


def gaussian_like(seed: Tensor, params: Params) -> Params:
    """Returns standard normal noise for each parameter, from seeds of their own."""
    leaves, spec = fmp.tree.flatten(params)
    noise = [fmp.random.normal(fmp.random.fold_in(seed, index), leaf.shape) for index, leaf in enumerate(leaves)]
    return fmp.tree.unflatten(spec, noise)


def private_gradient(
    params: Params, x: Tensor, y: Tensor, *, noise_multiplier: Tensor, max_norm: float, seed: Tensor
) -> Params:
    """Returns the noisy mean of the clipped per-sample gradients of a lot, x f32[n, 2] and y i64[n]."""
    total = clipped_sum(per_sample_gradients(params, x, y), max_norm)
    noise = gaussian_like(seed, params)
    # The size of the lot is random and private as well, so the sum is divided by the expected one.
    return fmp.tree.map(
        lambda grad, normal: (grad + noise_multiplier * max_norm * normal) / (SAMPLING_RATE * SAMPLES), total, noise
    )


def gradients_by_loop(params: Params, x: Tensor, y: Tensor, max_norm: float) -> tuple[Params, Params]:
    """Returns the per-sample gradients and their clipped sum, one sample after the other."""
    names = list(params)
    variables = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    rows, total = [], {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    for index in range(len(x)):
        loss = mixed_loss(variables, x[index], y[index])
        row = dict(zip(names, torch.autograd.grad(loss, list(variables.values())), strict=True))
        norm = math.sqrt(sum(leaf.square().sum().item() for leaf in row.values()))
        for name, leaf in row.items():
            total[name] += leaf * (max_norm / max(norm, max_norm))
        rows.append(row)
    return {name: torch.stack([row[name] for row in rows]) for name in names}, total


def difference(left: Params, right: Params) -> Tensor:
    """Returns the norm of the difference of two trees relative to the norm of the second, f32[]."""
    gap = fmp.global_norm(fmp.tree.map(torch.sub, left, right))
    return torch.where(gap == 0, 0.0, gap / fmp.global_norm(right))  # a gradient may well be exactly zero


def epsilon(noise_multiplier: float, steps: int, sampling_rate: float, delta: float) -> float:
    """Returns the epsilon that a run guarantees for a delta, when each sample enters each lot by chance.

    Mironov, Talwar and Zhang, Renyi Differential Privacy of the Sampled Gaussian Mechanism, 2019; for whole orders a,

        moment  = log sum_k binomial(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 noise_multiplier^2))
        epsilon = min_a (steps * moment + log(1 / delta)) / (a - 1)
    """
    if noise_multiplier == 0.0:
        return math.inf

    def at_order(order: int) -> float:
        k = torch.arange(order + 1, dtype=torch.float64)
        chosen = math.lgamma(order + 1) - torch.lgamma(k + 1) - torch.lgamma(order - k + 1)
        chance = k * math.log(sampling_rate) + (order - k) * math.log1p(-sampling_rate)
        moment = torch.logsumexp(chosen + chance + k * (k - 1) / (2 * noise_multiplier**2), 0).item()
        return (steps * moment + math.log(1 / delta)) / (order - 1)

    return min(map(at_order, range(2, 257)))


def make_data(seed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns points on two noisy half moons, f32[n, 2], and which moon each lies on, i64[n]."""
    y = (torch.arange(SAMPLES) % 2).to(torch.int64)
    angle = math.pi * fmp.random.uniform(fmp.random.fold_in(seed, 0), (SAMPLES,))
    upper = torch.stack([angle.cos() - 0.5, angle.sin() - 0.25], -1)
    moons = torch.where(y[:, None] == 0, upper, -upper)
    return moons + 0.2 * fmp.random.normal(fmp.random.fold_in(seed, 1), (SAMPLES, 2)), y


def make_params(seed: int) -> Params:
    noise = fmp.random.normal(seed, (2 * WIDTH + WIDTH * 2,))
    return {
        "hidden.weight": noise[: 2 * WIDTH].reshape(2, WIDTH),
        "hidden.bias": torch.zeros(WIDTH),
        "out.weight": noise[2 * WIDTH :].reshape(WIDTH, 2) / WIDTH**0.5,
        "out.bias": torch.zeros(2),
    }


def train(args: argparse.Namespace, x: Tensor, y: Tensor, steps: int) -> Params:
    """Trains all noise levels at once; returns their parameters along dimension 0."""
    optimizer = fmp.optim.sgd(args.learning_rate, momentum=0.9)
    noise_multipliers = torch.tensor(NOISE_MULTIPLIERS)
    count = len(noise_multipliers)
    params = fmp.tree.map(lambda leaf: leaf.repeat(count, *[1] * leaf.ndim), make_params(args.seed))
    opt_state = vmap(optimizer.init)(params)

    for index in tqdm(range(steps), desc="DP-SGD", delay=1.0):
        seed = fmp.random.fold_in(args.seed, index)
        lot = fmp.random.keep_mask(fmp.random.fold_in(seed, 0), (SAMPLES,), 1.0 - SAMPLING_RATE)
        lot_x, lot_y, noise_seed = x[lot], y[lot], fmp.random.fold_in(seed, 1)

        def step(params, opt_state, noise_multiplier, x=lot_x, y=lot_y, seed=noise_seed):
            grads = private_gradient(params, x, y, noise_multiplier=noise_multiplier, max_norm=args.max_norm, seed=seed)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return fmp.optim.apply_updates(params, updates), opt_state

        params, opt_state = vmap(step)(params, opt_state, noise_multipliers)
    return params


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--max-norm", type=float, default=1.0, help="what each sample's gradient is clipped to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not 1 <= args.steps < 2**31:
        parser.error("--steps must be at least 1 and below 2**31")
    for name in ("learning_rate", "max_norm"):
        if not 0 < getattr(args, name) <= 1e6:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and at most 1e6")
    if not 0 <= args.seed < 2**32:
        parser.error("--seed must be at least 0 and below 2**32")
    return args


def main() -> None:
    args = parse_arguments()
    x, y = make_data(fmp.random.fold_in(args.seed, -1))
    test_x, test_y = make_data(fmp.random.fold_in(args.seed, -2))

    params = train(args, x, y, args.steps)
    if not fmp.all_finite(params):
        raise SystemExit("the training diverged; take a smaller --learning-rate or --max-norm")
    losses = vmap(mixed_loss, in_dims=(0, None, None))(params, x, y)
    right = vmap(mixed_logits, in_dims=(0, None))(params, test_x).argmax(-1) == test_y
    print(f"noise  epsilon (delta {DELTA:g})  training loss  test accuracy")
    for noise, loss, accuracy in zip(NOISE_MULTIPLIERS, losses.tolist(), right.float().mean(-1).tolist(), strict=True):
        spent = epsilon(noise, args.steps, SAMPLING_RATE, DELTA)
        print(f"{noise:5g} {spent:23.2f} {loss:14.3f} {accuracy:14.3f}")

    few = min(args.steps, 5)
    first, again = train(args, x, y, few), train(args, x, y, few)
    same = all(torch.equal(first[name], again[name]) for name in first)
    print(f"same seed, same bits: {'yes' if same else 'no'}")

    last = {name: leaf[-1] for name, leaf in params.items()}  # of the noisiest run, whose samples differ most
    together = per_sample_gradients(last, x[:200], y[:200])
    alone, total = gradients_by_loop(last, x[:200], y[:200], args.max_norm)
    of_sum = difference(clipped_sum(together, args.max_norm), total)
    largest = torch.cat([vmap(difference)(together, alone), of_sum[None]]).max()
    clipped = int((vmap(fmp.global_norm)(together) > args.max_norm).sum())
    print(f"checked     200 samples against a loop, {clipped} of them clipped; the clipped sum differs by {of_sum:.2g}")
    print(f"proof       largest difference between vmap and loop: {largest:.2g}")
    assert same, "two runs with the same seed differ"
    assert largest <= TOLERANCE, "vmap and loop differ"


if __name__ == "__main__":
    main()
