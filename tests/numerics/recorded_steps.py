"""A small train step, and what it is given, for the tests of recording."""

import torch

import fmp
from fmp.numerics.record import record
from fmp.numerics.watch import watch_gradients


def loss_fn(params, batch):
    """Is linear in both parameters, so their gradients are known."""
    return (params["w"] * batch).sum() + params["b"].sum()


def make_step(optimizer=None, **options):
    """Makes a step that watches its gradients, unless an optimizer is given."""
    optimizer = fmp.optim.chain(watch_gradients("fp16"), fmp.optim.sgd(0.1)) if optimizer is None else optimizer
    return fmp.train_step(loss_fn, optimizer, **options)


def params():
    """Makes two leaves of ones."""
    return {"w": torch.ones(4), "b": torch.ones(2)}


def run(step, state, batches, **options):
    """Runs a recorded step; returns the state, the history and the metrics of each step."""
    recorded = record(step, **options)
    carry, metrics = recorded.init(state), []
    for batch in batches:
        carry, found = recorded(carry, batch)
        metrics.append(found)
    return *carry, metrics


def batches(n):
    """Makes batches of four numbers, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, generator=generator) for _ in range(n)]
