"""Peak memory by storage lifetimes, against the allocator events of the profiler and against bytes counted by hand."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fmp
from fmp import _compat
from tests.memory import peak_bytes

X, W = torch.randn(512, 16), torch.randn(16, 16) / 4
BIG, SMALL = X.nbytes, W.nbytes


def block(x, w):
    return torch.tanh(torch.tanh(x @ w) @ w)


# The profiler sees the states of random generators, which no op returns.
RANDOM_STATE = torch.get_rng_state().nbytes
LEAN = fmp.remat(block, preserve_rng_state=False)
KEEPING = fmp.remat(block, saveable=fmp.saveable.dots, preserve_rng_state=False)


def loss_of(block: Any) -> Callable[..., torch.Tensor]:
    return lambda w, x: block(block(x, w), w).sum()


def by_autograd(loss: Any) -> Any:
    def gradient(w, x):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(loss(w, x), w)

    return gradient


TRANSFORMS = {
    "forward": lambda loss: loss,
    "autograd": by_autograd,
    "grad": grad,
    "fmp.grad": fmp.grad,
    "fmp.value_and_grad": fmp.value_and_grad,
    "vmap(grad)": lambda loss: lambda w, x: vmap(grad(loss), (None, 0))(w, x[:64, None]),
    "jvp": lambda loss: lambda w, x: jvp(lambda w: loss(w, x), (w,), (w,)),
    "grad(grad)": lambda loss: grad(lambda w, x: grad(loss)(w, x).square().sum()),
    "jacrev": lambda loss: jacrev(lambda w, x: loss(w, x).expand(3)),
    "hessian": lambda loss: lambda w, x: hessian(lambda row: loss(w + row, x))(w[0]),
    "vmap(autograd)": lambda loss: (
        lambda w, x: by_autograd(lambda w, x: vmap(loss, (None, 0))(w, x[:, None]).sum())(w, x)
    ),
}
BLOCKS = {"plain": block, "remat": LEAN, "dots": KEEPING}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chain", BLOCKS)
def test_the_profiler_counts_the_same(transform, chain):
    call = TRANSFORMS[transform](loss_of(BLOCKS[chain]))
    expected = peak_bytes(lambda: call(W, X))
    measured = fmp.memory.peak(call, W, X)
    assert expected - measured in ([0] if chain == "plain" else [0, RANDOM_STATE])
    assert fmp.memory.peak(call, W, X, fake=True) == measured


@pytest.mark.parametrize("transform", ["forward", "grad", "fmp.grad", "vmap(grad)", "grad(grad)"])
def test_meta_and_fake_tensors_count_like_real_ones(transform):
    call = TRANSFORMS[transform](loss_of(block))
    expected = fmp.memory.peak(call, W, X)
    assert fmp.memory.peak(call, W.to("meta"), X.to("meta")) == expected
    with FakeTensorMode() as mode:
        w, x = mode.from_tensor(W), mode.from_tensor(X)
        assert fmp.memory.peak(call, w, x) == expected
    assert fmp.memory.peak(call, w, x) == expected


def test_chains_counted_by_hand():
    assert fmp.memory.peak(lambda x: x @ W, X) == BIG
    assert fmp.memory.peak(block, X, W) == 2 * BIG  # operand and result of each op
    assert fmp.memory.peak(lambda: [X + i for i in range(5)]) == 5 * BIG
    assert fmp.memory.peak(lambda: [X + 1 for i in range(5)][-1]) == 5 * BIG
    assert fmp.memory.peak(lambda: X.add(1).add_(1).mul_(2)) == BIG

    def in_turn():
        for _ in range(5):
            X.exp()

    assert fmp.memory.peak(in_turn) == BIG


def test_training_keeps_what_the_derivatives_need():
    w = W.clone().requires_grad_()

    def forward(x, depth):
        for _ in range(depth):
            x = torch.tanh(x @ w)
        return x

    more = fmp.memory.peak(forward, X, 6) - fmp.memory.peak(forward, X, 5)
    assert more == BIG  # the result of one more tanh; that of the product is dropped


def test_views_and_arguments_cost_nothing():
    def views(x, y):
        return x.t(), x[3:], x.view(-1), x.expand(2, *x.shape), y, x.detach(), torch.split(x, 4), x.unbind()

    assert fmp.memory.peak(views, X, W) == 0
    assert fmp.memory.peak(lambda x: x.add_(1), X.clone()) == 0
    assert fmp.memory.peak(lambda x: torch.add(x, 1, out=x), X.clone()) == 0
    assert fmp.memory.peak(lambda: None) == 0
    assert fmp.memory.peak(lambda tree: tree, {}) == 0
    assert fmp.memory.peak(lambda: torch.empty(0)) == 0


def test_a_part_keeps_all_of_its_storage():
    def parts(x):
        first = (x + 1)[:1]
        return first, x + 2

    assert fmp.memory.peak(parts, X) == 2 * BIG


def test_lists_of_results_and_no_results():
    def foreach(x):
        made = torch.ops.aten._foreach_add([x, x], 1.0)
        torch.ops.aten._foreach_mul_(made, 2.0)
        return made

    assert fmp.memory.peak(foreach, X) == 2 * BIG
    assert fmp.memory.peak(lambda x: torch.topk(x, 4), X) == 512 * 4 * (4 + 8)
    assert fmp.memory.peak(lambda x: torch.add(x, 1, out=torch.empty(0)), X) == BIG


def test_storages_that_are_resized():
    def grows():
        x = torch.empty(4)
        x.resize_(100)
        return x

    assert fmp.memory.peak(grows) == 400

    def shrinks():
        x, y = torch.empty(100), torch.empty(100)
        x.untyped_storage().resize_(0)
        x.size()
        x.detach()
        return y, torch.empty(100)

    assert fmp.memory.peak(shrinks) == 800


def test_tensors_made_of_data_and_complex_and_sparse_ones():
    assert fmp.memory.peak(lambda: torch.tensor([1.0] * 100)) == 400
    assert fmp.memory.peak(lambda x: torch.complex(x, x), X) == 2 * BIG
    indices, values = 2 * 8 * 16, 4 * 16
    assert fmp.memory.peak(lambda: torch.eye(16).to_sparse()) == 16 * 16 * 4 + indices + values


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc])
def test_compressed_sparse_tensors(convert):
    made = []
    live = fmp.memory.peak(lambda x: made.append(convert(x)), torch.eye(16))
    assert live >= 17 * 8 + 16 * 8 + 16 * 4
    assert fmp.memory.peak(lambda x: x * 2, made[0]) >= 16 * 4


def test_wrappers_of_tensors_count_what_they_wrap():
    pair = TwoTensor(X.clone(), X.clone())
    assert fmp.memory.peak(lambda x: x + 1, pair) == 2 * BIG


def test_garbage_of_before_is_no_memory_of_the_call():
    def cycle():
        held: list[Any] = [torch.empty(1000)]
        held.append(held)

    gc.disable()
    try:
        cycle()
        assert fmp.memory.peak(lambda x: (x + 1, gc.collect()), X) == BIG
        assert fmp.memory.peak(lambda: (cycle(), cycle())) == 8000
    finally:
        gc.enable()


def test_an_error_inside_leaves_nothing_on():
    def fails(x):
        x = x + 1
        raise KeyError("mine")

    for fake in (False, True):
        with pytest.raises(KeyError, match="mine"):
            fmp.memory.peak(fails, X, fake=fake)
        assert _compat.dispatch_modes() == []
    assert isinstance((X + 1).untyped_storage().data_ptr(), int)


def test_a_measurement_within_a_measurement_and_within_a_transform():
    inner = []

    def measured(x):
        inner.append(fmp.memory.peak(torch.exp, x))
        return x.exp().sum()

    assert fmp.memory.peak(measured, X) == BIG + 4
    vmap(grad(measured))(X[:, None])
    with torch.no_grad():
        measured(X)
    assert inner == [BIG] * 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": fmp.opt_level("O2", half_dtype=torch.bfloat16), "loss_scale": "dynamic"},
        {"accumulate": 4, "clip_norm": 1.0, "ema": 0.9},
    ],
)
def test_a_train_step(options):
    def loss(params, batch):
        out = block(batch, params["w"].to(batch.dtype)) + params["b"].to(batch.dtype)
        return out.float().square().mean()

    step = fmp.train_step(loss, fmp.optim.adamw(1e-3), **options)
    state = step.init({"w": W, "b": torch.zeros(16)})
    expected = peak_bytes(lambda: step(state, X))
    assert fmp.memory.peak(step, state, X) == pytest.approx(expected, rel=0.01)
    assert fmp.memory.peak(step, state, X, fake=True) == fmp.memory.peak(step, state, X)


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16, bias=False))
    model[3].weight = model[0].weight
    return model


def test_a_module_with_backward_and_statistics():
    def step(model, x):
        model.zero_grad()
        model(x).square().mean().backward()

    model = network()
    first, second = network_of(model), network_of(model)
    measured = fmp.memory.peak(step, first, X)
    assert measured == pytest.approx(peak_bytes(lambda: step(second, X)), rel=0.01)  # workspaces of BatchNorm
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fmp.memory.peak(step, model, X, fake=True) == measured
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in model.parameters())


def network_of(model: nn.Sequential) -> nn.Sequential:
    copy = network()
    copy.load_state_dict(model.state_dict())
    return copy


def test_gradients_that_are_there_are_added_to():
    def step(model, x):
        model(x).square().mean().backward()

    model = network()
    fresh = fmp.memory.peak(step, model, X, fake=True)
    step(model, X)
    again = fmp.memory.peak(step, model, X, fake=True)
    assert again == fmp.memory.peak(step, model, X)
    assert again <= fresh


def test_a_model_too_large_for_the_machine():
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(2**17, 2**17) for _ in range(8)]), torch.empty(2, 2**17)
    row, weights = x.nbytes, sum(parameter.nbytes for parameter in model.parameters())

    def step(model, x):
        model(x).sum().backward()

    with torch.no_grad():
        assert fmp.memory.peak(model, x, fake=True) == 2 * row
    assert fmp.memory.peak(model, x, fake=True) == 8 * row
    assert weights < fmp.memory.peak(step, model, x, fake=True) < 1.01 * weights
    assert all(parameter.is_meta for parameter in model.parameters())


def test_torch_utils_checkpoint_and_compiled_functions():
    def checkpointed(w, x):
        return checkpoint(block, x, w, use_reentrant=False, preserve_rng_state=False).sum()

    call = by_autograd(checkpointed)
    assert fmp.memory.peak(call, W, X) == peak_bytes(lambda: call(W, X))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    compiled(X, W)
    assert fmp.memory.peak(compiled, X, W) == fmp.memory.peak(block, X, W)
    assert torch.equal(compiled(X, W), block(X, W))
    assert fmp.memory.peak(compiled, X, W, fake=True) == fmp.memory.peak(block, X, W)


def test_higher_order_ops_count_their_results():
    def chosen(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    assert fmp.memory.peak(chosen, X) >= BIG


def test_the_mode_sees_what_other_modes_run():
    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            func(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def doubled(x):
        with Doubling():
            return x + 1

    assert fmp.memory.peak(doubled, X) >= BIG
