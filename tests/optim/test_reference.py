"""Each optimizer against torch.optim, over 100 steps in float64; schedules against torch's schedulers."""

import pytest
import torch
from torch.optim import lr_scheduler

from fmp import optim, tree
from fmp.optim import schedules

SHAPES = {"matrix": (4, 3), "vector": (5,), "scalar": ()}


def gradient(param, step):
    """The gradient of a bumpy bowl that moves with the step."""
    return param**3 + torch.cos(3.0 * param + step) + 0.1 * step


def start():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def run(tx, values, steps=100):
    state = tx.init(values)
    for step in range(steps):
        grads = tree.map(lambda param: gradient(param, step), values)
        updates, state = tx.update(grads, state, values)
        values = optim.apply_updates(values, updates)
    return values


def run_torch(make, values, steps=100, scheduler=None, max_norm=None):
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    optimizer = make(values)
    scheduler = scheduler(optimizer) if scheduler else None
    for step in range(steps):
        for value in values.values():
            value.grad = gradient(value.detach(), step)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(values.values(), max_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return {name: value.detach() for name, value in values.items()}


def over(cls, **kwargs):
    return lambda values: cls(values.values(), **kwargs)


CASES = {
    "sgd": (optim.sgd(0.01), over(torch.optim.SGD, lr=0.01)),
    "sgd momentum": (optim.sgd(0.01, momentum=0.9), over(torch.optim.SGD, lr=0.01, momentum=0.9)),
    "sgd momentum 0": (optim.sgd(0.01, momentum=0.0), over(torch.optim.SGD, lr=0.01, momentum=0.0)),
    "sgd dampening": (
        optim.sgd(0.01, momentum=0.9, dampening=0.3),
        over(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.3),
    ),
    "sgd nesterov": (
        optim.sgd(0.01, momentum=0.8, nesterov=True),
        over(torch.optim.SGD, lr=0.01, momentum=0.8, nesterov=True),
    ),
    "sgd everything": (
        optim.sgd(0.01, momentum=0.8, nesterov=True, weight_decay=0.1),
        over(torch.optim.SGD, lr=0.01, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "adam": (optim.adam(0.01), over(torch.optim.Adam, lr=0.01)),
    "adam betas": (
        optim.adam(0.01, b1=0.0, b2=0.6, eps=1e-3),
        over(torch.optim.Adam, lr=0.01, betas=(0.0, 0.6), eps=1e-3),
    ),
    "adam l2": (optim.adam(0.01, weight_decay=0.1), over(torch.optim.Adam, lr=0.01, weight_decay=0.1)),
    "adamw": (optim.adamw(0.01), over(torch.optim.AdamW, lr=0.01)),
    "adamw decay": (optim.adamw(0.01, weight_decay=0.3), over(torch.optim.AdamW, lr=0.01, weight_decay=0.3)),
    "adamw tensors": (
        optim.adamw(*(torch.tensor(value, dtype=torch.float64) for value in (0.01, 0.9, 0.99, 1e-8, 0.3))),
        over(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99), weight_decay=0.3),
    ),
    "adamw mask": (
        optim.adamw(0.01, weight_decay=0.3, mask={"matrix": True, "vector": False, "scalar": False}),
        lambda values: torch.optim.AdamW(
            [
                {"params": [values["matrix"]], "weight_decay": 0.3},
                {"params": [values["vector"], values["scalar"]], "weight_decay": 0.0},
            ],
            lr=0.01,
        ),
    ),
    "partition": (
        optim.partition(
            {"slow": optim.sgd(0.001), "fast": optim.sgd(0.02, momentum=0.5)},
            {"matrix": "slow", "vector": "fast", "scalar": "slow"},
        ),
        lambda values: torch.optim.SGD(
            [
                {"params": [values["matrix"], values["scalar"]], "lr": 0.001},
                {"params": [values["vector"]], "lr": 0.02, "momentum": 0.5},
            ]
        ),
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), CASES.values(), ids=CASES.keys())
def test_is_torch_optim(ours, theirs):
    torch.testing.assert_close(run(ours, start()), run_torch(theirs, start()), rtol=1e-10, atol=0.0)


def test_float32_is_torch_optim():
    values = {name: value.float() for name, value in start().items()}
    ours, theirs = run(optim.adamw(0.01), values), run_torch(over(torch.optim.AdamW, lr=0.01), values)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_clip_is_torch_clip_but_for_its_epsilon():
    values = start()
    grads = tree.map(lambda value: gradient(value, 0), values)
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    ours = optim.clip_by_global_norm(0.5).update(grads, (), values)[0]
    for value, grad in zip(values.values(), grads.values(), strict=True):
        value.grad = grad.clone()
    assert torch.nn.utils.clip_grad_norm_(values.values(), 0.5) == norm
    theirs = {name: value.grad for name, value in values.items()}
    torch.testing.assert_close(tree.map(lambda grad: grad * norm / (norm + 1e-6), ours), theirs, rtol=1e-12, atol=0.0)


def test_clipped_training_is_that_of_torch():
    ours = run(optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.01, momentum=0.9)), start())
    theirs = run_torch(over(torch.optim.SGD, lr=0.01, momentum=0.9), start(), max_norm=0.5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


SCHEDULES = {
    "constant": (schedules.constant(0.1), lambda o: lr_scheduler.LambdaLR(o, lambda count: 1.0)),
    "linear": (
        schedules.linear(0.1, 0.02, transition_steps=40),
        lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=40),
    ),
    "linear up": (
        schedules.linear(0.01, 0.1, transition_steps=7),
        lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, end_factor=1.0, total_iters=7),
    ),
    "linear later": (
        schedules.linear(0.1, 0.02, transition_steps=40, transition_begin=30),
        lambda o: lr_scheduler.LambdaLR(o, lambda count: 1.0 - 0.8 * min(max(count - 30, 0) / 40, 1.0)),
    ),
    "exponential": (
        schedules.exponential_decay(0.1, 1, 0.97),
        lambda o: lr_scheduler.ExponentialLR(o, gamma=0.97),
    ),
    "staircase": (
        schedules.exponential_decay(0.1, 15, 0.5, staircase=True),
        lambda o: lr_scheduler.StepLR(o, step_size=15, gamma=0.5),
    ),
    "exponential later, bounded": (
        schedules.exponential_decay(0.1, 10, 0.5, transition_begin=20, end_value=0.01),
        lambda o: lr_scheduler.LambdaLR(o, lambda count: max(0.5 ** (max(count - 20, 0) / 10), 0.1)),
    ),
    "piecewise": (
        schedules.piecewise_constant([0.1, 0.01, 0.001], [30, 80]),
        lambda o: lr_scheduler.MultiStepLR(o, milestones=[30, 80], gamma=0.1),
    ),
    "join": (
        schedules.join([schedules.linear(0.0, 0.1, 20), schedules.exponential_decay(0.1, 1, 0.9)], [20]),
        lambda o: lr_scheduler.LambdaLR(o, lambda count: count / 20 if count < 20 else 0.9 ** (count - 20)),
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedule_is_torch_scheduler(ours, theirs):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = theirs(optimizer)
    for count in range(100):
        found = ours(torch.tensor(count, dtype=torch.int32))
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-5)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["linear", "piecewise"])
def test_scheduled_training_is_that_of_torch(name):
    ours, theirs = SCHEDULES[name]
    found = run(optim.adam(ours), start())
    expected = run_torch(over(torch.optim.Adam, lr=0.1), start(), scheduler=theirs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "torch_class", "options"),
    [
        (optim.adam, torch.optim.Adam, {}),
        (optim.adamw, torch.optim.AdamW, {}),
        (optim.rmsprop, torch.optim.RMSprop, {}),
    ],
)
def test_a_huge_gradient_is_survived_as_torch_survives_it(make, torch_class, options):
    values, param = {"w": torch.ones(2)}, torch.ones(2, requires_grad=True)
    tx, optimizer = make(0.1, weight_decay=0.0), torch_class([param], lr=0.1, weight_decay=0.0, **options)
    state = tx.init(values)
    for size in (1e20, 1.0, 1.0):
        param.grad = torch.tensor([size, 1.0])
        optimizer.step()
        updates, state = tx.update({"w": param.grad}, state, values)
        values = optim.apply_updates(values, updates)
    torch.testing.assert_close(values["w"], param.detach(), rtol=1e-5, atol=1e-6)
