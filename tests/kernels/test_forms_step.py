"""Whole train steps on parameters in a form of `fmp.master`: bit for bit the steps without kernels."""

from typing import Any

import pytest

import fmp
from fmp import master, optim, tree
from tests.bits import differing, same_bits
from tests.kernels import test_step_launch as steps
from tests.kernels.harness import needs_executor
from tests.kernels.on_executor import kernels_on_cpu

pytestmark = needs_executor


POLICIES: dict[str, dict[str, Any]] = {
    "remainder": {"policy": fmp.opt_level("O2", "bf16", master_weights="remainder"), "loss_scale": 64.0},
    "remainder, some in float32": {
        "policy": fmp.opt_level("O2", "bf16", master_weights="remainder", keep_full=["body.b"]),
        "loss_scale": 64.0,
    },
    "stochastic": {"policy": fmp.opt_level("O2", "bf16", master_weights="stochastic"), "loss_scale": 64.0},
    "stochastic in float16": {"policy": fmp.opt_level("O2", master_weights="stochastic"), "loss_scale": "dynamic"},
}
OPTIMIZERS = {"adam": optim.adamw(0.01), "sgd": optim.sgd(0.1, momentum=0.9, nesterov=True), "two": steps.TWO}


def step_of(policy: str, optimizer: str, **options: Any) -> fmp.TrainStep:
    given = {
        "optimizer": OPTIMIZERS[optimizer],
        "clip_norm": 0.1,
        "skip_nonfinite": True,
        **POLICIES[policy],
        **options,
    }
    return steps.step_of("O2", **given)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ema", [None, 0.9])
def test_whole_steps(policy: str, optimizer: str, donate: bool, ema: float | None) -> None:
    step = step_of(policy, optimizer, donate=donate, ema=ema)
    with kernels_on_cpu() as names:
        found = steps.run(step, steps.BATCHES)
    with steps.without_kernels():
        expected = steps.run(step, steps.BATCHES)
    own = {name for name in names if name.startswith(("adam", "sgd"))}
    dtype, of = "f16" if "float16" in policy else "bf16", {"adam", "sgd"} if optimizer == "two" else {optimizer}
    last = "remainder" if "remainder" in policy else dtype if ema is not None else f"stochastic_{dtype}"
    narrow = {f"{name}_{dtype}_{last}" for name in of}
    assert narrow <= own
    assert own - narrow <= ({"adam_f32_bf16", "sgd_f32_bf16"} if "some in float32" in policy else set())
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other), differing(one, other)
    assert sum(tree.leaves(found[-1][0].skip_count)) >= 1
    # A skipped step leaves all but its own count and the loss scale.
    (before, _), (after, _) = found[:2]
    for part in ("params", "master", "opt_state", "ema"):
        assert same_bits(getattr(before, part), getattr(after, part))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_neither_merges_nor_splits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pass over the parameters")

    step = step_of(policy, "adam", donate=True, ema=None)
    state = step.init(steps.PARAMS)
    monkeypatch.setattr(master, "split", refuse)
    monkeypatch.setattr(master, "merge", refuse)
    old = [*tree.leaves(state.params), *tree.leaves(state.master), state.opt_state.first_moment["body"]["w"]]
    with kernels_on_cpu():
        state, _ = step(state, steps.BATCHES[0])
    new = [*tree.leaves(state.params), *tree.leaves(state.master), state.opt_state.first_moment["body"]["w"]]
    assert all(one is other for one, other in zip(new, old, strict=True))
