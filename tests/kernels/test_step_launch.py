"""Whole train steps on the kernels: bit for bit the steps without them, state and metrics."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fmp
from fmp import optim, reductions, tree
from fmp.kernels import multi_tensor, trials, trust
from fmp.kernels.multi_tensor import Measured
from fmp.numerics import watch_gradients
from tests.bits import differing, same_bits
from tests.kernels.harness import needs_executor
from tests.kernels.on_executor import exact_root, kernels_on_cpu

pytestmark = needs_executor
F16, BF16 = torch.float16, torch.bfloat16
PARAMS = {
    "body": {"w": torch.linspace(-1, 1, 40 * 12).reshape(40, 12), "b": torch.zeros(12)},
    "head": {"w": torch.linspace(1, -1, 12 * 3).reshape(12, 3)},
}
BATCHES = [torch.linspace(0, 1, 160).reshape(4, 40) + index for index in range(4)]
BATCHES[1] = torch.full((4, 40), float("inf"))


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    hidden = (batch.to(params["body"]["w"].dtype) @ params["body"]["w"]).float() + params["body"]["b"].float()
    return (hidden @ params["head"]["w"].float() - 1.0).square().mean()


def other_loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return (params["head"]["w"] * batch.to(params["head"]["w"].dtype).mean()).float().square().mean()


TWO = {"body": optim.adamw(0.01), "head": optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)}
O2 = {"policy": fmp.opt_level("O2"), "loss_scale": "dynamic"}
CASES: dict[str, dict[str, Any]] = {
    "O2": {**O2, "clip_norm": 0.1, "ema": 0.9},
    "O2 two groups": {**O2, "optimizer": TWO, "clip_norm": 0.1, "ema": 0.9},
    "O2 microbatches": {**O2, "optimizer": TWO, "clip_norm": 0.1, "accumulate": 2},
    "O2 weighted": {**O2, "accumulate": 2, "microbatch_weight": lambda batch: batch.sum().isfinite() * 2.0},
    "bf16, some in float32": {"policy": fmp.opt_level("O2", "bf16", keep_full=["body.b"]), "loss_scale": 64.0},
    "bf16 without a scale": {"policy": fmp.opt_level("O2", "bf16"), "clip_norm": 0.1, "skip_nonfinite": True},
    "float32": {"optimizer": TWO, "loss_scale": "dynamic", "clip_norm": 0.1},
    "two losses": {
        **O2,
        "losses": {"a": loss_fn, "b": other_loss_fn},
        "optimizer": TWO,
        "uses": {"b": ["head"]},
        "clip_norm": 0.1,
    },
    "one optimizer without a pass": {**O2, "optimizer": {**TWO, "head": optim.lion(0.01)}, "clip_norm": 0.1},
    "remainder": {"policy": fmp.Policy.parse("params=bf16,compute=bf16,output=f32,master=remainder"), "clip_norm": 0.1},
    "watched": {**O2, "optimizer": optim.chain(watch_gradients(), optim.adamw(0.01)), "clip_norm": 0.1},
}


def step_of(case: str, **options: Any) -> fmp.TrainStep:
    given = {"optimizer": optim.adamw(0.01), "losses": loss_fn, **CASES[case], **options}
    return fmp.train_step(given.pop("losses"), given.pop("optimizer"), **given)


def run(step: fmp.TrainStep, batches: list[torch.Tensor]) -> list[Any]:
    state, seen = step.init(PARAMS), []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append(copy.deepcopy((state, metrics)))
    return seen


@contextmanager
def without_kernels() -> Iterator[None]:
    """Lets steps run on torch's operators, but for the order in which squares are added up."""

    def norm(values: Any) -> torch.Tensor:
        leaves = [leaf for leaf in tree.leaves(values) if leaf is not None]
        with kernels_on_cpu():
            found = multi_tensor.measure(leaves).norm
        expected = tree.global_norm(values)
        if expected.isfinite():
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
        return found

    with pytest.MonkeyPatch.context() as patch, exact_root():
        patch.setattr(reductions, "global_norm", norm)
        patch.setattr(reductions, "measure", lambda values: Measured(norm(values), tree.all_finite(values)))
        yield


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_bit_of_state_and_metrics_is_the_same(case: str, donate: bool) -> None:
    step = step_of(case, donate=donate)
    batches = BATCHES if case != "remainder" else [BATCHES[0], *BATCHES[2:]]
    with kernels_on_cpu() as names:
        found = run(step, batches)
    with without_kernels():
        expected = run(step, batches)
    assert {"finish", "adam"} <= {name.split("_")[0] for name in names}
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other), differing(one, other)
    if case != "remainder":
        assert sum(tree.leaves(found[-1][0].skip_count)) >= (0 if case == "O2 weighted" else 1)


def test_a_step_is_four_launches() -> None:
    step = step_of("O2", donate=True)
    with kernels_on_cpu() as names:
        run(step, BATCHES[:1])
    assert names == ["scale_f16_f32", "finish", "adam_f16_f16", "adjust"]
    with kernels_on_cpu() as names:
        run(step_of("O2 two groups"), BATCHES[:1])
    measured = ["scale_f16_f32", "finish"] * 2
    assert names == [*measured, "adam_f16_f16", "sgd_f16_f16", "adjust"]


def test_a_watched_step_launches_the_same_and_sees_what_the_usual_form_sees() -> None:
    step, optimizer = step_of("watched"), CASES["watched"]["optimizer"]
    with kernels_on_cpu() as names:
        found = run(step, BATCHES)
    assert names[:4] == ["scale_f16_f32", "finish", "adam_f16_f16", "adjust"]
    with without_kernels():
        expected = run(step_of("watched", optimizer=optimizer._replace(fused=None)), BATCHES)
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other), differing(one, other)


def test_gradients_are_neither_widened_nor_split_from_their_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pass over the gradients or the parameters")

    step = step_of("O2", donate=True)
    state = step.init(PARAMS)
    for module, name in ((fmp.StaticLossScale, "unscale"), (fmp.DynamicLossScale, "unscale"), (fmp.master, "split")):
        monkeypatch.setattr(module, name, refuse)
    old = [*tree.leaves(state.params), *tree.leaves(state.master), state.opt_state.first_moment["body"]["w"]]
    with kernels_on_cpu():
        state, _ = step(state, BATCHES[0])
    new = [*tree.leaves(state.params), *tree.leaves(state.master), state.opt_state.first_moment["body"]["w"]]
    assert all(one is other for one, other in zip(new, old, strict=True))


@pytest.mark.parametrize("scale", [3.0, 1000.0])
def test_a_scale_that_is_no_power_of_two_moves_a_gradient_by_one_unit_in_the_last_place(scale: float) -> None:
    step = step_of("O2", loss_scale=scale, optimizer=optim.sgd(1.0), clip_norm=None, ema=None)
    with kernels_on_cpu():
        ((state, metrics),) = run(step, BATCHES[:1])
    with without_kernels():
        ((expected, expected_metrics),) = run(step, BATCHES[:1])
    assert same_bits(metrics, expected_metrics)
    for path, start in tree.items(tree.cast(PARAMS, torch.float32)):
        found, wanted = (dict(tree.items(part.master))[path] for part in (state, expected))
        moved = (wanted - start).abs()
        # one unit of the gradient, and the rounding of the sum
        bound = 2.0**-23 * (2.0 * moved + torch.maximum(found.abs(), wanted.abs()))
        assert ((found - wanted).abs() <= bound).all()


@pytest.mark.parametrize(
    "options",
    [
        {"policy": fmp.Policy.parse("params=f32,compute=f64,output=f32")},
        {"optimizer": optim.chain(optim.clip_by_value(1.0), optim.sgd(0.1))},
        {"losses": lambda params, batch: (params["body"]["w"].half() ** 2).mean(), "loss_scale": 2.0**20},
        {"accumulate": 2},
    ],
    ids=["f64", "no pass", "excess", "microbatches"],
)
def test_where_the_scale_cannot_wait_it_does_not(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    unscale = fmp.DynamicLossScale.unscale
    monkeypatch.setattr(fmp.DynamicLossScale, "unscale", lambda self, g: seen.append(1) or unscale(self, g))
    monkeypatch.setattr(fmp.StaticLossScale, "unscale", lambda self, g: seen.append(1) or unscale(self, g))
    with kernels_on_cpu():
        ((state, _),) = run(step_of("O2", **options), BATCHES[2:3])
    assert seen
    assert fmp.all_finite(state.params)


def test_a_scaler_of_ones_own_unscales_by_itself() -> None:
    @tree.dataclass
    class Twice(fmp.StaticLossScale):
        def unscale(self, grads: Any) -> Any:
            return tree.map(lambda grad: None if grad is None else grad.float() / self.loss_scale * 2.0, grads)

    make: Any = Twice
    own = step_of("O2", loss_scale=make(8.0), optimizer=optim.sgd(0.125), clip_norm=None)
    plain = step_of("O2", loss_scale=8.0, optimizer=optim.sgd(0.25), clip_norm=None)
    with kernels_on_cpu():
        ((state, _),), ((expected, _),) = run(own, BATCHES[:1]), run(plain, BATCHES[:1])
    assert same_bits(state.master, expected.master)


@pytest.mark.parametrize("kernel", ["scale", "adam", "loss_scale"])
def test_a_kernel_that_is_not_trusted_is_left_out(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TRIALS", {**trials.TRIALS, kernel: lambda device: False})
    monkeypatch.setattr(trust, "TRIALS", trials.TRIALS)
    step = step_of("O2", clip_norm=None)
    with kernels_on_cpu(trusted=False), pytest.warns(RuntimeWarning, match=f"the kernel '{kernel}'"), exact_root():
        found = run(step, BATCHES[:3])
    with without_kernels():
        expected = run(step, BATCHES[:3])
    for (state, _), (wanted, _) in zip(found, expected, strict=True):
        assert same_bits(state, wanted)


def test_under_vmap_and_compile_and_grad_no_kernel_runs() -> None:
    step = step_of("O2", clip_norm=None)
    state = step.init(PARAMS)
    both = tree.map(lambda leaf: None if leaf is None else torch.stack([leaf, leaf]), state)
    with kernels_on_cpu() as names:
        mapped, _ = torch.func.vmap(step)(both, torch.stack([BATCHES[0], BATCHES[2]]))
        torch.compile(step, backend="aot_eager", fullgraph=True)(state, BATCHES[0])
        torch.func.grad(lambda batch: step(state, batch)[0].master["head"]["w"].sum())(BATCHES[0])
    assert names == []
    assert math.isfinite(mapped.master["head"]["w"].sum().item())
