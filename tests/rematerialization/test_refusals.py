"""What remat refuses, and what the errors say."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.utils.checkpoint import CheckpointError

import fmp
from tests.versions import BEFORE_2_13

X = torch.linspace(-1.0, 1.0, 4)


def under_grad(f):
    return grad(lambda x: f(x).sum())(X.clone())


def plainly(f):
    return f(X.clone())


@pytest.mark.parametrize("run", [under_grad, plainly])
def test_a_changed_argument(run):
    with pytest.raises(fmp.RematError, match=r"changed its argument 0, f32\[4\], in place.*Return the new value"):
        run(fmp.remat(lambda x: x.mul_(2)))


@pytest.mark.parametrize("run", [under_grad, plainly])
def test_a_changed_buffer_of_batch_norm(run):
    norm = nn.BatchNorm1d(4)
    with pytest.raises(fmp.RematError, match=r"the module's (running_mean|num_batches_tracked).*fmp.functionalize"):
        run(lambda x: fmp.remat(norm)(x.expand(3, 4) * torch.ones(3, 4)))


@pytest.mark.parametrize("run", [under_grad, plainly])
def test_a_replaced_buffer(run):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return x * self.count

    with pytest.raises(fmp.RematError, match="gave the module's count a new value"):
        run(fmp.remat(Counting()))


def test_a_changed_number_of_results():
    lengths = iter([1, 2])
    f = fmp.remat(lambda x: [torch.sin(x)] * next(lengths))
    with pytest.raises(fmp.RematError, match="returned 1 leaves at first and 2"):
        grad(lambda x: f(x)[0].sum())(X)


@pytest.mark.parametrize("check", ["default", "bitwise"])
def test_a_changed_shape(check):
    rows = iter([1, 3])
    f = fmp.remat(lambda x: {"y": torch.sin(x).expand(next(rows), 4)}, determinism_check=check)
    with pytest.raises(fmp.RematError, match=r"result 'y' was f32\[1,4\] on cpu at first and f32\[3,4\] on cpu when"):
        grad(lambda x: f(x)["y"].sum())(X)


def test_changed_bits():
    factors = iter([1.0, 2.0] * 2)
    f = fmp.remat(lambda x: torch.sin(x) * next(factors), determinism_check="bitwise")
    with pytest.raises(fmp.RematError, match=r"was -0.8414\d* at \(0,\) at first and -1.68\d* when"):
        grad(lambda x: f(x).sum())(X)
    with pytest.raises(fmp.RematError, match="at first and"):
        f(X.clone().requires_grad_()).sum().backward()


def test_the_saved_tensor_that_changed_without_a_transform():
    rows = iter([1, 3])
    f = fmp.remat(lambda x: torch.sin(torch.sin(x).expand(next(rows), 4)).sum(0))
    with pytest.raises(CheckpointError, match=r"(?s)position 1:.*'shape': torch.Size\(\[1, 4\]\).*\(\[3, 4\]\)"):
        f(X.clone().requires_grad_()).sum().backward()


def test_a_changed_dtype():
    dtypes = iter([torch.float32, torch.float64])
    f = fmp.remat(lambda x: (torch.sin(x), {"z": torch.cos(x).to(next(dtypes))}))
    with pytest.raises(fmp.RematError, match=r"result '1/z' was f32\[4\] on cpu at first and f64\[4\] on cpu when"):
        grad(lambda x: f(x)[1]["z"].sum())(X)


def changing(*operations):
    """A function that calls another operation each time."""
    remaining = iter(operations)

    def function(x):
        y = torch.tanh(x)
        return next(remaining)(y)

    return function


@pytest.mark.parametrize("transform", [lambda f: grad(f)(X), lambda f: vmap(grad(f))(torch.stack([X, X]))])
def test_debug_shows_where_the_passes_part(transform):
    f = fmp.remat(changing(torch.sin, lambda y: torch.cos(y)[:2]), debug=True)
    with pytest.raises(fmp.RematError, match="the result was") as raised:
        transform(lambda x: f(x).sum())
    report = str(raised.value)
    assert "The passes part at op 2:" in report
    first, again = [line for line in report.splitlines() if line.startswith(("  at first: ", "  again: "))]
    assert "aten.sin.default(f32[" in first
    assert "aten.cos.default(f32[" in again
    assert "test_refusals.py:" in again
    assert "in <lambda>" in again
    assert report.count("aten.tanh.default") == 2  # once in the list of each pass


def test_debug_shows_changed_numbers():
    factors = iter([1.0, 2.0])
    f = fmp.remat(lambda x: torch.sin(x) * next(factors), determinism_check="bitwise", debug=True)
    with pytest.raises(
        fmp.RematError, match=r"(?s)at first: aten.mul.Tensor\(f32\[4\], 1.0\).*again: .*f32\[4\], 2.0\)"
    ):
        f(X.clone().requires_grad_()).sum().backward()


def test_debug_if_a_value_was_changed():
    class Box:
        scale = torch.ones(4)

    def f(x):
        return torch.sin(x) * Box.scale

    vjp: Any = torch.func.vjp
    y, pull = vjp(fmp.remat(f, determinism_check="bitwise", debug=True), X)
    Box.scale = torch.zeros(4)
    with pytest.raises(fmp.RematError, match="Both passes ran the same ops: a value that they read must have changed"):
        pull(torch.ones_like(y))


def test_debug_of_torch_without_a_transform():
    f = fmp.remat(changing(lambda y: torch.sin(y.sin()), lambda y: torch.sin(y[:2].cos())), debug=True)
    with pytest.raises(CheckpointError, match=r"(?s)aten.sin.*aten.cos"):
        f(X.clone().requires_grad_()).sum().backward()


def test_debug_changes_nothing_else():
    f = lambda x: (torch.tanh(x[None] @ x[:, None]) * torch.rand(1)).sum()
    for saveable in (fmp.saveable.nothing, fmp.saveable.dots):
        results = []
        for debug in (False, True):
            torch.manual_seed(1)
            lean = fmp.remat(f, saveable=saveable, debug=debug, determinism_check="bitwise")
            results.append(grad(lambda x, lean=lean: grad(lean)(x).square().sum())(X))
        assert torch.equal(*results)


def test_no_check():
    factors = iter([1.0, 2.0])
    f = fmp.remat(lambda x: torch.sin(x) * next(factors), determinism_check="none")
    assert torch.equal(grad(lambda x: f(x).sum())(X), 2 * torch.cos(X))


def test_a_kept_value_that_does_not_occur_again():
    calls = iter([True, False])
    f = fmp.remat(lambda x: torch.tanh(x) if next(calls) else torch.sin(x), saveable=lambda op, args: "tanh" in str(op))
    with pytest.raises(fmp.RematError, match=r"call 1 of aten.tanh.default was kept at first, and did not occur"):
        under_grad(f)


def test_a_kept_value_that_is_changed_later():
    def changed(x):
        y = fmp.remat(lambda x: torch.sin(x).cos(), saveable=lambda op, args: op is torch.ops.aten.cos.default)(x)
        return y.mul_(2).sin()

    with pytest.raises(fmp.RematError, match=r"aten.cos.default returned was kept, and was changed in place after"):
        under_grad(changed)


@pytest.mark.parametrize("run", [under_grad, lambda f: f(X.clone().requires_grad_())])
def test_a_named_value_that_was_changed_before(run):
    f = fmp.remat(lambda x: fmp.checkpoint_name(torch.sin(x).mul_(2), "y"), saveable=fmp.saveable.only_names("y"))
    with pytest.raises(fmp.RematError, match="'y' was changed in place after"):
        run(f)


def test_random_numbers_under_vmap_need_its_permission():
    f = fmp.remat(lambda x: torch.nn.functional.dropout(x).sum())
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(grad(f))(torch.stack([X, X]))


ANY: Any = fmp.remat


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ANY(3), TypeError, "transforms a function, got 3"),
        (lambda: ANY(torch.sin, saveable="dots"), TypeError, "got 'dots'"),
        (lambda: ANY(torch.sin, saveable=fmp.saveable.only_names), TypeError, "only_names makes a policy"),
        (lambda: ANY(torch.sin, determinism_check="values"), ValueError, "got 'values'"),
        (lambda: fmp.saveable.only_names("a", 3), TypeError, "only_names takes names, each a string, got 3"),  # pyright: ignore
        (lambda: fmp.checkpoint_name(X, 3), TypeError, "string as the name, got 3"),  # pyright: ignore
        (lambda: fmp.checkpoint_name(3, "x"), TypeError, "names a tensor, got int"),  # pyright: ignore
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: torch.eye(4).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "torch.sparse_bsr"),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)]),
            "nested",
            marks=pytest.mark.skipif(BEFORE_2_13, reason="no torch.autograd.Function takes these before torch 2.13"),
        ),
    ],
)
def test_a_layout_that_transforms_cannot_wrap(make, layout):
    held = make()
    for f in (fmp.remat(lambda x, held: x.sin()), fmp.remat(lambda x, held: x.sin(), saveable=fmp.saveable.dots)):
        with pytest.raises(fmp.RematError, match=rf"its argument 1 is {layout}, which no transform"):
            grad(lambda x, f=f: f(x, held).sum())(X)
        assert plainly(lambda x, f=f: f(x, held)).shape == (4,)


def test_sparse_coo_operands():
    held = torch.eye(4).to_sparse()
    for check in ("default", "bitwise"):
        f = fmp.remat(lambda x, held: ((held @ x[:, None]).sin().sum(), held), determinism_check=check)
        assert torch.equal(grad(lambda x, f=f: f(x, held)[0])(X), torch.cos(X))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("saveable", [fmp.saveable.nothing, fmp.saveable.dots], ids=["nothing", "dots"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_attribute_of_an_object_is_refused_under_every_policy(saveable, debug, depth):
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, x):
            return torch.tanh(x * self.factor)

    def loss(w):
        scale = Scale(w)
        return fmp.remat(lambda x: scale(x), saveable=saveable, debug=debug)(w * 2).sum()

    for _ in range(depth - 1):
        loss = (lambda inner: lambda w: torch.func.grad(inner)(w).sum())(loss)
    with pytest.raises(fmp.RematError, match="pass it as an argument"):
        torch.func.grad(loss)(torch.ones(3))


def test_an_attribute_of_an_object_is_refused_inside_of_a_transform_of_the_function():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

    def loss(w):
        scale = Scale(w)
        inner = torch.func.grad(lambda x: torch.tanh(x * scale.factor).sum())
        return fmp.remat(lambda x: inner(x))(w * 2).sum()

    with pytest.raises(fmp.RematError, match="pass it as an argument"):
        torch.func.grad(loss)(torch.ones(3))
