import math

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree
from fmp.optim import schedules


def gradient(param, step):
    return param**3 + torch.cos(3.0 * param + step) + 0.1 * step


def start():
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (4, 3), "one": (1,), "scalar": (), "zeros": (2,)}
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    values["zeros"].zero_()
    return values


def norm(entries):
    return math.sqrt(math.fsum(entry * entry for entry in entries))


def by_apex(g, p, rate, trust=0.02, clip=True, eps=1e-8, weight_decay=0.0):
    """The gradients that Apex's LARC hands to its optimizer, in Python's floats."""
    if norm(p) == 0.0 or norm(g) == 0.0:
        return g
    adaptive = trust * norm(p) / (norm(g) + norm(p) * weight_decay + eps)
    if clip:
        adaptive = min(adaptive / rate, 1.0)
    return [adaptive * (gi + weight_decay * pi) for gi, pi in zip(g, p, strict=True)]


def adapted(grads, values, *args, **kwargs):
    tx = optim.larc(*args, **kwargs)
    return tx.update(grads, tx.init(values), values)[0]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("trust", [1e-3, 0.02, 10.0])
def test_gradients_are_those_of_apex(trust, weight_decay, clip):
    values = start()
    grads = tree.map(lambda value: gradient(value, 0), values)
    found = adapted(grads, values, 0.1, trust, clip, weight_decay=weight_decay)
    for name, value in values.items():
        entries = by_apex(
            grads[name].flatten().tolist(), value.flatten().tolist(), 0.1, trust, clip, weight_decay=weight_decay
        )
        expected = torch.tensor(entries, dtype=torch.float64).reshape(value.shape)
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("rate", [0.1, schedules.exponential_decay(0.1, 1, 0.9)], ids=["number", "schedule"])
@pytest.mark.parametrize("clip", [True, False])
def test_training_is_that_of_apex_around_sgd(clip, rate):
    """Apex changes the gradients in place and then lets torch's optimizer, with its weight decay off, take the step."""
    values = start()
    tx = optim.chain(optim.larc(rate, clip=clip, weight_decay=0.1), optim.sgd(rate, momentum=0.9))
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = torch.optim.SGD(theirs.values(), lr=0.1, momentum=0.9)
    state = tx.init(values)
    for step in range(20):
        updates, state = tx.update(tree.map(lambda value: gradient(value, step), values), state, values)
        values = optim.apply_updates(values, updates)
        eta = 0.1 * 0.9**step if callable(rate) else 0.1
        optimizer.param_groups[0]["lr"] = eta
        for param in theirs.values():
            grad = gradient(param.detach(), step).flatten().tolist()
            entries = by_apex(grad, param.flatten().tolist(), eta, clip=clip, weight_decay=0.1)
            param.grad = torch.tensor(entries, dtype=torch.float64).reshape(param.shape)
        optimizer.step()
    expected = {name: param.detach() for name, param in theirs.items()}
    # A schedule answers in float32.
    torch.testing.assert_close(values, expected, rtol=1e-5 if callable(rate) else 1e-10, atol=1e-12)


def test_hyper_parameters_may_be_tensors():
    values = start()
    grads = tree.map(lambda value: gradient(value, 0), values)
    numbers = {"learning_rate": 0.1, "trust_coefficient": 0.01, "eps": 1e-3, "weight_decay": 0.1}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    found, expected = adapted(grads, values, **tensors), adapted(grads, values, **numbers)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


@given(st.floats(1e-4, 1e18), st.floats(1e-6, 1e6), st.floats(1e-3, 1.0))
def test_no_parameter_moves_further_than_its_trust(grad_size, size, rate):
    values = {"w": size * torch.linspace(-1.0, 2.0, 7), "scalar": torch.tensor(size)}
    grads = {"w": grad_size * torch.linspace(1.0, 2.0, 7), "scalar": torch.tensor(-grad_size)}
    found = adapted(grads, values, rate)
    for name, value in values.items():
        step, plain, trust = rate * found[name].norm(), rate * grads[name].norm(), 0.02 * value.norm()
        assert step.item() == pytest.approx(min(plain.item(), trust.item()), rel=1e-3)


def test_small_gradients_keep_every_bit_when_clipped():
    values = {"w": torch.full((5,), 10.0)}
    grads = {"w": 1e-3 * torch.randn(5)}
    assert torch.equal(adapted(grads, values, 0.1)["w"], grads["w"])


def test_zero_parameters_and_zero_gradients_pass_unchanged():
    values = {"zeros": torch.zeros(2), "still": torch.ones(2), "scalar": torch.zeros(()), "hole": torch.ones(1)}
    grads = {"zeros": torch.tensor([3.0, -3.0]), "still": torch.zeros(2), "scalar": torch.tensor(5.0), "hole": None}
    for clip in (True, False):
        found = adapted(grads, values, 0.1, clip=clip, eps=0.0, weight_decay=0.5)
        assert found.pop("hole") is None
        assert {name: leaf.tolist() for name, leaf in found.items()} == {
            "zeros": [3.0, -3.0],
            "still": [0.0, 0.0],
            "scalar": 5.0,
        }


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0), lambda count: 0.1 * count], ids=["0", "tensor", "schedule"])
@pytest.mark.parametrize("trust", [0.0, 0.02])
def test_a_rate_of_zero_leaves_the_gradient(rate, trust):
    values, grads = {"w": torch.ones(2)}, {"w": torch.full((2,), 100.0)}
    assert torch.equal(adapted(grads, values, rate, trust)["w"], grads["w"])
    if isinstance(rate, torch.Tensor):
        derivative = torch.func.grad(lambda each: adapted(grads, {"w": each}, rate, trust)["w"].sum())(values["w"])
        assert derivative.tolist() == [0.0, 0.0]


def test_derivative_at_zero_parameters_is_finite():
    ones = torch.ones(3)
    for clip in (True, False):
        moved = lambda p, g, clip=clip: adapted({"w": g}, {"w": p}, 0.1, clip=clip, eps=0.0, weight_decay=0.1)["w"]
        for at in [(torch.zeros(3), ones), (ones, torch.zeros(3)), (torch.zeros(3), torch.zeros(3))]:
            total = lambda p, g, moved=moved: moved(p, g).sum()
            assert all(each.isfinite().all() for each in torch.func.grad(total, argnums=(0, 1))(*at))


def test_half_precision_is_adapted_in_float32():
    values = {"w": torch.full((4,), 6e4, dtype=torch.float16)}
    found = adapted({"w": torch.full((4,), 6e4, dtype=torch.float16)}, values, 0.1, clip=False)
    assert found["w"].dtype == torch.float32
    assert found["w"].norm().item() == pytest.approx(0.02 * 2.0 * 6e4, rel=1e-3)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e30, 3e38])
def test_gradients_at_the_ends_of_float32_stay_finite(size, clip):
    values = {"w": torch.ones(3), "scalar": torch.ones(())}
    grads = tree.map(lambda value: torch.full_like(value, size), values)
    found = adapted(grads, values, 0.1, clip=clip, weight_decay=0.1)
    assert all(leaf.isfinite().all() for leaf in found.values())
    if clip:
        # A 0-dim leaf has no squares to overflow.
        assert found["w"].norm().item() <= 0.02 * values["w"].norm().item() / 0.1 * (1 + 1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_stays_visible(bad):
    found = adapted(
        {"w": torch.tensor([1.0, bad]), "good": torch.ones(1)}, {"w": torch.ones(2), "good": torch.ones(1)}, 1
    )
    assert found["w"][1].isnan()
    assert found["good"].item() == pytest.approx(0.02)


def test_members_are_adapted_by_their_own_norms():
    params = torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])
    grad = torch.tensor([0.6, 0.8])
    found = torch.func.vmap(lambda value: adapted({"w": grad}, {"w": value}, 0.1, 0.1, False)["w"])(params)
    torch.testing.assert_close(found, torch.tensor([[0.3, 0.4], [3.0, 4.0], [0.6, 0.8]]))


def test_leaves_without_entries_pass():
    empty = {"empty": torch.zeros(0, 3)}
    assert adapted(empty, empty, 0.1)["empty"].shape == (0, 3)


def test_only_a_schedule_needs_a_count():
    values = {"w": torch.ones(1)}
    assert optim.larc(0.1).init(values).count is None
    assert optim.larc(torch.tensor(0.1)).init(values).count is None
    tx = optim.larc(schedules.constant(0.1))
    assert tx.update(values, tx.init(values), values)[1].count.item() == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", math.nan),
        ("trust_coefficient", -0.02),
        ("trust_coefficient", torch.ones(2)),
        ("eps", math.inf),
        ("weight_decay", -0.1),
    ],
)
def test_bad_numbers_are_refused(argument, value):
    with pytest.raises(ValueError, match=argument):
        optim.larc(**{"learning_rate": 0.1, argument: value})


@pytest.mark.parametrize(("argument", "value"), [("learning_rate", "0.1"), ("trust_coefficient", True), ("clip", 1e-8)])
def test_other_types_are_refused(argument, value):
    with pytest.raises(TypeError, match=argument):
        optim.larc(**{"learning_rate": 0.1, argument: value})


@pytest.mark.parametrize("clip", [True, False])
def test_a_parameter_whose_norm_overflows_has_no_gradient(clip):
    tx, values = optim.larc(0.1, clip=clip), {"w": torch.full((2,), 1e20)}
    updates, _ = tx.update({"w": torch.ones(2)}, tx.init(values), values)
    assert not updates["w"].any()
