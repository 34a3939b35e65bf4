"""What a plan refuses, and which argument or leaf the message names; and what it takes for a shape or a number."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fmp
from fmp.memory import estimators
from fmp.memory.activations import Transformer
from fmp.memory.plan import plan

BATCH = torch.randn(64, 16)
SHAPES = Transformer(2, 64, 4, 32)


def loss_fn(params, batch):
    return (batch @ params["w"]).float().square().mean()


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "a negative number": (ValueError, "not negative", {"model": -1}),
    "half a parameter": (ValueError, "whole", {"model": 1.5}),
    "infinity": (ValueError, "whole", {"model": math.inf}),
    "a flag": (ValueError, "whole", {"model": True}),
    "too large a number": (ValueError, "the model: a tensor has fewer than 2", {"model": 2.4e18}),
    "far too large a number": (ValueError, "fewer than 2", {"model": 10**400}),
    "too large a shape": (ValueError, "w: a tensor has fewer than 2", {"model": {"w": (2**40, 2**40)}}),
    "an empty shape that is too large": (ValueError, "w: a tensor", {"model": {"w": (0, 2**62)}}),
    "half a size": (ValueError, "w: a number of parameters must be whole", {"model": {"w": (2.5, 3)}}),
    "a lazy module": (ValueError, "this parameter has no shape yet", {"model": nn.LazyLinear(3)}),
    "a sparse tensor": (
        TypeError,
        "w: a plan counts what is trained as plain",
        {"model": {"w": torch.eye(3).to_sparse()}},
    ),
    "a string": (ValueError, "model must be a number of parameters such as .* 7B, got 'gpt2'", {"model": "gpt2"}),
    "a leaf": (TypeError, "w: a plan is for", {"model": {"w": "gpt2"}}),
    "an optimizer": (ValueError, "'adamm' is not known", {"optimizer": "adamm"}),
    "no optimizer": (TypeError, "GradientTransformation", {"optimizer": 3}),
    "a policy": (ValueError, "neither an opt level, O0, O1, O2, O3,", {"policy": "O4"}),
    "a level in lower case": (ValueError, "O0, O1, O2, O3", {"policy": "o2"}),
    "a policy of other names": (
        ValueError,
        "policy: its keep_full names .'nothing'., but no leaf matches",
        {"model": {"w": (2, 3)}, "policy": fmp.Policy("bf16", "bf16", "f32", keep_full=["nothing"])},
    ),
    "no policy": (TypeError, "policy", {"policy": 3}),
    "a stage": (ValueError, "0 to 3", {"zero": 4}),
    "devices": (ValueError, "devices", {"devices": 0}),
    "microbatches": (ValueError, "accumulate", {"accumulate": 0}),
    "a unit": (ValueError, "GiB", {"unit": "gigs"}),
    "remat of nothing": (ValueError, "Transformer", {"remat": True}),
    "an unknown remat": (ValueError, "'half'", {"remat": "half"}),
    "negative activations": (ValueError, "activations", {"activations": -1}),
    "activations that are NaN": (ValueError, "activations must be", {"activations": math.nan}),
    "infinite activations": (ValueError, "activations must be", {"activations": math.inf}),
    "infinite bits": (ValueError, "weight_bits must be", {"optimizer": None, "weight_bits": math.inf}),
    "bits as text": (ValueError, "weight_bits must be", {"optimizer": None, "weight_bits": "11"}),
    "a flag for bits": (ValueError, "weight_bits must be", {"optimizer": None, "weight_bits": True}),
    "bits of what is trained": (ValueError, "optimizer=None", {"weight_bits": 11}),
    "moments of 8 bits": (ValueError, "leave the dtype out", {"optimizer": "adam8bit", "moments": "f32"}),
    "a pair for one moment": (ValueError, "two dtypes", {"optimizer": "lion", "moments": ("f32", "f32")}),
    "three moments": (ValueError, "pair", {"moments": ("f32", "f32", "f32")}),
    "a dtype": (ValueError, "gradients: 'f33'", {"gradients": "f33"}),
    "a dtype of moments": (ValueError, "moments: 'f33'", {"moments": "f33"}),
    "no dtype of moments": (TypeError, "moments: expected a dtype", {"moments": 5}),
    "gradients of flags": (ValueError, "gradients must be of a floating-point dtype", {"gradients": "bool"}),
    "complex gradients": (ValueError, "gradients must be of a floating-point dtype", {"gradients": "c64"}),
    "complex moments": (ValueError, "moments must be of a floating-point dtype or i8 or u8", {"moments": "c64"}),
    "a measurement that is no flag": (TypeError, "measure must be True or False", {"measure": "yes"}),
    "a loss without a measurement": (ValueError, "measure=True, or leave them out", {"loss_fn": loss_fn}),
    "a unit that is no text": (ValueError, "unit must be one of", {"unit": []}),
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


def wrapped_module() -> nn.Module:
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)))
    return module


def test_a_tensor_that_wraps_others():
    for model, path in ((wrapped_module(), "weight"), ({"w": wrapped_module().weight}, "w")):
        with pytest.raises(TypeError, match=rf"^{path}: .* a TwoTensor; give its shape, \(4, 4\)"):
            plan(model, "adam", "O2")
        # As it is stored, its parts count.
        assert plan(model, None).params == 2 * 64


@pytest.mark.parametrize(
    ("model", "numbers"),
    [
        ({"w": (4096.0, 4096)}, 4096**2),
        ({"w": [4096, 4096.0]}, 4096**2),
        ({"w": (4, 4), "s": ()}, 17),
        ({"s": ()}, 1),
        ({"s": torch.Size(())}, 1),
        (np.prod((4096, 4096)), 4096**2),
        (np.float32(5.0), 5),
        ({"w": (np.int64(3), 4)}, 12),
        ({"w": torch.ones(3), "rest": ()}, 3),
        ((), 0),
    ],
)
def test_shapes_and_numbers(model, numbers):
    made = plan(model, "adam")
    assert (made.numbers, made.params, made.gradients) == (numbers, 4 * numbers, 4 * numbers)
    assert type(made.numbers) is int


def test_a_module_and_its_shapes_with_a_scalar():
    module = nn.Linear(4, 4)
    module.scale = nn.Parameter(torch.ones(()))
    assert plan({name: tuple(each.shape) for name, each in module.named_parameters()}).bytes == plan(module).bytes


ESTIMATES: dict[str, tuple[str, Callable[[], Any]]] = {
    "text": ("numbers must be", lambda: estimators.accelerate_training("7")),  # pyright: ignore[reportArgumentType]
    "NaN": ("numbers must be", lambda: estimators.accelerate_training(math.nan)),
    "a negative number": ("numbers must be", lambda: estimators.deepspeed_zero2(-1e9, devices=1)),
    "an infinite number": ("numbers must be", lambda: estimators.deepspeed_zero3(math.inf, 1, devices=1)),
    "no device": ("devices must be a whole number from 1", lambda: estimators.deepspeed_zero2(1e9, devices=0)),
    "fewer devices": ("devices must be", lambda: estimators.deepspeed_zero3(1e9, 1e6, devices=-1)),
    "no node": ("nodes must be", lambda: estimators.deepspeed_zero3(1e9, 1e6, devices=1, nodes=0)),
    "a layer of all and more": ("largest_layer must be a part", lambda: estimators.deepspeed_zero3(1, 2, devices=1)),
    "a negative factor": ("buffer_factor", lambda: estimators.deepspeed_zero2(1, devices=1, buffer_factor=-1)),
    "negative bytes": ("itemsize must be", lambda: estimators.accelerate_inference(7e9, -2)),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_what_an_estimate_refuses(name):
    match, estimate = ESTIMATES[name]
    with pytest.raises(ValueError, match=match):
        estimate()


def test_remat_of_a_transformer_may_be_a_flag():
    assert SHAPES.layer_bytes(True) == SHAPES.layer_bytes("full")
    assert SHAPES.activation_bytes(False) == SHAPES.activation_bytes("none")
    for wrong in (1, None, "half"):
        with pytest.raises(ValueError, match="True or False, got"):
            SHAPES.layer_bytes(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="itemsize"):
        SHAPES.layer_bytes("none", torch.float16)  # pyright: ignore[reportArgumentType]
    # Numbers of numpy would overflow.
    large = Transformer(
        2**20,
        2**20,
        1,
        2**20,
        batch=np.int64(2**20),  # pyright: ignore[reportArgumentType]
    )
    assert large.activation_bytes("full") == 2 * 2**80
