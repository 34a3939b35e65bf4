"""The train step under vmap, under differentiation and compiled."""

import dataclasses
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fmp
from fmp import tree
from fmp.step.advance import advance
from fmp.step.build import compiled_advance
from tests.bits import same_bits, snapshot

INF = float("inf")
STEPS = 20


def squares(params, batch):
    x, y = batch
    return (((x * params["w"]).sum(-1).float() + params["b"].float() - y.float()) ** 2).mean()


def problem(rows=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w, b, x, y = (torch.randn(size, generator=generator, dtype=dtype) for size in [(3,), (), (rows, 3), (rows,)])
    return {"w": w, "b": b}, (x, y)


def everything(**changes: Any):
    """A step with everything switched on; its scale of 2^12 overflows now and then, and grows."""
    options: dict[str, Any] = {
        "policy": fmp.opt_level("O2", keep_full="b"),
        "loss_scale": fmp.DynamicLossScale(2.0**12, growth_interval=2),
        "accumulate": 2,
        "clip_norm": 1.0,
        "ema": 0.9,
    }
    schedule = fmp.optim.schedules.linear(0.1, 0.01, 10)
    return fmp.train_step(squares, fmp.optim.adamw(schedule), **{**options, **changes})


# vmap


def stacked(trees):
    return tree.map(lambda *leaves: None if leaves[0] is None else torch.stack(leaves), *trees)


def member(batched, index):
    return tree.map(lambda leaf: None if leaf is None else leaf[index], batched)


def close(found, expected):
    """Compares counts, flags and scales exactly, floating-point leaves up to the order of a sum."""
    assert tree.structure(found) == tree.structure(expected)
    for (path, one), other in zip(tree.items(found), tree.leaves(expected), strict=True):
        if one is None or "loss_scale" in path or not one.dtype.is_floating_point:
            assert same_bits(one, other), path
        else:
            tolerance = 1e-5 if one.dtype == torch.float32 else 2e-3
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True, msg=path)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_ensemble_of_eight_equals_eight_runs(accumulate):
    step = everything(accumulate=accumulate)
    states = [step.init(problem(seed=index)[0], seed=index) for index in range(8)]
    scales = [2.0 ** (4 + 2 * index) for index in range(8)]
    states = [
        tree.replace(state, loss_scale=fmp.DynamicLossScale(scale, growth_interval=2))
        for state, scale in zip(states, scales, strict=True)
    ]
    ensemble = stacked(states)
    for index in range(6):
        batches = [problem(seed=100 + 8 * index + number)[1] for number in range(8)]
        batches = [(x * INF, y) if (number + index) % 5 == 0 else (x, y) for number, (x, y) in enumerate(batches)]
        before = snapshot((ensemble, batches))
        vmapped, metrics = torch.func.vmap(step)(ensemble, stacked(batches))
        assert same_bits((ensemble, batches), before)
        ensemble = vmapped
        pairs = [step(state, batch) for state, batch in zip(states, batches, strict=True)]
        states = [state for state, _ in pairs]
        for number, (state, expected) in enumerate(pairs):
            close(member(ensemble, number), state)
            close(
                (member(metrics, number).skipped, member(metrics, number).loss_scale),
                (expected.skipped, expected.loss_scale),
            )
    # The members went their own ways.
    assert len(ensemble.loss_scale.loss_scale.unique()) > 3
    assert len(ensemble.skip_count.unique()) > 1
    assert ((ensemble.step + ensemble.skip_count) == 6).all()


def test_a_float16_loss_under_vmap():
    step = fmp.train_step(lambda params, batch: (params["w"] * batch).sum(), fmp.optim.sgd(1.0), skip_nonfinite=True)
    state = step.init({"w": torch.ones(1, dtype=torch.float16)})
    for exponents in ([10.0, 15.0, 16.0, 24.0], [24.0, 24.0, 24.0, 24.0]):
        scales = 2.0 ** torch.tensor(exponents)
        scaled = dataclasses.replace(
            step, config=dataclasses.replace(step.config, scalers={"": fmp.DynamicLossScale()})
        )
        states = tree.map(lambda leaf: None if leaf is None else leaf.expand(4, *leaf.shape), scaled.init(state.params))
        states = tree.replace(states, loss_scale=tree.replace(states.loss_scale, loss_scale=scales))
        after, metrics = torch.func.vmap(scaled, in_dims=(0, None))(states, torch.tensor([0.5], dtype=torch.float16))
        assert not metrics.skipped.any()
        assert same_bits(after.params["w"], torch.full((4, 1), 0.5, dtype=torch.float16))
        assert same_bits(metrics.loss_scale, scales)


def test_an_ensemble_is_made_by_a_vmapped_init():
    step = everything()
    params = stacked([problem(seed=index)[0] for index in range(3)])
    ensemble = torch.func.vmap(lambda params, seed: step.init(params, seed=seed))(params, torch.arange(3))
    for index in range(3):
        assert same_bits(member(ensemble, index), step.init(problem(seed=index)[0], seed=index))


def shared(batched):
    """The paths of leaves of which all members share one memory."""
    return [path for path, leaf in tree.items(batched) if leaf is not None and 0 in leaf.stride()]


def with_buffers(params, batch, *, buffers):
    return squares(params, batch), {"mean": buffers["mean"] + 1}


def several_ways():
    """Makes states by a vmapped init that maps over parameters, over some of them, over seeds, and twice."""
    vmap, step = torch.func.vmap, everything()
    counted = fmp.train_step(with_buffers, fmp.optim.inject_hyperparams(fmp.optim.adafactor)(learning_rate=0.1))
    params, buffers, seeds = {"w": torch.randn(2, 3), "b": torch.randn(2)}, {"mean": torch.zeros(3)}, torch.arange(2)
    one = tree.map(lambda leaf: leaf[0], params)
    grid = tree.map(lambda leaf: torch.stack([leaf] * 4), params)
    return {
        "parameters": vmap(step.init)(params),
        "some": vmap(step.init, in_dims=({"w": 0, "b": None},))({**params, "b": torch.ones(())}),
        "buffers": vmap(lambda params: counted.init(params, buffers=buffers))(params),
        "seeds": vmap(lambda seed: step.init(one, seed=seed))(seeds),
        "twice": vmap(lambda params: vmap(step.init)(params))(grid),
        "crossed": vmap(lambda b: vmap(lambda w: step.init({"w": w, "b": b}))(params["w"]))(params["b"]),
        "compiled": torch.compile(vmap(step.init), backend="aot_eager", fullgraph=True)(params),
    }


def test_a_vmapped_init_gives_each_member_memory_of_its_own():
    for way, states in several_ways().items():
        assert shared(states) == [], way


def test_a_vmapped_init_changes_no_bit():
    params = {"w": torch.tensor([-0.0, float("nan"), 1e-42]), "b": torch.tensor(-0.0)}
    step = fmp.train_step(squares, fmp.optim.sgd(0.1))
    ensemble = torch.func.vmap(lambda seed: step.init(params, seed=seed))(torch.arange(2))
    for index in range(2):
        assert same_bits(member(ensemble, index), step.init(params, seed=index))


def test_an_optimizers_vmapped_init_gives_each_member_memory_of_its_own():
    params = stacked([problem(seed=index)[0] for index in range(3)])
    injected = fmp.optim.inject_hyperparams(fmp.optim.lion)(learning_rate=lambda count: count * 0.1, weight_decay=0.1)
    for transformation in (fmp.optim.adamw(0.1), fmp.optim.adafactor(0.1), fmp.optim.sgd(0.1, momentum=0.9), injected):
        assert shared(torch.func.vmap(transformation.init)(params)) == []


def test_vmap_of_init_by_keyword_says_how_to_map_seeds():
    step = fmp.train_step(squares, fmp.optim.sgd(0.1))
    params, seeds = stacked([problem(seed=index)[0] for index in range(3)]), torch.arange(3)
    with pytest.raises(TypeError, match=r"got i64\[3\].*vmap\(lambda p, s: step\.init\(p, seed=s\)\)"):
        torch.func.vmap(step.init)(params, seed=seeds)
    assert same_bits(torch.func.vmap(lambda p, s: step.init(p, seed=s))(params, seeds).seed, seeds)


def test_members_that_share_a_batch_get_noise_of_their_own():
    def loss_fn(params, batch, *, seed):
        noise = fmp.random.uniform(seed, (2,))
        return (params["w"] * noise * batch).sum(), noise

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), has_aux=True)
    states = [step.init({"w": torch.ones(2)}, seed=seed) for seed in range(4)]
    _, metrics = torch.func.vmap(step, in_dims=(0, None))(stacked(states), torch.ones(2))
    assert len(metrics.aux.flatten().unique()) == 8
    for index, state in enumerate(states):
        assert same_bits(metrics.aux[index], step(state, torch.ones(2))[1].aux)


def test_several_losses_under_vmap_skip_by_member_and_group():
    losses = {
        "a": lambda params, batch: (params["a"] * batch[0]).sum(),
        "b": lambda params, batch: (params["b"] * batch[1]).sum(),
    }
    optimizers = {"a": fmp.optim.sgd(0.5), "b": fmp.optim.adamw(0.1)}
    step = fmp.train_step(losses, optimizers, uses={"a": ["a"], "b": ["b"]}, loss_scale="dynamic")
    state = step.init({"a": torch.ones(1), "b": torch.ones(1)})
    values = torch.tensor([[1.0, 1.0], [INF, 1.0], [1.0, INF], [INF, INF]])
    batches = (values[:, :1], values[:, 1:])
    after, metrics = torch.func.vmap(step, in_dims=(None, 0))(state, batches)
    assert metrics.skipped["a"].tolist() == [False, True, False, True]
    assert metrics.skipped["b"].tolist() == [False, False, True, True]
    assert after.step.tolist() == [1, 1, 1, 0]
    assert after.params["a"].tolist() == [[0.5], [1.0], [0.5], [1.0]]


# Differentiation through steps


def residuals(params, batch):
    x, y = batch
    return ((x * params["w"]).sum(-1) + params["b"] - y).square().mean()


def after_steps(step, state, batch, count=3):
    for _ in range(count):
        state, metrics = step(state, batch)
    return residuals(state.params, batch) + metrics.loss


def meta_step(**options):
    factory = fmp.optim.inject_hyperparams(fmp.optim.adamw)
    return fmp.train_step(residuals, factory(learning_rate=0.1, weight_decay=0.1), **options)


OPTIONS = [{}, {"accumulate": 2, "clip_norm": 0.5, "loss_scale": 64.0}]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_derivative_by_a_learning_rate_is_right(options):
    step = meta_step(**options)
    params, batch = problem(dtype=torch.float64)
    start = step.init(params)

    def outer(rate):
        hyperparams = {**start.opt_state.hyperparams, "learning_rate": rate}
        state = tree.replace(start, opt_state=tree.replace(start.opt_state, hyperparams=hyperparams))
        return after_steps(step, state, batch)

    rate, h = torch.tensor(0.1, dtype=torch.float64), 1e-6
    expected = (outer(rate + h) - outer(rate - h)) / (2 * h)
    torch.testing.assert_close(torch.func.grad(outer)(rate), expected, rtol=1e-6, atol=0)
    tangent = torch.func.jvp(outer, (rate,), (torch.ones_like(rate),))[1]
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=0)


def central_differences(fn, x, h=1e-6):
    return torch.stack([(fn(x + d) - fn(x - d)) / (2 * h) for d in h * torch.eye(len(x), dtype=x.dtype)])


@pytest.mark.parametrize("options", OPTIONS)
def test_the_derivative_by_initial_parameters_is_right(options):
    step = meta_step(**options)
    params, batch = problem(dtype=torch.float64)
    outer = lambda w: after_steps(step, step.init({**params, "w": w}), batch)
    expected = central_differences(outer, params["w"])
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(torch.func.grad(outer)(params["w"]), expected, rtol=1e-6, atol=1e-9)


def test_the_derivative_through_a_compiled_step_is_right():
    step = fmp.train_step(residuals, fmp.optim.sgd(0.1))
    params, batch = problem(dtype=torch.float64)
    outer = lambda w: after_steps(step, step.init({**params, "w": w}), batch, count=1)
    expected = torch.func.grad(outer)(params["w"])
    differentiate = torch.compile(torch.func.grad(outer), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(differentiate(params["w"]), expected)


def test_the_derivative_through_float32_masters_is_right():
    step = fmp.train_step(squares, fmp.optim.sgd(0.125), policy=fmp.opt_level("O2", loss_scale=64.0))
    params, batch = problem()

    def outer(w):
        state, _ = step(step.init({**params, "w": w}), batch)
        return (state.master["w"] ** 2).sum()

    exact = fmp.train_step(residuals, fmp.optim.sgd(0.125))

    def reference(w):
        state, _ = exact(exact.init({**params, "w": w}), batch)
        return (state.params["w"] ** 2).sum()

    torch.testing.assert_close(
        torch.func.grad(outer)(params["w"]), torch.func.grad(reference)(params["w"]), rtol=0.02, atol=0.02
    )


def test_derivatives_of_an_ensemble_of_steps():
    step = fmp.train_step(residuals, fmp.optim.sgd(0.1))
    params, batch = problem(dtype=torch.float64)
    outer = lambda w: after_steps(step, step.init({**params, "w": w}), batch)
    starts = torch.stack([params["w"], params["w"] * 2])
    found = torch.func.vmap(torch.func.grad(outer))(starts)
    expected = torch.stack([torch.func.grad(outer)(start) for start in starts])
    torch.testing.assert_close(found, expected)


def test_the_state_takes_no_graph_along_under_vmap():
    weight = torch.ones(3, requires_grad=True)
    step = fmp.train_step(
        lambda params, batch: squares(params, batch) + (params["w"] * weight).sum(), fmp.optim.sgd(0.1)
    )
    params, batch = problem()
    states = stacked([step.init(params)] * 2)
    after, _ = torch.func.vmap(step, in_dims=(0, None))(states, batch)
    assert not any(leaf.requires_grad for leaf in tree.leaves(after) if leaf is not None)


# Compiled


def with_losses_of(step, other):
    return dataclasses.replace(step, config=dataclasses.replace(step.config, losses=other.config.losses))


def compiled(step):
    return dataclasses.replace(step, advance=torch.compile(advance, backend="aot_eager", fullgraph=True))


def batches(count):
    found = [problem(seed=index)[1] for index in range(count)]
    return [(x * INF, y) if index in (3, 4, 11) else (x, y) for index, (x, y) in enumerate(found)]


def test_a_compiled_step_has_the_same_bits_changes_no_input_and_compiles_once():
    step = everything()
    fast = compiled(step)
    expected = state = step.init(problem()[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(STEPS):
            expected, eager = step(expected, batch)
            given, before = (state, batch), snapshot((state, batch))
            state, metrics = fast(state, batch)
            assert same_bits((state, metrics), (expected, eager))
            assert same_bits(given, before)
    assert state.skip_count > 2
    assert state.loss_scale.loss_scale != 2.0**12


def test_a_compiled_step_takes_buffers_seeds_frozen_and_auxiliary_output():
    def loss_fn(params, batch, *, buffers, seed, frozen):
        x, y = batch
        keep = fmp.random.keep_mask(seed, tuple(x.shape), 0.5)
        loss = squares(params, (torch.where(keep, x, 0.0), y)) + frozen["shift"].float().sum()
        return loss, {"n": buffers["n"] + 1, "mean": x.float().mean()}, {"keep": keep, "name": "text", "hole": None}

    step = everything(
        loss_scale="dynamic", has_aux=True, microbatch_weight=lambda batch: (batch[1] > 0).sum(), donate=True
    )
    step = with_losses_of(step, fmp.train_step(loss_fn, fmp.optim.sgd(0.1), has_aux=True))
    fast = compiled(step)
    frozen = {"shift": torch.ones(1)}
    start = {"buffers": {"n": torch.tensor(0), "mean": torch.zeros(())}, "seed": 5}
    expected, state = step.init(problem()[0], **start), step.init(problem()[0], **start)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(5):
            expected, eager = step(expected, batch, frozen=frozen)
            state, metrics = fast(state, batch, frozen=frozen)
            assert same_bits((state, metrics), (expected, eager))


def test_a_compiled_step_with_several_losses():
    losses = {
        "a": lambda params, batch: squares(params["a"], batch),
        "b": lambda params, batch: squares(params["b"], batch) * params["a"]["b"],
    }
    optimizers = {"a": fmp.optim.sgd(0.1, momentum=0.9), "b": fmp.optim.adamw(0.1)}
    step = fmp.train_step(
        losses, optimizers, loss_scale=fmp.DynamicLossScale(64.0, growth_interval=2), uses={"a": ["a"], "b": ["a", "b"]}
    )
    fast = compiled(step)
    expected = state = step.init({"a": problem(seed=1)[0], "b": problem(seed=2)[0]})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(6):
            expected, eager = step(expected, batch)
            state, metrics = fast(state, batch)
            assert same_bits((state, metrics), (expected, eager))


def test_a_step_inside_a_function_that_is_compiled():
    step = everything()
    params, batch = problem()

    def two_steps(state, batch):
        state, _ = step(state, batch)
        return step(state, batch)

    fast = torch.compile(two_steps, backend="aot_eager", fullgraph=True)
    state = step.init(params)
    assert same_bits(fast(state, batch), two_steps(state, batch))


def test_a_donating_step_inside_a_function_that_is_compiled():
    keeping, donating = (fmp.train_step(squares, fmp.optim.sgd(0.1), donate=donate) for donate in (False, True))
    params, batch = problem()
    fast = torch.compile(lambda state, batch: donating(state, batch), backend="aot_eager", fullgraph=True)
    assert same_bits(fast(donating.init(params), batch), keeping(keeping.init(params), batch))


def test_a_compiled_step_with_a_float16_loss():
    loss_fn = lambda params, batch: (params["w"] * batch).sum()
    scaler = fmp.DynamicLossScale(2.0**14, growth_interval=1)
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.125), policy=fmp.opt_level("O2"), loss_scale=scaler)
    fast = compiled(step)
    expected = state = step.init({"w": torch.ones(2)})
    for _ in range(5):
        expected, eager = step(expected, torch.full((2,), 0.5))
        state, metrics = fast(state, torch.full((2,), 0.5))
        assert same_bits((state, metrics), (expected, eager))
    assert (state.step, state.loss_scale.loss_scale) == (5, 2.0**19)


def test_compile_true_compiles_with_the_default_backend():
    step = fmp.train_step(
        squares, fmp.optim.sgd(0.1), loss_scale=fmp.DynamicLossScale(8.0, growth_interval=1), compile=True
    )
    plain = dataclasses.replace(step, advance=advance)
    expected = state = step.init(problem()[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(5):
            expected, _ = plain(expected, batch)
            state, _ = step(state, batch)
    torch.testing.assert_close(tree.leaves(state.params), tree.leaves(expected.params), rtol=1e-5, atol=1e-6)
    assert same_bits(
        (state.loss_scale, state.step, state.skip_count), (expected.loss_scale, expected.step, expected.skip_count)
    )
    assert (state.step, state.skip_count) == (3, 2)


def test_a_compiled_step_says_that_it_cannot_be_mapped():
    step = compiled(fmp.train_step(squares, fmp.optim.sgd(0.1)))
    params, batch = problem()
    states = stacked([step.init(params)] * 2)
    with pytest.raises(ValueError, match=r"put torch\.compile around the vmap of a step without it"):
        torch.func.vmap(step, in_dims=(0, None))(states, batch)


def test_compiled_steps_do_not_share_the_limit_of_recompilations():
    params, batch = torch.ones(3), torch.randn(4, 3)
    with torch._dynamo.config.patch(recompile_limit=2):
        for power in range(1, 5):
            step = fmp.train_step(lambda w, b, p=power: ((b @ w) ** p).mean(), fmp.optim.sgd(0.1))
            step = dataclasses.replace(step, advance=compiled_advance(backend="eager"))
            _, metrics = step(step.init(params), batch)
            torch.testing.assert_close(metrics.loss, ((batch @ params) ** power).mean())


def test_accumulation_compiles_twice_for_all_sizes_of_batch():
    counter = CompileCounterWithBackend("eager")
    step = fmp.train_step(lambda w, b: ((b @ w) ** 2).mean(), fmp.optim.sgd(0.1), accumulate=2)
    step = dataclasses.replace(step, advance=torch.compile(advance, backend=counter, fullgraph=True))
    state = step.init(torch.ones(3))
    for size in range(2, 26, 2):
        state, _ = step(state, torch.randn(size, 3))
    assert counter.frame_count <= 2


def test_a_mapped_step_can_be_compiled():
    step = fmp.train_step(lambda w, b: ((b @ w) ** 2).mean(), fmp.optim.sgd(0.1))
    states = torch.func.vmap(step.init)(torch.randn(3, 2))
    batches = torch.randn(3, 4, 2)
    expected, _ = torch.func.vmap(step)(states, batches)
    found, _ = torch.compile(torch.func.vmap(step), backend="aot_eager", fullgraph=True)(states, batches)
    torch.testing.assert_close(found.params, expected.params)


def test_a_compiled_ensemble_compiles_once():
    step = everything(policy=None, loss_scale="dynamic")
    params = stacked([problem(seed=index)[0] for index in range(3)])
    states = torch.func.vmap(step.init)(params)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch.func.vmap(step), backend=counter, fullgraph=True)
    for index in range(3):
        states, _ = compiled(states, stacked([problem(seed=10 * index + number)[1] for number in range(3)]))
    assert counter.frame_count == 1
    assert states.step.tolist() == [3, 3, 3]
