import io
import json
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fmp
from fmp import tree
from fmp.dtypes import parse_dtype
from fmp.errors import DonatedStateError
from fmp.numerics.history import History
from fmp.numerics.logs import write_jsonl, write_tensorboard
from fmp.numerics.record import record
from fmp.numerics.watch import watch_gradients
from fmp.step.advance import advance
from fmp.testing import check_optimizer, check_pure
from tests.bits import same_bits, snapshot


def loss_fn(params, batch):
    return (params["w"] * batch).sum() + params["b"].sum()


def make_step(optimizer=None, **options):
    optimizer = fmp.optim.chain(watch_gradients("fp16"), fmp.optim.sgd(0.1)) if optimizer is None else optimizer
    return fmp.train_step(loss_fn, optimizer, **options)


def params():
    return {"w": torch.ones(4), "b": torch.ones(2)}


def run(step, state, batches, **options):
    recorded = record(step, **options)
    carry, metrics = recorded.init(state), []
    for batch in batches:
        carry, found = recorded(carry, batch)
        metrics.append(found)
    return *carry, metrics


def batches(n):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, generator=generator) for _ in range(n)]


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


def test_a_planted_underflow_is_measured():
    gradient = torch.ones(1000)
    gradient[:370] = 2.0**-25  # the largest number that float16 rounds to zero
    gradient[370:400] = 2.0**-24
    gradient[999] = -3.0
    tx = watch_gradients("fp16")
    updates, state = tx.update({"w": gradient}, tx.init({"w": gradient}), {"w": gradient})
    assert updates["w"] is gradient
    assert state.underflow["w"].item() == pytest.approx(0.37, abs=1e-7)
    assert (state.amax["w"].item(), state.zeros["w"].item(), state.count.item()) == (3.0, 0.0, 1)
    scaled = watch_gradients("fp16", scale=2.0)
    assert scaled.update({"w": gradient}, scaled.init({"w": gradient}), {"w": gradient})[1].underflow["w"] == 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("numel", [17, 200_000])
def test_underflow_is_what_the_cast_does(dtype, numel):
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-149, 20, (numel,), generator=generator)
    gradient = torch.ldexp(torch.rand(numel, generator=generator) * 2 - 1, exponents)
    gradient[::7] = 0.0
    tx = watch_gradients(dtype)
    state = tx.update(gradient, tx.init(gradient), gradient)[1]
    nonzero = gradient != 0
    lost = (gradient.to(parse_dtype(dtype)).float() == 0) & nonzero
    assert state.underflow.item() == pytest.approx(lost.sum().item() / nonzero.sum().item(), abs=1e-6)
    assert state.zeros.item() == pytest.approx(1 - nonzero.float().mean().item(), abs=1e-6)
    assert state.amax.item() == gradient.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_any_dtype_pass_untouched(dtype):
    tx = watch_gradients("f8e5m2")
    grads = {"w": torch.tensor([1.0, 0.0], dtype=dtype), "hole": None, "empty": torch.ones(0, dtype=dtype)}
    leaves = {"w": torch.ones(2), "hole": torch.ones(3), "empty": torch.ones(0)}
    updates, state = tx.update(grads, tx.init(leaves), leaves)
    assert all(updates[key] is grads[key] for key in grads)
    assert state.zeros["w"].item() == 0.5
    assert state.amax["empty"].item() == 0.0
    assert state.amax["hole"].isnan()


def test_a_leaf_that_is_no_float_is_not_watched():
    tx = watch_gradients()
    state = tx.init({"w": torch.ones(2), "ids": torch.arange(2), "none": None})
    assert state.measured["ids"] is None
    assert state.measured["none"] is None


def test_infinities_and_nan_show_in_the_amax():
    tx = watch_gradients()
    grads = {"inf": torch.tensor([1.0, -torch.inf]), "nan": torch.tensor([1.0, torch.nan])}
    state = tx.update(grads, tx.init(grads), grads)[1]
    assert state.amax["inf"] == torch.inf
    assert state.amax["nan"].isnan()


def test_leaves_are_recorded_by_path_and_skipped_steps_as_unknown():
    step = make_step(loss_scale=2.0**10, policy=fmp.opt_level("O0"))
    batch = torch.tensor([1.0, 1e-9, 0.0, 2.0])
    bad = torch.tensor([1.0, torch.inf, 0.0, 2.0])
    _, history, _ = run(step, step.init(params()), [batch, bad, batch])
    arrays = history.arrays()
    assert arrays["skipped"].tolist() == [False, True, False]
    for measure, value in (("amax", 2.0), ("underflow", 1 / 3), ("zeros", 0.25)):
        np.testing.assert_allclose(arrays[f"grad_{measure}/w"], [value, np.nan, value], rtol=1e-6)
    assert arrays["grad_amax/b"][0] == 1.0


def test_accumulated_steps_are_unknown_until_the_last():
    optimizer = fmp.optim.accumulate(fmp.optim.chain(watch_gradients(), fmp.optim.sgd(0.1)), every=2)
    step = make_step(optimizer)
    _, history, _ = run(step, step.init(params()), batches(4))
    assert np.isnan(history.arrays()["grad_amax/w"]).tolist() == [True, False, True, False]


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


def test_two_watchers_are_told_apart():
    optimizer = fmp.optim.named_chain(
        ("raw", watch_gradients()),
        ("clip", fmp.optim.clip_by_value(0.5)),
        ("clipped", watch_gradients("bf16")),
        ("sgd", fmp.optim.sgd(0.1)),
    )
    step = make_step(optimizer)
    _, history, _ = run(step, step.init(params()), [torch.full((4,), 3.0)])
    arrays = history.arrays()
    assert (arrays["grad_amax/raw/w"].item(), arrays["grad_amax/clipped/w"].item()) == (3.0, 0.5)
    assert history.leaves[0] == ("grad", "clipped/b", "bf16")


def test_any_tree_of_metrics():
    aux_step = fmp.train_step(
        lambda params, batch: (loss_fn(params, batch), {"tokens": torch.tensor(2**24 + 1), "vector": batch}),
        fmp.optim.sgd(0.1),
        has_aux=True,
    )
    state, batch = aux_step.init(params()), batches(1)[0]
    recorded = record(aux_step)
    assert "aux/tokens" not in recorded.init(state)[1].arrays()
    carry, _ = recorded(recorded.init(state, batch), batch)
    arrays = carry[1].arrays()
    assert arrays["aux/tokens"].tolist() == [2**24 + 1]  # which float32 cannot hold
    assert "aux/vector" not in arrays

    def own(state, batch):
        return state, [torch.tensor(True), {"step": 7, "half": torch.tensor(0.5, dtype=torch.bfloat16)}, None, "text"]

    carry = record(own).init({}, batch)
    carry, _ = record(own)(carry, batch)
    arrays = carry[1].arrays()
    assert arrays["0"].tolist() == [True]
    assert arrays["1/step"].tolist() == [7]
    assert arrays["1/half"].tolist() == [0.5]
    assert "3" not in arrays

    clashing = record(lambda state, batch: (state, {"step": batch.sum()}))
    carry, _ = clashing(clashing.init({}, batch), batch)
    assert carry[1].arrays()["metrics/step"].tolist() == [batch.sum().item()]
    single = record(lambda state, batch: (state, batch.sum()))
    assert list(single.init({}, batch)[1].arrays()) == ["step", "metrics"]


def test_double_precision_is_kept():
    step = make_step(fmp.optim.sgd(0.1))
    start = {key: leaf.double() for key, leaf in params().items()}
    _, history, metrics = run(step, step.init(start), [batch.double() for batch in batches(2)])
    assert history.arrays()["loss"].dtype == np.float64
    assert history.arrays()["loss"].tolist() == [found.loss.item() for found in metrics]


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


def history_of(values) -> History:
    recorded = record(lambda state, batch: (state, {"loss": batch, "skipped": ~batch.isfinite()}), length=4)
    carry = recorded.init({}, torch.tensor(0.0))
    for value in values:
        carry, _ = recorded(carry, torch.tensor(value))
    return carry[1]


def read_lines(path):
    def refuse(text):
        raise AssertionError(text)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    assert write_jsonl(history_of([0.1, float("nan"), float("-inf")]), path) == 3
    assert read_lines(path) == [
        {"step": 0, "loss": 0.1, "skipped": False},
        {"step": 1, "loss": "nan", "skipped": True},
        {"step": 2, "loss": "-inf", "skipped": True},
    ]
    assert float(read_lines(path)[2]["loss"]) == float("-inf")


def test_json_lines_are_appended_once(tmp_path):
    path, values = tmp_path / "log.jsonl", [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    for stop, appended in ((2, 2), (2, 0), (5, 3), (6, 1)):
        assert write_jsonl(history_of(values[:stop]), path) == appended
    assert [line["loss"] for line in read_lines(path)] == values
    # Another run goes behind the first; so does one that went on from an earlier step.
    assert write_jsonl(history_of([9.0]), path) == 1
    assert write_jsonl(history_of([9.0, 8.0]), path) == 1
    assert [(line["step"], line["loss"]) for line in read_lines(path)[-3:]] == [(5, 5.5), (0, 9.0), (1, 8.0)]


def test_a_line_that_was_cut_off_is_replaced(tmp_path):
    path = tmp_path / "log.jsonl"
    write_jsonl(history_of([0.5, 1.5]), path)
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        write_jsonl(history_of([0.5, 1.5]), path)
        assert path.read_bytes() == whole


def test_long_lines_are_found(tmp_path):
    names = {f"{'x' * 500}{index}": torch.tensor(1.0) for index in range(200)}
    recorded = record(lambda state, batch: (state, names))
    carry = recorded.init({}, torch.tensor(0.0))
    for appended in (1, 1, 1):
        carry, _ = recorded(carry, torch.tensor(0.0))
        assert write_jsonl(carry[1], tmp_path / "log.jsonl") == appended
    assert [line["step"] for line in read_lines(tmp_path / "log.jsonl")] == [0, 1, 2]


def test_other_files_are_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes, without an end of line")
    with pytest.raises(ValueError, match="ends with no line of a history"):
        write_jsonl(history_of([0.5]), path)
    assert path.read_text() == "my notes, without an end of line"
    with pytest.raises(OSError, match="not a regular file"):
        write_jsonl(history_of([0.5]), "/dev/null")


def read_events(folder):
    """Reads the scalars in event files: records with an 8-byte length, a checksum, the event, a checksum."""
    protocol = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = {}
    for path in sorted(folder.iterdir()):
        file = io.BytesIO(path.read_bytes())
        while header := file.read(12):
            event = protocol.Event()
            event.ParseFromString(file.read(struct.unpack("<Q", header[:8])[0]))
            file.read(4)
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_event_files(tmp_path):
    folder = tmp_path / "run"
    since = write_tensorboard(history_of([0.5, 1.5]), folder)
    assert since == 2
    assert write_tensorboard(history_of([0.5, 1.5, float("nan")]), folder, since=since) == 3
    found = read_events(folder)
    assert sorted(found["loss"])[:2] == [(0, 0.5), (1, 1.5)]
    assert [step for step, _ in sorted(found["skipped"])] == [0, 1, 2]
    assert np.isnan(dict(found["loss"])[2])


def test_event_files_need_a_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match="the extra `tools`"):
        write_tensorboard(history_of([0.5]), tmp_path)


def test_the_watcher_obeys_the_laws_of_an_optimizer():
    check_optimizer(watch_gradients())


def test_the_step_that_records_is_pure():
    step = make_step(loss_scale="dynamic")
    recorded = record(step, length=3)
    check_pure(recorded, recorded.init(step.init(params())), batches(1)[0], may_alias=True, vmap=True)


def test_watchers_of_groups_are_told_apart():
    groups = {
        "one": fmp.optim.chain(watch_gradients(), fmp.optim.sgd(0.1)),
        "two": fmp.optim.chain(watch_gradients("bf16"), fmp.optim.adam(0.1)),
    }
    step = make_step(fmp.optim.partition(groups, lambda path, leaf: "one" if path == "w" else "two"))
    _, history, _ = run(step, step.init(params()), [torch.full((4,), 3.0)])
    assert history.leaves == (("grad", "one/w", "f16"), ("grad", "two/b", "bf16"))
    masked = make_step(fmp.optim.masked(fmp.optim.chain(watch_gradients(), fmp.optim.sgd(0.1)), ["w"]))
    _, history, _ = run(masked, masked.init(params()), [torch.full((4,), 3.0)])
    assert history.leaves == (("grad", "w", "f16"),)
    assert history.arrays()["grad_amax/w"].tolist() == [3.0]


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
