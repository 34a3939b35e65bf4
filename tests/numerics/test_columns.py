import pickle
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fmp
from fmp.dropout import SeededRandomness
from fmp.numerics.record import record
from tests.numerics.recorded_steps import batches, loss_fn, make_step, params, run


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


def constant(value):
    return lambda: value  # torch.compile before 2.13 would not notice another default


def record_each(values, *, compiled=False):
    recorded = record(lambda state, batch: (state + 1, {"value": batch()}))
    call = torch.compile(recorded, backend="aot_eager", fullgraph=True) if compiled else recorded
    carry = recorded.init(torch.tensor(0), lambda: values[0])
    for value in values:
        carry, _ = call(carry, constant(value))
    return carry[1].arrays()["value"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "values", [[0.1, 1e300, -123456789.0, float("nan")], [0, -1, 2**53 + 1, 2**63 - 1, -(2**63)], [True, False]]
)
def test_numbers_of_python_keep_their_value(values, compiled):
    torch._dynamo.reset()
    found = record_each(values, compiled=compiled)
    assert found.dtype == {float: np.float64, int: np.int64, bool: np.bool_}[type(values[0])]
    np.testing.assert_array_equal(found, np.array(values))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16, torch.bool, torch.float64])
def test_tensors_of_any_dtype_keep_their_value(dtype):
    if dtype.is_floating_point:
        values = [torch.finfo(dtype).max, torch.finfo(dtype).tiny]
    else:
        values = [0, 1] if dtype == torch.bool else [torch.iinfo(dtype).max, torch.iinfo(dtype).min]
    assert record_each([torch.tensor(value, dtype=dtype) for value in values]).tolist() == values


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [
        (0, 0.75, "was i64.* is f64"),
        (0, float("nan"), "was i64.* is f64"),
        (0.5, 1, "was f64.* is i64"),
        (True, 0.5, "was bool.* is f64"),
        (torch.tensor(1.0), 0.1, "was f32.* is f64"),
        (torch.tensor(0.5, dtype=torch.float16), torch.tensor(1e6), "was f16.* is f32"),
        (torch.tensor(0.5, dtype=torch.float16), torch.tensor(1.0, dtype=torch.bfloat16), "was f16.* is bf16"),
        (torch.tensor(1, dtype=torch.int16), torch.tensor(70_000), "was i16.* is i64"),
        (torch.tensor(1.0), torch.ones(2), r"was f32\[\] .* is f32\[2\]"),
        (torch.tensor(1.0), None, "was f32.* is None"),
    ],
)
def test_a_metric_that_its_column_cannot_hold_is_refused(first, then, found):
    with pytest.raises(TypeError, match=f"'value' {found}.* now"):
        record_each([first, then])


def test_a_wider_column_holds_narrower_numbers():
    half = torch.tensor(0.1, dtype=torch.bfloat16)
    assert record_each([torch.tensor(1.0), half]).tolist() == [1.0, half.item()]
    assert record_each([0.5, torch.tensor(0.1)]).tolist() == [0.5, torch.tensor(0.1).item()]
    with pytest.raises(ValueError, match="beyond 64 bits"):
        record_each([2**63])


def test_integers_are_mapped_saved_and_donated(tmp_path):
    large = torch.tensor([2**60 + 1, -(2**60) - 1])
    recorded = record(lambda state, batch: (state, {"seed": batch, "loss": batch.float()}), length=2)
    carry = torch.func.vmap(recorded.init, (None, 0))(torch.tensor(0.0), large)
    for _ in range(3):
        carry, _ = torch.func.vmap(recorded)(carry, large)
    fmp.checkpoint.save(carry, tmp_path / "state.fmp")
    loaded = fmp.checkpoint.load(carry, tmp_path / "state.fmp")
    assert loaded[1].arrays()["seed"].tolist() == [[2**60 + 1] * 2, [-(2**60) - 1] * 2]

    def loss_of(params, batch):
        return loss_fn(params, batch), {"seed": torch.tensor(2**60 + 1)}

    step = fmp.train_step(loss_of, fmp.optim.sgd(0.1), has_aux=True, donate=True)
    recorded = record(step, length=2)
    carry = recorded.init(step.init(params()), batches(1)[0])
    for _ in range(3):
        carry, _ = recorded(carry, batches(1)[0])
    assert carry[1].arrays()["aux/seed"].tolist() == [2**60 + 1] * 2


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"a/b": 1.0, "a": {"b": 2.0}}, "a/b"),
        ({1: 1.0, "1": 2.0}, "1"),
        ({"step": 1.0, "metrics/step": 2.0}, "metrics/step"),
        ({"": 1.0, "metrics": 2.0}, "metrics"),
        ({"param_amax/w": 1.0, "metrics/param_amax/w": 2.0}, "metrics/param_amax/w"),
    ],
)
def test_two_metrics_of_one_name_are_refused(metrics, name):
    recorded = record(lambda state, batch: (state, metrics), params="fp16")
    with pytest.raises(ValueError, match=f"would both be recorded as '{name}'; rename one"):
        recorded.init({"params": {"w": torch.ones(2)}}, torch.tensor(1.0))


def test_two_leaves_of_one_name_are_refused():
    recorded = record(lambda state, batch: (state, {"loss": batch}), params="fp16")
    leaves = {"a/b": torch.ones(2), "a": {"b": torch.ones(2)}}
    with pytest.raises(ValueError, match="measured of two leaves would both be recorded as 'param_amax/a/b'"):
        recorded.init({"params": leaves}, torch.tensor(1.0))


@pytest.mark.parametrize("donate", [None, False, True], ids=["own step", "train step", "donating step"])
def test_looking_at_the_metrics_draws_no_random_numbers(donate):
    generator = torch.Generator().manual_seed(3)

    def loss_of(params, batch):
        factor = torch.rand(()) + torch.rand((), generator=generator) + random.random() + np.random.rand()
        return (params["w"] * F.dropout(batch)).sum() * factor, {}

    def own(state, batch):
        return state, {"loss": loss_of(state, batch)[0]}

    def drawn():
        of_torch = [state.numpy().tobytes() for state in (torch.get_rng_state(), generator.get_state())]
        return *of_torch, random.getstate(), pickle.dumps(np.random.get_state())

    made = None if donate is None else fmp.train_step(loss_of, fmp.optim.sgd(0.1), has_aux=True, donate=donate)
    start = params() if made is None else made.init(params())
    before = drawn()
    record(own if made is None else made).init(start, torch.ones(4))
    assert before == drawn()


def test_looking_at_the_metrics_moves_no_seeded_numbers():
    recorded = record(lambda state, batch: (state, {"loss": F.dropout(batch).sum()}))
    with SeededRandomness(torch.tensor(3)) as seeded:
        recorded.init(torch.tensor(0.0), torch.ones(4))
        assert seeded.calls == 0
        recorded.step(torch.tensor(0.0), torch.ones(4))
        assert seeded.calls == 1


def test_double_precision_is_kept():
    step = make_step(fmp.optim.sgd(0.1))
    start = {key: leaf.double() for key, leaf in params().items()}
    _, history, metrics = run(step, step.init(start), [batch.double() for batch in batches(2)])
    assert history.arrays()["loss"].dtype == np.float64
    assert history.arrays()["loss"].tolist() == [found.loss.item() for found in metrics]
