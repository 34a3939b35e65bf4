"""The bridge against torch.optim itself, and against a class in the style of another package."""

import re

import pytest
import torch
from torch._dynamo.exc import Unsupported

import fmp
from fmp import tree
from fmp.optim import apply_updates, from_torch, schedules

CASES = [
    (torch.optim.SGD, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.2}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.95)}),
    (torch.optim.Adadelta, {"rho": 0.8}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 5, "weight_decay": 0.1}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adafactor, {"weight_decay": 0.1}),
    (torch.optim.Muon, {}),
]
NOT_CASES = {"LBFGS", "SparseAdam", "Optimizer"}
every_case = pytest.mark.parametrize(
    ("cls", "options"),
    [
        pytest.param(cls, options, marks=[pytest.mark.mixed_dtypes] if cls is torch.optim.Muon else [])
        for cls, options in CASES
    ],
)


class SignMomentum(torch.optim.Optimizer):
    """What packages write: a Python count, state made at the first gradient, numbers compared and raised to powers."""

    def __init__(self, params, lr=0.1, beta=0.9, group_steps=False):
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0})
        self.group_steps = group_steps

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["mean"] = param.grad.clone()
                state["step"] += 1
                state["mean"].lerp_(param.grad, 1 - group["beta"])
                param.add_(state["mean"].sign(), alpha=-group["lr"] / state["step"] ** 0.5)
            group["steps"] += self.group_steps


def start(cls):
    shapes = {"a": (4, 3), "b": (3, 2)} if cls is torch.optim.Muon else {"a": (4, 3), "b": (5,), "c": ()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def randn(values):
    return tree.map(torch.randn_like, values)


def plain(cls, values, **options):
    twins = {name: value.clone().requires_grad_() for name, value in values.items()}
    return twins, cls(twins.values(), **options)


def assert_same_bits(a, b):
    assert tree.structure(a) == tree.structure(b)
    for (path, x), (_, y) in zip(tree.items(a), tree.items(b), strict=True):
        assert x is y or (x is not None and y is not None and torch.equal(x, y)), path


def test_every_class_of_torch_is_a_case():
    classes = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and name[0] != "_"}
    assert classes == {cls.__name__ for cls, _ in CASES} | NOT_CASES


@every_case
@pytest.mark.parametrize("holes", [False, True], ids=["all gradients", "some gradients"])
def test_bits_are_those_of_torch(cls, options, holes):
    values = start(cls)
    twins, optimizer = plain(cls, values, **options)
    tx = from_torch(cls, **options)
    state = tx.init(values)
    for step in range(20):
        grads = randn(values)
        if holes:
            grads["b" if step % 3 else "a"] = None
        for name, twin in twins.items():
            twin.grad = None if grads[name] is None else grads[name].clone()
        optimizer.step()
        updates, state = tx.update(grads, state, values)
        moved = apply_updates(values, updates)
        for name, twin in twins.items():
            # Two roundings, where a parameter passes close to zero.
            spacing = torch.finfo(torch.float32).eps * torch.maximum(values[name].abs(), twin.abs())
            assert ((moved[name] - twin).abs() <= spacing).all()
            keeps = (twin / values[name] >= 0.5) & (twin / values[name] <= 2)
            assert torch.equal(moved[name][keeps], twin[keeps])
        values = {name: twin.detach().clone() for name, twin in twins.items()}
    for name, twin in twins.items():
        assert optimizer.state[twin].keys() == {slot for slot in state.slots if state.slots[slot][name] is not None} | {
            slot for slot, value in optimizer.state[twin].items() if value is None
        }
        for slot, value in optimizer.state[twin].items():
            assert value is None or torch.equal(state.slots[slot][name].reshape(value.shape), value)


@every_case
def test_first_slots_are_torchs(cls, options):
    values = start(cls)
    slots = from_torch(cls, **options).init(values).slots
    shifted = {"prev", "mu_product", "sum", "step_size", "eta", "mu"}
    for name, column in slots.items():
        if name not in shifted:
            assert all(slot is None or not slot.any() for slot in tree.leaves(column)), name
    if cls is torch.optim.Adagrad:
        assert all((slot == 0.5).all() for slot in tree.leaves(slots["sum"]))


@pytest.mark.parametrize("kind", ["tensor", "schedule"])
def test_learning_rates_that_are_no_numbers(kind):
    values = start(torch.optim.AdamW)
    schedule = schedules.linear(0.5, 0.25, transition_steps=2)
    rates = [0.5, 0.375, 0.25] if kind == "schedule" else [0.5] * 3
    tx = from_torch(torch.optim.AdamW, lr=schedule if kind == "schedule" else torch.tensor(0.5))
    state = tx.init(values)
    expected_state = from_torch(torch.optim.AdamW, lr=0.5).init(values)
    for rate in rates:
        grads = randn(values)
        updates, state = tx.update(grads, state, values)
        expected, expected_state = from_torch(torch.optim.AdamW, lr=rate).update(grads, expected_state, values)
        assert_same_bits(updates, expected)


def test_a_class_of_another_package():
    values = start(SignMomentum)
    twins, optimizer = plain(SignMomentum, values)
    tx = from_torch(SignMomentum)
    state = tx.init(values)
    assert state.numbers == ("step",)
    for _ in range(20):
        grads = randn(values)
        for name, twin in twins.items():
            twin.grad = grads[name].clone()
        optimizer.step()
        previous = state
        updates, state = tx.update(grads, state, values)
        moved = apply_updates(values, updates)
        torch.testing.assert_close(moved, {name: twin.detach() for name, twin in twins.items()}, rtol=1e-6, atol=1e-7)
        in_vmap = torch.func.vmap(lambda grads, s=previous, v=values: tx.update(grads, s, v)[0])(
            tree.map(lambda grad: grad[None], grads)
        )
        torch.testing.assert_close(tree.map(lambda update: update[0], in_vmap), updates)
        values = {name: twin.detach().clone() for name, twin in twins.items()}
    assert all(state.slots["step"][name] == 20 for name in values)


def test_two_optimizers_in_one_compiled_function():
    values = start(torch.optim.Adam)
    compiled = torch.compile(lambda tx, *args: tx.update(*args)[0], backend="aot_eager", fullgraph=True)
    for betas in [(0.9, 0.999), (0.1, 0.2)]:
        tx = from_torch(torch.optim.Adam, lr=0.1, betas=betas)
        state = tx.init(values)
        _, state = tx.update(randn(values), state, values)
        grads = randn(values)
        torch.testing.assert_close(compiled(tx, grads, state, values), tx.update(grads, state, values)[0])


def loss_fn(params, batch):
    return ((batch @ params["w"].to(batch.dtype)) ** 2).mean()


def make_step(**options):
    policy = fmp.opt_level("O2", half_dtype=torch.bfloat16)
    return fmp.train_step(loss_fn, from_torch(torch.optim.AdamW, lr=0.1), policy=policy, **options)


@pytest.mark.parametrize("compile", [False, True])
def test_low_parameters_have_full_masters(compile):
    step = make_step()
    state = step.init({"w": torch.randn(3, 2)})
    assert state.params["w"].dtype == torch.bfloat16
    assert {slot["w"].dtype for slot in state.opt_state.slots.values()} == {torch.float32}
    run = torch.compile(step, backend="aot_eager", fullgraph=True) if compile else step
    for _ in range(3):
        state, _ = run(state, torch.randn(4, 3))
    assert torch.equal(state.params["w"], state.master["w"].to(torch.bfloat16))
    assert state.opt_state.slots["step"]["w"] == 3


def test_a_skipped_step_changes_nothing():
    step = make_step(loss_scale="dynamic")
    state, _ = step(step.init({"w": torch.randn(3, 2)}), torch.randn(4, 3))
    after, metrics = step(state, torch.full((4, 3), float("inf")))
    assert metrics.skipped
    assert_same_bits((after.params, after.master, after.opt_state), (state.params, state.master, state.opt_state))


@pytest.mark.parametrize(
    ("cls", "options"), [(torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}), (SignMomentum, {}), CASES[3]]
)
def test_a_checkpoint_resumes_with_the_same_bits(cls, options, tmp_path):
    values = start(cls)
    tx = from_torch(cls, **options)
    _, state = tx.update(randn(values), tx.init(values), values)
    fmp.checkpoint.save(state, tmp_path / "state")
    resumed = fmp.checkpoint.load(tx.init(values), tmp_path / "state")
    for _ in range(3):
        grads = randn(values)
        updates, state = tx.update(grads, state, values)
        again, resumed = tx.update(grads, resumed, values)
        assert_same_bits((updates, state), (again, resumed))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: from_torch(torch.optim.LBFGS), TypeError, "cannot take LBFGS.*evaluates the loss"),
        (lambda: from_torch(torch.optim.SparseAdam), TypeError, "sparse gradients only; use torch.optim.Adam"),
        (lambda: from_torch(torch.nn.Linear), TypeError, "optimizer_class must be a class such as"),  # pyright: ignore[reportArgumentType]
        (lambda: from_torch(torch.optim.Adam([torch.ones(1)])), TypeError, "got an instance of torch.optim.Adam; its"),  # pyright: ignore[reportArgumentType]
        (lambda: from_torch(torch.optim.Adam, learning_rate=0.1), TypeError, r"no option \['learning_rate'\].*'lr'"),
        (lambda: from_torch(torch.optim.Adam, lr=-1.0), ValueError, "lr must be at least 0.0"),
        (
            lambda: from_torch(torch.optim.Rprop, lr=torch.tensor(0.1)),
            ValueError,
            "Rprop keeps its first learning rate",
        ),
        (lambda: from_torch(torch.optim.Muon).init({"b": torch.ones(2)}), ValueError, "2D parameters"),
        (
            lambda: from_torch(SignMomentum, group_steps=True).init({"b": torch.ones(2)}),
            ValueError,
            r'changes param_groups\[0\]\["steps"\]',
        ),
    ],
)
def test_messages(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_what_cannot_be_differentiated_says_so():
    tx = from_torch(SignMomentum)
    values = {"a": torch.ones(2)}
    state = tx.init(values)
    with pytest.raises(TypeError, match="SignMomentum cannot be differentiated"):
        torch.func.grad(lambda grads: tx.update(grads, state, values)[0]["a"].sum())(values)


class Remembers(torch.optim.Optimizer):
    """Gradient descent that also writes to one more place, chosen by name."""

    def __init__(self, params, place="nothing"):
        super().__init__(params, {"factor": torch.tensor(0.5), "history": []})
        self.place, self.count, self.table, self.mean, self.all = place, 0, {"calls": [0]}, torch.zeros(2), []
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.5, momentum=0.5)
        # What refers to parameters may change with them.
        self.all = [self.param_groups[0]["params"], self.state, float("nan")]

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for param in group["params"]:
            if param.grad is not None:
                self.state[param].setdefault("mean", torch.zeros_like(param)).add_(param.grad)
                param.sub_(param.grad, alpha=0.5)
        if self.place == "count":
            self.count += 1
        elif self.place == "new":
            self.seen = True
        elif self.place == "table":
            self.table["calls"].append(1)
        elif self.place == "mean":
            self.mean.add_(1)
        elif self.place == "inner":
            self.inner.step()
        elif self.place == "factor":
            group["factor"].mul_(0.5)
        elif self.place == "history":
            group["history"].append(1)
        elif self.place == "global":
            self.state["global"] = torch.ones(())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("count", "self.count"),
        ("new", "self.seen"),
        ("table", "self.table"),
        ("mean", "self.mean"),
        ("inner", "self.inner"),
        ("factor", 'param_groups[0]["factor"]'),
        ("history", 'param_groups[0]["history"]'),
        ("global", "self.state['global']"),
    ],
)
def test_what_would_be_forgotten_is_refused(place, name):
    with pytest.raises(ValueError, match=f"a step of Remembers changes {re.escape(name)}, which is no part of the"):
        from_torch(Remembers, place=place).init({"a": torch.ones(2)})


def test_a_class_may_refer_to_its_parameters():
    values = {"a": torch.ones(2)}
    tx = from_torch(Remembers)
    updates, state = tx.update(values, tx.init(values), values)
    assert updates["a"].tolist() == [-0.5, -0.5]
    assert state.slots["mean"]["a"].tolist() == [1.0, 1.0]


def test_an_option_that_is_a_tensor_cannot_be_traced():
    values = {"a": torch.ones(2)}
    tx = from_torch(torch.optim.Adam, lr=0.5, eps=torch.tensor(1.0))
    state = tx.init(values)
    assert tx.update(values, state, values)[0]["a"].tolist() == [-0.25, -0.25]
    with pytest.raises(Unsupported, match="only lr may be a tensor, but eps is f32"):
        torch.compile(tx.update, backend="eager", fullgraph=True)(values, state, values)
    with pytest.raises(TypeError, match="only lr may be a tensor, but eps is f32"):
        torch.func.vmap(lambda eps: from_torch(torch.optim.Adam, eps=eps) and eps)(torch.ones(2))
