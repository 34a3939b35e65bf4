from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fmp
from fmp import tree
from fmp.errors import DonatedStateError
from fmp.numerics.logs import write_jsonl
from fmp.numerics.record import record
from fmp.numerics.watch import watch_gradients
from fmp.step.advance import advance
from fmp.testing import check_pure
from tests.bits import same_bits, snapshot
from tests.numerics.recorded_steps import batches, make_step, params, run


def test_it_records_what_the_step_reports_and_changes_nothing_about_it():
    step = make_step(loss_scale="dynamic")
    state, history, metrics = run(step, step.init(params()), batches(5))
    expected = step.init(params())
    for batch in batches(5):
        expected, _ = step(expected, batch)
    assert same_bits(state, expected)
    arrays = history.arrays()
    for name in ("loss", "loss_scale", "skipped", "grads_finite", "grad_norm"):
        wanted = torch.stack([getattr(found, name) for found in metrics]).numpy()
        np.testing.assert_array_equal(arrays[name], wanted)
        assert arrays[name].dtype == wanted.dtype
    np.testing.assert_array_equal(arrays["step"], np.arange(5))


@given(length=st.integers(1, 7), steps=st.integers(0, 20), n=st.integers(0, 25))
def test_the_ring_keeps_the_last_steps_in_order(length, steps, n):
    recorded = record(lambda state, batch: (state + 1, {"value": state}), length=length)
    carry = recorded.init(torch.tensor(0.0), torch.tensor(0.0))
    for _ in range(steps):
        carry, _ = recorded(carry, torch.tensor(0.0))
    kept = np.arange(max(0, steps - min(n, length)), steps)
    latest = carry[1].latest(n)
    np.testing.assert_array_equal(latest["step"], kept)
    np.testing.assert_array_equal(latest["value"], kept.astype(np.float32))
    assert len(carry[1].arrays()["step"]) == min(steps, length)


def test_parameters_can_be_measured():
    step = make_step(fmp.optim.sgd(0.0))
    start = {"w": torch.tensor([1.0, 1e-9, 0.0, -4.0]), "b": torch.zeros(2)}
    _, history, _ = run(step, step.init(start), batches(2), params="fp16")
    arrays = history.arrays()
    np.testing.assert_allclose(arrays["param_underflow/w"], [1 / 3, 1 / 3], rtol=1e-6)
    assert arrays["param_amax/w"].tolist() == [4.0, 4.0]
    assert arrays["param_zeros/b"].tolist() == [1.0, 1.0]
    assert not any(name.startswith("grad_amax") for name in arrays)


def gan():
    optimizers = {key: fmp.optim.chain(watch_gradients(), fmp.optim.sgd(0.1)) for key in ("one", "two")}
    losses = {
        "first": lambda params, batch: (params["one"]["w"] * batch).sum(),
        "second": lambda params, batch: (params["two"]["w"] * batch * 2).sum(),
    }
    return fmp.train_step(
        losses, optimizers, loss_scale={"first": "dynamic"}, uses={"first": ["one"], "second": ["two"]}
    )


def test_several_losses_and_optimizers():
    step = gan()
    start = {"one": {"w": torch.ones(2)}, "two": {"w": torch.ones(2)}}
    good, bad = torch.ones(2), torch.tensor([1.0, torch.inf])
    _, history, metrics = run(step, step.init(start), [good, bad])
    arrays = history.arrays()
    assert arrays["loss/first"][0] == metrics[0].loss["first"].item()
    assert arrays["loss/second"][0] == 4.0
    assert arrays["skipped/one"].tolist() == [False, True]
    assert arrays["skipped/two"].tolist() == [False, False]
    np.testing.assert_array_equal(arrays["grad_amax/one/w"], [1.0, np.nan])
    np.testing.assert_array_equal(arrays["grad_amax/two/w"], [2.0, np.inf])


def test_it_is_pure_unless_the_step_donates():
    step = make_step()
    recorded = record(step, length=4)
    carry = recorded.init(step.init(params()))
    before = snapshot(carry)
    first, _ = recorded(carry, batches(1)[0])
    second, _ = recorded(carry, batches(1)[0])
    assert same_bits(carry, before)
    assert same_bits(first, second)
    assert not same_bits(first, carry)


def test_a_donating_step_takes_the_history_too():
    step = make_step(donate=True)
    recorded = record(step, length=4)
    carry = recorded.init(step.init(params()), batches(1)[0])  # trying the metrics out does not take the state
    table = carry[1].table
    after, _ = recorded(carry, batches(1)[0])
    assert after[1].table.data_ptr() == table.data_ptr()
    with pytest.raises(DonatedStateError):
        recorded(carry, batches(1)[0])
    with pytest.raises(DonatedStateError):
        recorded((after[0], carry[1]), batches(1)[0])
    plain = make_step()
    _, expected, _ = run(plain, plain.init(params()), batches(1))
    for name, values in expected.arrays().items():
        np.testing.assert_array_equal(after[1].arrays()[name], values)


@pytest.mark.parametrize("whole", [True, False], ids=["compiled as a whole", "a compiled step"])
def test_compiled(whole):
    step = make_step(loss_scale="dynamic")
    recorded = record(step, length=3, params="bf16")
    if whole:
        call = torch.compile(recorded, backend="aot_eager", fullgraph=True)
    else:
        inner = torch.compile(step, backend="aot_eager", fullgraph=True)
        call = record(inner, length=3, params="bf16")
    carry, expected = recorded.init(step.init(params())), recorded.init(step.init(params()))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(5):
            carry, _ = call(carry, batch)
            expected, _ = recorded(expected, batch)
    for name, values in expected[1].arrays().items():
        np.testing.assert_allclose(carry[1].arrays()[name], values, rtol=1e-6)
    assert expected[1].count == 5


def test_mapped():
    step = make_step(loss_scale="dynamic")
    recorded = record(step, length=3)
    starts = {"w": torch.randn(2, 4), "b": torch.randn(2, 2)}
    carry = torch.func.vmap(lambda start: recorded.init(step.init(start)))(starts)
    for batch in batches(5):
        carry, _ = torch.func.vmap(recorded, (0, None))(carry, batch)
    arrays = carry[1].arrays()
    assert arrays["loss"].shape == (2, 3)
    for member in range(2):
        start = tree.map(lambda leaf: leaf[member], starts)
        _, alone, _ = run(step, step.init(start), batches(5), length=3)
        own = tree.map(lambda leaf: leaf[member], carry[1])
        for name, values in alone.arrays().items():
            np.testing.assert_allclose(own.arrays()[name], values, rtol=1e-6)
            np.testing.assert_allclose(np.atleast_2d(arrays[name])[member if name != "step" else 0], values, rtol=1e-6)
    with pytest.raises(ValueError, match="take one of them"):
        write_jsonl(carry[1], "nowhere")
    with pytest.raises(ValueError, match="from 2 to 5 steps"):
        tree.replace(carry[1], count=torch.tensor([2, 5])).arrays()


def test_saved_and_resumed(tmp_path):
    step = make_step(loss_scale="dynamic")
    recorded = record(step, length=4)
    carry = recorded.init(step.init(params()))
    for batch in batches(3):
        carry, _ = recorded(carry, batch)
    fmp.checkpoint.save(carry, tmp_path / "state.fmp")
    resumed = fmp.checkpoint.load(recorded.init(step.init(params())), tmp_path / "state.fmp")
    for batch in batches(3):
        carry, _ = recorded(carry, batch)
        resumed, _ = recorded(resumed, batch)
    assert same_bits(carry, resumed)
    np.testing.assert_array_equal(resumed[1].arrays()["step"], [2, 3, 4, 5])


def test_new_parameters_need_a_new_history():
    step = fmp.train_step(
        lambda params, batch: sum(leaf.sum() for leaf in params.values()) * batch,
        fmp.optim.chain(watch_gradients(), fmp.optim.sgd(0.1)),
    )
    recorded = record(step)
    carry, _ = recorded(recorded.init(step.init({"w": torch.ones(2)})), torch.tensor(1.0))
    extended = step.extend(carry[0], {"v": torch.ones(3)})
    with pytest.raises(ValueError, match=r"2 leaves to measure, and the history has 1; start a new history"):
        recorded((extended, carry[1]), torch.tensor(1.0))
    carry, _ = recorded(recorded.init(extended), torch.tensor(1.0))
    assert carry[1].arrays()["grad_amax/v"].tolist() == [1.0]


def test_the_step_can_be_differentiated_through_the_recorder():
    step = make_step(fmp.optim.sgd(0.1))
    recorded = record(step, length=2)

    def loss_after(w):
        carry = recorded.init(step.init({"w": w, "b": torch.ones(2)}))
        (state, history), _ = recorded(carry, torch.ones(4))
        return state.params["w"].square().sum(), history.table

    gradient, table = torch.func.grad(loss_after, has_aux=True)(torch.ones(4))
    assert torch.allclose(gradient, torch.full((4,), 1.8))
    assert not table.requires_grad


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(TypeError, match="step must be"):
        record("step")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="length must be a number of steps"):
        record(make_step(), length=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="length must be at least 1"):
        record(make_step(), length=0)
    with pytest.raises(ValueError, match="no format"):
        record(make_step(), params="i32")
    with pytest.raises(ValueError, match="scale must be"):
        watch_gradients(scale=0.0)
    own = record(lambda state, batch: (state, {}), params="fp16")
    with pytest.raises(TypeError, match="pass a batch"):
        own.init({"params": {}})
    with pytest.raises(ValueError, match="without params"):
        own.init({}, torch.ones(1))
    with pytest.raises(ValueError, match="nothing to record"):
        record(lambda state, batch: (state, {"text": "a"})).init({}, torch.ones(1))
    step = record(lambda state, batch: (state, {"a": batch} if batch > 0 else {"b": batch}))
    with pytest.raises(KeyError, match=r"no 'a' .* among \['b'\]"):
        step(step.init({}, torch.tensor(1.0)), torch.tensor(-1.0))
    with pytest.raises(ValueError, match="n must be"):
        step.init({}, torch.tensor(1.0))[1].latest(-1)


def test_what_is_no_pair_of_state_and_history_is_refused():
    step, batch = make_step(), batches(1)[0]
    recorded = record(step)
    state = step.init(params())
    carry = recorded.init(state)
    for wrong, found in (
        (state, "a TrainState"),
        (batch, "a Tensor"),
        ((carry[1], state), "a tuple of History, TrainState"),
        ((carry, {}), "a tuple of tuple, dict"),
    ):
        with pytest.raises(TypeError, match=rf"carry, metrics = recorded\(carry, batch\); as carry it got {found}"):
            recorded(wrong, batch)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="a pair of state and history already; pass the state alone"):
        recorded.init(carry)


def test_a_module_s_step_with_buffers_and_a_policy():
    model = fmp.functionalize(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))

    def loss_of(params, batch, *, buffers):
        out, buffers = model.apply(params, buffers, batch, train=True)
        return out.float().square().mean(), buffers

    optimizer = fmp.optim.chain(watch_gradients(), fmp.optim.adamw(1e-3))
    step = fmp.train_step(loss_of, optimizer, policy=fmp.opt_level("O2", half_dtype=torch.bfloat16, keep_full=model))
    _, history, _ = run(step, step.init(model.params, buffers=model.buffers), [torch.randn(8, 3)] * 3)
    arrays = history.arrays()
    assert {name.removeprefix("grad_amax/") for name in arrays if name.startswith("grad_amax/")} == set(model.params)
    assert (arrays["grad_amax/2.weight"] > 0).all()


def test_the_step_that_records_is_pure():
    step = make_step(loss_scale="dynamic")
    recorded = record(step, length=3)
    check_pure(recorded, recorded.init(step.init(params())), batches(1)[0], may_alias=True, vmap=True)


def test_a_compiled_step_that_donates():
    compiled = torch.compile(advance, backend="aot_eager", fullgraph=True)
    step = replace(make_step(donate=True), advance=compiled)
    recorded = record(step, length=2)
    carry = recorded.init(step.init(params()))
    for batch in batches(3):
        carry, _ = recorded(carry, batch)
    plain = make_step()
    _, expected, _ = run(plain, plain.init(params()), batches(3), length=2)
    np.testing.assert_allclose(carry[1].arrays()["loss"], expected.arrays()["loss"], rtol=1e-6)
