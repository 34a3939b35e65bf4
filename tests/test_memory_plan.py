"""The planner against published figures, and against the state that a real step makes."""

import dataclasses
import json
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fmp
from fmp import tree
from fmp.memory.model_sizes import model_sizes
from fmp.memory.plan import plan
from fmp.memory.planned import KINDS, Plan
from fmp.memory.units import in_unit

BILLION = 10**9


def nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor))


# -- published figures


def test_the_parts_of_three_and_a_half_billion_parameters():
    made = plan(3.5e9, "adam", "O2")
    assert (made.params, made.gradients, made.masters, made.moments) == (
        7 * BILLION,
        7 * BILLION,
        14 * BILLION,
        28 * BILLION,
    )
    assert made.total == 56 * BILLION == 16 * made.numbers
    # The 49 GB that are often quoted: weights, masters and moments, without the gradients.
    assert plan(3.5e9, "adam", "O2", gradients=None).total == 49 * BILLION
    assert in_unit(made.params, "GiB") == "6.52"
    assert in_unit(made.total, "GiB") == "52.15"


BF16 = fmp.opt_level("O3", "bf16")


def by_form(form: str | bool) -> fmp.Policy:
    return fmp.opt_level("O3", "bf16", master_weights=form)


# Bytes a parameter, by who counts them so.
ACCOUNTINGS: dict[str, tuple[float, dict[str, Any]]] = {
    "weights alone": (2, {"optimizer": None, "policy": "O3"}),
    "weights and gradients": (4, {"optimizer": "sgd", "policy": "O3"}),
    "ZeRO paper": (16, {"optimizer": "adam", "policy": "O2"}),
    "float32": (16, {"optimizer": "adam", "policy": "O0"}),
    "Hugging Face, DeepSpeed ZeRO 3": (18, {"optimizer": "adam", "policy": "O2", "gradients": "f32"}),
    "ultrascale playbook": (20, {"optimizer": "adam", "policy": fmp.opt_level("O2", "bf16"), "accumulate": 4}),
    "49 GB without gradients": (14, {"optimizer": "adam", "policy": "O2", "gradients": None}),
    "49 GB without masters": (14, {"optimizer": "adam", "policy": "O3", "activations": 7e9}),
    "stochastic, moments in bf16": (8, {"optimizer": "adam", "policy": by_form("stochastic"), "moments": "bf16"}),
    "Kahan, moments in bf16": (10, {"optimizer": "adam", "policy": by_form("kahan"), "moments": "bf16"}),
    "stochastic, 8-bit Adam": (6 + 8 / 256, {"optimizer": "adam8bit", "policy": by_form("stochastic")}),
    "masters, 8-bit Adam": (10 + 8 / 256, {"optimizer": "adamw8bit", "policy": by_form(True)}),
    "MS-AMP O2": (6, {"optimizer": "adam", "policy": "O3", "gradients": "f8e4m3", "moments": ("f8e4m3", "f16")}),
    "DF11": (11 / 8, {"optimizer": None, "policy": BF16, "weight_bits": 11}),
    "remainder": (14, {"optimizer": "adam", "policy": by_form("remainder")}),
}


@pytest.mark.parametrize("name", ACCOUNTINGS)
def test_bytes_a_parameter(name):
    each, options = ACCOUNTINGS[name]
    assert plan(3.5e9, **options).total == 3.5e9 * each


def test_the_table_of_the_zero_paper():
    made = [plan(7.5e9, "adam", "O2", zero=stage, devices=64) for stage in range(4)]
    assert [round(each.total / 1e9, 1) for each in made] == [120.0, 31.4, 16.6, 1.9]


@given(st.integers(1, 10**6), st.integers(1, 100), st.integers(0, 3))
def test_the_formulas_of_the_zero_paper(numbers, devices, zero):
    made = plan(numbers, "adam", "O2", zero=zero, devices=devices)
    share = Fraction(1, devices)
    each = [4 + 12, 4 + 12 * share, 2 + 14 * share, 16 * share]
    # Each of the kinds is rounded up to whole bytes.
    assert 0 <= made.total - numbers * each[zero] < 4


# -- models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


OPTIMIZERS = {
    "adam": fmp.optim.adam(1e-3),
    "adamw": fmp.optim.adamw(1e-3),
    "lamb": fmp.optim.lamb(1e-3),
    "lion": fmp.optim.lion(1e-3),
    "adafactor": fmp.optim.adafactor(1e-3),
    "rmsprop": fmp.optim.rmsprop(1e-3),
    "sgd": fmp.optim.sgd(1e-3),
    "sgd_momentum": fmp.optim.sgd(1e-3, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_state_is_the_one_that_a_step_makes(level, optimizer):
    module = Tied()
    model = fmp.functionalize(module)

    def loss_fn(params, batch, *, buffers):
        return params["embedding.weight"].float().sum(), buffers

    policy = fmp.opt_level(level, keep_full=module) if level == "O2" else fmp.opt_level(level)
    step = fmp.train_step(loss_fn, OPTIMIZERS[optimizer], policy=policy, ema=0.9)
    state = step.init(model.params, buffers=model.buffers)
    for given_optimizer in (optimizer, OPTIMIZERS[optimizer]):
        for given_model in (module, model):
            made = plan(given_model, given_optimizer, level, average=True)
            assert made.params == nbytes(state.params)
            assert made.masters == nbytes(state.master)
            assert made.moments + made.other == nbytes(state.opt_state)
            assert made.average == nbytes(state.ema)
            assert made.buffers == nbytes(state.buffers)
            assert made.numbers == sum(value.numel() for value in model.params.values())


@pytest.mark.parametrize("form", fmp.master.FORMS)
def test_masters_of_every_form(form):
    policy = fmp.opt_level("O2", "bf16", master_weights=form)
    params = {"w": torch.randn(30, 20), "norm": torch.ones(20)}
    step = fmp.train_step(lambda params, batch: params["w"].float().sum(), fmp.optim.adam(1e-3), policy=policy)
    state = step.init(params)
    made = plan(params, "adam", policy)
    found = (made.params, made.masters, made.moments + made.other)
    assert found == (nbytes(state.params), nbytes(state.master), nbytes(state.opt_state))


def test_a_module_on_the_meta_device_and_its_shapes():
    with torch.device("meta"):
        huge = nn.Sequential(*[nn.Linear(2**15, 2**15, bias=False) for _ in range(16)])
    shapes = {name: tuple(parameter.shape) for name, parameter in huge.named_parameters()}
    numbers = 16 * 2**30
    first = plan(huge, "adamw", "O2")
    assert first.numbers == numbers
    assert first.total - first.other == 16 * numbers
    assert plan(shapes, "adamw", "O2").bytes == first.bytes
    assert plan(numbers, "adamw", "O2").total == 16 * numbers


def test_shared_tensors_count_as_often_as_a_step_copies_them():
    module = Tied()
    module.register_buffer("alias", module.embedding.weight.detach())
    assert plan(module, None).params == sum(parameter.nbytes for parameter in module.parameters())
    w = torch.randn(4, 4)
    shared = {"a": w, "b": w.view(4, 4), "c": w.t(), "d": w[:2], "e": w.view(torch.int32)}
    for policy in (None, fmp.opt_level("O2")):
        step = fmp.train_step(lambda params, batch: params["a"].sum(), fmp.optim.adam(1e-3), policy=policy)
        state = step.init(shared)
        made = plan(shared, "adam", policy)
        found = (made.params, made.masters, made.moments + made.other)
        assert found == (nbytes(state.params), nbytes(state.master), nbytes(state.opt_state))
    # The buffer is one more copy in a state.
    step = fmp.train_step(lambda params, batch, *, buffers: (params["a"].sum(), buffers), fmp.optim.adam(1e-3))
    state = step.init(dict(module.named_parameters()), buffers=dict(module.named_buffers()))
    assert plan(module).buffers == nbytes(state.buffers) > module.embedding.weight.nbytes
    # If nothing is trained, the tensors are those that are there.
    assert plan(shared, None).params == (16 + 16 + 8 + 16) * 4
    with torch.device("meta"):
        a, b = torch.empty(4), torch.empty(4)
    assert (model_sizes([a, b, a]).numbers, model_sizes([a, b, a], trains=False).numbers) == (12, 8)


def test_frozen_parameters_are_parameters_only():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[0].weight.requires_grad_(False)
    made = plan(module, "adam", "O2")
    assert (made.params, made.masters, made.gradients, made.moments) == (256, 256, 128, 512)
    frozen = plan(module, None, "O2")
    assert frozen.total == frozen.params == 256


def test_compressed_weights_count_as_stored():
    weight = torch.randn(128, 64).bfloat16()
    compressed = fmp.df11.compress({"w": weight, "b": torch.ones(64)})
    made = plan(compressed, "adam", None)
    stored = nbytes(tree.leaves(compressed["w"]))
    assert stored < weight.nbytes
    assert made.params == stored + 256
    assert made.moments == 512
    assert made.numbers == weight.numel() + 64
    plain = nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)
    wrapped = plan(fmp.df11.wrap(plain), "adam", "O2")
    assert wrapped.numbers == plain.weight.numel()
    assert wrapped.total < plain.weight.nbytes


def test_leaves_that_no_policy_casts():
    made = plan({"ids": torch.arange(3), "none": None, "w": torch.ones(3, dtype=torch.float64)}, "adam", "O2")
    assert made.params == 24 + 6
    assert made.numbers == 6
    assert made.moments == 24


def test_compute_copies():
    assert plan(1000, "adam", "params=f32,compute=bf16,output=f32").compute == 2000
    assert plan(1000, "adam", "params=f32,compute=bf16,output=f32").gradients == 2000
    by_op = plan(1000, "adam", "O1")
    assert (by_op.params, by_op.compute, by_op.gradients, by_op.total) == (4000, 2000, 4000, 18_000)
    assert plan(1000, "adam", "O1", zero=3, devices=2).compute == 1000
    assert plan(1000, "adam", "O2").compute == 0


def test_eight_bit_moments_leave_small_leaves():
    made = plan({"small": (4095,), "large": (4097,)}, "adam8bit", "O2")
    assert made.moments == 8 * 4095 + 2 * (4097 + 4 * math.ceil(4097 / 256))


# -- the plan itself


def test_kinds_are_independent_numbers():
    made = plan(1000, "adam", "O2", accumulate=2, average=True, activations=5)
    assert made.bytes == {
        "params": 2000,
        "compute": 0,
        "masters": 4000,
        "gradients": 2000,
        "accumulators": 4000,
        "moments": 8000,
        "average": 4000,
        "buffers": 0,
        "activations": 5,
        "other": 0,
    }
    assert tuple(made.bytes) == KINDS
    assert made.total == sum(made.bytes.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.params = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_the_table_says_what_was_counted_and_what_not():
    text = str(plan(3.5e9, "adamw", "O2", zero=1, devices=8, unit="GiB", gradients=None))
    lines = text.splitlines()
    assert lines[0] == "3,500,000,000 parameters, adamw, O2, ZeRO 1 on 8 devices; on each device"
    assert lines[1].split() == ["kind", "GiB", "bytes", "a", "number", "counted"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:-1]}
    assert rows["masters"] == ["1.63", "0.500", "f32,", "a", "share", "of", "1/8"]
    assert rows["total"][:2] == [f"{(2 + 12 / 8) * 3.5e9 / 2**30:.2f}", "3.500"]
    assert "gradients" not in rows
    assert lines[-1].startswith("not counted: activations; gradients; ")
    assert "communication" in lines[-1]


def test_a_plan_as_json():
    made = plan(3.5e9, "adamw", "O2", zero=3, devices=8)
    read = json.loads(json.dumps(made.as_dict()))
    assert read["total"] == made.total == 7 * BILLION
    assert read["bytes"]["masters"] == 14 * BILLION // 8
    assert read["counted"]["masters"] == "f32, a share of 1/8"
    assert read["measured"] is None


def test_an_empty_model():
    made = plan({}, "adam", "O2")
    assert isinstance(made, Plan)
    assert made.total == made.other
    assert "total" in str(made)
