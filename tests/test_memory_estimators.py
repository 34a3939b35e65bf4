"""Estimates by the formulas of others, against the numbers that they print."""

from typing import Any

import pytest

from fmp.memory import estimators
from fmp.memory.activations import Transformer
from fmp.memory.plan import plan

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
