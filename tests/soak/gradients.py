"""The gradients of a step, against torch.autograd in float64."""

import contextlib
import math
from typing import Any

import torch

import fmp
from fmp import tree
from tests.soak.program import Program, of_groups, of_losses
from tests.soak.rounding import UNIT, Largest, Rounding, excess

Tensor = torch.Tensor
Tree = Any

_LARGEST = {torch.float16: 65504.0}


def check_gradients(
    program: Program,
    state: fmp.TrainState,
    batch: dict[str, Tensor],
    metrics: Any,
    grads: Tree,
    *,
    is_poisoned: bool,
) -> None:
    """Checks losses, gradients, their norms and the verdicts on them.

    Args:
        program: The program.
        state: The state before the step.
        batch: Its batch.
        metrics: What the step reports.
        grads: The gradients, unscaled, before they are clipped.
        is_poisoned: Whether the batch has an inf.

    Raises:
        AssertionError: If something is off by more than rounding.
    """
    found = dict(tree.items(grads))
    finite = {name: bool(value) for name, value in of_losses(program, metrics.grads_finite).items()}
    loss_is_finite = all(bool(value.isfinite()) for value in of_losses(program, metrics.loss).values())
    norms = of_groups(program, metrics.grad_norm)
    for group in program.groups:
        mine = [value.double() for path, value in found.items() if path.startswith(group)]
        norm = torch.stack([value.square().sum() for value in mine]).sum().sqrt()
        if bool(norm.isfinite()) and float(norm) < 1e18:
            error = abs(float(norms[group]) - float(norm))
            assert error <= 1e-5 * float(norm) + 1e-20, f"grad_norm {group}: found {norms[group]}, exact {norm}"
        using = [name for name, groups in program.losses.items() if group in ("", *groups)]
        is_finite = all(bool(value.isfinite().all()) for value in mine)
        # A sum of two finite gradients may overflow.
        assert is_finite or not all(finite[name] for name in using) or len(using) > 1, f"finite {group}"
    if is_poisoned:
        assert not any(finite.values()), "an inf in the batch is not seen"
        return

    seeds = {name: aux["seed"] for name, aux in of_losses(program, metrics.aux).items()}
    forward, both = Largest(), Largest()
    with both:
        exact = _oracle(program, state, batch, metrics, seeds, forward)
    most = 0.45 * _LARGEST.get(program.dtype, 1e38)
    if not all(finite.values()) or not loss_is_finite:
        assert both.value > most, f"not finite, though no number exceeds {both.value}"
        return

    def sample(index: int) -> dict[str, Tensor]:
        with Rounding(program.dtype, index):
            return _oracle(program, state, batch, metrics, seeds)

    # Where rows are averaged and losses added, float32 rounds a few times more.
    unit = 8.0 * UNIT[torch.float32]
    tiny = 2.0**-24 / min(_scales(program, metrics).values()) if program.dtype == torch.float16 else 1e-37

    def floor(name: str) -> Any:
        return unit * exact[name].abs() + tiny

    losses = {f"loss {name}": value for name, value in of_losses(program, metrics.loss).items()}
    problem = excess({**losses, **found}, exact, sample, floor=floor)
    # An inf on the way to the loss may vanish again, as in a tanh; one on the way back makes a gradient inf or NaN.
    assert problem is None or forward.value > most, problem


def _oracle(
    program: Program,
    state: fmp.TrainState,
    batch: dict[str, Tensor],
    metrics: Any,
    seeds: dict[str, Tensor],
    forward: Any = None,
) -> dict[str, Tensor]:
    """Losses and gradients by `torch.autograd.grad`, in float64; the losses under the mode `forward`."""
    params = tree.map(lambda leaf: leaf.double().requires_grad_(), state.params)
    paths, leaves = zip(*tree.items(params), strict=True)
    # Only O2 and O3 cast the batch; what is computed from it starts from what it was rounded to.
    narrow = program.dtype if program.level in ("O2", "O3") else torch.float32
    rounded = {name: x.to(narrow).double() if x.is_floating_point() else x for name, x in batch.items()}
    parts = [dict(zip(rounded, part, strict=True)) for part in zip(*_chunks(program, rounded), strict=True)]
    scales = _scales(program, metrics)
    found: dict[str, Tensor] = {}
    for name, groups in program.losses.items():
        loss_fn = program.loss(name, remat="none")
        buffers = {} if not program.has_buffers else {"buffers": tree.map(lambda leaf: leaf.double(), state.buffers)}
        total = torch.zeros((), dtype=torch.float64)
        for index, part in enumerate(parts):
            seed = seeds[name][index] if program.accumulate > 1 else seeds[name]
            with forward or contextlib.nullcontext():
                loss = loss_fn(params, part, seed=seed, **buffers)[0]
            scaled = loss * scales[name]
            grads = torch.autograd.grad(scaled, leaves, allow_unused=True, materialize_grads=True)
            total = total + loss.detach() / len(parts)
            for path, grad in zip(paths, grads, strict=True):
                if len(program.groups) == 1 or path.split("/")[0] in groups:
                    grad = grad / scales[name] / len(parts)
                    found[path] = found[path] + grad if path in found else grad
        found[f"loss {name}"] = total
    return found


def _scales(program: Program, metrics: Any) -> dict[str, float]:
    """By what the losses are scaled; one in float16 takes 2^15 at most."""
    most = 2.0**15 if program.is_narrow and program.dtype == torch.float16 else math.inf
    return {name: min(float(scale), most) for name, scale in of_losses(program, metrics.loss_scale).items()}


def _chunks(program: Program, batch: dict[str, Tensor]) -> list[tuple[Tensor, ...]]:
    return [value.split(program.rows) for value in batch.values()]
