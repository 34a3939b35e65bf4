"""torch.compile allows a code object eight compilations; every optimizer is to have its own."""

import pytest
import torch

from fmp import optim

PARAMS = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([3.0])}
FACTORIES = {
    "accumulate": lambda rate: optim.accumulate(optim.clip_by_value(rate), every=1),
    "adam": optim.adam,
    "adamw": optim.adamw,
    "adafactor": optim.adafactor,
    "chain": lambda rate: optim.chain(optim.larc(rate)),
    "clip_by_global_norm": optim.clip_by_global_norm,
    "clip_by_value": optim.clip_by_value,
    "ema": lambda rate: optim.ema(rate, debias=False),
    "freeze": lambda rate: optim.freeze(["a"]),
    "from_torch": lambda rate: optim.from_torch(torch.optim.SGD, lr=rate),
    "inject_hyperparams": lambda rate: optim.inject_hyperparams(optim.clip_by_value)(max_delta=rate),
    "lamb": optim.lamb,
    "larc": optim.larc,
    "lion": optim.lion,
    "masked": lambda rate: optim.masked(optim.ema(rate, debias=False), ["a"]),
    "named_chain": lambda rate: optim.named_chain(("only", optim.larc(rate))),
    "partition": lambda rate: optim.partition({"all": optim.clip_by_value(rate)}, lambda path, leaf: "all"),
    "rmsprop": optim.rmsprop,
    "sgd": optim.sgd,
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES.keys())
def test_two_optimizers_share_no_code(make):
    first, second = make(0.1), make(0.2)
    for name in ("init", "update"):
        assert getattr(first, name).__code__ is not getattr(second, name).__code__, name


@pytest.mark.parametrize("name", ["accumulate", "from_torch", "inject_hyperparams", "masked", "partition"])
def test_more_of_a_kind_than_the_limit_compile_in_one_process(name):
    with torch._dynamo.config.patch(recompile_limit=2):
        for index in range(4):
            tx = FACTORIES[name](0.01 * (index + 1))
            state = tx.init(PARAMS)
            updates, _ = torch.compile(tx.update, backend="eager", fullgraph=True)(PARAMS, state, PARAMS)
            torch.testing.assert_close(updates, tx.update(PARAMS, state, PARAMS)[0])
