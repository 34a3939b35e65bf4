"""What a policy keeps is not computed again."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacrev, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fmp
from tests.bits import same_bits

X, W = torch.linspace(-1.0, 1.0, 12).reshape(3, 4), torch.linspace(0.5, 2.0, 16).reshape(4, 4)


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))

    def count(self, *names):
        return sum(name in names for name in self.names)


def named(x, w):
    y = fmp.checkpoint_name((x @ w)[:, :2], "product")  # a view of what is kept
    return torch.tanh(fmp.checkpoint_name(torch.sin(y), "sine")).sum()


def by_autograd(f):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad(f(x, w), (x, w))


GRADIENTS = {
    "autograd": by_autograd,
    "grad": lambda f: grad(f, (0, 1))(X, W),
    "vmap(grad)": lambda f: vmap(grad(f, (0, 1)), (0, None))(torch.stack([X, -X]), W),
    "grad(vmap)": lambda f: grad(lambda x, w: vmap(f, (0, None))(x, w).sum(), (0, 1))(torch.stack([X, -X]), W),
}
PRODUCTS = ("mm", "bmm")


@pytest.mark.parametrize("how", GRADIENTS)
@pytest.mark.parametrize(
    ("saveable", "products", "sines"),
    [
        (fmp.saveable.everything, 0, 0),
        (fmp.saveable.nothing, 1, 1),
        (fmp.saveable.dots, 0, 1),
        (fmp.saveable.only_names("product"), 0, 1),
        (fmp.saveable.only_names("sine", "other"), 1, 0),
        (fmp.saveable.any_except_names("sine"), 0, 1),
        (fmp.saveable.any_except_names(), 0, 0),
        (fmp.saveable.offload_names("sine"), 1, 0),
        (lambda op, args: op is torch.ops.aten.sin.default, 1, 0),
    ],
)
def test_kept_values_are_not_computed_again(how, saveable, products, sines):
    with Ops() as plain:
        want = GRADIENTS[how](named)
    with Ops() as lean:
        got = GRADIENTS[how](fmp.remat(named, saveable=saveable))
    if how == "grad(vmap)":
        torch.testing.assert_close(got, want)
    else:
        assert same_bits(got, want)
    assert lean.count(*PRODUCTS) - plain.count(*PRODUCTS) == products
    assert lean.count("sin") - plain.count("sin") == sines


def test_products_with_batch_dimensions():
    def attend(x, w):
        return torch.bmm(torch.stack([x, x]) @ w, torch.ones(2, 4, 1)).sum()

    def extra(saveable):
        with Ops() as ops:
            grad(fmp.remat(attend, saveable=saveable))(X, W)
        return ops.count(*PRODUCTS)

    kept = {name: extra(getattr(fmp.saveable, name)) for name in ("nothing", "dots_with_no_batch_dims", "dots")}
    assert kept["nothing"] - kept["dots_with_no_batch_dims"] == 1
    assert kept["dots_with_no_batch_dims"] - kept["dots"] == 1


@pytest.mark.parametrize("how", ["autograd", "grad"])
def test_what_is_drawn_after_a_kept_draw(how):
    def f(x, w):
        return (F.dropout(x @ w) * torch.rand(3, 4) * torch.sin(x)).sum()

    def run(wrap):
        torch.manual_seed(3)
        return GRADIENTS[how](wrap(f)), torch.rand(1)

    def draws(op, args):
        return op in (
            torch.ops.aten.native_dropout.default,
            torch.ops.aten.bernoulli_.float,
            torch.ops.aten.rand.default,
        )

    assert same_bits(run(lambda f: fmp.remat(f, saveable=draws)), run(lambda f: f))


@pytest.mark.parametrize("how", ["autograd", "grad"])
def test_a_kept_value_that_the_function_itself_changes(how):
    def f(x, w):
        return torch.tanh((x @ w).mul_(2).add_(1)).sum()

    assert same_bits(GRADIENTS[how](fmp.remat(f, saveable=fmp.saveable.dots)), GRADIENTS[how](f))


def transposed(x, w):
    return torch.tanh(fmp.checkpoint_name(x @ w, "kept").transpose_(0, 1))


def resized(x, w):
    return (x @ w).detach().resize_(6, 2).sum() * torch.sin(x @ w)


RESHAPED = {
    "vector": lambda x, w: torch.tanh(x[0] @ w) @ w,
    "mapped vectors": lambda x, w: vmap(lambda row: torch.tanh(row @ w) @ w)(x),
    "squeeze_": lambda x, w: torch.tanh((x[:1] @ w).squeeze_(0)),
    "unsqueeze_": lambda x, w: torch.tanh((x @ w).unsqueeze_(0)),
    "t_": lambda x, w: torch.tanh((x @ w).t_()),
    "transpose_": transposed,
    "resize_": resized,
    "unsqueeze_ and mul_": lambda x, w: torch.tanh((x @ w).unsqueeze_(0).mul_(x)),
    "mul_ and unsqueeze_": lambda x, w: torch.tanh((x @ w).mul_(x).unsqueeze_(0)),
}


@pytest.mark.parametrize("how", ["autograd", "grad"])
@pytest.mark.parametrize("name", RESHAPED)
def test_a_kept_value_that_is_reshaped_in_place(name, how):
    def f(x, w):
        return RESHAPED[name](x, w).sum()

    want = GRADIENTS[how](f)
    for saveable in (fmp.saveable.dots, fmp.saveable.only_names("kept"), lambda op, args: True):
        assert same_bits(GRADIENTS[how](fmp.remat(f, saveable=saveable)), want)


@pytest.mark.parametrize("name", ["vector", "t_"])
def test_backward_twice_through_a_value_that_is_reshaped_in_place(name):
    x = X.clone().requires_grad_()
    y = fmp.remat(RESHAPED[name], saveable=fmp.saveable.dots)(x, W).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert same_bits(torch.autograd.grad(y, x), first)


def test_a_kept_value_that_was_reshaped_must_not_change():
    x = X.clone().requires_grad_()
    y, z = fmp.remat(lambda x: ((y := (x @ W).t_()), y.sin()), saveable=fmp.saveable.dots)(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(fmp.RematError, match="changed in place after the function had returned"):
        z.sum().backward()


def test_backward_twice():
    x = X.clone().requires_grad_()
    y = fmp.remat(named, saveable=fmp.saveable.dots)(x, W)
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert same_bits(torch.autograd.grad(y, x), first)


def test_a_name_outside_of_remat_does_nothing():
    assert fmp.checkpoint_name(X, "x") is X


def test_an_operand_may_have_a_name():
    f = fmp.remat(lambda x: torch.sin(fmp.checkpoint_name(x, "x")).sum(), saveable=fmp.saveable.only_names("x"))
    assert same_bits(grad(f)(X), torch.cos(X))


def test_policies_are_values():
    assert fmp.saveable.only_names("a", "b") == fmp.saveable.only_names("b", "a")
    assert len({fmp.saveable.dots, fmp.saveable.dots_with_no_batch_dims, fmp.saveable.dots}) == 2


# torch takes `matmul` and attention apart by which of their arguments require grad: here some never do, some now and
# then.
BATCH, (SQUARE, OTHER) = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
MASK = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -1e9)


def folded(x, w, v):
    return torch.tanh(fmp.checkpoint_name(x.transpose(0, 1) @ w, "kept").reshape(-1, 4) @ v).sum()


def graph(x, w, v):
    return torch.tanh(fmp.checkpoint_name(v @ x, "kept") @ w).sum()


def attention(x, w, v):
    q = (x @ w)[:, None]
    attended = fmp.checkpoint_name(F.scaled_dot_product_attention(q, q * 2, q, attn_mask=MASK), "kept")
    scores = torch.bmm(attended[:, 0], attended[:, 0].transpose(1, 2))
    return torch.tanh(torch.bmm(scores, attended[:, 0]) @ v).sum()


def changed(x, w, v):
    return torch.sin(torch.relu_(fmp.checkpoint_name(x @ w, "kept")) @ v).sum()


def changed_twice(x, w, v):
    y = fmp.checkpoint_name(x @ w, "kept")
    y.mul_(2)
    y[0].add_(1.5)
    return torch.sin(torch.tanh(y) @ v).sum()


GIVEN, SOME = (BATCH, SQUARE, OTHER), [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]


def of_some(f, which):
    """The function of some of its arguments."""

    def g(*some):
        given = list(GIVEN)
        for place, value in zip(which, some, strict=True):
            given[place] = value
        return f(*given)

    return g, [GIVEN[place] for place in which]


def by_vjp(f, which):
    g, some = of_some(f, which)
    return vjp(g, *some)[1](torch.ones(()))


def mapped_gradient(f, which):
    batch = torch.stack([BATCH, BATCH - 1, 2 * BATCH])
    return vmap(grad(f, which), (0, None, None))(batch, SQUARE, OTHER)


def gradient_of_mapped(f, which):
    batch = torch.stack([BATCH, BATCH - 1, 2 * BATCH])
    return grad(lambda x, w, v: vmap(f, (0, None, None))(x, w, v).sum(), which)(batch, SQUARE, OTHER)


def square_of_gradient(f, which, given):
    return torch.stack([part.square().sum() for part in grad(f, which)(*given)]).sum()


def gradient_of_gradient(f, which):
    return grad(lambda *given: square_of_gradient(f, which, given), (which[0] + 1) % 3)(*GIVEN)


def autograd_of_gradient(f, which):
    given = [value.clone().requires_grad_() for value in GIVEN]
    return torch.autograd.grad(square_of_gradient(f, which, given), given[which[-1]])


def autograd_of_some(f, which):
    given = [value.clone().requires_grad_() for value in GIVEN]
    return torch.autograd.grad(f(*given), [given[place] for place in which])


OF_SOME = {
    "grad": lambda f, which: grad(f, which)(*GIVEN),
    "vjp": by_vjp,
    "autograd": autograd_of_some,
    "vmap(grad)": mapped_gradient,
    "grad(vmap)": gradient_of_mapped,
    "jacrev(grad)": lambda f, which: jacrev(grad(f, which[0]), which)(*GIVEN),
    "hessian": lambda f, which: hessian(f, which[0])(*GIVEN),
    "grad(grad)": gradient_of_gradient,
    "autograd(grad)": autograd_of_gradient,
}
FIRST_ORDER = ("grad", "vjp", "autograd")


@pytest.mark.parametrize(
    ("f", "how"),
    [
        *itertools.product([folded, graph, changed, changed_twice], OF_SOME),
        *itertools.product([attention], FIRST_ORDER),  # on a CPU, torch can neither map nor twice differentiate it
    ],
)
def test_what_is_kept_does_not_depend_on_what_is_differentiated(f, how):
    for which in SOME:
        want = OF_SOME[how](f, which)
        for saveable in (
            fmp.saveable.dots,
            fmp.saveable.dots_with_no_batch_dims,
            fmp.saveable.only_names("kept"),
            fmp.saveable.offload_names("kept"),
            lambda op, args: True,
        ):
            got = OF_SOME[how](fmp.remat(f, saveable=saveable), which)
            if how in FIRST_ORDER:
                assert same_bits(got, want), (which, saveable)
            else:
                torch.testing.assert_close(got, want, msg=lambda text, at=(which, saveable): f"{at}: {text}")


@pytest.mark.parametrize("f", [folded, attention])
def test_a_kept_product_of_constants_is_not_computed_again(f):
    def extra(saveable):
        with Ops() as ops:
            grad(fmp.remat(f, saveable=saveable), 2)(*GIVEN)
        return ops.count(*PRODUCTS, "_scaled_dot_product_flash_attention_for_cpu")

    assert extra(fmp.saveable.only_names("kept")) < extra(fmp.saveable.nothing)
    assert extra(fmp.saveable.dots) < extra(fmp.saveable.only_names("kept"))


class GraphLayer(nn.Module):
    def __init__(self, saveable):
        super().__init__()
        self.w = nn.Parameter(SQUARE.clone())
        self.register_buffer("adjacent", OTHER.clone())
        self.saveable = saveable

    def propagate(self, h):
        return torch.tanh(fmp.checkpoint_name(self.adjacent @ h, "kept") @ self.w)

    def forward(self, h):
        propagate = self.propagate if self.saveable is None else fmp.remat(self.propagate, saveable=self.saveable)
        return F.dropout(propagate(h), 0.2, self.training)


@pytest.mark.parametrize("saveable", [fmp.saveable.dots, fmp.saveable.only_names("kept")])
def test_constants_in_a_train_step(saveable):
    def trained(saveable):
        model = fmp.functionalize(GraphLayer(saveable))

        def loss(params, batch, *, buffers, seed):
            y, buffers = model.apply(params, buffers, batch, seed=seed, train=True)
            return y.square().mean(), buffers, {}

        step = fmp.train_step(loss, fmp.optim.sgd(1.0), has_aux=True)
        return step(step.init(model.params, buffers=model.buffers, seed=0), BATCH)[0].params["w"]

    assert same_bits(trained(saveable), trained(None))


def test_a_kept_value_is_refused_for_other_arguments():
    calls = []

    def f(x, w):
        calls.append(1)
        return torch.tanh((x if len(calls) == 1 else x[:2]) @ w).sum()

    with pytest.raises(
        fmp.RematError, match=r"call 1 of aten.mm.default was kept at first, as .*float32\[3, 4\] on cpu"
    ):
        grad(fmp.remat(f, saveable=fmp.saveable.dots))(X, W)


@pytest.mark.parametrize("how", ["autograd", "grad"])
def test_a_kept_value_is_refused_for_other_numbers(how):
    powers = iter([2.0, 3.0])

    def f(x, w):
        return torch.sin(torch.pow(x @ w, next(powers))).sum()

    with pytest.raises(fmp.RematError, match=r"of \(torch.float32\[3, 4\] on cpu, 2.0\), and got .* 3.0\)"):
        GRADIENTS[how](fmp.remat(f, saveable=lambda op, args: op is torch.ops.aten.pow.Tensor_Scalar))


def test_a_kept_value_is_refused_if_the_op_ran_more_often_at_first():
    cache = SimpleNamespace(square=None)

    def f(w):
        if cache.square is None:
            cache.square = torch.eye(4) @ torch.eye(4)
        y = fmp.checkpoint_name(w @ w, "kept")
        return torch.tanh((y @ w) @ w).sum()

    with pytest.raises(fmp.RematError, match="ran 4 times at first and 3 times"):
        grad(fmp.remat(f, saveable=fmp.saveable.only_names("kept")))(SQUARE)


def test_a_value_that_was_changed_before_it_got_its_name():
    def f(x, w):
        return torch.tanh(fmp.checkpoint_name((x @ w).mul_(2), "kept")).sum()

    with pytest.raises(fmp.RematError, match="'kept' was changed in place"):
        grad(fmp.remat(f, saveable=fmp.saveable.only_names("kept")))(X, W)


@pytest.mark.parametrize("how", ["autograd", "grad"])
def test_a_value_that_an_op_made_together_with_one_that_was_changed(how):
    def f(x, w):
        values, places = (x @ w).detach().topk(4)
        values.mul_(2)
        return (values * x * fmp.checkpoint_name(places, "kept") * w.sum()).sum()

    with pytest.raises(fmp.RematError, match=r"'kept' was changed in place .* or what that op made with it"):
        GRADIENTS[how](fmp.remat(f, saveable=fmp.saveable.only_names("kept")))


@pytest.mark.parametrize("how", ["autograd", "grad"])
def test_a_value_that_an_op_made_together_with_one_that_was_reshaped(how):
    def f(x, w):
        values, places = (x @ w).topk(4)
        return (values.unsqueeze_(0) * x * fmp.checkpoint_name(places, "kept")).sum()

    assert same_bits(GRADIENTS[how](fmp.remat(f, saveable=fmp.saveable.only_names("kept"))), GRADIENTS[how](f))


@pytest.mark.parametrize("how", ["autograd", "grad"])
def test_a_named_constant_may_lie_where_a_value_lay_before(how):
    def f(x, w):
        with torch.no_grad():
            scale = (x @ w).sin()  # the product is gone by now
        for number in range(3):
            fmp.checkpoint_name(torch.tensor([[float(number)] * 4] * 3), "kept")
        return (scale * x * w.sum()).sum()

    assert same_bits(GRADIENTS[how](fmp.remat(f, saveable=fmp.saveable.only_names("kept"))), GRADIENTS[how](f))


def product(x, w):
    return torch.complex(x @ w, x) @ torch.complex(w, w.sin())


NAMED_VIEWS = {
    "conjugate": lambda x, w: fmp.checkpoint_name(product(x, w).conj(), "kept").imag * x,
    "conjugate transposed": lambda x, w: fmp.checkpoint_name(product(x, w).mH, "kept").imag.T * x,
    "negative": lambda x, w: fmp.checkpoint_name(torch.ops.aten._neg_view(x @ w), "kept").sin() * x,
    "real": lambda x, w: fmp.checkpoint_name(product(x, w).real, "kept").sin() * x,
    "imaginary of the conjugate": lambda x, w: fmp.checkpoint_name(product(x, w).conj().imag, "kept").sin() * x,
    "pairs": lambda x, w: fmp.checkpoint_name(torch.view_as_real(product(x, w))[1:], "kept").sin().sum((0, 2)) * x,
    "bits": lambda x, w: fmp.checkpoint_name((x @ w).detach()[1:].view(torch.int16), "kept").sign().sum() * (x @ w),
    "bits of a part": lambda x, w: (
        fmp.checkpoint_name((x @ w).bfloat16().detach()[..., :2].view(torch.int32), "kept").sign().sum() * (x @ w)
    ),
    "bits of what is no multiple": lambda x, w: (
        fmp.checkpoint_name((x @ w).sum().repeat(5).bfloat16().detach()[:4].view(torch.int32), "kept").sign().sum()
        * (x @ w)
    ),
}


@pytest.mark.parametrize("how", ["autograd", "grad"])
@pytest.mark.parametrize("view", NAMED_VIEWS)
def test_a_name_for_a_view_that_shows_other_numbers_than_lie_in_memory(view, how):
    def f(x, w):
        return torch.tanh(NAMED_VIEWS[view](x, w)).sum()

    want = GRADIENTS[how](f)
    for saveable in (
        fmp.saveable.only_names("kept"),
        fmp.saveable.any_except_names("other"),
        fmp.saveable.offload_names("kept"),
    ):
        got = GRADIENTS[how](fmp.remat(f, saveable=saveable))
        assert same_bits(got, want), saveable


@pytest.mark.parametrize("view", ["conjugate", "real"])
def test_what_is_kept_by_the_name_of_such_a_view_must_not_change(view):
    shown = {"conjugate": torch.conj, "real": torch.real}[view]

    def f(x, w):
        y = product(x, w)
        fmp.checkpoint_name(shown(y), "kept")
        return y, y.sin()

    x = X.clone().requires_grad_()
    y, z = fmp.remat(f, saveable=fmp.saveable.only_names("kept"))(x, W)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(fmp.RematError, match="changed in place after the function had returned"):
        z.abs().sum().backward()


def test_what_was_kept_by_an_attempt_that_was_given_up_is_dropped():
    def f(x, w):
        y = torch.sin(fmp.checkpoint_name(x @ w, "kept") @ w)  # a transform cannot be recomputed as the rest can
        return (y * grad(lambda z: torch.cos(z).sum())(y)).sum()

    assert same_bits(by_autograd(fmp.remat(f, saveable=fmp.saveable.only_names("kept"))), by_autograd(f))


@pytest.mark.parametrize(
    "saveable",
    [fmp.saveable.nothing, fmp.saveable.everything, fmp.saveable.dots, fmp.saveable.only_names("h", "s")],
    ids=["nothing", "everything", "dots", "names"],
)
def test_sparse_tensors_inside(saveable) -> None:
    adjacency = torch.eye(3).to_sparse()

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = fmp.checkpoint_name(torch.sparse.mm(adjacency, x) @ w, "h")
        sparse = fmp.checkpoint_name(hidden.sin().to_sparse(), "s")
        return torch.sparse.mm(sparse, w).sum()

    args = torch.linspace(0.1, 0.9, 9).reshape(3, 3), torch.linspace(-1.0, 1.0, 9).reshape(3, 3)
    expected = fmp.grad(fn, argnums=(0, 1))(*args)
    found = fmp.grad(fmp.remat(fn, saveable=saveable), argnums=(0, 1))(*args)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_argument_of_jax_is_answered_with_the_one_here():
    with pytest.raises(TypeError, match="remat takes no 'policy'; jax's policy is saveable here"):
        fmp.remat(torch.sin, policy=fmp.saveable.dots)
    with pytest.raises(TypeError, match=r"remat takes no 'prevent_cse'$"):
        fmp.remat(prevent_cse=False)
