"""What a recomputation leaves out under a transform, nothing can read: where something does, or holds it, it is there.

Memory that nothing has written to is NaN here, so that whatever would read it shows.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vjp
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

import fmp
from fmp import _compat
from fmp.rematerialization.early_stop import ValueNeeded

X, W = torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(1, -2, 16).reshape(4, 4).sin()
COUNTS, SPARSE = torch.ones(4, 4), torch.eye(4).roll(1, 0).to_sparse().coalesce()


@pytest.fixture(autouse=True)
def nan_for_no_value():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(call):
    return grad(lambda x, w: call(x, w).sin().sum(), (0, 1))(X, W)


class ByNumpy(torch.autograd.Function):
    """Computes `x @ COUNTS` with a kernel of its own, and saves nothing."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return torch.from_numpy(x.detach().numpy() @ COUNTS.numpy())

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent @ COUNTS.T


class Handled(torch.Tensor):
    """Has its own linear layer, and its own maximum."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return ByNumpy.apply(args[0])
        if func is torch.Tensor.amax:
            return max(map(max, args[0].as_subclass(torch.Tensor).tolist()))
        return super().__torch_function__(func, types, args, kwargs or {})


def overridable(x):
    if has_torch_function((x,)):
        return handle_torch_function(overridable, (x,), x)
    return ByNumpy.apply(x)


def without_function_modes(x):
    with _compat.DisableTorchFunction():
        return ByNumpy.apply(x)


def without_dispatch_modes(x):
    with _disable_current_modes():
        return x.detach().abs()


def in_a_thread(x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: float(x.detach().abs().amax())).result()


HIDDEN = {
    "handler of an operand": lambda x, w: torch.tanh(F.linear(x @ w, COUNTS.as_subclass(Handled))),
    "handler reads": lambda x, w: x * (y := x @ w).as_subclass(Handled).amax() + y,
    "overridable": lambda x, w: torch.tanh(overridable(x @ w)),
    "given as a function": lambda x, w: F.triplet_margin_with_distance_loss(
        x @ w, x, w, distance_function=lambda a, b: (ByNumpy.apply(a) * b).sum(-1), margin=100.0, reduction="none"
    ),
    "no function modes": lambda x, w: without_function_modes(x @ w).tanh(),
    "no dispatch modes": lambda x, w: x * without_dispatch_modes(x @ w) + x @ w,
    "thread": lambda x, w: x * in_a_thread(y := x @ w) + y,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_first_pass_does_not_see(name):
    plain, lean = gradients(HIDDEN[name]), gradients(fmp.remat(HIDDEN[name]))
    torch.testing.assert_close(lean, plain, rtol=0, atol=0)


LOGGED = {
    "itself": lambda y: y,
    "detached": lambda y: y.detach(),
    "view": lambda y: y.detach()[1:],
    "mean": lambda y: y.detach().mean(),
}


@pytest.mark.parametrize("is_residual", [False, True])
@pytest.mark.parametrize("name", LOGGED)
def test_what_a_hook_appends_has_its_value(name, is_residual):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    logged, total = [], SimpleNamespace(value=torch.zeros(()), calls=0)

    def log(module, args, output):
        logged.append(LOGGED[name](output))
        total.value, total.calls = total.value + output.detach().mean(), total.calls + 1

    result = layers(X).detach()
    layers[2].register_forward_hook(log)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            y = fmp.remat(self.layers)(x)
            return x + y if is_residual else y

    model = Model()
    for _ in range(2):
        grad(lambda params: functional_call(model, params, X).sin().sum())(dict(model.named_parameters()))
    assert total.calls == len(logged) == 4  # no pass was given up
    for value in logged:
        torch.testing.assert_close(_compat.below_transforms(value), LOGGED[name](result), rtol=0, atol=0)
    torch.testing.assert_close(_compat.below_transforms(total.value), 4 * result.mean())


def second(calls, how):
    """A function that looks at a product in its second call and the fourth only."""

    def function(x, w):
        y = torch.tanh(x @ w) @ w
        calls.append(how(y) if len(calls) % 2 else None)
        return x + y

    return function


SECOND = {
    "repr": repr,
    "format": lambda y: f"{y}",
    "tolist": torch.Tensor.tolist,
    "pointer": lambda y: _compat.below_transforms(y).data_ptr() != 0,
    "storage": lambda y: _compat.below_transforms(y).untyped_storage().data_ptr() != 0,
    "copy": lambda y: _compat.below_transforms(y).clone().tolist(),
    "shared": lambda y: _compat.below_transforms(y).share_memory_().is_shared(),
    "function": lambda y: ByNumpy.apply(y.detach()).tolist(),
}


@pytest.mark.parametrize("name", SECOND)
def test_what_only_the_recomputation_reads(name):
    seen, expected = [], []
    torch.testing.assert_close(gradients(fmp.remat(second(seen, SECOND[name]))), gradients(second([], len)))
    gradients(fmp.remat(second(expected, SECOND[name]), determinism_check="none"))
    assert seen[1::2] == expected[1::2]
    assert "nan" not in str(seen)


def test_what_switches_the_dispatch_to_classes_off_gets_no_numbers():
    failed = []

    def read(y):
        try:
            with torch._C._DisableTorchDispatch():
                return y.tanh().isnan().any().item()
        except NotImplementedError as error:
            failed.append(error)
            raise

    gradients(fmp.remat(second([], read)))
    assert len(failed) == 1


def test_a_value_that_only_an_attempt_holds_cannot_be_read():
    held = SimpleNamespace(values=[], calls=0)

    def function(x, w):
        y = torch.tanh(x @ w) @ w
        held.calls += 1
        if held.calls == 2:
            held.values.append(y)
        return x + y

    gradients(fmp.remat(function))
    assert held.calls == 3
    with pytest.raises(ValueNeeded, match="hold that in the first pass, too"):
        _compat.below_transforms(held.values[0]).sum()


def test_a_pass_that_fails_does_not_matter_to_one_in_another_thread():
    me, first_is_in, second_is_in, first_is_done = threading.local(), *[threading.Event() for _ in range(3)]

    def function(x, w):
        who = getattr(me, "who", "")
        if who == "second":
            second_is_in.set()
            first_is_done.wait(5)
        y = torch.tanh(x @ w) @ w
        y.register_hook(lambda cotangent: cotangent * y.detach().sign())
        if who == "first":
            first_is_in.set()
            second_is_in.wait(5)
        return x + y

    def pull_as(who):
        me.who = who
        if who == "second":
            first_is_in.wait(5)
        found = pull(torch.ones(()))
        if who == "first":
            first_is_done.set()
        return found

    expected = gradients(function)
    lean = fmp.remat(function)
    pull = vjp(lambda x, w: lean(x, w).sin().sum(), X, W)[1]
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(pull_as, ["first", "second"]):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def made_inside(x):
    return torch.sparse_coo_tensor(SPARSE.indices(), x[0].detach(), (4, 4), check_invariants=False)


WITH_SPARSE = {
    "product of it": lambda x, w: torch.relu(torch.sparse.mm(SPARSE, x @ w)),
    "beside": lambda x, w: torch.sparse.mm(SPARSE, torch.tanh(x @ w)) + x @ w,
    "made inside": lambda x, w: x @ w + x * made_inside(x).to_dense(),
    "made of it": lambda x, w: x * (y := x @ w).detach().to_sparse().to_dense() + y,
    "added": lambda x, w: x * (SPARSE + (y := x @ w).detach().to_sparse()).to_dense() + y,
}


@pytest.mark.parametrize("name", WITH_SPARSE)
def test_sparse_tensors(name):
    plain, lean = gradients(WITH_SPARSE[name]), gradients(fmp.remat(WITH_SPARSE[name]))
    torch.testing.assert_close(lean, plain, rtol=0, atol=0)


def test_a_value_that_is_held_costs_no_call():
    log = SimpleNamespace(calls=0, last=None)

    def function(x, w):
        log.calls += 1
        y = torch.tanh(x @ w) @ w
        log.last = y.detach()
        return x + y

    pull = vjp(lambda x: fmp.remat(function)(x, W).sin().sum(), X)[1]
    for calls in (2, 3, 4):
        pull(torch.ones(()))
        assert log.calls == calls


def test_after_an_attempt_has_failed_each_pull_takes_one_call():
    calls = []

    def function(x, w):
        y = torch.tanh(x @ w) @ w
        calls.append(None)
        return x + (y.sin() * 0 + y if len(calls) == 2 else y)

    pull = vjp(lambda x: fmp.remat(function)(x, W).sin().sum(), X)[1]
    for count in (3, 4, 5):
        pull(torch.ones(()))
        assert len(calls) == count


RESULTS = {
    "one": lambda x, y: y,
    "sum": lambda x, y: x + y,
    "view": lambda x, y: y.view(16),
    "with its view": lambda x, y: (y, y.T),
    "two views": lambda x, y: {"rows": y[1:], "columns": y[:, 1:]},
    "twice": lambda x, y: [x + y, y, y],
    "detached": lambda x, y: (y, y.detach()),
    "with others": lambda x, y: (y, x, 3, x.argmax(), x + 1),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", RESULTS)
def test_what_only_the_result_holds_is_left_out(name, depth, monkeypatch):
    attempts = []
    made = fmp.rematerialization.early_stop.Attempt.__init__
    monkeypatch.setattr(
        fmp.rematerialization.early_stop.Attempt,
        "__init__",
        lambda self, *args: (attempts.append(self), made(self, *args))[-1],
    )

    def loss(call):
        def of(x, w):
            leaves = fmp.tree.leaves(call(x, w))
            return sum(
                leaf.sin().sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            )

        return of

    def function(x, w):
        return RESULTS[name](x, torch.tanh(x @ w) @ w)

    found, expected = [grad(loss(call), (0, 1)) for call in (fmp.remat(function), function)]
    xs = torch.stack([X, X.sin()])
    if depth == 2:
        found, expected = [torch.func.vmap(each, (0, None)) for each in (found, expected)]
    torch.testing.assert_close(found(xs if depth == 2 else X, W), expected(xs if depth == 2 else X, W))
    assert len(attempts) == 1
    assert not attempts[0].has_failed()
