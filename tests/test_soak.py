"""The long random runs of `python -m tests.soak`, for a second or two each, and that they notice what is wrong."""

import dataclasses
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmp import df11
from tests.soak import campaign, df11_reference, df11_targets
from tests.soak.optimizers import BY_NAME, ORACLES, Oracle, over
from tests.soak.program import Program
from tests.soak.report import Report

PROGRAM = Program(
    seed=3,
    layers=("linear", "tanh", "norm"),
    is_tied=False,
    rows=3,
    level="O2",
    half="bf16",
    master="f32",
    scaler=(1024.0, 2.0, 0.5, 1),
    optimizers=("adamw",),
    second_loss=(),
    is_narrow=False,
    shrink=1.0,
    clip=None,
    ema=None,
    accumulate=2,
    donate=True,
    remat="block",
    has_buffers=False,
    around="plain",
    steps=3,
    poison=(1, 0),
)


@pytest.mark.mixed_dtypes  # torch's optimizers in float64 have counts in float32
def test_a_few_programs():
    failing, count = campaign.one_round(0, 4, ("plain",))
    assert failing is None, failing
    assert count >= 4


@pytest.mark.mixed_dtypes
def test_an_ensemble():
    campaign.run(dataclasses.replace(PROGRAM, around="vmap", donate=False))


@pytest.mark.mixed_dtypes
def test_a_program_by_its_repr():
    assert eval(repr(PROGRAM), {"Program": Program}) == PROGRAM
    campaign.run(PROGRAM)


def narrowed(x: torch.Tensor) -> torch.Tensor:
    return x.float() * (1.0 if x.dtype == torch.float64 else 1.1)


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tests.soak.models.wide", narrowed, "loss first"),
        ("fmp.DynamicLossScale.adjust", lambda scaler, finite: scaler, "next loss_scale"),
    ],
)
def test_wrong_gradients_and_scales_are_noticed(
    name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, value)
    with pytest.raises(AssertionError, match=message):
        campaign.run(PROGRAM)


@pytest.mark.mixed_dtypes
def test_a_wrong_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The learning rate is off in the 17th of float32's 24 digits.
    wrong = Oracle(over(torch.optim.AdamW, 0.1 * (1 + 2.0**-16), weight_decay=0.1))
    monkeypatch.setattr("tests.soak.masters.ORACLES", {**ORACLES, "adamw": wrong})
    with pytest.raises(AssertionError, match="adamw: "):
        campaign.run(PROGRAM)


def test_every_row_of_the_battery_has_an_oracle():
    assert BY_NAME.keys() == ORACLES.keys()


def mutated(seed: bytes, generator: random.Random) -> bytes:
    data = bytearray(seed)
    for _ in range(generator.choice([1, 1, 2, 8])):
        place = generator.randrange(1, len(data))
        if generator.random() < 0.7:
            data[place] ^= 1 << generator.randrange(8)
        elif len(data) > 16:
            del data[place : place + generator.randrange(9)]
    return bytes(data)


def test_a_few_damaged_files_of_weights():
    generator, seeds = random.Random(0), df11_targets.seeds()
    for seed in seeds:
        df11_targets.run(seed)
    for _ in range(100):
        df11_targets.run(mutated(generator.choice(seeds), generator))


def test_wrong_tensors_are_noticed(monkeypatch: pytest.MonkeyPatch):
    numbers = df11_reference._numbers
    monkeypatch.setattr(df11_reference, "_numbers", lambda rest, exponents: numbers(rest, exponents) ^ np.uint16(1))
    noticed = set()
    for seed in df11_targets.seeds():
        try:
            df11_targets.run(seed)
        except (AssertionError, df11_reference.Refused):
            noticed.add(list(df11_targets.TARGETS)[seed[0]])
    # A pattern has no tensor, and what is forged is forged by the same reference.
    assert noticed == set(df11_targets.TARGETS) - {"pattern", "sealed"}


def test_the_forger_keeps_what_is_right(tmp_path: Path):
    df11.save(df11.compress({"w": torch.full((64, 64), 0.5).bfloat16()}), tmp_path / "w")
    (tmp_path / "forged").write_bytes(df11_targets.forged((tmp_path / "w").read_bytes()))
    assert torch.equal(df11.load(tmp_path / "forged", decompress=True)["w"], torch.full((64, 64), 0.5).bfloat16())


def test_the_fuzzer_says_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "atheris", None)
    with pytest.raises(SystemExit, match="pip install atheris"):
        runpy.run_module("tests.soak.df11_fuzzer", run_name="fuzzer")


def test_the_report_has_the_findings():
    report = Report("programs", examples=7, seconds=2.0, findings=["what\n    replay: how"])
    assert str(report).startswith("finding 1: what\n    replay: how\nprograms: 7 examples in 2 s, 1 finding(s); ")
