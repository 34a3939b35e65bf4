import gc
import threading
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fmp.gradients
import fmp.tree
from fmp import _compat
from tests.memory import peak_bytes
from tests.versions import BEFORE_2_13, differentiates_in_inference_mode

vjp: Any = torch.func.vjp  # its annotation says that the length of the result depends on nothing
DOUBLE = torch.float64


def by_autograd(fn, params, *args):
    """The gradient by `torch.autograd.grad`: the oracle for bit equality."""
    leaves, spec = fmp.tree.flatten(params)
    variables = [leaf.detach().requires_grad_() for leaf in leaves]
    value = fn(fmp.tree.unflatten(spec, variables), *args)
    grads = torch.autograd.grad(value, variables, materialize_grads=True)
    return value.detach(), fmp.tree.unflatten(spec, list(grads))


def assert_same(found, expected):
    """Equal bits, dtypes, shapes and structure."""
    assert fmp.tree.structure(found) == fmp.tree.structure(expected)
    torch.testing.assert_close(fmp.tree.leaves(found), fmp.tree.leaves(expected), rtol=0, atol=0, equal_nan=True)


def assert_close(found, expected):
    assert fmp.tree.structure(found) == fmp.tree.structure(expected)
    torch.testing.assert_close(fmp.tree.leaves(found), fmp.tree.leaves(expected), rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------------- values and structure


def mlp(activation, dtype=torch.float32):
    def loss(params, x):
        for w, b in params:
            x = activation(x @ w + b)
        return (x.float() ** 2).mean()

    params = [(torch.randn(16, 16).to(dtype) / 4, torch.randn(16).to(dtype)) for _ in range(3)]
    return loss, params, torch.randn(8, 16).to(dtype)


def normalized(norm):
    def loss(params, x):
        return norm(x, params["w"], params["b"]).sin().sum()

    return loss, {"w": torch.randn(8), "b": torch.randn(8)}, torch.randn(4, 8, 5)


CASES = {
    "tanh": lambda: mlp(torch.tanh),
    "silu": lambda: mlp(F.silu),
    "mish": lambda: mlp(F.mish),
    "silu in bf16": lambda: mlp(F.silu, torch.bfloat16),
    "gelu in f16": lambda: mlp(F.gelu, torch.float16),
    "group norm": lambda: normalized(lambda x, w, b: F.group_norm(x, 4, w, b)),
    "layer norm": lambda: normalized(lambda x, w, b: F.layer_norm(x.transpose(1, 2), (8,), w, b)),
    "softmax": lambda: (lambda w, x: F.cross_entropy(x @ w, torch.arange(4)), torch.randn(6, 6), torch.randn(4, 6)),
    "complex": lambda: (lambda w, x: (w * x).abs().sum(), torch.randn(3, dtype=torch.complex64), torch.randn(3)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bit_equal_to_autograd(case):
    loss, params, x = case()
    value, grads = fmp.gradients.value_and_grad(loss)(params, x)
    assert_same((value, grads), by_autograd(loss, params, x))
    assert_same(fmp.gradients.grad(loss)(params, x), grads)
    with torch.no_grad():
        assert_same(fmp.gradients.value_and_grad(loss)(params, x), (value, grads))


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@fmp.tree.dataclass
class Node:
    w: torch.Tensor
    rest: Any = None
    name: str = fmp.tree.static(default="node")


@pytest.mark.parametrize(
    "params",
    [
        torch.tensor(2.0),
        {"b": torch.ones(2), "a": torch.ones(3, 1)},
        OrderedDict(b=torch.ones(2), a=torch.ones(1)),
        [torch.ones(2), (torch.ones(()), [torch.ones(1)])],
        Pair(torch.ones(2), {"x": torch.ones(1)}),
        Node(torch.ones(2), [torch.ones(1)], "other"),
    ],
    ids=fmp.tree.describe,
)
def test_gradients_have_the_structure_of_the_argument(params):
    def loss(params):
        return torch.stack([leaf.pow(2).sum() for leaf in fmp.tree.leaves(params)]).sum()

    value, grads = fmp.gradients.value_and_grad(loss)(params)
    assert_same((value, grads), by_autograd(loss, params))
    assert type(grads) is type(params)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_gradients_have_shape_and_dtype_of_the_leaf(shape, dtype):
    leaf = torch.ones(shape, dtype=dtype)
    grad = fmp.gradients.grad(lambda x: (x.abs() ** 2).sum())(leaf)
    assert (grad.shape, grad.dtype) == (leaf.shape, dtype)
    assert (grad == 2 * leaf).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_leaves(dtype):
    leaf = torch.tensor([1.0, 2.0]).to(dtype)
    for grad in (
        fmp.gradients.grad(lambda x: x.float().pow(2).sum()),
        vmap(fmp.gradients.grad(lambda x: x.float() ** 2)),
    ):
        assert grad(leaf).dtype == dtype
        assert grad(leaf).float().tolist() == [2.0, 4.0]


def test_views_and_expanded_leaves():
    for leaf in (torch.ones(4, 6).t(), torch.ones(1, 3).expand(5, 3), torch.arange(8.0)[::2]):
        grad = fmp.gradients.grad(lambda x: x.square().sum())(leaf)
        assert torch.equal(grad, 2 * leaf)


def test_a_tensor_in_two_places_has_two_gradients():
    x = torch.tensor(3.0)
    grads = fmp.gradients.grad(lambda p: p["a"] ** 2 + 5 * p["b"])({"a": x, "b": x})
    assert_same(grads, {"a": torch.tensor(6.0), "b": torch.tensor(5.0)})


# -------------------------------------------------------------------------------------------------------------- argnums


def polynomial(a, b, c, *, scale=1.0):
    return scale * (a * b**2 * c**3)


ARGUMENTS = (torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0))
PARTIALS = (torch.tensor(1125.0), torch.tensor(1500.0), torch.tensor(1350.0))


@given(st.lists(st.integers(-3, 2), max_size=3, unique_by=lambda number: number % 3), st.booleans())
def test_argnums_sequences(numbers, as_list):
    argnums = numbers if as_list else tuple(numbers)
    value, grads = fmp.gradients.value_and_grad(polynomial, argnums=argnums)(*ARGUMENTS)
    assert float(value) == 2250.0
    assert_same(grads, tuple(PARTIALS[number] for number in numbers))


@pytest.mark.parametrize("number", range(-3, 3))
def test_argnums_number(number):
    assert_same(fmp.gradients.grad(polynomial, number)(*ARGUMENTS), PARTIALS[number])


@pytest.mark.parametrize("argnums", [3, -4, (0, 3), [5]])
def test_argnums_out_of_range(argnums):
    with pytest.raises(ValueError, match="out of range for 3 positional arguments"):
        fmp.gradients.grad(polynomial, argnums)(*ARGUMENTS)
    with pytest.raises(ValueError, match="must be passed by position"):
        fmp.gradients.grad(polynomial)(a=1, b=2, c=3)


@pytest.mark.parametrize("argnums", [(0, 0), (0, -3), [1, 1]])
def test_argnums_twice(argnums):
    with pytest.raises(ValueError, match="names an argument twice"):
        fmp.gradients.grad(polynomial, argnums)(*ARGUMENTS)


@pytest.mark.parametrize("argnums", ["a", "0", 0.0, True, None, (0, "a"), (0.0,)])
def test_argnums_of_other_types(argnums):
    with pytest.raises(TypeError, match="argnums must be an int or a sequence of them"):
        fmp.gradients.grad(polynomial, argnums)(*ARGUMENTS)


def test_keyword_arguments_are_passed_through():
    assert_same(fmp.gradients.grad(polynomial)(*ARGUMENTS, scale=2.0), 2 * PARTIALS[0])
    doubled = fmp.gradients.value_and_grad(polynomial, (0, 1))(*ARGUMENTS, scale=torch.tensor(2.0))
    assert_same(doubled, (torch.tensor(4500.0), (2 * PARTIALS[0], 2 * PARTIALS[1])))


# ------------------------------------------------------------------------------------------------------------------ aux

AUX: dict[str, Any] = {
    "none": lambda x: None,
    "text": lambda x: "done",
    "numbers": lambda x: (1, 2.5, True),
    "tensor": lambda x: x * 2,
    "the argument": lambda x: x,
    "a view of it": lambda x: x[:1],
    "integer tensor": lambda x: torch.arange(3),
    "nested": lambda x: {"b": [x.sum(), None, "s"], "a": (x > 0, {})},
    "node": lambda x: Node(x * 2, {"n": None}, "aux"),
    "empty": lambda x: {},
}


def assert_same_aux(found, expected):
    assert fmp.tree.structure(found) == fmp.tree.structure(expected)
    for new, old in zip(fmp.tree.leaves(found), fmp.tree.leaves(expected), strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(new, old)
            assert not new.requires_grad
        else:
            assert type(new) is type(old)
            assert new == old


@pytest.mark.parametrize("make", AUX.values(), ids=AUX)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_any_aux(make, backend):
    call = fmp.gradients.value_and_grad(lambda x: (x.square().sum(), make(x)), has_aux=True)
    if backend:
        call = torch.compile(call, backend=backend, fullgraph=True)
    x = torch.tensor([1.0, 2.0])
    (value, aux), grads = call(x)
    assert_same((value, grads), (torch.tensor(5.0), 2 * x))
    assert_same_aux(aux, make(x))
    grads, aux = fmp.gradients.grad(lambda x: (x.square().sum(), make(x)), has_aux=True)(x)
    assert_same(grads, 2 * x)
    assert_same_aux(aux, make(x))


@pytest.mark.parametrize(
    "make", [make for name, make in AUX.items() if name not in ("none", "text", "numbers", "nested")]
)
def test_aux_under_vmap(make):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    grads, aux = vmap(fmp.gradients.grad(lambda x: (x.square().sum(), make(x)), has_aux=True))(x)
    assert_same(grads, 2 * x)
    assert_same_aux(aux, vmap(make)(x))


def test_aux_that_is_no_tree_is_passed_as_it_is():
    thing = object()
    _, aux = fmp.gradients.grad(lambda x: (x, thing), has_aux=True)(torch.tensor(1.0))
    assert aux is thing
    stored = []
    vmap(lambda x: fmp.gradients.grad(lambda x: (x, stored), has_aux=True)(x)[0])(torch.ones(2))
    assert stored == []


def test_aux_that_a_transform_can_differentiate_stays_connected():
    def inner(x):
        _, aux = fmp.gradients.grad(lambda x: (x**2, {"cube": x**3, "text": "s"}), has_aux=True)(x)
        return aux["cube"]

    assert float(torch.func.grad(inner)(torch.tensor(2.0))) == 12.0
    assert float(fmp.gradients.grad(inner)(torch.tensor(2.0))) == 12.0


# ---------------------------------------------------------------------------------------------------- unusual arguments


@pytest.mark.parametrize("around", [lambda fn: fn, functionalize], ids=["plain", "functionalize"])
def test_leaves_that_cannot_be_differentiated_have_none(around):
    params = {
        **{"w": torch.tensor(3.0), "count": torch.tensor(2), "mask": torch.tensor([True, False])},
        **{"none": None, "k": 4, "rate": 0.5, "name": "adam", "empty": {}, "unused": torch.ones(2)},
    }
    grads: Any = {}

    def call(w):
        nonlocal grads
        grads = fmp.gradients.grad(lambda p: p["w"] ** p["count"] * p["rate"] * p["mask"].sum())({**params, "w": w})
        return grads["w"]

    assert float(around(call)(params["w"])) == 3.0
    assert {key: grads[key] for key in params if key not in ("w", "unused")} == {
        **dict.fromkeys(["count", "mask", "none", "k", "rate", "name"]),
        "empty": {},
    }
    assert grads["unused"].tolist() == [0.0, 0.0]


SURROUNDINGS: dict[str, Any] = {
    "plain": lambda fn: fn,
    "no_grad": torch.no_grad(),
    "vmap": lambda fn: (
        lambda *args: fmp.tree.map(
            lambda leaf: None if leaf is None else leaf[0], vmap(fn)(*fmp.tree.map(lambda leaf: leaf[None], args))
        )
    ),
    "compiled": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_unused_leaves_and_constant_values(around):
    x, y = torch.ones(2), torch.ones(3, dtype=torch.float16)
    value_and_grad = fmp.gradients.value_and_grad
    assert_same(around(value_and_grad(lambda x, y: x.sum(), (0, 1)))(x, y), (x.sum(), (x, torch.zeros_like(y))))
    assert_same(
        around(value_and_grad(lambda x, y: torch.tensor(4.0), (0, 1)))(x, y), (torch.tensor(4.0), (0 * x, 0 * y))
    )
    assert_same(around(value_and_grad(lambda x: x.detach().sum()))(x), (x.sum(), 0 * x))
    assert_same(around(value_and_grad(lambda x: x.argmax().float()))(x), (torch.tensor(0.0), 0 * x))


def test_arguments_without_anything_to_differentiate():
    ids = torch.arange(3)
    for around in (lambda fn: fn, lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True)):
        value, grads = around(fmp.gradients.value_and_grad(lambda tree: tree["ids"].sum() * 1.0))(
            {"ids": ids, "n": None}
        )
        assert_same((value, grads), (torch.tensor(3.0), {"ids": None, "n": None}))
    for empty in ({}, [], (), None):
        (_, aux), grads = fmp.gradients.value_and_grad(lambda tree: (torch.tensor(1.0), "aux"), has_aux=True)(empty)
        assert grads == empty
        assert aux == "aux"
    assert fmp.gradients.grad(lambda x: x, argnums=())(torch.tensor(1.0)) == ()
    values = vmap(lambda x: fmp.gradients.value_and_grad(lambda ids, x: x.sum())(ids, x)[0])(torch.ones(2, 3))
    assert values.tolist() == [3.0, 3.0]


class Tagged(torch.Tensor):
    """A tensor subclass that keeps to torch's default rules."""


def test_tensor_subclasses_and_parameters():
    for leaf in (torch.tensor([1.0, 2.0]).as_subclass(Tagged), torch.nn.Parameter(torch.tensor([1.0, 2.0]))):
        with torch.no_grad():
            value, grad = fmp.gradients.value_and_grad(lambda x: x.square().sum())(leaf)
        assert float(value) == 5.0
        assert grad.tolist() == [2.0, 4.0]
        assert leaf.grad is None


def test_the_function_runs_once_and_arguments_stay_as_they_are():
    calls = []
    x = torch.tensor([1.0, 2.0])
    params = {"w": x, "b": torch.nn.Parameter(torch.ones(2))}

    def loss(params):
        calls.append(params)
        return (params["w"] * params["b"]).sum()

    fmp.gradients.value_and_grad(loss)(params)
    assert len(calls) == 1
    assert not x.requires_grad
    assert params["b"].requires_grad
    assert params["b"].grad is None
    assert params["w"] is x
    assert x._version == 0
    vmap(lambda x: fmp.gradients.grad(loss)({"w": x, "b": x}))(torch.ones(3, 2))
    assert len(calls) == 2


def test_the_result_keeps_the_name_of_the_function():
    def loss(x):
        """Says what it does."""
        return x

    for wrapped in (fmp.gradients.grad(loss), fmp.gradients.value_and_grad(loss)):
        assert (wrapped.__name__, wrapped.__doc__) == ("loss", "Says what it does.")
    assert fmp.gradients.grad(torch.nn.Identity())(torch.tensor(1.0)) == 1.0


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fn", "has_aux", "error", "message"),
    [
        (lambda x: x, False, ValueError, r"must return a scalar, got f32\[2\]; reduce it, e.g. .mean\(\)"),
        (lambda x: x[:1], False, ValueError, r"f32\[1\]"),
        (lambda x: x.sum().long(), False, TypeError, r"real floating-point scalar, got i64\[\]"),
        (lambda x: (x > 0).all(), False, TypeError, r"got bool\[\]"),
        (lambda x: x.sum() * 1j, False, TypeError, r"real floating-point scalar, got c64\[\]"),
        (lambda x: 1.0, False, TypeError, "must return a scalar tensor, got float"),
        (lambda x: None, False, TypeError, "got NoneType"),
        (lambda x: (x.sum(), 1), False, TypeError, "got tuple; pass has_aux=True if it returns"),
        (lambda x: [x.sum()], False, TypeError, "got list$"),
        (lambda x: x.sum(), True, TypeError, r"has_aux=True: the function must return \(value, aux\), got Tensor"),
        (lambda x: (x.sum(), 1, 2), True, TypeError, "has_aux=True"),
        (lambda x: (x, 1), True, ValueError, r"f32\[2\]"),
        (lambda x: (1, x), True, TypeError, "got int"),
    ],
)
@pytest.mark.parametrize("around", [lambda fn: fn, vmap], ids=["plain", "vmap"])
def test_bad_outputs(fn, has_aux, error, message, around):
    x = torch.ones(2) if around is not vmap else torch.ones(3, 2)
    with pytest.raises(error, match=message):
        around(fmp.gradients.grad(fn, has_aux=has_aux))(x)
    assert not _compat.transform_active()


def test_errors_of_the_function_pass_through():
    def fail(x):
        raise ZeroDivisionError("mine")

    for around in (lambda fn: fn, vmap, torch.func.grad):
        with pytest.raises(ZeroDivisionError, match="mine"):
            around(fmp.gradients.grad(fail))(torch.ones(2))
        assert not _compat.transform_active()
        assert torch.is_grad_enabled()


def test_sparse_gradients_are_refused_by_name():
    ids = torch.tensor([0, 2])
    params = {"emb": [torch.ones(2), torch.randn(4, 3)]}
    with pytest.raises(ValueError, match=r"argument 1, leaf 'emb/1', is sparse .*sparse=False in the embedding"):
        fmp.gradients.grad(lambda x, p: F.embedding(ids, p["emb"][1], sparse=True).sum(), (0, 1))(torch.ones(1), params)
    grads = fmp.gradients.grad(lambda p: F.embedding(ids, p["emb"][1]).sum())(params)
    assert grads["emb"][1].tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3]


IN_PLACE: dict[str, Any] = {
    "plain": lambda fn, x: fn(x),
    "no_grad": lambda fn, x: torch.no_grad()(fn)(x),
    "vmap": lambda fn, x: vmap(fn)(x[None]),
    "grad": lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
    "a leaf outside": lambda fn, x: fn(x.requires_grad_()),
    "a graph outside": lambda fn, x: fn(x.requires_grad_() * 1),
}
IN_INFERENCE_MODE = pytest.param(
    lambda fn, x: torch.inference_mode()(fn)(x), id="inference", marks=differentiates_in_inference_mode
)


@pytest.mark.parametrize(
    "around", [*[pytest.param(around, id=name) for name, around in IN_PLACE.items()], IN_INFERENCE_MODE]
)
@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x[0].zero_(), lambda x: x.copy_(x * 2)])
def test_changing_the_argument_in_place_raises(around, change):
    x = torch.tensor([1.0, 2.0])

    def loss(x):
        change(x)
        return x.square().sum()

    with pytest.raises(RuntimeError, match=r"in-?place"):
        around(fmp.gradients.grad(loss), x)
    assert x.tolist() == [1.0, 2.0]


def test_a_graph_outside_is_not_changed_in_place_either():
    base = torch.tensor([1.0, 2.0], requires_grad=True)
    argument = base * 1
    with pytest.raises(RuntimeError, match="modified inplace"):
        fmp.gradients.grad(lambda x: x.mul_(2).sum())(argument)
    assert argument.tolist() == [1.0, 2.0]


def test_changing_a_copy_in_place_is_fine():
    grad = fmp.gradients.grad(lambda x: x.clone().mul_(3).sum())
    assert grad(torch.ones(2)).tolist() == vmap(grad)(torch.ones(2)[:, None])[:, 0].tolist() == [3.0, 3.0]


# -------------------------------------------------------------------------------------------------------- outer tensors


def energy(x, w):
    return (torch.tanh(x * w) * x).sum() + (w**2 * x**3).sum()


X = torch.linspace(-1, 2, 4, dtype=DOUBLE)
W = torch.linspace(0.5, -1, 4, dtype=DOUBLE)
BATCH = torch.linspace(-1, 1, 12, dtype=DOUBLE).reshape(3, 4)


def outer_results(grad):
    """Derivatives of gradients by ordinary autograd outside, through arguments, captured tensors and both."""
    results = {}

    def outside(name, fn):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        results[name] = torch.autograd.grad(fn(x, w), (x, w), materialize_grads=True)

    outside("argument", lambda x, w: grad(energy)(x, W).pow(2).sum())
    outside("captured", lambda x, w: grad(lambda x: energy(x, w))(X).pow(2).sum())
    outside("both", lambda x, w: grad(lambda x: energy(x, w))(x).pow(2).sum())
    outside("arguments", lambda x, w: sum(g.pow(2).sum() for g in grad(energy, (0, 1))(x, w)))
    outside("not a leaf", lambda x, w: grad(energy)(x * 2, w.sin()).pow(2).sum())
    outside("inner step", lambda x, w: energy(x - 0.1 * grad(energy)(x, w), w))
    outside("two inner steps", lambda x, w: energy((y := x - 0.1 * grad(energy)(x, w)) - 0.1 * grad(energy)(y, w), w))
    outside("under vmap", lambda x, w: vmap(grad(lambda x: energy(x, w)))(BATCH).pow(2).sum())
    outside("under vmap, argument", lambda x, w: vmap(grad(energy), (0, None))(x * BATCH, w).pow(2).sum())
    outside("nested", lambda x, w: grad(lambda x: grad(energy)(x, w).pow(2).sum())(x).pow(2).sum())
    outside("aux", lambda x, w: grad(lambda x: (energy(x, w), (x * w).sum()), has_aux=True)(X)[1])
    outside("aux only", lambda x, w: grad(lambda x: ((x**2).sum(), (x**2 * w).sum()), has_aux=True)(X)[1])
    return results


def test_ordinary_autograd_outside():
    found, expected = outer_results(fmp.gradients.grad), outer_results(torch.func.grad)
    for name in expected:
        assert_close(found[name], expected[name])
        assert any(grad.abs().sum() > 0 for grad in found[name]), name


def test_values_stay_connected_to_what_requires_grad_outside():
    w = W.clone().requires_grad_()
    value, grads = fmp.gradients.value_and_grad(lambda x: energy(x, w))(X)
    assert_close(torch.autograd.grad(value, w, retain_graph=True)[0], torch.func.grad(energy, 1)(X, W))
    assert torch.autograd.grad(grads.sum(), w)[0].abs().sum() > 0
    (value, aux), grads = fmp.gradients.value_and_grad(lambda x: (energy(x, w).detach(), w), has_aux=True)(X)
    assert aux is w or aux.requires_grad


def test_a_closure_under_functorch():
    for outer in (torch.func.grad, fmp.gradients.grad):
        found = outer(lambda w: fmp.gradients.grad(lambda x: energy(x, w))(X).pow(2).sum())(W)
        expected = torch.func.grad(lambda w: torch.func.grad(lambda x: energy(x, w))(X).pow(2).sum())(W)
        assert_close(found, expected)


# -------------------------------------------------------------------------------------------------------------- nesting

NESTINGS: dict[str, Any] = {
    "grad": lambda grad: lambda x, w: grad(energy, (0, 1))(x, w),
    "grad of tree": lambda grad: lambda x, w: grad(lambda p: energy(p["x"], p["w"]))({"x": x, "w": w}),
    "vmap": lambda grad: lambda x, w: vmap(grad(energy), (0, None))(BATCH * x, w),
    "vmap over both": lambda grad: lambda x, w: vmap(grad(energy, (0, 1)))(BATCH * x, BATCH * w),
    "vmap of vmap": lambda grad: lambda x, w: vmap(vmap(grad(energy)))(BATCH[:, :, None] * x, BATCH[:, :, None] * w),
    "grad of grad": lambda grad: lambda x, w: grad(lambda x: grad(energy)(x, w).pow(2).sum())(x),
    "grad of grad of grad": lambda grad: (
        lambda x, w: grad(lambda x: grad(lambda x: grad(energy)(x, w).pow(2).sum())(x).pow(2).sum())(x)
    ),
    "torch's grad of grad": lambda grad: lambda x, w: torch.func.grad(lambda w: grad(energy)(x, w).pow(2).sum())(w),
    "grad of vmap of grad": lambda grad: (
        lambda x, w: grad(lambda w: vmap(grad(energy), (0, None))(BATCH * x, w).pow(2).sum())(w)
    ),
    "vmap of grad of grad": lambda grad: (
        lambda x, w: vmap(grad(lambda x, w: grad(energy)(x, w).pow(2).sum()), (0, None))(BATCH * x, w)
    ),
    "captured": lambda grad: lambda x, w: grad(lambda w: grad(lambda x: energy(x, w))(x).pow(2).sum())(w),
    "vjp": lambda grad: lambda x, w: vjp(grad(energy, (0, 1)), x, w)[1]((w, x)),
    "jvp": lambda grad: lambda x, w: jvp(grad(energy), (x, w), (w, x)),
    "jvp of vmap": lambda grad: lambda x, w: jvp(lambda w: vmap(grad(energy), (0, None))(BATCH * x, w), (w,), (x,)),
    "grad of jvp": lambda grad: lambda x, w: grad(lambda x: jvp(grad(energy), (x, w), (w, x))[1].sum())(x),
    "jacfwd": lambda grad: lambda x, w: jacfwd(grad(energy), (0, 1))(x, w),
    "jacrev": lambda grad: lambda x, w: jacrev(grad(energy), (0, 1))(x, w),
    "vmap of jacrev": lambda grad: lambda x, w: vmap(jacrev(grad(energy)), (0, None))(BATCH * x, w),
    "grad of hessian": lambda grad: lambda x, w: grad(lambda x: hessian(energy)(x, w).sum())(x),
    "hessian of grad": lambda grad: lambda x, w: hessian(lambda x: grad(energy)(x, w).sum())(x),
    "functionalize": lambda grad: lambda x, w: functionalize(grad(energy))(x, w),
}


@pytest.mark.parametrize("nesting", NESTINGS.values(), ids=NESTINGS)
@pytest.mark.parametrize(
    "surround",
    [
        pytest.param(lambda fn: fn, id=""),
        pytest.param(torch.no_grad(), id="no_grad"),
        pytest.param(torch.inference_mode(), id="inf", marks=differentiates_in_inference_mode),
    ],
)
def test_nesting(nesting, surround):
    found = surround(nesting(fmp.gradients.grad))(X, W)
    assert_close(found, nesting(torch.func.grad)(X, W))
    assert all(leaf.grad_fn is None for leaf in fmp.tree.leaves(found))


COMPILED = [
    *[("aot_eager", name) for name in NESTINGS if name != "functionalize"],
    *[("eager", name) for name in ("grad", "vmap", "grad of grad", "captured", "jvp", "jacrev")],
]


@pytest.mark.parametrize(("backend", "nesting"), COMPILED)
def test_nesting_compiled(backend, nesting):
    nested = NESTINGS[nesting]
    found = torch.compile(nested(fmp.gradients.grad), backend=backend, fullgraph=True)(X, W)
    assert_close(found, nested(torch.func.grad)(X, W))
    assert all(leaf.grad_fn is None for leaf in fmp.tree.leaves(found))


def test_compiled_gradients_of_a_graph_outside():
    compiled = torch.compile(fmp.gradients.grad(energy, (0, 1)), backend="aot_eager", fullgraph=True)
    results = []
    for grad in (compiled, torch.func.grad(energy, (0, 1))):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        loss = torch.stack([g.pow(2).sum() for g in grad(x, w)]).sum()
        results.append(torch.autograd.grad(loss, (x, w)))
    assert_close(*results)


def test_no_recompilation_over_steps():
    counter = CompileCounter()
    step = torch.compile(fmp.gradients.value_and_grad(energy), backend=counter, fullgraph=True)
    for k in range(20):
        step(X + k, W * k)
    assert counter.frame_count == 1


def test_forward_mode_outside():
    tangent = torch.ones_like(X)
    expected = jvp(torch.func.grad(energy), (X, W), (tangent, torch.zeros_like(W)))
    with forward_ad.dual_level():
        value, grads = fmp.gradients.value_and_grad(energy)(forward_ad.make_dual(X, tangent), W)
        primal, directional = forward_ad.unpack_dual(grads)
        slope = forward_ad.unpack_dual(value).tangent
    assert directional is not None
    assert_close((primal, directional), expected)
    assert_close(slope, torch.func.grad(energy)(X, W).sum())


@pytest.mark.skipif(not BEFORE_2_13, reason="torch differentiates in inference mode since 2.13")
def test_zero_gradients_in_inference_mode_are_refused():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="zero gradients in inference mode"):
        fmp.gradients.grad(energy)(X, W)


@differentiates_in_inference_mode
def test_inference_mode_and_tensors_made_in_it():
    with torch.inference_mode():
        made_inside = X.clone()
        inside = fmp.gradients.value_and_grad(energy)(made_inside, W)
    assert made_inside.is_inference()
    outside = fmp.gradients.value_and_grad(energy)(made_inside, W)
    for found in (inside, outside):
        assert_close(found, by_autograd(energy, X, W))


def test_checkpointed_parts_where_no_transform_is_active():
    def part(x):
        return checkpoint(lambda x: torch.tanh(x) * x, x, use_reentrant=False)

    loss = lambda x: part(part(x)).sum()
    assert_same(fmp.gradients.value_and_grad(loss)(X), by_autograd(loss, X))


def test_traced_and_fake_tensors():
    graph = make_fx(fmp.gradients.grad(energy))(X, W)
    assert_close(graph(W, X), torch.func.grad(energy)(W, X))
    with FakeTensorMode() as mode:
        grads = fmp.gradients.grad(energy)(mode.from_tensor(X), mode.from_tensor(W))
    assert (grads.shape, grads.dtype) == (X.shape, DOUBLE)
    assert fmp.gradients.grad(energy)(X.to("meta"), W.to("meta")).shape == X.shape


def test_threads_do_not_disturb_each_other():
    # Not jvp: the levels of torch's forward mode are shared by all threads.
    nestings = [NESTINGS[name] for name in ("grad", "vmap", "grad of grad", "jacrev", "captured")] * 4
    results: list[Any] = [None] * len(nestings)

    def work(index):
        results[index] = nestings[index](fmp.gradients.grad)(X, W)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(nestings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for nesting, found in zip(nestings, results, strict=True):
        assert_close(found, nesting(torch.func.grad)(X, W))


# ---------------------------------------------------------------------------------------------------- graphs and memory


def tracked(watched):
    """A loss that hands out a weak reference to a tensor which its graph saves."""

    def loss(params, x):
        hidden = x @ params["w"]
        watched.append(weakref.ref(hidden))
        return hidden.square().sum(), {"hidden": hidden * 1, "params": params}

    return loss


@pytest.mark.parametrize("parameter", [False, True])
def test_nothing_of_the_graph_outlives_the_call(parameter):
    w = torch.nn.Parameter(torch.randn(3, 3)) if parameter else torch.randn(3, 3)
    watched: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(not parameter):
            (value, aux), grads = fmp.gradients.value_and_grad(tracked(watched), has_aux=True)(
                {"w": w}, torch.ones(2, 3)
            )
        assert watched[0]() is None
        vmap(fmp.gradients.value_and_grad(tracked(watched), has_aux=True), (None, 0))(
            {"w": w.detach()}, torch.ones(4, 2, 3)
        )
        assert watched[1]() is None
    finally:
        gc.enable()
    assert all(leaf.grad_fn is None and not leaf.requires_grad for leaf in fmp.tree.leaves([value, aux, grads]))


@pytest.mark.parametrize("around", [vmap, lambda fn: lambda x: jvp(fn, (x,), (x,)), lambda fn: fn])
def test_nothing_is_connected_to_parameters_under_no_grad(around):
    w = torch.nn.Parameter(torch.randn(3))
    watched: list[Any] = []

    def of_captured(x):
        return fmp.gradients.value_and_grad(lambda x: tracked(watched)({"w": w * w[:, None]}, x), has_aux=True)(x)

    def of_parameter(x):
        return fmp.gradients.value_and_grad(lambda w: tracked(watched)({"w": w * w[:, None]}, x), has_aux=True)(w)

    with torch.no_grad():
        results = around(of_captured)(torch.ones(2, 3)), around(of_parameter)(torch.ones(2, 3))
    assert not any(leaf.requires_grad for leaf in fmp.tree.leaves(results))
    assert [reference() for reference in watched] == [None, None]


def test_a_parameter_with_grad_mode_on_stays_connected():
    w = torch.nn.Parameter(torch.randn(3, 3))
    watched: list[Any] = []
    (value, _), grads = fmp.gradients.value_and_grad(tracked(watched), has_aux=True)({"w": w}, torch.ones(2, 3))
    assert value.requires_grad
    assert grads["w"].requires_grad
    assert watched[0]() is not None


def test_a_captured_parameter_under_no_grad():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SiLU(), torch.nn.Linear(4, 1))
    x = torch.randn(2, 3)
    with torch.no_grad():
        value, grads = fmp.gradients.value_and_grad(lambda x: module(x).sum())(x)
        params = dict(module.named_parameters())
        of_params = fmp.gradients.grad(lambda params: functional_call(module, params, (x,)).sum())(params)
    assert not value.requires_grad
    assert_same((value, grads), by_autograd(lambda x: module(x).sum(), x))
    module(x).sum().backward()
    assert_same(of_params, {name: param.grad for name, param in params.items()})


def deep_mlp(params, x):
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().sum()


def test_peak_memory_is_that_of_autograd():
    params, x = [torch.randn(64, 64) / 8 for _ in range(16)], torch.randn(512, 64)
    ours = peak_bytes(lambda: fmp.gradients.value_and_grad(deep_mlp)(params, x))
    plain = peak_bytes(lambda: by_autograd(deep_mlp, params, x))
    with_graph = peak_bytes(lambda: torch.func.grad_and_value(deep_mlp)(params, x))
    assert ours <= 1.05 * plain
    assert with_graph > 1.5 * plain, "the measurement would not notice a graph that is kept"


def test_peak_memory_under_vmap_is_that_of_vjp_without_a_graph():
    params, x = [torch.randn(64, 64) / 8 for _ in range(16)], torch.randn(8, 64, 64)

    def by_vjp(params, x):
        value, pull = vjp(lambda params: deep_mlp(params, x), params)
        return value, pull(torch.ones_like(value), retain_graph=False, create_graph=False)[0]

    ours = peak_bytes(lambda: vmap(fmp.gradients.value_and_grad(deep_mlp), (None, 0))(params, x))
    plain = peak_bytes(lambda: vmap(by_vjp, (None, 0))(params, x))
    with_graph = peak_bytes(lambda: vmap(torch.func.grad_and_value(deep_mlp), (None, 0))(params, x))
    assert ours <= 1.05 * plain
    assert with_graph > 1.2 * plain, "the measurement would not notice a graph that is kept"


# ----------------------------------------------------------------------------------------------------- custom Functions


class Quadruple(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so a backward that is not called shows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factor):
        return x * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * x, None


class QuadrupleByHand(Quadruple):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x, factor):
        return QuadrupleByHand.apply(x, factor), in_dims[0]


class QuadrupleOldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * x, None


FORMS: dict[str, Any] = {
    "on the argument": lambda fn, x: fn.apply(x, 4.0).sum(),
    "on a result": lambda fn, x: fn.apply(x * 1.0, 4.0).sum(),
    "twice": lambda fn, x: fn.apply(fn.apply(x, 4.0), 3.0).sum(),
    "in a tree": lambda fn, x: sum(fn.apply(leaf, 4.0).sum() for leaf in fmp.tree.leaves({"a": x, "b": [x * 2]})),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("function", [Quadruple, QuadrupleByHand, QuadrupleOldStyle])
def test_custom_backward_is_called(form, function):
    x = torch.tensor([1.0, 2.0])
    loss = lambda x: form(function, x)
    expected = by_autograd(loss, x)
    assert not torch.equal(expected[1], torch.ones(2))
    assert_same(fmp.gradients.value_and_grad(loss)(x), expected)
    assert_same(torch.compile(fmp.gradients.value_and_grad(loss), backend="aot_eager", fullgraph=True)(x), expected)


SECOND: dict[str, Any] = {
    "grad of grad": lambda grad: fmp.gradients.grad(lambda x: grad(x).square().sum()),
    "vjp": lambda grad: lambda x: vjp(grad, x)[1](2 * grad(x))[0],
}


@pytest.mark.parametrize("function", [Quadruple, QuadrupleByHand])
def test_custom_backward_is_called_under_transforms(function):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    grad = fmp.gradients.grad(lambda x: function.apply(x, 4.0).sum())
    assert_same(vmap(grad)(x), 4 * x)
    assert_same(fmp.gradients.grad(lambda x: vmap(grad)(x).square().sum())(x), 32 * x)
    for second in SECOND.values():
        assert_same(second(grad)(x), 32 * x)


# What torch.compile itself cannot do with a custom backward. When one of these passes, say so in `value_and_grad`.


@pytest.mark.xfail(strict=True, reason="torch.compile: the second derivative of a custom backward is zero")
@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_compiled_second_derivative_of_a_custom_function(second):
    x = torch.tensor([1.0, 2.0])
    transformed = second(fmp.gradients.grad(lambda x: Quadruple.apply(x, 4.0).sum()))
    assert_same(torch.compile(transformed, backend="eager", fullgraph=True)(x), 32 * x)


def test_compiled_vmap_of_a_custom_function_raises():
    grad = fmp.gradients.grad(lambda x: Quadruple.apply(x, 4.0).sum())
    with pytest.raises(Exception, match="vmap over ApplyTemplate"):
        torch.compile(vmap(grad), backend="eager", fullgraph=True)(torch.ones(2, 2))
    assert not _compat.transform_active()


def test_torch_compile_still_drops_the_backward_of_a_function_applied_to_a_variable():
    # When this fails, the view that `_by_vjp` makes under the compiler is no longer needed.
    compiled = torch.compile(torch.func.grad(lambda x: Quadruple.apply(x, 4.0).sum()), backend="eager", fullgraph=True)
    assert compiled(torch.tensor([1.0, 2.0])).tolist() == [1.0, 1.0]
