import operator
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fmp._compat import constant_while_tracing
from fmp.policy.oplists import ALIASES, OPERATORS
from fmp.policy.spellings import Spellings, name_of, spellings
from tests.policy.test_oplists import LISTED

aten: Any = torch.ops.aten
private: Any = torch._C
attribute: Any = Tensor


class Recording(TorchFunctionMode):
    """Keeps what it is shown."""

    def __init__(self):
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def shown(call: Any, *args: Any) -> Any:
    """The last of what a mode sees of a call: before it may come a clone, so that the test can write in place."""
    with Recording() as mode:
        call(*args)
    return mode.seen[-1]


X, Y = torch.rand(3, 3) + 0.5, torch.rand(3, 3) + 0.5
IMAGE = torch.rand(1, 1, 4, 4)
LABELS, MASK, INDEX = torch.tensor([0, 1, 2]), torch.tensor([True, False, True]), torch.tensor([2, 0])


def write(x: Tensor, index: Any, value: Any) -> None:
    x[index] = value


PLAIN = {
    "matmul": [
        lambda x, y: x @ y,
        torch.matmul,
        Tensor.matmul,
        lambda x, y: x.__matmul__(y),
        Tensor.__rmatmul__,
        torch.linalg.matmul,
        operator.matmul,
        operator.imatmul,
        private._VariableFunctions.matmul,
        private._linalg.linalg_matmul,
        aten.matmul,
        aten.matmul.default,
        aten.linalg_matmul,
        aten.linalg_matmul.default,
        lambda x, y: torch.matmul(x, y, out=torch.empty(3, 3)),
    ],
    "mm": [torch.mm, Tensor.mm, aten.mm, aten.mm.default, lambda x, y: aten.mm.out(x, y, out=torch.empty(3, 3))],
    "add": [
        lambda x, y: x + y,
        lambda x, y: x + 1,
        lambda x, y: 1 + x,
        lambda x, y: x.__radd__(y),
        torch.add,
        Tensor.add,
        aten.add,
        aten.add.Tensor,
        operator.add,
        lambda x, y: torch.add(x, y, out=torch.empty(3, 3)),
    ],
    "sub": [
        lambda x, y: x - y,
        lambda x, y: 2 - x,
        lambda x, y: x.__rsub__(y),
        torch.sub,
        torch.rsub,
        torch.subtract,
        Tensor.subtract,
        aten.rsub.Tensor,
    ],
    "mul": [lambda x, y: x * y, lambda x, y: 2 * x, torch.mul, torch.multiply, Tensor.multiply, aten.mul.Tensor],
    "div": [
        lambda x, y: x / y,
        lambda x, y: 2 / x,
        lambda x, y: x.__rtruediv__(y),
        torch.div,
        torch.divide,
        torch.true_divide,
        Tensor.true_divide,
        operator.truediv,
        aten.div.Tensor,
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
    ],
    "pow": [
        lambda x, y: x**2,
        lambda x, y: 2**x,
        lambda x, y: x.__pow__(y),
        lambda x, y: x.pow(2),
        torch.pow,
        Tensor.pow,
        aten.pow.Tensor_Tensor,
    ],
    "remainder": [lambda x, y: x % y, lambda x, y: 2 % x, torch.remainder, operator.mod],
    "floor_divide": [lambda x, y: x // y, lambda x, y: 2 // x, torch.floor_divide, operator.floordiv],
    "neg": [lambda x, y: -x, lambda x, y: torch.negative(x), lambda x, y: x.neg()],
    "abs": [lambda x, y: abs(x), lambda x, y: torch.absolute(x), lambda x, y: x.__abs__()],
    "eq": [lambda x, y: x == y, torch.eq, Tensor.eq, lambda x, y: x.__eq__(y), operator.eq, aten.eq.Tensor],
    "ne": [lambda x, y: x != y, torch.not_equal, Tensor.ne],
    "lt": [lambda x, y: x < y, torch.less, Tensor.lt],
    "le": [lambda x, y: x <= y, torch.less_equal, Tensor.le],
    "gt": [lambda x, y: x > y, lambda x, y: x.__gt__(y), torch.greater],
    "ge": [lambda x, y: x >= y, torch.greater_equal, aten.ge.Tensor],
    "softmax": [
        lambda x, y: F.softmax(x, -1),
        lambda x, y: torch.softmax(x, -1),
        lambda x, y: x.softmax(-1),
        lambda x, y: torch.special.softmax(x, -1),
        lambda x, y: private._special.special_softmax(x, -1),
        lambda x, y: aten.softmax.int(x, -1),
    ],
    "expm1": [lambda x, y: torch.special.expm1(x), lambda x, y: x.expm1(), lambda x, y: aten.special_expm1(x)],
    "acos": [lambda x, y: torch.arccos(x), lambda x, y: x.acos(), lambda x, y: aten.arccos.default(x)],
    "norm": [lambda x, y: x.norm(), lambda x, y: torch.norm(x), lambda x, y: aten.norm.Scalar(x)],
    "linalg_norm": [lambda x, y: torch.linalg.norm(x), lambda x, y: aten.linalg_norm(x)],
    "linalg_vector_norm": [lambda x, y: torch.linalg.vector_norm(x)],
    "linalg_inv": [lambda x, y: torch.linalg.inv(x), lambda x, y: x.inverse(), lambda x, y: torch.inverse(x)],
    "fft_rfft": [lambda x, y: torch.fft.rfft(x), lambda x, y: private._fft.fft_rfft(x), lambda x, y: aten.fft_rfft(x)],
    "cat": [
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.concat([x, y]),
        lambda x, y: aten.concatenate.default([x, y]),
    ],
    "einsum": [lambda x, y: torch.einsum("ij,jk->ik", x, y), lambda x, y: torch.functional.einsum("ij->j", x)],
    "tensordot": [lambda x, y: torch.tensordot(x, y, 1)],
    "cdist": [torch.cdist],
    "linear": [F.linear, private._nn.linear, aten.linear],
    "gelu": [lambda x, y: F.gelu(x), lambda x, y: private._nn.gelu(x)],
    "layer_norm": [lambda x, y: F.layer_norm(x, (3,)), lambda x, y: torch.layer_norm(x, (3,))],
    "cross_entropy": [
        lambda x, y: F.cross_entropy(x, LABELS),
        lambda x, y: private._nn.cross_entropy_loss(x, LABELS),
        lambda x, y: aten.cross_entropy_loss(x, LABELS),
    ],
    "nll_loss": [
        lambda x, y: F.nll_loss(x, LABELS),
        lambda x, y: private._nn.nll_loss_nd(x, LABELS),
        lambda x, y: aten.nll_loss_nd.default(x, LABELS),
    ],
    "pairwise_distance": [F.pairwise_distance, torch.pairwise_distance],
    "interpolate": [lambda x, y: F.interpolate(IMAGE, scale_factor=2)],
    "upsample_nearest2d": [lambda x, y: private._nn.upsample_nearest2d(IMAGE, [2, 2])],
    "normalize": [lambda x, y: F.normalize(x)],
    "max_pool2d": [
        lambda x, y: F.max_pool2d(IMAGE, 2),
        lambda x, y: F.max_pool2d(IMAGE, 2, return_indices=True),
        lambda x, y: torch.max_pool2d(IMAGE, 2),
    ],
    "adaptive_max_pool2d": [
        lambda x, y: F.adaptive_max_pool2d(IMAGE, 2),
        lambda x, y: F.adaptive_max_pool2d(IMAGE, 2, return_indices=True),
    ],
    "im2col": [lambda x, y: F.unfold(IMAGE, 2), lambda x, y: private._nn.im2col(IMAGE, [2, 2], [1, 1], [0, 0], [1, 1])],
    "unfold": [lambda x, y: x.unfold(0, 2, 1)],
    "threshold": [lambda x, y: F.threshold(x, 0.1, 0.0), lambda x, y: torch.threshold(x, 0.1, 0.0)],
    "log_sigmoid": [lambda x, y: F.logsigmoid(x)],
    "sigmoid": [lambda x, y: F.sigmoid(x), lambda x, y: torch.special.expit(x), lambda x, y: x.sigmoid()],
    "index_put": [lambda x, y: x.index_put((LABELS,), y), lambda x, y: torch.index_put(x, [LABELS], y)],
    "bitwise_and": [lambda x, y: MASK & MASK, lambda x, y: torch.bitwise_and(MASK, MASK), lambda x, y: True & MASK],
    "bitwise_not": [lambda x, y: ~MASK],
    "cpu": [lambda x, y: x.cpu()],
    "T": [lambda x, y: x.T],
}

IN_PLACE = {
    "add": [lambda x, y: x.add_(y), operator.iadd, aten.add_, aten.add_.Tensor, lambda x, y: x.__iadd__(y)],
    "sub": [operator.isub, lambda x, y: x.subtract_(y)],
    "mul": [operator.imul, lambda x, y: x.multiply_(y)],
    "div": [operator.itruediv, lambda x, y: x.true_divide_(y), lambda x, y: x.__idiv__(y)],
    "pow": [lambda x, y: operator.ipow(x, 2), lambda x, y: x.pow_(2), lambda x, y: x.__ipow__(2)],
    "remainder": [operator.imod],
    "exp": [lambda x, y: x.exp_(), lambda x, y: torch.exp_(x), lambda x, y: aten.exp_.default(x)],
    "eq": [lambda x, y: x.eq_(y)],
    "acos": [lambda x, y: x.arccos_()],
    "index_put": [
        lambda x, y: write(x, 0, 1.0),
        lambda x, y: write(x, INDEX, y[0]),
        lambda x, y: write(x, x > 1, 0.0),
        lambda x, y: x.index_put_((INDEX,), y[0]),
    ],
    "bitwise_and": [lambda x, y: operator.iand(MASK.clone(), MASK)],
}


def written(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, call, id=f"{name}-{i}") for name, calls in table.items() for i, call in enumerate(calls)]


@pytest.mark.parametrize(("name", "call"), written(PLAIN))
def test_a_mode_is_shown_a_plain_spelling(name, call):
    func = shown(call, X.clone(), Y)
    assert func in spellings(name).plain
    assert func not in spellings(name).in_place
    assert name_of(func) == name


@pytest.mark.parametrize(("name", "call"), written(IN_PLACE))
def test_a_mode_is_shown_an_in_place_spelling(name, call):
    func = shown(call, X.clone(), Y)
    assert func in spellings(name).in_place
    assert func not in spellings(name).plain
    assert name_of(func) == name


def test_every_form_of_an_operator_is_a_spelling():
    for name, symbols in OPERATORS.items():
        for symbol in symbols:
            for side, group in (("", "plain"), ("r", "plain"), ("i", "in_place")):
                method = getattr(Tensor, f"__{side}{symbol}__", None)
                assert method is None or method in getattr(spellings(name), group), (name, side)


def test_the_c_forms_of_namespaces_are_the_same_functions():
    for namespace in ("linalg", "special", "fft"):
        ours, theirs = getattr(torch, namespace), getattr(private, f"_{namespace}")
        names = [name for name in dir(theirs) if name.startswith(f"{namespace}_")]
        assert len(names) > 20
        for name in names:
            public = getattr(ours, name.removeprefix(f"{namespace}_"), None)
            assert public is None or public == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("matmul", lambda x, y: x @ y),
        ("sub", lambda x, y: 2 - x),
        ("pow", lambda x, y: x**2),
        ("div", lambda x, y: 2 / x),
        ("softmax", lambda x, y: F.softmax(x, -1)),
        ("norm", lambda x, y: x.norm()),
        ("cross_entropy", lambda x, y: F.cross_entropy(x, LABELS)),
    ],
)
def test_the_compiler_shows_a_mode_the_same_callables(name, call):
    known = {*spellings(name).plain}

    @constant_while_tracing
    def is_known(func: Any) -> bool:
        return func in known

    class Marking(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result + 7 if is_known(func) else result

    def marked(x: Tensor, y: Tensor) -> Tensor:
        with Marking():
            return call(x, y)

    compiled = torch.compile(marked, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X, Y), call(X, Y) + 7)


# --- names


def members(spelled: Spellings) -> Iterator[Any]:
    yield from spelled.plain
    yield from spelled.in_place


@pytest.mark.parametrize("name", sorted({*LISTED, *ALIASES, *OPERATORS}))
def test_every_spelling_has_the_canonical_name(name):
    assert {name_of(op) for op in members(spellings(name))} == {name}
    assert name_of(name) == name
    assert all(op in spellings(name) for op in members(spellings(name)))


def test_no_callable_is_two_ops():
    names = sorted({*LISTED, *ALIASES, *OPERATORS, "rand", "index", "float", "unfold", "real", "T", "where"})
    owners: dict[Any, str] = {}
    for name in names:
        for op in members(spellings(name)):
            assert owners.setdefault(op, name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("softmax", "softmax"),
        ("torch.softmax", "softmax"),
        ("F.softmax", "softmax"),
        ("torch.nn.functional.softmax", "softmax"),
        ("torch.special.softmax", "softmax"),
        ("special_softmax", "softmax"),
        ("Tensor.add_", "add"),
        ("torch.Tensor.__iadd__", "add"),
        ("__radd__", "add"),
        ("add_", "add"),
        ("aten.mm", "mm"),
        ("aten::mm", "mm"),
        ("torch.ops.aten.mm.default", "mm"),
        ("operator.truediv", "div"),
        ("linalg.norm", "linalg_norm"),
        ("torch.linalg.norm", "linalg_norm"),
        ("norm", "norm"),
        ("fft.rfft", "fft_rfft"),
        ("F.unfold", "im2col"),
        ("unfold", "unfold"),
        ("F.threshold", "threshold"),
        ("F.upsample", "interpolate"),
        ("Tensor.__setitem__", "index_put"),
        ("F.multi_head_attention_forward", "multi_head_attention_forward"),
    ],
)
def test_names_from_text(text, name):
    assert name_of(text) == name


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (operator.matmul, "matmul"),
        (operator.imul, "mul"),
        (operator.truediv, "div"),
        (operator.and_, "bitwise_and"),
        (operator.setitem, "index_put"),
        (operator.getitem, "__getitem__"),
        (torch.relu, "relu"),
        (torch.relu_, "relu"),
        (F.relu, "relu"),
        (F.gelu, "gelu"),
        (F.grid_sample, "grid_sample"),
        (torch.grid_sampler, "grid_sampler"),
        (torch.lu, "lu"),
        (torch.meshgrid, "meshgrid"),
        (torch.rand, "rand"),
        (attribute.__rand__, "bitwise_and"),
        (Tensor.float, "float"),
        (attribute.__float__, "__float__"),
        (attribute.grad.__set__, "grad"),
        (aten.copy_.default, "copy"),
    ],
)
def test_names_of_ops_on_no_list(op, name):
    assert name_of(op) == name


def test_custom_ops_go_by_their_qualified_names():
    @torch.library.custom_op("fmp_test_spellings::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    packet = torch.ops.fmp_test_spellings.twice
    name = "fmp_test_spellings::twice"
    for op in (packet, packet.default, name, f"{name}.default", "torch.ops.fmp_test_spellings.twice"):
        assert name_of(op) == name
    assert spellings(name) == Spellings(plain=(packet, packet.default), in_place=())
    assert shown(packet, X) in spellings(name).plain
    assert shown(packet.default, X) in spellings(name).plain


def test_a_custom_op_is_found_once_it_is_registered():
    with pytest.raises(ValueError, match="fmp_test_spellings::late"):
        name_of("fmp_test_spellings::late")
    torch.library.define("fmp_test_spellings::late", "(Tensor x) -> Tensor")
    assert name_of("fmp_test_spellings::late") == "fmp_test_spellings::late"


# --- errors


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("soft_max", "'softmax'"),
        ("F.crossentropy", "'cross_entropy'"),
        ("vector_norm", "'linalg_vector_norm'"),
        ("aten::matmull", "'matmul'"),
        ("mylib.conv2", "'conv2d'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(text, found):
    with pytest.raises(ValueError, match=f"torch has no op '{text}'; did you mean {found}"):
        name_of(text)


@pytest.mark.parametrize("text", ["", ".", "::", "torch.", "qqqqqqqq", "torch.qqqqqqqq", "a.b.c.d.e.qqqqqqqq"])
def test_a_name_like_no_other_gets_no_advice(text):
    with pytest.raises(ValueError, match="torch has no op") as error:
        name_of(text)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x,
        Squared,
        Squared.apply,
        nn.Linear,
        nn.Linear(2, 2),
        torch.save,
        torch.set_num_threads,
        torch.compile,
        len,
        operator.concat,
        "torch.save",
        "nn.functional.boolean_dispatch",
    ],
)
def test_what_no_mode_is_shown_must_be_decorated(op):
    with pytest.raises(TypeError, match=r"decorate it.*fmp\.low_precision, fmp\.full_precision or fmp\.promote"):
        name_of(op)


def test_a_namesake_is_not_the_op():
    def softmax(x: Tensor) -> Tensor:
        return x

    with pytest.raises(TypeError, match="softmax is no op of torch"):
        name_of(softmax)


def test_an_op_must_be_callable_or_text():
    wrong: Any = 3
    with pytest.raises(TypeError, match="op must be a function of torch or the name of one, got 3 of type int"):
        name_of(wrong)


# --- cost


def test_importing_builds_no_table():
    code = """
import sys, torch
before = set(sys.modules)
import fmp.policy.spellings as spellings
assert spellings._of_torch.cache_info().currsize == 0
assert "torch._dynamo" not in set(sys.modules) - before
print("lazy")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "lazy\n", done.stderr
