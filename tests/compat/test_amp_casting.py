"""Apex 1.9 to 1.11: O1's casts, registrations and decorators, the cast cache, and recurrent networks."""

import functools
import multiprocessing
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fmp
from fmp import _compat
from fmp.compat import amp
from fmp.policy.caster import casters

HALVES = [torch.float16, torch.bfloat16]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
X = torch.ones(2, 2)


def start(model: Any = None, optimizers: Any = None, **kwargs: Any) -> Any:
    defaults = {"opt_level": "O1", "half_dtype": BF16, "verbosity": 0}
    return amp.initialize(nn.Linear(2, 2) if model is None else model, optimizers, **defaults | kwargs)


# --- 1.9


@pytest.mark.parametrize("half", HALVES)
def test_functions_run_in_the_dtype_of_their_list(half):
    start(half_dtype=half)
    low = X.to(half)
    assert (X @ X).dtype == F.linear(X, X).dtype == torch.mm(X.double(), X).dtype == half
    assert low.softmax(0).dtype == low.sum().dtype == low.pow(2).dtype == low.cpu().dtype == F32
    assert F.mse_loss(low, low).dtype == F32
    assert (low + X).dtype == torch.cat([low, X]).dtype == F32
    assert low.relu().dtype == half
    assert X.relu().dtype == F32
    assert low.clone().add_(X).dtype == half
    with pytest.raises(fmp.BannedOpError):
        low.exp_()
    advice = r"_with_logits, or before amp\.initialize .*register_float_function.* amp\.disable_casts\(\)"
    with pytest.raises(NotImplementedError, match=advice):
        F.binary_cross_entropy(low, low)
    with amp.disable_casts():
        assert F.binary_cross_entropy(torch.sigmoid(X.float()), torch.ones_like(X)).dtype == F32
    amp.shutdown()
    assert (X @ X).dtype == F32
    assert not casters()


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_other_levels_cast_no_functions(level):
    start(opt_level=level)
    assert (X @ X).dtype == F32


def test_patch_torch_functions_false_leaves_functions_alone():
    start(patch_torch_functions=False)
    assert (X @ X).dtype == F32


def test_disable_casts_and_exceptions_in_it():
    start()

    def failing() -> None:
        with amp.disable_casts():
            assert (X @ X).dtype == F32
            with amp.disable_casts():
                pass
            assert (X @ X).dtype == F32
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        failing()
    assert (X @ X).dtype == BF16
    amp.shutdown()
    with amp.disable_casts():
        assert (X @ X).dtype == F32


def test_autocast_switched_off_does_not_stop_the_casting():
    start()
    with torch.autocast("cpu", enabled=False):
        assert (X @ X).dtype == BF16


def test_a_step_is_not_cast():
    seen = []

    class Optimizer(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            seen.append((X @ X).dtype)
            if closure is not None:
                with torch.enable_grad():
                    closure()

    model = nn.Linear(2, 2)
    optimizer = Optimizer(model.parameters(), lr=0.1)
    start(model, optimizer)
    optimizer.step()
    assert seen == [F32]
    assert (X @ X).dtype == BF16
    optimizer.step(lambda: seen.append(model(X).dtype))
    assert seen[2:] == [BF16]
    assert (X @ X).dtype == BF16


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_registered_functions_are_consumed_by_one_session(name):
    low = X.to(BF16)
    amp.register_float_function(torch, name)
    start(opt_level="O2")  # does not cast, and so leaves it
    amp.shutdown()
    start()
    assert getattr(low, name)().dtype == getattr(torch, name)(low).dtype == getattr(F, name)(low).dtype == F32
    amp.shutdown()
    start()
    assert getattr(low, name)().dtype == BF16


def test_registrations_of_each_kind():
    amp.register_half_function(torch.Tensor, "relu")
    amp.register_promote_function(torch, "softmax")
    amp.register_float_function(F, "binary_cross_entropy")
    start()
    low = X.to(BF16)
    assert X.relu().dtype == BF16
    assert low.softmax(0).dtype == BF16
    assert F.binary_cross_entropy(low, low).dtype == F32


def test_what_cannot_be_registered():
    with pytest.raises(ValueError, match="no_such_function"):
        amp.register_half_function(torch, "no_such_function")
    with pytest.raises(TypeError, match="decorate"):
        amp.register_float_function(pytest, "raises")
    start()
    assert (X @ X).dtype == BF16
    with pytest.raises(RuntimeError, match="before"):
        amp.register_float_function(torch, "relu")


def test_decorators_cast_arguments_and_leave_what_is_inside_to_the_rules():
    low, ids = X.to(BF16), torch.arange(2)

    def dtypes(a: Any, b: Any, *, more: Any) -> Any:
        assert ids is more["ids"]
        return a.dtype, b[0].dtype, more["x"].dtype, (a @ a).dtype

    half, full, widest = (
        decorate(dtypes) for decorate in (amp.half_function, amp.float_function, amp.promote_function)
    )
    more = {"x": low, "ids": ids}
    for function in (half, full, widest):
        assert function(X, [low], more=more) == (F32, BF16, BF16, F32)
        assert function.__name__ == "dtypes"
    start()
    assert half(X, [low], more=more) == (BF16, BF16, BF16, BF16)
    assert full(X, [low], more=more) == (F32, F32, F32, BF16)
    assert widest(low, [low], more=more) == (BF16, BF16, BF16, BF16)
    assert widest(low, [X], more=more) == (F32, F32, F32, BF16)
    with amp.disable_casts():
        assert half(X, [low], more=more) == (F32, BF16, BF16, F32)


def test_decorators_pass_on_what_has_no_tensors():
    @amp.promote_function
    def add(a: int, b: int) -> int:
        return a + b

    start()
    assert add(1, 2) == 3


def test_methods_of_every_kind_can_be_decorated():
    class Layer:
        @amp.half_function
        def method(self, x: Tensor) -> torch.dtype:
            return x.dtype

        @staticmethod
        @amp.half_function
        def inside(x: Tensor) -> torch.dtype:
            return x.dtype

        @amp.half_function
        @staticmethod
        def outside(x: Tensor) -> torch.dtype:
            return x.dtype

        @amp.half_function
        @classmethod
        def of_class(cls, x: Tensor) -> torch.dtype:
            assert cls is Layer
            return x.dtype

    start(half_dtype="bf16")
    layer = Layer()
    for call in (layer.method, layer.inside, layer.outside, Layer.outside, layer.of_class, Layer.of_class):
        assert call(X) == BF16


def test_functions_of_every_kind_can_be_decorated():
    start(half_dtype="bf16")
    for fn in (torch.relu, lambda x: x, functools.partial(torch.mul, 2), torch.nn.functional.relu, nn.Identity()):
        assert amp.half_function(fn)(X).dtype == BF16
    assert amp.half_function(len)(X) == len(X)
    no_functions: list[Any] = [None, 3, "relu"]
    for no_function in no_functions:
        with pytest.raises(TypeError, match=r"amp\.half_function"):
            amp.half_function(no_function)


def test_custom_functions_in_a_decorated_call():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert x.dtype == F32
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * grad

    double = amp.float_function(Double.apply)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start(model, optimizer, loss_scale=8.0)
    output = model(X)
    assert output.dtype == BF16
    with amp.scale_loss(double(output).sum(), optimizer) as scaled:
        scaled.backward()
    assert model.bias.grad is not None
    assert torch.equal(model.bias.grad, torch.full((2,), 4.0))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("differentiate", [Tensor.backward, torch.autograd.backward])
def test_recomputation_in_backward_is_cast(reentrant, differentiate):
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start(model, optimizer, loss_scale=8.0)
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        optimizer.zero_grad()
        output: Any = run(X.clone().requires_grad_())
        with amp.scale_loss(output.float().sum(), optimizer) as scaled:
            differentiate(scaled)
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)


def test_functions_called_in_a_backward_pass_are_cast():
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append((X @ X).dtype)
            return grad

    start()
    x = X.clone().requires_grad_()
    Looks.apply(x).sum().backward()
    torch.autograd.grad(Looks.apply(x).sum(), x)
    with amp.disable_casts():
        Looks.apply(x).sum().backward()
    assert seen == [BF16, BF16, F32]


def test_shutdown_takes_its_mode_out_from_under_another_one():
    class Other(TorchFunctionMode):
        pass

    start()
    with Other() as other:
        amp.shutdown()
        assert _compat.function_modes()[-1] is other
        assert not casters()
    assert other not in _compat.function_modes()


def test_a_session_belongs_to_one_thread():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start(model, optimizer)
    errors = []

    def elsewhere() -> None:
        for call in (lambda: amp.scale_loss(X.sum(), optimizer).__enter__(), amp.shutdown):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert ["thread" in error for error in errors] == [True, True]
    assert (X @ X).dtype == BF16


# --- 1.10, Apex's test of train, eval, train


class Cached(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype):
        super().__init__()
        self.kind = kind
        shape = (8, 8) if kind == "low" else (2, 8)
        self.weight = nn.Parameter(torch.arange(64 if kind == "low" else 16, dtype=dtype).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        if self.kind == "low":
            return torch.mm(torch.mm(x, w), w).sum()
        if self.kind == "full":
            return (x + torch.pow(w, 2) + torch.pow(w, 2)).sum()
        return ((x * w) * w).sum()


@pytest.mark.parametrize("kind", ["low", "full", "promote"])
@pytest.mark.parametrize("half", HALVES)
def test_training_evaluation_and_training_see_the_weights_of_now(kind, half):
    model = Cached(kind, F32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start(model, optimizer, half_dtype=half, loss_scale=4.0)
    x = torch.ones(2, 8)
    for training in (True, False, True, False, False, True):
        if not training:
            with torch.no_grad():
                before = model(x)
                model.weight.sub_(1.0)
                after = model(x)
                assert not torch.equal(before, after) or not before.isfinite()
            continue
        optimizer.zero_grad()
        with amp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward()
        weight = model.weight.detach().requires_grad_()
        rounded = weight.to(half).float() if kind == "low" else weight
        if kind == "low":
            first = x @ rounded
            first = first.to(half).float()
            (first @ rounded).sum().backward()
        elif kind == "full":
            (2 * rounded**2).sum().backward()
        else:
            ((x * rounded) * rounded).sum().backward()
        assert model.weight.grad is not None
        assert weight.grad is not None
        assert model.weight.grad.dtype == F32
        rtol = 0.02 if kind == "low" and half == BF16 else 0.002 if kind == "low" else 0.0
        torch.testing.assert_close(model.weight.grad, weight.grad, rtol=rtol, atol=0.0)
        with torch.no_grad():
            model.weight.sub_(1.0)


def test_first_gradients_are_those_that_apex_expects():
    model = Cached("low", F32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start(model, optimizer, half_dtype=F16, loss_scale=4.0)
    output = model(torch.ones(2, 8))
    with amp.scale_loss(output, optimizer) as scaled:
        scaled.backward()
    row = torch.arange(8.0) * 128 + 504
    expected = row + 16 * torch.arange(8.0)[:, None]
    torch.testing.assert_close(model.weight.grad, expected, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_is_cast_anew_after_a_step(fused):
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    start(model, optimizer, loss_scale=1.0)
    outputs = []
    for _ in range(2):
        outputs.append(model(X.to(BF16)))
        with torch.no_grad():
            for _ in range(2):
                outputs.append(model(X.to(BF16)))
        optimizer.zero_grad()
        with amp.scale_loss(outputs[-3].sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert torch.equal(outputs[1], outputs[2])
    assert not torch.equal(outputs[2], outputs[4])
    assert torch.equal(outputs[4], outputs[5])


class CountCasts(TorchDispatchMode):
    def __init__(self, source: torch.dtype):
        super().__init__()
        self.source = source
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].dtype == self.source
        return func(*args, **(kwargs or {}))


def test_a_weight_that_is_used_twice_is_cast_once_until_the_block_ends():
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start(model, optimizer, loss_scale=2.0)
    x = X.to(BF16)
    for _ in range(2):
        with CountCasts(F32) as casts:
            loss = model(x) * model(x)
        assert casts.count == 1
        with amp.scale_loss(loss.float().sum(), optimizer) as scaled:
            scaled.backward()


def test_writes_through_data_are_seen():
    model = nn.Linear(2, 2)
    start(model)
    with torch.no_grad():
        before = model(X)
        model.weight.data.zero_()
        model.bias.data.zero_()
        assert before.any()
        assert not model(X).any()


# --- 1.11


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_run_in_half_and_train(half, cell):
    first, model = nn.Linear(3, 3), cell(3, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *model.parameters()], lr=0.1)
    start([first, model], optimizer, half_dtype=half, loss_scale=8.0)
    state = None
    outputs = []
    for _ in range(3):
        state = model(first(torch.randn(2, 3)), state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    assert {output.dtype for output in outputs} == {half}
    with amp.scale_loss(torch.stack(outputs).sum(), optimizer) as scaled:
        scaled.backward()
    assert all(p.grad is not None and p.grad.dtype == F32 and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("packed", [False, True])
def test_sequences_after_a_half_layer_run_in_half_and_train(half, layer, packed):
    first, model = nn.Linear(3, 3), layer(3, 4, num_layers=2, bidirectional=True)
    optimizer = torch.optim.SGD([*first.parameters(), *model.parameters()], lr=0.1)
    start([first, model], optimizer, half_dtype=half, loss_scale=8.0)
    x = first(torch.randn(5, 2, 3))
    assert x.dtype == half
    x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3])) if packed else x
    output, _ = model(x)
    output = nn.utils.rnn.pad_packed_sequence(output)[0] if packed else output
    assert output.dtype == half
    with amp.scale_loss(output.float().square().sum(), optimizer) as scaled:
        scaled.backward()
    assert all(p.grad is not None and p.grad.any() for p in [*first.parameters(), *model.parameters()])


def test_a_sequence_is_that_of_its_rounded_weights():
    model = nn.LSTM(3, 4)
    half = nn.LSTM(3, 4).bfloat16()
    half.load_state_dict(model.state_dict())
    start(model)
    x = torch.randn(5, 2, 3)
    output, _ = model(x)
    with amp.disable_casts():
        expected, _ = half(x.to(BF16))
    assert torch.equal(output, expected)


# --- 1.9: where casting is not to be, and where it is to come back


class FailingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert (X @ X).dtype == F32  # a step is not cast
        if closure is not None:
            closure()
            assert (X @ X).dtype == F32
        raise ArithmeticError


@pytest.mark.parametrize("closure", [None, lambda: X @ X])
def test_casting_is_on_again_right_after_a_step_that_raises(closure):
    model = nn.Linear(2, 2)
    optimizer = FailingOptimizer(model.parameters(), lr=0.1)
    start(model, optimizer)
    seen = amp.half_function(lambda tensor: tensor.dtype)
    for function in (lambda: (X @ X).dtype, lambda: seen(X), lambda: F.linear(X, X).dtype):
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                optimizer.step(closure)
        assert function() == BF16
        with amp.disable_casts():
            assert function() == F32
        assert function() == BF16


class Products(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        decorated = amp.half_function(lambda tensor: tensor + 0.0)
        return torch.tensor([(X @ X).dtype == BF16, decorated(X).dtype == BF16])


def test_other_processes_are_not_cast():
    start()
    loader = torch.utils.data.DataLoader(Products(), num_workers=1, multiprocessing_context="fork")
    assert [batch.tolist() for batch in loader] == [[[False, False]]] * 2
    assert Products()[0].tolist() == [True, True]
    assert (X @ X).dtype == BF16


def test_a_session_belongs_to_one_process():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start(model, optimizer)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def elsewhere() -> None:
        try:
            with amp.scale_loss(model(X).sum(), optimizer):
                pass
        except RuntimeError as error:
            queue.put(str(error))

    process = context.Process(target=elsewhere)
    process.start()
    assert "train in the process" in queue.get(timeout=60)
    process.join()


@pytest.mark.parametrize("recorded", [True, False])
def test_casts_go_with_their_weights(recorded):
    start()
    weights = []
    with torch.set_grad_enabled(recorded):
        for _ in range(3):
            weight = nn.Parameter(torch.ones(2, 2))
            weights.append(weakref.ref(weight))
            output = F.linear(X, weight)
            assert output.dtype == BF16
            again = F.linear(X, weight)
            assert again.requires_grad == recorded
    del weight, output, again
    assert [reference() for reference in weights] == [None] * 3
