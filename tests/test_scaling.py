import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch._dynamo.testing import CompileCounter

import fmp.tree
from fmp import gradients, scaling
from fmp.scaling import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from tests.host import NoHostSync

GOOD, BAD = torch.tensor(True), torch.tensor(False)
SCALERS = [NoOpLossScale(), StaticLossScale(2.0**10), DynamicLossScale()]
HISTORIES = st.lists(st.booleans(), max_size=40)


def run(scaler, history):
    """The scale and the count after each step of a history."""
    trace = []
    for finite in history:
        scaler = scaler.adjust(torch.tensor(finite))
        trace.append((float(scaler.loss_scale), int(scaler.growth_count)))
    return trace


def run_torch(history, scale, growth, backoff, interval):
    """The same by `torch.amp.GradScaler`'s own update, which knows no bounds."""
    current, tracker = torch.tensor([scale]), torch.tensor([0], dtype=torch.int32)
    trace = []
    for finite in history:
        found_inf = torch.tensor([0.0 if finite else 1.0])
        torch.ops.aten._amp_update_scale_(current, tracker, found_inf, growth, backoff, interval)
        trace.append((float(current), int(tracker)))
    return trace


# ------------------------------------------------------------------------------------------------------- the trajectory


@given(HISTORIES, st.integers(1, 5), st.sampled_from([2.0, 4.0]), st.sampled_from([0.5, 0.25]))
def test_same_trajectory_as_torch(history, interval, growth, backoff):
    scaler = DynamicLossScale(1.0, growth, backoff, interval, min_scale=2.0**-100, max_scale=2.0**100)
    assert run(scaler, history) == run_torch(history, 1.0, growth, backoff, interval)


@given(HISTORIES, st.integers(1, 5), st.floats(1.001, 3.0), st.floats(0.1, 0.999))
def test_same_trajectory_as_torch_for_other_factors(history, interval, growth, backoff):
    scaler = DynamicLossScale(1.0, growth, backoff, interval, min_scale=2.0**-126, max_scale=2.0**126)
    found, expected = run(scaler, history), run_torch(history, 1.0, growth, backoff, interval)
    assert [count for _, count in found] == [count for _, count in expected]
    # torch multiplies by the factor in double precision.
    assert [scale for scale, _ in found] == pytest.approx([scale for scale, _ in expected], rel=1e-5)


@given(
    HISTORIES,
    st.integers(1, 3),
    st.floats(1.001, 1e6),
    st.floats(1e-6, 0.999),
    st.tuples(*[st.floats(2.0**-120, 2.0**120)] * 3).map(sorted),
)
def test_the_scale_stays_within_its_bounds(history, interval, growth, backoff, bounds):
    smallest, first, largest = bounds
    scaler = DynamicLossScale(first, growth, backoff, interval, smallest, largest)
    for finite in history:
        scaler = scaler.adjust(torch.tensor(finite))
        assert scaler.min_scale <= float(scaler.loss_scale) <= scaler.max_scale
        assert math.isfinite(float(1.0 / scaler.loss_scale))
        assert 0 <= int(scaler.growth_count) < interval
        assert (scaler.loss_scale.dtype, scaler.growth_count.dtype) == (torch.float32, torch.int32)
        assert scaler.loss_scale.shape == scaler.growth_count.shape == ()


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_growth_on_exactly_the_nth_finite_step_in_a_row(interval):
    scaler = DynamicLossScale(8.0, growth_interval=interval)
    expected = [8.0 * 2.0 ** ((step + 1) // interval) for step in range(3 * interval)]
    assert [scale for scale, _ in run(scaler, [True] * 3 * interval)] == expected


def test_one_overflow_starts_the_count_again():
    scaler = DynamicLossScale(8.0, growth_interval=3)
    trace = run(scaler, [True, True, False, True, True, True])
    assert trace == [(8.0, 1), (8.0, 2), (4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0)]


def test_two_hundred_growths_stay_finite_and_back_off():
    scaler = DynamicLossScale(2.0**16, growth_interval=1)
    trace = run(scaler, [True] * 200 + [False])
    assert trace[199][0] == 2.0**24
    assert trace[200][0] == 2.0**23
    widest = DynamicLossScale(1.0, growth_interval=1, max_scale=2.0**126)
    assert run(widest, [True] * 200)[-1] == (2.0**126, 0)


@pytest.mark.parametrize("floor", [1.0, 2.0**-10, 1 / 64, 2.0**-126])
def test_four_hundred_overflows_end_at_the_floor(floor):
    scaler = DynamicLossScale(min_scale=floor)
    trace = run(scaler, [False] * 400)
    assert trace[-1] == (floor, 0)
    assert math.isfinite(1 / trace[-1][0])
    scaled = fmp.tree.replace(scaler, loss_scale=torch.tensor(floor)).unscale(torch.ones(1))
    assert torch.isfinite(scaled).all()


def test_adjust_leaves_the_scaler_as_it_was():
    scaler = DynamicLossScale(8.0, growth_interval=1)
    for flag in (GOOD, BAD):
        scaler.adjust(flag)
        assert (float(scaler.loss_scale), int(scaler.growth_count)) == (8.0, 0)
    for same in (NoOpLossScale(), StaticLossScale(3.0)):
        assert same.adjust(BAD) is same


def test_two_scalers_share_no_storage():
    first, second = DynamicLossScale(), DynamicLossScale()
    first.loss_scale.zero_()
    first.growth_count.fill_(9)
    assert (float(second.loss_scale), int(second.growth_count)) == (65536.0, 0)


@pytest.mark.parametrize(
    ("flag", "error", "message"),
    [
        (True, TypeError, "grads_finite must be a boolean tensor, as fmp.all_finite returns it, got True"),
        (None, TypeError, "got None"),
        (torch.tensor(1.0), TypeError, r"got f32\[\]"),
        (torch.tensor(1, dtype=torch.uint8), TypeError, r"got u8\[\]"),
        (torch.tensor([True, False]), ValueError, r"must be a scalar, got bool\[2\]"),
        (torch.tensor([True]), ValueError, r"must be a scalar, got bool\[1\]"),
    ],
)
def test_adjust_takes_a_boolean_scalar_only(flag, error, message):
    with pytest.raises(error, match=message):
        DynamicLossScale().adjust(flag)


# ---------------------------------------------------------------------------------------------------- scale and unscale


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scaler", [StaticLossScale(2.0**16), DynamicLossScale()], ids=["static", "dynamic"])
def test_the_loss_is_scaled_in_full_precision(shape, dtype, scaler):
    scaled = scaler.scale(torch.full(shape, 1.5, dtype=dtype))
    assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert scaled.shape == shape
    assert (scaled == 98304.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_gradients_are_unscaled_in_full_precision(dtype, shape):
    grads = StaticLossScale(2.0**26).unscale({"w": torch.ones(shape, dtype=dtype), "none": None, "count": 3})
    assert grads["w"].dtype == torch.float32
    assert (grads["w"] == 2.0**-26).all()
    assert grads["none"] is None
    assert grads["count"] == 3


def test_unscale_passes_what_is_not_a_gradient_and_divides_complex_ones():
    ids, wide = torch.arange(3), torch.ones(2, dtype=torch.float64)
    grads = StaticLossScale(4.0).unscale([ids, wide, torch.full((2,), 4 + 8j)])
    assert grads[0] is ids
    assert grads[1].dtype == torch.float64
    assert grads[1].tolist() == [0.25, 0.25]
    assert grads[2].tolist() == [1 + 2j, 1 + 2j]


def test_finiteness_shows_in_the_unscaled_gradients():
    scaler = DynamicLossScale(2.0**-120, min_scale=2.0**-126)
    scaled = torch.tensor(1e30)
    assert bool(fmp.tree.all_finite(scaled))
    assert not bool(fmp.tree.all_finite(scaler.unscale(scaled)))


@given(st.floats(-1e4, 1e4, width=16), st.integers(-20, 24))
def test_unscale_undoes_scale(value, exponent):
    scaler = StaticLossScale(2.0**exponent)
    loss = torch.tensor(value, dtype=torch.float16)
    assert float(scaler.unscale(scaler.scale(loss))) == value


def test_the_no_op_scaler_does_nothing():
    scaler = NoOpLossScale()
    loss, grads = torch.ones(2).half(), {"w": torch.ones(1), "n": None}
    assert scaler.scale(loss) is loss
    assert scaler.unscale(grads) is grads


def test_half_precision_losses_at_the_default_scale():
    scaler, w = DynamicLossScale(), torch.tensor([1.0, 0.5], dtype=torch.float16)
    scaled = scaler.scale((w * 1.0).sum())
    assert (scaled.dtype, float(scaled), float(scaled / scaler.loss_scale)) == (torch.float32, 98304.0, 1.5)
    scaled, grads = gradients.value_and_grad(lambda w: scaler.scale(w * 1.5).mean())(w)
    assert float(scaled / scaler.loss_scale) == 1.125
    unscaled = scaler.unscale(grads)
    assert bool(fmp.tree.all_finite(unscaled))
    assert unscaled.tolist() == [0.75, 0.75]


def test_a_half_precision_scalar_overflows_in_its_own_backward_at_the_default_scale():
    # The gradient of the scaled loss by the loss is the scale, and 2**16 is no float16: the first step is skipped.
    grad = lambda scaler: gradients.grad(lambda w: scaler.scale(w.sum()))(torch.ones(2, dtype=torch.float16))
    scaler = DynamicLossScale()
    assert not bool(fmp.tree.all_finite(grad(scaler)))
    assert bool(fmp.tree.all_finite(grad(scaler.adjust(BAD))))


def test_values_and_gradients_on_the_step_that_grows():
    scaler, w = DynamicLossScale(4.0, growth_interval=3), torch.ones(3)
    for step in range(7):
        scaled, scaled_grads = gradients.value_and_grad(lambda w, scaler=scaler: scaler.scale((w * w).sum()))(w)
        grads = scaler.unscale(scaled_grads)
        assert float(scaled / scaler.loss_scale) == 3.0
        assert grads.tolist() == [2.0, 2.0, 2.0]
        scaler = scaler.adjust(fmp.tree.all_finite(grads))
        assert float(scaler.loss_scale) == 4.0 * 2 ** ((step + 1) // 3)


# ------------------------------------------------------------------------------------------ transforms and the compiler


def ensemble(scalers):
    return fmp.tree.map(lambda *leaves: torch.stack(leaves), *scalers)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12), st.integers(1, 3))
def test_an_ensemble_equals_a_loop(history, interval):
    members = [DynamicLossScale(2.0**k, growth_interval=interval, max_scale=2.0**8) for k in (0, 3, 8)]
    together = ensemble(members)
    for flags in history:
        together = torch.func.vmap(lambda scaler, finite: scaler.adjust(finite))(together, torch.tensor(flags))
        members = [scaler.adjust(torch.tensor(flag)) for scaler, flag in zip(members, flags, strict=True)]
    alone = ensemble(members)
    assert torch.equal(together.loss_scale, alone.loss_scale)
    assert torch.equal(together.growth_count, alone.growth_count)
    assert together.growth_count.dtype == torch.int32
    assert (together.growth_interval, together.max_scale) == (interval, 2.0**8)
    scaled = torch.func.vmap(lambda scaler, loss: scaler.scale(loss))(together, torch.ones(3, 2).half())
    assert torch.equal(scaled, alone.loss_scale[:, None].expand(3, 2))
    unscaled = torch.func.vmap(lambda scaler, grads: scaler.unscale(grads))(together, {"w": torch.ones(3, 2).half()})
    assert torch.equal(unscaled["w"], 1 / alone.loss_scale[:, None].expand(3, 2))


@pytest.mark.parametrize("scaler", SCALERS, ids=lambda scaler: type(scaler).__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_equals_an_eager_one(scaler, backend):
    def step(scaler, loss, grads):
        unscaled = scaler.unscale(grads)
        return scaler.scale(loss), unscaled, scaler.adjust(fmp.tree.all_finite(unscaled))

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    ours = theirs = scaler
    for bad in (1.0, math.inf, 1.0):
        arguments = (torch.tensor(1.5).half(), {"w": torch.tensor([1.0, bad]), "n": None})
        *results, ours = compiled(ours, *arguments)
        *expected, theirs = step(theirs, *arguments)
        found = fmp.tree.leaves([results, ours])
        for new, old in zip(found, fmp.tree.leaves([expected, theirs]), strict=True):
            assert new is old is None or (torch.equal(new, old) and new.dtype == old.dtype)
    assert type(ours) is type(scaler)


def test_a_compiled_scaler_does_not_recompile():
    counter = CompileCounter()
    compiled = torch.compile(lambda scaler, finite: scaler.adjust(finite), backend=counter, fullgraph=True)
    scaler = DynamicLossScale(growth_interval=2)
    for step in range(20):
        scaler = compiled(scaler, torch.tensor(step % 5 != 0))
    assert counter.frame_count == 1


def test_a_scaler_never_waits_for_the_device():
    for scaler in SCALERS:
        with NoHostSync():
            adjusted = scaler.adjust(fmp.tree.all_finite(scaler.unscale([scaler.scale(torch.ones(2))])))
        assert type(adjusted) is type(scaler)


def test_gradients_flow_through_scaling():
    for scaler, scale in ((NoOpLossScale(), 1.0), (StaticLossScale(4.0), 4.0), (DynamicLossScale(2.0**10), 2.0**10)):
        grad = torch.func.grad(lambda x: scaler.scale(x.half()).sum())(torch.ones(2))
        assert grad.tolist() == [scale, scale]


# --------------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        *[({name: value}, ValueError) for name in ("init_scale", "min_scale", "max_scale") for value in (
            0.0, -1.0, math.nan, math.inf, -math.inf, 1e-45, 2.0**127, 1e39, 10**400, -(10**400),
        )],
        *[({"growth_factor": value}, ValueError) for value in (1.0, 0.5, -2.0, math.nan, math.inf, 1 + 1e-12, 1e39)],
        *[({"backoff_factor": value}, ValueError) for value in (1.0, 2.0, 0.0, -0.5, math.nan, 1 - 1e-12, 1e-60)],
        *[({"growth_interval": value}, ValueError) for value in (0, -1, 2**31)],
        *[({"growth_interval": value}, TypeError) for value in (2.0, "3", None, True, math.nan)],
        *[({name: value}, TypeError) for name in (
            "init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale",
        ) for value in (True, "2.0", None, torch.tensor(2), torch.ones(1), [2.0], 2j)],
        ({"min_scale": 8.0, "max_scale": 4.0, "init_scale": 6.0}, ValueError),
        ({"init_scale": 0.5}, ValueError),
        ({"init_scale": 2.0**25}, ValueError),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(arguments, error):
    with pytest.raises(error, match="|".join(arguments)):
        DynamicLossScale(**arguments)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-45, 10**400])
def test_bad_static_scales_are_refused(value):
    with pytest.raises(ValueError, match="value must"):
        StaticLossScale(value)
    with pytest.raises(TypeError, match="value must be a number, got True of type bool"):
        StaticLossScale(True)


def test_a_tensor_that_is_a_number_is_one():
    scale = fmp.numerics.suggest_scale({"w": torch.tensor([1e-9])}, "fp16")
    assert fmp.tree.leaves(fmp.loss_scale(scale)) == [scale] == fmp.tree.leaves(StaticLossScale(scale))
    assert DynamicLossScale(scale).loss_scale == scale
    with pytest.raises(TypeError, match="value must be a number"):
        torch.vmap(lambda scales: StaticLossScale(scales).loss_scale)(torch.ones(2))


def test_nothing_is_refused_when_a_tree_is_rebuilt():
    broken = fmp.tree.map(lambda _: "anything", DynamicLossScale())
    assert (broken.loss_scale, broken.growth_count, broken.growth_interval) == ("anything", "anything", 2000)


def test_defaults_are_those_of_torch():
    ours, theirs = DynamicLossScale(), torch.amp.GradScaler("cpu")
    assert float(ours.loss_scale) == theirs._init_scale
    assert ours.growth_factor == theirs._growth_factor
    assert ours.backoff_factor == theirs._backoff_factor
    assert ours.growth_interval == theirs._growth_interval
    assert (ours.min_scale, ours.max_scale) == (1.0, 2.0**24)


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_the_default_dtype_has_no_influence(default):
    torch.set_default_dtype(default)
    try:
        scalers = [StaticLossScale(2.0**20), DynamicLossScale(2.0**20)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(scaler.loss_scale.dtype == torch.float32 and scaler.loss_scale == 2.0**20 for scaler in scalers)


def test_scalers_can_be_made_anywhere():
    with torch.device("meta"):
        assert DynamicLossScale().loss_scale.device.type == "meta"
    made = torch.func.vmap(lambda x: DynamicLossScale().scale(x))(torch.ones(2))
    assert made.tolist() == [65536.0] * 2


def test_bounds_are_what_float32_makes_of_them():
    scaler = DynamicLossScale(0.3, min_scale=0.1, max_scale=0.3)
    assert scaler.min_scale == float(torch.tensor(0.1))
    assert scaler.max_scale == float(scaler.loss_scale)
    assert float(scaler.adjust(BAD).adjust(BAD).loss_scale) == scaler.min_scale


# -------------------------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize("value", ["dynamic", " Dynamic "])
def test_parse_dynamic(value):
    assert isinstance(scaling.loss_scale(value), DynamicLossScale)


@pytest.mark.parametrize("value", [None, "none", "None"])
def test_parse_none(value):
    assert isinstance(scaling.loss_scale(value), NoOpLossScale)


@pytest.mark.parametrize(
    ("value", "scale"), [("128.0", 128.0), ("1e3", 1000.0), (128, 128.0), (0.5, 0.5), (" 2 ", 2.0)]
)
def test_parse_numbers(value, scale):
    scaler = scaling.loss_scale(value)
    assert isinstance(scaler, StaticLossScale)
    assert float(scaler.loss_scale) == scale


@pytest.mark.parametrize("scaler", SCALERS, ids=lambda scaler: type(scaler).__name__)
def test_parse_returns_a_scaler_itself(scaler):
    assert scaling.loss_scale(scaler) is scaler
    assert isinstance(scaler, LossScale)


@pytest.mark.parametrize("value", ["", "fast", "nan", "inf", "-1", "0", "1e99", "128,0"])
def test_parse_refuses_other_strings(value):
    with pytest.raises(ValueError, match="use 'dynamic', 'none' or a positive number"):
        scaling.loss_scale(value)


@pytest.mark.parametrize("value", [True, [1], {}, torch.tensor(1), torch.ones(1), DynamicLossScale, object()])
def test_parse_refuses_other_types(value):
    with pytest.raises(TypeError, match="loss scale must be 'dynamic', a number, None or a scaler"):
        scaling.loss_scale(value)
    with pytest.raises(ValueError, match="loss_scale must be positive"):
        scaling.loss_scale(-1.0)


def test_a_scaler_that_is_no_tree_is_refused():
    class Custom:
        def scale(self, loss):
            return loss

        def unscale(self, grads):
            return grads

        def adjust(self, grads_finite):
            return self

    with pytest.raises(TypeError, match=r"Custom is no pytree.*fmp\.tree\.dataclass"):
        scaling.loss_scale(Custom())
    assert isinstance(scaling.loss_scale(fmp.tree.dataclass(Custom)()), Custom)
