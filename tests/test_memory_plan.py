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
from fmp.memory import estimators
from fmp.memory.activations import Transformer
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


# What DeepSpeed prints for t5-3b, 2851M parameters with 32M in the largest layer, on 8 GPUs of one node, in GiB.
T5_3B: dict[str, tuple[Any, tuple[float, float]]] = {
    "zero 2": (estimators.deepspeed_zero2(2851e6, devices=8), (127.45, 15.93)),
    "zero 2, offloaded": (estimators.deepspeed_zero2(2851e6, devices=8, offload_optimizer=True), (127.45, 5.31)),
    "zero 3": (estimators.deepspeed_zero3(2851e6, 32e6, devices=8), (1.43, 6.09)),
    "zero 3, whole": (estimators.deepspeed_zero3(2851e6, 32e6, devices=8, sharded_init=False), (127.45, 6.09)),
    "zero 3, optimizer offloaded": (
        estimators.deepspeed_zero3(2851e6, 32e6, devices=8, offload_optimizer=True),
        (63.72, 0.78),
    ),
    "zero 3, optimizer offloaded, whole": (
        estimators.deepspeed_zero3(2851e6, 32e6, devices=8, offload_optimizer=True, sharded_init=False),
        (127.45, 0.78),
    ),
    "zero 3, all offloaded": (
        estimators.deepspeed_zero3(2851e6, 32e6, devices=8, offload_optimizer=True, offload_params=True),
        (71.69, 0.12),
    ),
}


@pytest.mark.parametrize("name", T5_3B)
def test_what_deepspeed_estimates(name):
    made, expected = T5_3B[name]
    # It prints two digits.
    assert (round(made.host / 2**30, 2), round(made.device / 2**30, 2)) == pytest.approx(expected, abs=0.0101)


def test_deepspeed_on_several_nodes():
    one, two = (
        estimators.deepspeed_zero3(1e9, 1e7, devices=8, nodes=nodes, offload_optimizer=True) for nodes in (1, 2)
    )
    assert (two.device - int(4e7), two.host) == ((one.device - int(4e7)) // 2, one.host // 2)
    with pytest.raises(ValueError, match="offload_optimizer=True"):
        estimators.deepspeed_zero3(1e9, 1e7, devices=8, offload_params=True)


def test_what_accelerate_estimates():
    gemma_2b = 2506172416
    half = estimators.accelerate_training(gemma_2b, "bfloat16")
    assert half is not None
    assert [round(size / 1e9, 2) for size in half] == [10.02, 15.04, 20.05, 20.05]
    assert half.peak == half.optimizer
    single = estimators.accelerate_training(gemma_2b)
    assert single is not None
    assert single == (half.model, half.model, 2 * half.model, 4 * half.model)
    assert single.peak == plan(gemma_2b, "adam", "O0").total
    assert estimators.accelerate_training(gemma_2b, "int4") is None
    with pytest.raises(ValueError, match="float8"):
        estimators.accelerate_training(gemma_2b, "float8")
    assert estimators.accelerate_inference(7e9, 0.5) == 4_200_000_000


def test_activations_of_a_transformer():
    gpt3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048)
    found = [round(gpt3.layer_bytes(remat) / 2**30, 2) for remat in ("none", "selective", "full")]
    assert found == [2.67, 0.80, 0.05]
    rows = 2048 * 12288
    assert gpt3.layer_bytes() == rows * (34 + 5 * 96 * 2048 / 12288)
    assert gpt3.activation_bytes("selective") == 96 * 34 * rows
    # In float32 all but the masks doubles.
    assert gpt3.layer_bytes("none", 4) == 2 * gpt3.layer_bytes() - 2 * rows - 96 * 2048**2
    assert Transformer(2, 64, 4, 32, vocabulary=1000).logit_bytes() == 32 * 1000 * 10
    for remat, each in {False: 34 + 80, "selective": 34, True: 2, "full": 2}.items():
        made = plan(1000, "adam", "O2", activations=gpt3, remat=remat)
        assert made.activations == 96 * rows * each
    assert plan(1000, "adam", "O0", activations=gpt3, remat=True).activations == 2 * 96 * rows * 2


def test_sizes_of_a_transformer_are_checked():
    with pytest.raises(ValueError, match="layers"):
        Transformer(0, 64, 4, 32)
    with pytest.raises(ValueError, match="heads"):
        Transformer(1, 64, 4.0, 32)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'half'"):
        Transformer(1, 64, 4, 32).layer_bytes("half")


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


def test_tied_weights_count_once():
    module = Tied()
    assert plan(module, None).params == sum(parameter.nbytes for parameter in module.parameters())
    w = torch.randn(4, 4)
    assert plan({"a": w, "b": w.view(4, 4), "c": w.t(), "d": w[:2]}, None).params == (16 + 16 + 8) * 4
    with torch.device("meta"):
        a, b = torch.empty(4), torch.empty(4)
    assert model_sizes([a, b, a]).numbers == 8


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


def test_an_optimizer_that_looks_at_values():
    tx = fmp.optim.from_torch(torch.optim.AdamW, lr=1e-3)
    params = {"w": torch.ones(30, 20), "b": torch.ones(20)}
    made = plan(params, tx)
    assert made.moments == 8 * 620
    with torch.device("meta"):
        large = torch.empty(2**27)
    with pytest.raises(ValueError, match="too large to make"):
        plan({"w": large}, tx)


def test_a_number_says_nothing_of_shapes():
    for optimizer in ("adafactor", fmp.optim.adafactor(1e-3)):
        with pytest.raises(ValueError, match="depends on the shapes"):
            plan(1000, optimizer)
    assert plan({"w": (30, 40)}, "adafactor").moments == 4 * 70


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


BATCH = torch.randn(64, 16)


def loss_fn(params, batch):
    return (batch @ params["w"].to(batch.dtype)).float().square().mean()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_measured_with_the_plan(accumulate):
    params = {"w": torch.randn(16, 32)}
    options: dict[str, Any] = {"measure": True, "loss_fn": loss_fn, "batch": BATCH, "accumulate": accumulate}
    made = plan(params, "adam", "O2", **options)
    assert made.timeline is not None
    start = {kind: values[0] for kind, values in made.timeline.live.items()}
    assert (made.params, made.masters, made.moments + made.other) == (
        start["params"],
        start["masters"],
        start["moments"],
    )
    assert made.activations == max(made.timeline.live["activations"]) > 0
    assert "measured peak" in str(made)
    assert made.as_dict()["measured"]["peak"] == made.timeline.peak
    smaller = plan(params, "adam", "O2", **{**options, "activations": 7})
    assert smaller.activations == 7


def test_a_measured_module():
    module = Tied()
    model = fmp.functionalize(module)

    def of_module(params, batch, *, buffers):
        logits, buffers = model.apply(params, buffers, batch)
        return logits.float().square().mean(), buffers

    batch = torch.randint(50, (6,))
    peaks = []
    for given_model in (module, model):
        made = plan(given_model, "adamw", "O2", measure=True, loss_fn=of_module, batch=batch, average=True)
        assert made.timeline is not None
        assert made.timeline.live["buffers"][0] == made.buffers
        assert made.timeline.live["average"][0] == made.average
        peaks.append(made.timeline.peak)
    assert peaks[0] == peaks[1]


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "a negative number": (ValueError, "not negative", {"model": -1}),
    "half a parameter": (ValueError, "whole", {"model": 1.5}),
    "infinity": (ValueError, "whole", {"model": math.inf}),
    "a flag": (ValueError, "whole", {"model": True}),
    "a string": (TypeError, "got a str", {"model": "gpt2"}),
    "a leaf": (TypeError, "w: a plan is for", {"model": {"w": "gpt2"}}),
    "an optimizer": (ValueError, "'adamm' is not known", {"optimizer": "adamm"}),
    "no optimizer": (TypeError, "GradientTransformation", {"optimizer": 3}),
    "a policy": (ValueError, "O4", {"policy": "O4"}),
    "no policy": (TypeError, "policy", {"policy": 3}),
    "a stage": (ValueError, "0 to 3", {"zero": 4}),
    "devices": (ValueError, "devices", {"devices": 0}),
    "microbatches": (ValueError, "accumulate", {"accumulate": 0}),
    "a unit": (ValueError, "GiB", {"unit": "gigs"}),
    "remat of nothing": (ValueError, "Transformer", {"remat": True}),
    "an unknown remat": (ValueError, "'half'", {"remat": "half"}),
    "negative activations": (ValueError, "activations", {"activations": -1}),
    "bits of what is trained": (ValueError, "optimizer=None", {"weight_bits": 11}),
    "moments of 8 bits": (ValueError, "leave the dtype out", {"optimizer": "adam8bit", "moments": "f32"}),
    "a pair for one moment": (ValueError, "two dtypes", {"optimizer": "lion", "moments": ("f32", "f32")}),
    "three moments": (ValueError, "pair", {"moments": ("f32", "f32", "f32")}),
    "a dtype": (ValueError, "f33", {"gradients": "f33"}),
    "nothing to measure": (ValueError, "loss_fn and batch", {"measure": True}),
    "a number to measure": (ValueError, "with tensors", {"measure": True, "loss_fn": loss_fn, "batch": BATCH}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    error, match, options = REFUSED[name]
    with pytest.raises(error, match=match):
        plan(**{"model": 1000, **options})


def test_masters_that_do_not_fit_a_parameter():
    policy = fmp.Policy(None, None, None, master_weights="remainder")
    with pytest.raises(TypeError, match="w: masters of the form 'remainder'"):
        plan({"w": torch.ones(2, dtype=torch.float16)}, "adam", policy)


def test_an_empty_model():
    made = plan({}, "adam", "O2")
    assert isinstance(made, Plan)
    assert made.total == made.other
    assert "total" in str(made)
