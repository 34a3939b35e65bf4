"""Accumulation over microbatches: the same step as on the whole batch, and no trace of a bad or empty microbatch."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fmp
from fmp import tree
from tests.bits import differing, same_bits, snapshot

INF, NAN = float("inf"), float("nan")


def squares(params, batch):
    x, y = batch
    return ((x @ params["w"] - y) ** 2).mean()


def problem(rows, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y, w = (torch.randn(size, generator=generator, dtype=dtype) for size in [(rows, 3), (rows, 2), (3, 2)])
    return {"w": w}, (x, y)


def gradient_spy():
    """An optimizer that changes nothing and keeps the gradients that it was given as its state."""
    return fmp.optim.GradientTransformation(
        init=lambda params: tree.map(lambda leaf: torch.zeros_like(leaf, dtype=torch.float32), params),
        update=lambda grads, state, params: (tree.map(lambda leaf: None, grads), grads),
    )


@given(count=st.integers(1, 6), size=st.integers(1, 4))
def test_microbatches_equal_the_whole_batch(count, size):
    params, batch = problem(count * size)
    results = []
    for accumulate in (1, count):
        step = fmp.train_step(squares, fmp.optim.adamw(0.1), accumulate=accumulate, clip_norm=1.0, ema=0.9)
        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, batch)
        results.append((state, metrics))
    torch.testing.assert_close(tree.leaves(results[0]), tree.leaves(results[1]), rtol=1e-10, atol=1e-12)


def test_half_precision_gradients_are_summed_in_float32():
    # In bfloat16, 1 + 2^-9 is 1 again.
    step = fmp.train_step(
        lambda params, batch: (params["w"] * batch).sum(), gradient_spy(), policy=fmp.Policy.parse("bf16"), accumulate=4
    )
    state, metrics = step(step.init({"w": torch.ones(1)}), torch.tensor([1.0, 2.0**-9, 2.0**-9, 2.0**-9]))
    assert same_bits(state.opt_state["w"], torch.tensor([(1 + 3 * 2.0**-9) / 4]))
    assert same_bits(metrics.loss, torch.tensor((1 + 3 * 2.0**-9) / 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_are_those_of_a_step_without_accumulation(dtype):
    params, batch = problem(4, dtype)
    params["scalar"] = torch.ones((), dtype=dtype)
    loss_fn = lambda params, batch: squares(params, batch) * params["scalar"]
    weights = [None, lambda batch: torch.tensor(2.0, dtype=torch.float64), lambda batch: torch.tensor(3)]
    for weight in [*weights, lambda batch: torch.tensor(True), lambda batch: torch.tensor(0.5, dtype=torch.float16)]:
        plain = fmp.train_step(loss_fn, fmp.optim.adamw(0.1), ema=0.9)
        step = fmp.train_step(loss_fn, fmp.optim.adamw(0.1), ema=0.9, accumulate=2, microbatch_weight=weight)
        state = step.init(params)
        expected, found = plain(state, batch), step(state, batch)
        assert tree.describe(found) == tree.describe(expected)
        torch.testing.assert_close(tree.leaves(found), tree.leaves(expected))


# A bad microbatch


def batch_norm(params, batch, buffers):
    x, y = batch
    x = x @ params["w"]
    mean, var = buffers["mean"].clone(), buffers["var"].clone()
    x = nn.functional.batch_norm(x, mean, var, training=True)
    return ((x - y) ** 2).mean(), {"mean": mean, "var": var, "count": buffers["count"] + 1}


def stateful_step(**options):
    scaler = fmp.DynamicLossScale(init_scale=64.0, growth_interval=2)
    schedule = fmp.optim.schedules.linear(0.1, 0.0, 10)
    return fmp.train_step(
        batch_norm, fmp.optim.adamw(schedule), loss_scale=scaler, accumulate=4, ema=0.9, clip_norm=0.5, **options
    )


def stateful_state(step):
    buffers = {"mean": torch.zeros(2), "var": torch.ones(2), "count": torch.tensor(0)}
    return step.init(problem(8, torch.float32)[0], buffers=buffers)


@pytest.mark.parametrize("position", [0, 1, 3])
@pytest.mark.parametrize("poison", [INF, NAN])
def test_one_bad_microbatch_leaves_no_trace_of_its_window(position, poison):
    step = stateful_step()
    _, (x, y) = problem(8, torch.float32)
    bad = x.clone()
    bad[2 * position, 0] = poison
    fresh = stateful_state(step)
    before = snapshot(fresh)

    state, metrics = step(fresh, (bad, y))
    assert (metrics.skipped, metrics.grads_finite) == (True, False)
    assert differing(fresh, state) == {"loss_scale/loss_scale", "skip_count"}
    assert (state.loss_scale.loss_scale, state.skip_count) == (32.0, 1)
    assert same_bits(fresh, before)

    # Scales are powers of two: the next window is bit for bit that of a run that never saw the bad one.
    state, _ = step(state, (x, y))
    clean, _ = step(fresh, (x, y))
    assert differing(state, clean) == {"loss_scale/loss_scale", "skip_count"}
    assert state.buffers["count"] == 4


def test_an_overflow_in_a_window_backs_the_scale_off_once():
    step = stateful_step()
    _, (x, y) = problem(8, torch.float32)
    state, _ = step(stateful_state(step), (x * INF, y))
    assert state.loss_scale.loss_scale == 32.0


# Weights


def token_loss(params, batch):
    """The mean over valid tokens; NaN without any."""
    errors = (batch["x"] @ params["w"] - batch["y"]).square().sum(-1)
    return (errors * batch["valid"]).sum() / batch["valid"].sum()


def valid_tokens(batch):
    return batch["valid"].sum()


def tokens(valid):
    _, (x, y) = problem(len(valid))
    return {"x": x, "y": y, "valid": torch.tensor(valid, dtype=torch.int64)}


@pytest.mark.parametrize("first", [1, 7, 4])
def test_weights_make_uneven_microbatches_equal_to_the_whole_batch(first):
    # Windows of 8 rows with 1 and 7 valid tokens, against the 8 valid tokens as one batch.
    valid = [1] * first + [0] * (8 - first) + [1] * (8 - first) + [0] * first
    batch = tokens(valid)
    rows = torch.tensor(valid).nonzero().squeeze()
    params, _ = problem(1)
    whole = fmp.train_step(token_loss, fmp.optim.adamw(0.1), ema=0.9)
    uneven = fmp.train_step(token_loss, fmp.optim.adamw(0.1), ema=0.9, accumulate=2, microbatch_weight=valid_tokens)
    expected = whole(whole.init(params), {name: leaf[rows] for name, leaf in batch.items()})
    found = uneven(uneven.init(params), batch)
    torch.testing.assert_close(tree.leaves(found), tree.leaves(expected), rtol=1e-10, atol=1e-12)

    equal = fmp.train_step(token_loss, fmp.optim.adamw(0.1), ema=0.9, accumulate=2)
    same = torch.allclose(equal(equal.init(params), batch)[1].grad_norm, expected[1].grad_norm, rtol=1e-6)
    assert same == (first == 4)


def test_a_microbatch_of_weight_zero_counts_for_nothing():
    def loss_fn(params, batch, *, buffers):
        loss = token_loss(params, batch)
        return loss, {"mean": 0.5 * buffers["mean"] + loss.detach(), "count": buffers["count"] + 1}, loss

    params, _ = problem(1)
    buffers = {"mean": torch.zeros((), dtype=torch.float64), "count": torch.tensor(0)}
    batch = tokens([1, 1, 0, 0, 1, 0])
    options = {"loss_scale": "dynamic", "microbatch_weight": valid_tokens, "has_aux": True}
    step = fmp.train_step(loss_fn, fmp.optim.adamw(0.1), accumulate=3, **options)
    state, metrics = step(step.init(params, buffers=buffers), batch)
    assert not metrics.skipped
    assert metrics.aux.isnan().tolist() == [False, True, False]
    assert state.buffers["count"] == 2
    assert fmp.all_finite((state, metrics.loss))

    rows = torch.tensor([0, 1, 4, 5])
    without = fmp.train_step(loss_fn, fmp.optim.adamw(0.1), accumulate=2, **options)
    expected, _ = without(without.init(params, buffers=buffers), {name: leaf[rows] for name, leaf in batch.items()})
    assert same_bits(state, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_but_weights_of_zero_is_a_step_of_zero_gradients(accumulate):
    step = fmp.train_step(
        token_loss, fmp.optim.sgd(0.1), accumulate=accumulate, microbatch_weight=valid_tokens, loss_scale="dynamic"
    )
    state = step.init(problem(1)[0])
    after, metrics = step(state, tokens([0, 0]))
    assert (metrics.loss, metrics.grad_norm, metrics.skipped) == (0.0, 0.0, False)
    assert same_bits(after.params, state.params)


def test_weights_apply_to_a_single_microbatch_too():
    params, batch = problem(4)
    plain = fmp.train_step(squares, fmp.optim.sgd(0.1))
    step = fmp.train_step(squares, fmp.optim.sgd(0.1), microbatch_weight=lambda batch: torch.tensor(3.0))
    torch.testing.assert_close(
        tree.leaves(step(step.init(params), batch)), tree.leaves(plain(plain.init(params), batch))
    )


@pytest.mark.parametrize("weight", [NAN, INF])
def test_a_weight_that_is_not_finite_skips_the_step(weight):
    weights = iter([1.0, weight])
    step = fmp.train_step(
        squares,
        fmp.optim.sgd(0.1),
        accumulate=2,
        loss_scale="dynamic",
        microbatch_weight=lambda batch: torch.tensor(next(weights)),
    )
    params, batch = problem(4)
    state = step.init(params)
    after, metrics = step(state, batch)
    assert metrics.skipped
    assert same_bits(after.params, state.params)


@pytest.mark.parametrize(
    ("weight", "found"),
    [(2.0, "2.0"), (3, "3"), (None, "None"), (torch.ones(2), r"f32\[2\]"), (torch.ones(1), r"f32\[1\]")],
)
def test_weights_must_be_scalar_tensors(weight, found):
    step = fmp.train_step(squares, fmp.optim.sgd(0.1), accumulate=2, microbatch_weight=lambda batch: weight)
    params, batch = problem(4)
    with pytest.raises(TypeError, match=f"microbatch_weight must return a scalar tensor, got {found}"):
        step(step.init(params), batch)


def test_weights_see_the_batch_before_the_policy_casts_it():
    seen = []

    def weight(batch):
        seen.append(tree.describe(batch))
        return torch.ones(())

    loss_fn = lambda params, batch: (params["w"] * batch["x"].sum()).float().sum()
    policy = fmp.Policy.parse("bf16")
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy, accumulate=2, microbatch_weight=weight)
    step(step.init({"w": torch.ones(1)}), {"x": torch.ones(4, 3)})
    assert seen == ["{'x': f32[2,3]}"] * 2


# Splitting and stacking


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((torch.ones(5, 3), torch.ones(5)), r"\(f32\[5,3\], f32\[5\]\)"),
        ({"x": torch.ones(4), "mask": torch.ones(2, 2)}, r"{'x': f32\[4\], 'mask': f32\[2,2\]}"),
        ({"x": torch.tensor(1.0)}, r"{'x': f32\[\]}"),
        ((), r"\(\)"),
        (None, "None"),
        (torch.ones(0, 3), r"f32\[0,3\]"),
        (torch.ones(1), r"f32\[1\]"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_its_shapes(batch, found):
    step = fmp.train_step(lambda params, batch: params["w"].sum(), fmp.optim.sgd(0.1), accumulate=2)
    with pytest.raises(ValueError, match=f"accumulate=2 splits dimension 0 .*, but the batch is {found}"):
        step(step.init({"w": torch.ones(1)}), batch)


def test_what_has_no_dimension_goes_to_every_microbatch():
    seen = []

    def loss_fn(params, batch):
        seen.append(batch)
        return params["w"].sum()

    batch = {"x": torch.arange(4), "rate": torch.tensor(0.5), "name": "a", "n": 3, "hole": None}
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), accumulate=2)
    step(step.init({"w": torch.ones(1)}), batch)
    assert same_bits(seen, [{**batch, "x": torch.tensor([0, 1])}, {**batch, "x": torch.tensor([2, 3])}])


def test_auxiliary_tensors_are_stacked_and_the_rest_is_the_last():
    calls = iter("ab")

    def loss_fn(params, batch):
        aux = {"mean": batch.mean(), "rows": batch, "name": next(calls), "hole": None, "n": torch.tensor(2)}
        return params["w"].sum(), aux

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), accumulate=2, has_aux=True)
    _, metrics = step(step.init({"w": torch.ones(1)}), torch.tensor([1.0, 3.0, 5.0, 7.0]))
    assert same_bits(
        metrics.aux,
        {
            "mean": torch.tensor([2.0, 6.0]),
            "rows": torch.tensor([[1.0, 3.0], [5.0, 7.0]]),
            "name": "b",
            "hole": None,
            "n": torch.tensor([2, 2]),
        },
    )


def test_buffers_pass_from_one_microbatch_to_the_next():
    def loss_fn(params, batch, *, buffers):
        return params["w"].sum(), {"seen": buffers["seen"] * 10 + batch.sum()}

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), accumulate=3)
    state, _ = step(step.init({"w": torch.ones(1)}, buffers={"seen": torch.tensor(0)}), torch.tensor([1, 2, 3]))
    assert state.buffers["seen"] == 123


def test_parameters_that_cannot_be_differentiated_stay():
    params = {"w": torch.ones(1), "ids": torch.arange(2), "hole": None}
    loss_fn = lambda params, batch: params["w"].sum() * batch.sum()
    step = fmp.train_step(loss_fn, fmp.optim.adamw(0.1), accumulate=2, policy=fmp.opt_level("O2", "bf16"), ema=0.5)
    state, _ = step(step.init(params), torch.ones(2))
    assert same_bits(state.params["ids"], torch.arange(2))
    assert state.params["hole"] is None
