"""The one-pass form of the optimizers on a device: what `update` and `apply_updates` compute there, bit for bit."""

from typing import Any

import pytest
import torch

from fmp import optim, tree
from fmp.optim import schedules
from tests.bits import same_bits, snapshot
from tests.gpu.by_hand import placed
from tests.kernels.harness import numbers

Tree = Any
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = {"a.weight": 66_001, "b.bias": 1, "c.weight": 137, "d.empty": 0, "e.weight": 1000, "f.bias": 5}
OPTIMIZERS = {
    "adamw": optim.adamw(3e-3, weight_decay=0.1),
    "adamw, mask, schedule": optim.adamw(schedules.linear(0.01, 0.001, 3), mask=["*.weight"]),
    "adam, coupled decay": optim.adam(3e-3, b1=0.6, b2=0.95, weight_decay=0.1),
    "sgd": optim.sgd(0.1),
    "sgd, momentum, decay": optim.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "sgd, Nesterov": optim.sgd(schedules.linear(0.1, 0.01, 3), momentum=0.9, nesterov=True),
    "sgd, dampening": optim.sgd(0.1, momentum=0.9, dampening=0.4),
}


pytestmark = pytest.mark.usefixtures("exact_root_on_a_cpu")


def leaves(device: torch.device, dtype: torch.dtype, seed: int, offset: int = 0) -> Tree:
    contents = {name: numbers(size, seed=seed).to(dtype) for name, size in SIZES.items()}
    return {name: placed(content, device, offset * index % 5) for index, (name, content) in enumerate(contents.items())}


def expected(tx: Any, grads: Tree, state: Tree, params: Tree, scale: torch.Tensor, clip: torch.Tensor) -> Any:
    grads = tree.map(lambda grad: None if grad is None else grad.float() * scale * clip, grads)
    updates, state = tx.update(grads, state, params)
    return optim.apply_updates(params, updates), state


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("gradient", [F32, F16, BF16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_steps(device, sources, name, gradient, donate):
    tx, params = OPTIMIZERS[name], leaves(device, F32, 1, offset=1)
    low = tree.map(lambda leaf: leaf.to(F16 if gradient == F32 else gradient), params)
    state = tx.init(params)
    assert tx.fused is not None
    wanted_params, wanted_state = snapshot((params, state))
    scale, clip = torch.tensor(1 / 1024, device=device), torch.tensor(0.3, device=device)
    for step in range(4):
        grads = tree.map(lambda leaf: leaf * 50, leaves(device, gradient, 10 + step, offset=step))
        if step == 1:  # so that ages differ
            grads["c.weight"] = None
        finite = torch.tensor(step != 2, device=device)
        before = snapshot((params, low, state))
        found = tx.fused(grads, state, params, inv_scale=scale, clip=clip, finite=finite, low=low, donate=donate)
        if not donate:
            assert same_bits((params, low, state), before)
        params, low, state = found
        if step == 2:
            assert same_bits((params, low, state), before)
            continue
        wanted_params, wanted_state = expected(tx, grads, wanted_state, wanted_params, scale, clip)
        assert same_bits((params, state), (wanted_params, wanted_state)), step
        assert same_bits(low, tree.map(lambda leaf, old: leaf.to(old.dtype), params, low))
    assert name.partition("w")[0].partition(",")[0] in sources
