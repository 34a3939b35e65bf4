"""The train step with the opt level O1: float32 parameters, cast op by op inside the loss."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmp
from fmp import tree
from fmp.optim import apply_updates
from fmp.step.build import compiled_advance
from tests.bits import same_bits, snapshot

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")
HALVES = [BF16, F16]
by_half = pytest.mark.parametrize("half", HALVES)


def o1(half: torch.dtype, **overrides: Any) -> fmp.Policy:
    return fmp.opt_level("O1", half_dtype=half, **overrides)


def logits_of(params: Any, x: torch.Tensor, seen: list[Any] | None = None) -> torch.Tensor:
    hidden = F.linear(x, params["w"], params["b"])
    normed = F.layer_norm(F.gelu(hidden), (8,), params["scale"])
    logits = normed @ params["head"]
    if seen is not None:
        seen.append((hidden.dtype, normed.dtype, logits.dtype))
    return logits


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(logits_of(params, x), y)


def problem(seed: int = 0, rows: int = 8) -> tuple[Any, Any]:
    sizes = {"w": (8, 4), "b": (8,), "scale": (8,), "head": (8, 3)}
    generator = torch.Generator().manual_seed(seed)
    params = {name: torch.randn(size, generator=generator) / 2 for name, size in sizes.items()}
    x = torch.randn(rows, 4, generator=generator)
    return params, (x, x[:, :3].argmax(-1))


def dtypes(value: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor)}


def stacked(trees: Any) -> Any:
    return tree.map(lambda *leaves: None if leaves[0] is None else torch.stack(leaves), *trees)


# --- what it does


@by_half
def test_it_learns_in_float32_without_masters(half):
    seen: list[Any] = []
    watched = lambda params, batch: F.cross_entropy(logits_of(params, batch[0], seen), batch[1])
    step = fmp.train_step(watched, fmp.optim.adamw(0.02), policy=o1(half), ema=0.9, clip_norm=1.0)
    params, batch = problem()
    state = step.init(params)
    before = snapshot((state, batch))
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.5 * losses[0]
    assert set(seen) == {(half, F32, half)}
    assert dtypes((state.params, state.ema, metrics.loss, metrics.grad_norm)) == {F32}
    assert all(leaf is None for leaf in tree.leaves(state.master))
    assert state.step == 30
    first = step.init(params)
    assert same_bits((first, batch), before)
    assert isinstance(state.loss_scale, fmp.DynamicLossScale if half == F16 else fmp.NoOpLossScale)


def test_a_parameter_in_16_bits_has_no_master_either():
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=o1(BF16, cast_model_type=False))
    params, batch = problem()
    state = step.init({**params, "w": params["w"].to(BF16)})
    assert state.params["w"].dtype == BF16
    state, _ = step(state, batch)
    assert state.params["w"].dtype == BF16


def step_by_hand(policy: fmp.Policy, optimizer: Any, state: Any, batch: Any) -> tuple[Any, torch.Tensor]:
    params, opt_state, scaler = state

    def scaled(params: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = fmp.autocast(loss_fn, policy)(params, batch)
        return scaler.scale(loss), loss

    (_, loss), grads = fmp.value_and_grad(scaled, has_aux=True)(params)
    grads = scaler.unscale(grads)
    finite = fmp.all_finite(grads)
    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    new = (apply_updates(params, updates), new_opt_state)
    return (*fmp.select(finite, new, (params, opt_state)), scaler.adjust(finite)), loss


@by_half
def test_it_equals_a_step_written_by_hand(half):
    policy, optimizer = o1(half), fmp.optim.adamw(0.01)
    scaler = fmp.DynamicLossScale(2.0**13, growth_interval=2)
    step = fmp.train_step(loss_fn, optimizer, policy=policy, loss_scale=scaler)
    params, _ = problem()
    state = step.init(params)
    mine = (state.params, state.opt_state, scaler)
    for index in range(6):
        x, y = problem(seed=index)[1]
        batch = (x * INF if index in (1, 4) else x, y)
        state, metrics = step(state, batch)
        mine, loss = step_by_hand(policy, optimizer, mine, batch)
        assert same_bits((state.params, state.opt_state, state.loss_scale), mine)
        assert same_bits(metrics.loss, loss)
    assert state.skip_count == 2


def test_an_overflow_in_float16_skips_and_backs_off():
    """The gradient of a product in float16 overflows at a scale that one in bfloat16 bears."""
    scaler = fmp.DynamicLossScale(2.0**24, growth_interval=1000)
    params, batch = problem()
    for half, skips in ((F16, True), (BF16, False)):
        step = fmp.train_step(loss_fn, fmp.optim.adamw(0.01), policy=o1(half), loss_scale=scaler)
        state = step.init(params)
        after, metrics = step(state, batch)
        assert (bool(metrics.skipped), bool(metrics.grads_finite)) == (skips, not skips)
        assert metrics.loss.isfinite()
        if skips:
            assert same_bits((after.params, after.opt_state, after.step), (state.params, state.opt_state, state.step))
            assert after.loss_scale.loss_scale == 2.0**23
            for _ in range(12):
                after, metrics = step(after, batch)
            assert not metrics.skipped


@by_half
def test_gradients_are_those_of_float32_within_the_format(half):
    params, batch = problem()
    exact = torch.func.grad(loss_fn)(params, batch)
    found = fmp.grad(fmp.autocast(loss_fn, o1(half)))(params, batch)
    for path, leaf in tree.items(found):
        assert leaf.dtype == F32
        torch.testing.assert_close(leaf, exact[path], rtol=0.1, atol=20 * torch.finfo(half).eps)


# --- with the other parts of a step


@by_half
def test_an_ensemble_equals_its_members(half):
    step = fmp.train_step(loss_fn, fmp.optim.adamw(0.01), policy=o1(half), loss_scale="dynamic", clip_norm=1.0)
    states = [step.init(problem(seed)[0], seed=seed) for seed in range(3)]
    batches = [problem(seed)[1] for seed in range(3)]
    batches[1] = (batches[1][0] * INF, batches[1][1])
    ensemble, metrics = torch.func.vmap(step)(stacked(states), stacked(batches))
    assert metrics.skipped.tolist() == [False, True, False]
    members = stacked([step(state, batch)[0] for state, batch in zip(states, batches, strict=True)])
    assert same_bits(ensemble.loss_scale, members.loss_scale)
    for path, leaf in tree.items(ensemble.params):
        assert leaf.dtype == F32
        # adamw's first step has the size of the learning rate, whatever the gradient
        torch.testing.assert_close(leaf, members.params[path], rtol=0, atol=2e-3)


@pytest.mark.parametrize("half", HALVES)
def test_compiled_it_is_the_same_and_compiles_once(half):
    step = fmp.train_step(
        loss_fn, fmp.optim.adamw(0.01), policy=o1(half), loss_scale=fmp.DynamicLossScale(2.0**10), accumulate=2
    )
    fast = dataclasses.replace(step, advance=compiled_advance(backend="aot_eager"))
    expected = state = step.init(problem()[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for index in range(4):
            x, y = problem(seed=index)[1]
            batch = (x * INF if index == 2 else x, y)
            expected, eager = step(expected, batch)
            state, metrics = fast(state, batch)
            assert same_bits(metrics.skipped, eager.skipped)
            for one, other in zip(tree.leaves(state.params), tree.leaves(expected.params), strict=True):
                assert one.dtype == F32
                torch.testing.assert_close(one, other, rtol=0, atol=1e-2 * (index + 1))
    assert state.skip_count == expected.skip_count == 1


@by_half
def test_accumulation_averages_what_one_batch_gives(half):
    params, batch = problem()
    states = []
    for count in (1, 4):
        step = fmp.train_step(loss_fn, fmp.optim.sgd(1.0), policy=o1(half, loss_scale=64.0), accumulate=count)
        states.append(step(step.init(params), batch)[0])
    for path, leaf in tree.items(states[0].params):
        torch.testing.assert_close(states[1].params[path], leaf, rtol=0, atol=8 * torch.finfo(half).eps)


@by_half
def test_several_losses_with_auxiliary_output(half):
    def first(params, batch):
        logits = logits_of(params["a"], batch[0])
        return F.cross_entropy(logits, batch[1]), {"logits": logits, "n": 3}

    def second(params, batch):
        return (params["b"]["w"] @ params["a"]["w"].T).float().square().mean()

    step = fmp.train_step(
        {"first": first, "second": second},
        {"a": fmp.optim.sgd(0.1), "b": fmp.optim.adamw(0.1)},
        policy=o1(half),
        uses={"first": ["a"], "second": ["b"]},
        has_aux={"first": True},
    )
    params, batch = problem()
    state = step.init({"a": params, "b": problem(seed=1)[0]})
    after, metrics = step(state, batch)
    assert metrics.aux["first"]["logits"].dtype == F32
    assert metrics.aux["first"]["n"] == 3
    assert dtypes(after.params) == {F32}
    one = fmp.train_step(first, fmp.optim.sgd(0.1), policy=o1(half), has_aux=True)
    wrapped = one.init({"a": params})
    assert same_bits(one(wrapped, batch)[0].params["a"], after.params["a"])
    assert not torch.equal(after.params["b"]["w"], state.params["b"]["w"])


class Net(nn.Module):
    """With a norm that has statistics, and dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.norm(self.conv(x[:, None])))
        return self.head(self.drop(features).flatten(1))


@pytest.mark.parametrize("compiled", [False, True])
@by_half
def test_a_module_with_statistics_and_dropout(half, compiled):
    model = fmp.functionalize(Net())

    def with_buffers(params, batch, *, buffers, seed):
        out, buffers = model.apply(params, buffers, batch[0], seed=seed, train=True)
        return F.cross_entropy(out, batch[1]), buffers, out.dtype.itemsize

    step = fmp.train_step(with_buffers, fmp.optim.adamw(0.02), policy=o1(half), has_aux=True)
    fast = dataclasses.replace(step, advance=compiled_advance(backend="aot_eager")) if compiled else step
    state = fast.init(model.params, buffers=model.buffers, seed=3)
    losses = []
    for _ in range(15):
        state, metrics = fast(state, problem()[1])
        losses.append(float(metrics.loss))
    assert metrics.aux == 2  # bytes
    assert losses[-1] < 0.8 * losses[0]
    assert dtypes(state.params) == {F32}
    assert {name: leaf.dtype for name, leaf in state.buffers.items()} == {
        name: leaf.dtype for name, leaf in model.buffers.items()
    }
    assert state.buffers["norm.num_batches_tracked"] == 15
    assert not torch.equal(state.buffers["norm.running_var"], model.buffers["norm.running_var"])
    again = step(step.init(model.params, buffers=model.buffers, seed=3), problem()[1])
    other = step(step.init(model.params, buffers=model.buffers, seed=4), problem()[1])
    torch.testing.assert_close(again[1].loss, torch.tensor(losses[0]), rtol=1e-2, atol=0)
    assert not torch.equal(again[1].loss, other[1].loss)


# --- autocast around a step


def products(record: list[Any]) -> fmp.optim.GradientTransformation:
    """An optimizer that multiplies matrices, as some do."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        gram = tree.map(
            lambda g: None if g is None else (g.reshape(-1, 1) @ g.reshape(1, -1)).sum(-1).view_as(g), grads
        )
        record.extend(leaf.dtype for leaf in tree.leaves(gram))
        return tree.map(lambda g: None if g is None else -0.1 * g, gram), state

    return fmp.optim.GradientTransformation(lambda params: (), update)


POLICIES = [None, o1(F16), fmp.opt_level("O2", half_dtype="bf16"), fmp.opt_level("O0")]
OUTER = o1(BF16).with_output_dtype(None)


@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_around_a_step_does_not_reach_into_it(policy):
    found: list[Any] = []
    step = fmp.train_step(loss_fn, products(found), policy=policy, clip_norm=1.0, ema=0.9)
    params, batch = problem()
    state = step.init(params)
    expected = step(state, batch)
    assert set(found) == {F32}

    def run(params, batch):
        state = step.init(params)
        return state, step(state, batch), step.extend(state, {"new": params["w"]}), (batch[0] @ params["w"].T).dtype

    first, after, extended, dtype = fmp.autocast(run, OUTER)(params, batch)
    assert dtype == BF16
    assert same_bits((first, after), (state, expected))
    assert same_bits(extended, step.extend(state, {"new": params["w"]}))
    assert set(found) == {F32}


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_nor_does_it_reach_into_a_compiled_step(policy):
    step = fmp.train_step(loss_fn, products([]), policy=policy, clip_norm=1.0)
    fast = dataclasses.replace(step, advance=compiled_advance(backend="aot_eager"))
    params, batch = problem()
    state = step.init(params)
    expected = fast(state, batch)
    assert same_bits(fmp.autocast(fast, OUTER)(state, batch), expected)
    whole = torch.compile(
        lambda state, batch: fmp.autocast(step, OUTER)(state, batch), backend="aot_eager", fullgraph=True
    )
    assert same_bits(whole(state, batch), expected)
