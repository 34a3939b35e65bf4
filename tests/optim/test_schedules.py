import math

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim
from fmp.optim import schedules

EVERY = {
    "constant": schedules.constant(0.3),
    "linear": schedules.linear(0.1, 0.7, 10, 3),
    "exponential": schedules.exponential_decay(0.1, 10, 0.5, 3, staircase=True, end_value=0.01),
    "cosine": schedules.cosine_decay(0.7, 10, 0.1, exponent=1.5),
    "warm-up, cosine": schedules.warmup_cosine_decay(0.1, 0.7, 4, 15, 0.2),
    "warm-up, linear": schedules.warmup_linear_decay(0.1, 0.7, 4, 15, 0.2),
    "piecewise": schedules.piecewise_constant([0.1, 0.2, 0.3], [5, 6]),
    "join": schedules.join([schedules.linear(0.0, 1.0, 4), schedules.exponential_decay(1.0, 3, 0.5)], [4]),
}
every_schedule = pytest.mark.parametrize("schedule", EVERY.values(), ids=EVERY.keys())


@every_schedule
def test_works_under_vmap_and_compile(schedule):
    counts = torch.arange(20, dtype=torch.int32)
    each = torch.stack([schedule(count) for count in counts])
    torch.testing.assert_close(torch.func.vmap(schedule)(counts), each)
    compiled = torch.compile(schedule, backend="eager", fullgraph=True)
    torch.testing.assert_close(torch.stack([compiled(count) for count in counts]), each)


@every_schedule
def test_a_plain_int_will_do(schedule):
    for count in (0, 3, 4, 5, 100):
        assert torch.equal(schedule(count), schedule(torch.tensor(count, dtype=torch.int32)))
    with pytest.raises(TypeError, match=r"count must be an int, got 1.5"):
        schedule(1.5)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        schedule(-1)


@every_schedule
def test_is_finite_far_away(schedule):
    assert schedule(torch.tensor(2**31 - 1, dtype=torch.int32)).isfinite()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("begin", [2**31, 2**31 + 5, 2**40, 2**62])
def test_steps_beyond_32_bits_do_not_wrap(begin, dtype):
    count = torch.tensor(100, dtype=dtype)
    assert schedules.piecewise_constant([1.0, 0.25], [begin])(count) == 1.0
    assert schedules.join([schedules.constant(1.0), schedules.constant(0.25)], [begin])(count) == 1.0
    assert schedules.linear(1.0, 0.25, 10, begin)(count) == 1.0
    assert schedules.linear(1.0, 0.0, begin)(count) == pytest.approx(1.0)
    for staircase in (False, True):
        assert schedules.exponential_decay(1.0, 10, 0.5, begin, staircase=staircase)(count) == 1.0


def test_counts_beyond_32_bits_are_followed():
    count = torch.tensor(2**40 + 1)
    assert schedules.piecewise_constant([1.0, 0.25], [2**40 + 1])(count) == 0.25
    assert schedules.piecewise_constant([1.0, 0.25], [2**40 + 2])(count) == 1.0
    assert schedules.linear(1.0, 0.5, 2, 2**40)(count) == 0.75


@given(st.integers(1, 2**31), st.integers(0, 2**31 - 1))
def test_a_staircase_steps_where_whole_numbers_do(transition_steps, count):
    found = schedules.exponential_decay(1.0, transition_steps, 0.5, staircase=True)(torch.tensor(count))
    assert found.item() == pytest.approx(0.5 ** (count // transition_steps), rel=1e-5, abs=1e-45)


def test_a_staircase_is_exact_beyond_24_bits():
    schedule = schedules.exponential_decay(1.0, 2**30, 0.5, staircase=True)
    assert [schedule(torch.tensor(2**30 + more)).item() for more in (-1, 0)] == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("end_value", [None, 0.0])
@pytest.mark.parametrize("staircase", [False, True])
def test_zero_stays_zero_however_fast_it_grows(staircase, end_value):
    schedule = schedules.exponential_decay(0.0, 1, 1e10, staircase=staircase, end_value=end_value)
    for count in (0, 1, 4, 100, 2**31 - 1):
        assert schedule(torch.tensor(count, dtype=torch.int32)) == 0.0


def test_a_factor_beyond_float32_gives_a_value_within():
    assert schedules.exponential_decay(1e-30, 1, 1e10)(torch.tensor(5)).item() == pytest.approx(1e20, rel=1e-4)


@given(st.floats(0, 10, width=32), st.floats(0, 10, width=32), st.integers(1, 2**40), st.integers(0, 2**40))
def test_linear_starts_and_ends_exactly(init_value, end_value, transition_steps, transition_begin):
    schedule = schedules.linear(init_value, end_value, transition_steps, transition_begin)
    assert schedule(torch.tensor(0)).item() == init_value
    assert schedule(torch.tensor(transition_begin)).item() == init_value
    assert schedule(torch.tensor(transition_begin + transition_steps)).item() == end_value


VALUES = st.floats(0, 10, width=32)


@pytest.mark.parametrize("steps", [1, 7, 100])
def test_cosine_is_torch_cosine(steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=0.01)
    schedule = schedules.cosine_decay(0.3, steps, end_value=0.01)
    for count in range(steps + 1):
        found = schedule(torch.tensor(count, dtype=torch.int32))
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-5)
        optimizer.step()
        scheduler.step()


@given(VALUES, VALUES, st.integers(1, 10**6), st.floats(0.5, 4), st.data())
def test_cosine_is_its_formula(init_value, end_value, decay_steps, exponent, data):
    count = data.draw(st.integers(0, decay_steps))
    share = ((1 + math.cos(math.pi * count / decay_steps)) / 2) ** exponent
    found = schedules.cosine_decay(init_value, decay_steps, end_value, exponent)(torch.tensor(count))
    rounding = 1e-6 * max(1, init_value, end_value)
    assert found.item() == pytest.approx(end_value + (init_value - end_value) * share, rel=1e-5, abs=rounding)


@given(VALUES, VALUES, st.integers(1, 2**40), st.floats(0, 4), st.integers(0, 2**40))
def test_cosine_starts_and_ends_exactly(init_value, end_value, decay_steps, exponent, later):
    schedule = schedules.cosine_decay(init_value, decay_steps, end_value, exponent)
    assert schedule(torch.tensor(0)).item() == init_value
    assert schedule(torch.tensor(decay_steps)).item() == end_value
    assert schedule(torch.tensor(decay_steps + later)).item() == end_value


def test_the_last_steps_of_a_cosine_keep_their_digits():
    steps = 10**6
    schedule = schedules.cosine_decay(1.0, steps)
    for remaining in (1, 2, 5, 1000):
        expected = math.sin(math.pi / 2 * remaining / steps) ** 2
        assert schedule(torch.tensor(steps - remaining)).item() == pytest.approx(expected, rel=1e-6)


@given(st.integers(0, 100), st.integers(1, 100), st.integers(0, 250))
def test_warm_up_is_its_formula(warmup_steps, more, count):
    decay_steps = warmup_steps + more
    cosine = schedules.warmup_cosine_decay(0.25, 2.0, warmup_steps, decay_steps, 0.5, exponent=2.0)
    line = schedules.warmup_linear_decay(0.25, 2.0, warmup_steps, decay_steps, 0.5)
    if count < warmup_steps:
        expected = [0.25 + (2.0 - 0.25) * count / warmup_steps] * 2
    else:
        progress = min(count - warmup_steps, more) / more
        shares = [((1 + math.cos(math.pi * progress)) / 2) ** 2, 1 - progress]
        expected = [0.5 + (2.0 - 0.5) * share for share in shares]
    assert [each(torch.tensor(count)).item() for each in (cosine, line)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("make", [schedules.warmup_cosine_decay, schedules.warmup_linear_decay])
def test_warm_up_meets_its_values_exactly(make):
    schedule = make(0.1, 0.7, 3, 10, 0.3)
    for count, value in [(0, 0.1), (3, 0.7), (10, 0.3), (11, 0.3), (2**31 - 1, 0.3)]:
        assert schedule(torch.tensor(count, dtype=torch.int32)) == torch.tensor(value)
    assert make(0.1, 0.7, 0, 10)(torch.tensor(0)) == torch.tensor(0.7)
    assert make(0.1, 0.7, 2**40, 2**41)(torch.tensor(2**40)) == torch.tensor(0.7)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 150))
def test_a_joined_schedule_counts_from_its_own_beginning(first, more, count):
    parts = [schedules.linear(0.0, 1.0, 100), schedules.linear(1.0, 2.0, 100), schedules.linear(2.0, 3.0, 100)]
    boundaries = [first, first + more]
    index = sum(count >= boundary for boundary in boundaries)
    since = count - ([0, *boundaries][index])
    assert schedules.join(parts, boundaries)(torch.tensor(count)) == parts[index](torch.tensor(since))


def test_a_later_schedule_is_never_asked_below_zero():
    asked = []

    def later(count):
        asked.append(count.item())
        return torch.tensor(1.0)

    schedules.join([schedules.constant(0.0), later], [5])(torch.tensor(2))
    assert asked == [0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(-1.0), "value"),
        (lambda: schedules.constant(1e39), "value must be at most"),
        (lambda: schedules.linear(0.0, 1.0, 2**63), "transition_steps must be at most"),
        (lambda: schedules.linear(float("nan"), 1.0, 5), "init_value"),
        (lambda: schedules.linear(0.0, float("inf"), 5), "end_value"),
        (lambda: schedules.linear(0.0, 1.0, 0), "transition_steps must be at least 1, got 0"),
        (lambda: schedules.linear(0.0, 1.0, 5, -1), "transition_begin"),
        (lambda: schedules.exponential_decay(1.0, 5, 0.0), "decay_rate"),
        (lambda: schedules.exponential_decay(1.0, 5, 0.5, end_value=-1.0), "end_value"),
        (lambda: schedules.cosine_decay(-1.0, 5), "init_value"),
        (lambda: schedules.cosine_decay(1.0, 0), "decay_steps must be at least 1, got 0"),
        (lambda: schedules.cosine_decay(1.0, 5, float("nan")), "end_value"),
        (lambda: schedules.cosine_decay(1.0, 5, exponent=-1.0), "exponent"),
        (lambda: schedules.warmup_cosine_decay(-0.1, 1.0, 0, 5), "init_value"),
        (lambda: schedules.warmup_cosine_decay(0.0, float("inf"), 2, 5), "peak_value"),
        (lambda: schedules.warmup_cosine_decay(0.0, 1.0, -1, 5), "warmup_steps must be at least 0, got -1"),
        (lambda: schedules.warmup_cosine_decay(0.0, 1.0, 5, 5), "must be above warmup_steps=5, got 5"),
        (lambda: schedules.warmup_linear_decay(0.0, 1.0, 5, 4), "must be above warmup_steps=5, got 4"),
        (lambda: schedules.warmup_linear_decay(0.0, 1.0, 0, 0), "decay_steps must be at least 1, got 0"),
        (lambda: schedules.warmup_linear_decay(0.0, 1.0, 2, 5, -1.0), "end_value"),
        (lambda: schedules.piecewise_constant([1.0], [5]), "values must be one more than boundaries, got 1 and 1"),
        (lambda: schedules.piecewise_constant([1.0, 2.0, 3.0], [5, 5]), r"boundaries\[1\] must be at least 6, got 5"),
        (lambda: schedules.join([schedules.constant(1.0)], [5]), "schedules must be one more"),
        (lambda: schedules.join([], []), "schedules must be one more"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="transition_steps must be an int"):
        schedules.linear(0.0, 1.0, 5.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"schedules\[1\] is 0.5, not a function of the count; use constant\(0.5\)"):
        schedules.join([schedules.constant(1.0), 0.5], [5])  # pyright: ignore[reportArgumentType]


def test_members_may_be_at_different_steps():
    tx = optim.sgd(schedules.linear(1.0, 0.0, 4))
    values = {"w": torch.ones(1)}
    state = tx.init(values)
    update = lambda count: tx.update(values, type(state)(count, None), values)[0]["w"]
    assert torch.func.vmap(update)(torch.arange(3, dtype=torch.int32)).flatten().tolist() == [-1.0, -0.75, -0.5]


def test_values_may_come_from_a_generator():
    schedule = schedules.piecewise_constant((1.0 / n for n in (1, 2, 4)), iter([10, 20]))
    assert [schedule(torch.tensor(count)).item() for count in (0, 10, 20, 20)] == [1.0, 0.5, 0.25, 0.25]
    joined = schedules.join(map(schedules.constant, (0.5, 0.25)), boundaries=range(3, 4))
    assert [joined(torch.tensor(count)).item() for count in (2, 3)] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.exponential_decay(1.0, 5, 0.5, staircase="x"), "staircase must be True or False, got 'x'"),  # pyright: ignore[reportArgumentType]
        (lambda: schedules.piecewise_constant({1.0, 2.0}, [5]), "values must be a list or a tuple, got {"),
        (lambda: schedules.piecewise_constant(1.0, []), "values must be a list or a tuple, got 1.0"),  # pyright: ignore[reportArgumentType]
        (lambda: schedules.piecewise_constant([1.0, 2.0], 5), "boundaries must be a list or a tuple, got 5"),  # pyright: ignore[reportArgumentType]
        (lambda: schedules.piecewise_constant("ab", [5]), "values must be a list or a tuple, got 'ab'"),  # pyright: ignore[reportArgumentType]
        (lambda: schedules.join(schedules.constant(1.0), []), "schedules must be a list or a tuple"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_arguments_of_other_types_are_refused_by_name(make, message):
    with pytest.raises(TypeError, match=message):
        make()
