import threading
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jacfwd, jvp, vmap
from torch.overrides import TorchFunctionMode

from fmp import _compat
from fmp._compat import levels

vjp: Any = torch.func.vjp  # its annotation leaves the length of the result open


class Pair:
    def __init__(self, left, right, unit):
        self.left, self.right, self.unit = left, right, unit


_compat.register_pytree(
    Pair,
    fields=("left", "right"),
    flatten=lambda pair: ((pair.left, pair.right), (pair.unit,)),
    unflatten=lambda static, children: Pair(*children, *static),
)


def test_the_private_names_exist():
    names = ["get_interpreter_stack", "peek_interpreter_stack", "is_functorch_wrapped_tensor", "get_unwrapped"]
    names += ["maybe_current_level"]
    assert [name for name in names if not callable(getattr(levels._functorch, name, None))] == []
    assert levels._functorch.TransformType.Grad != levels._functorch.TransformType.Vmap
    assert levels._functorch.peek_interpreter_stack() is None
    assert forward_ad._current_level == -1


@pytest.mark.parametrize("namespace", ["", "torch", "anything"])
def test_optree_sees_a_registered_class_in_every_namespace(namespace):
    pair: Any = Pair(1, {"b": 2}, "m")
    doubled: Any = optree.tree_map(lambda leaf: leaf * 2, pair, namespace=namespace)
    assert type(doubled) is Pair
    assert (doubled.left, doubled.right, doubled.unit) == (2, {"b": 4}, "m")


@pytest.mark.parametrize("namespace", ["", "anything"])
def test_optree_names_the_fields(namespace):
    pair: Any = Pair(1, [2], "m")
    assert optree.tree_paths(pair, namespace=namespace) == [("left",), ("right", 0)]
    accessor = optree.tree_accessors(pair, namespace=namespace)[1]
    assert accessor(pair) == 2
    assert accessor.codify("p") == "p.right[0]"


def test_torch_sees_a_registered_class():
    doubled = torch_pytree.tree_map(lambda leaf: leaf * 2, Pair(1, {"b": [2, 3]}, "m"))
    assert (doubled.left, doubled.right, doubled.unit) == (2, {"b": [4, 6]}, "m")
    keyed, _ = torch_pytree.tree_flatten_with_path(Pair(1, {"b": 2}, "m"))
    assert [leaf for _, leaf in keyed] == [1, 2]
    assert all(name in str(key) for (key, _), name in zip(keyed, ["left", "right"], strict=True))


def test_torch_structures_tell_static_data_and_holes_apart():
    def structure(pair):
        return torch_pytree.tree_structure(pair)

    assert structure(Pair(1, 2, "m")) == structure(Pair(3, 4, "m"))
    assert structure(Pair(1, 2, "m")) != structure(Pair(1, 2, "s"))
    assert structure(Pair(1, None, "m")) != structure(Pair(None, 1, "m"))


def test_vmap_takes_and_returns_nodes_with_holes():
    pair = vmap(lambda pair: Pair(pair.left * 2, {"w": pair.right["w"], "b": None}, "s"))(
        Pair(torch.arange(3.0), {"w": torch.ones(3), "n": None}, "m")
    )
    assert pair.left.tolist() == [0.0, 2.0, 4.0]
    assert pair.right["w"].shape == (3,)
    assert pair.right["b"] is None
    assert pair.unit == "s"


def test_transform_active():
    seen = []

    def probe(x):
        seen.append(_compat.transform_active())
        return (x * x).sum()

    x = torch.ones(3)
    probe(x)
    assert seen == [False]
    for transformed in (
        grad(probe),
        vmap(probe),
        jacfwd(probe),
        functionalize(probe),
        lambda x: vjp(probe, x),
        lambda x: jvp(probe, (x,), (x,)),
    ):
        seen.clear()
        transformed(x)
        assert seen == [True]
        assert not _compat.transform_active()
    with forward_ad.dual_level():
        assert _compat.transform_active()
    assert not _compat.transform_active()


def test_transform_active_after_an_error_inside_a_transform():
    def fail(x):
        raise ZeroDivisionError

    for transform in (grad, vmap):
        with pytest.raises(ZeroDivisionError):
            transform(fail)(torch.ones(2))
        assert not _compat.transform_active()


def test_transform_active_is_a_matter_of_one_thread():
    answers = []

    def probe(x):
        thread = threading.Thread(target=lambda: answers.append(_compat.transform_active()))
        thread.start()
        thread.join()
        return x.sum()

    grad(probe)(torch.ones(2))
    assert answers == [False]


def _inner_vjp(answers, captured: Any = 1.0):
    """A vjp that asks, where a gradient would be taken, whether something outside can differentiate its value."""

    def call(x):
        value, pull = vjp(lambda x: (x * x * captured).sum(), x)
        answers.append(_compat.differentiated_outside(value))
        return pull(torch.ones_like(value))[0].sum()

    return call


@pytest.mark.parametrize(
    ("surround", "expected"),
    [
        (lambda call: call, False),
        (vmap, False),
        (lambda call: vmap(vmap(call)), False),
        (grad, True),
        (lambda call: vmap(grad(call)), True),
        (lambda call: grad(lambda x: vmap(call)(x).sum()), True),
        (jacfwd, False),
        (lambda call: jacfwd(grad(call)), True),
        (lambda call: grad(lambda x: jvp(call, (x,), (torch.ones_like(x),))[1]), True),
    ],
    ids=["plain", "vmap", "vmap-vmap", "grad", "vmap-grad", "grad-vmap", "jacfwd", "jacfwd-grad", "grad-jvp"],
)
def test_differentiated_outside_under_transforms(surround, expected):
    answers = []
    surround(_inner_vjp(answers))(torch.ones(2, 2, 2))
    assert set(answers) == {expected}


@pytest.mark.parametrize("surround", [lambda call: call, vmap, lambda call: vmap(vmap(call)), jacfwd])
def test_differentiated_outside_by_an_ordinary_graph(surround):
    answers = []
    captured = torch.tensor(2.0, requires_grad=True)
    surround(_inner_vjp(answers, captured))(torch.ones(2, 2))
    assert set(answers) == {True}
    answers.clear()
    surround(_inner_vjp(answers))(torch.ones(2, 2, requires_grad=True))
    assert set(answers) == {True}
    answers.clear()
    with torch.no_grad():
        surround(_inner_vjp(answers, captured))(torch.ones(2, 2, requires_grad=True))
    assert set(answers) == {False}


def test_a_function_marked_constant_is_not_traced():
    import_inside = _compat.constant_while_tracing(lambda: len(list(__import__("os").scandir("/"))))
    official = torch.compiler.assume_constant_result(lambda: 1)
    assert vars(import_inside).keys() == vars(official).keys()
    found = torch.compile(lambda x: x + import_inside(), backend="eager", fullgraph=True)(torch.zeros(1))
    assert found == import_inside()


def test_the_level_and_the_mode_of_transforms():
    seen = []

    def f(x):
        seen.append((_compat.transform_level(), _compat.forward_mode_active(), _compat.wrapped_by_transform(x)))
        return x.sum()

    x = torch.ones(2, 2)
    f(x)
    grad(f)(x)
    vmap(grad(f))(x)
    jvp(f, (x,), (x,))
    f(x)
    assert seen == [(None, False, False), (1, False, True), (2, False, True), (1, True, True), (None, False, False)]


def test_copies_of_a_function_do_not_share_the_limit_of_compilations():
    def times(factor):
        def run(x, *, plus=1.0):
            return x * factor + plus

        return _compat.compiled_on_its_own(run)

    count = torch._dynamo.config.recompile_limit + 2
    compiled = [torch.compile(times(float(factor)), backend="eager", fullgraph=True) for factor in range(count)]
    assert [float(run(torch.ones(()))) for run in compiled] == [factor + 1.0 for factor in range(count)]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_state_of_torch_autocast(compiled):
    def state():
        return _compat.autocast_depth(), _compat.autocast_devices()

    def states(x):
        found = [state()]
        with torch.autocast("cpu", torch.bfloat16):
            found.append(state())
            with torch.autocast("cpu", enabled=False):
                found.append(state())
        return x, [*found, state()]

    run = torch.compile(states, backend="eager", fullgraph=True) if compiled else states
    assert run(torch.ones(()))[1] == [(0, ()), (1, ("cpu",)), (2, ()), (0, ())]


def test_is_compiled():
    def double(x):
        return 2 * x

    assert not _compat.is_compiled(double)
    assert _compat.is_compiled(torch.compile(double, backend="eager"))
    assert _compat.is_compiled(torch.compile(torch.nn.Linear(2, 2), backend="eager"))


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, True])
def test_function_modes_are_listed_with_the_innermost_last(compiled):
    outer, inner = Nothing(), Nothing()

    def places(x):
        with outer, inner:
            modes = _compat.function_modes()
        return x + 1, [modes[-1] is inner, modes[-2] is outer, modes[-1] is outer]

    run = torch.compile(places, backend="eager", fullgraph=True) if compiled else places
    assert run(torch.zeros(()))[1] == [True, True, False]


def test_a_function_mode_leaves_the_stack_from_any_place():
    outer = _compat.function_modes()
    modes = [TorchFunctionMode() for _ in range(3)]
    for mode in modes:
        mode.__enter__()
    assert _compat.remove_function_mode(modes[1])
    assert _compat.function_modes() == [*outer, modes[0], modes[2]]
    assert not _compat.remove_function_mode(modes[1])
    assert _compat.remove_function_mode(modes[0])
    assert _compat.remove_function_mode(modes[2])
    assert _compat.function_modes() == outer


@pytest.mark.parametrize("name", ["fused_adam_", "fused_adamw_", "fused_sgd_"])
def test_the_kernels_of_torch_optim_exist(name):
    assert callable(getattr(_compat, name))


def test_an_error_says_that_a_transform_refuses_saved_tensor_hooks():
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with pytest.raises(RuntimeError) as refused, hooks:
        grad(lambda x: x.sum())(torch.ones(2))
    assert _compat.refuses_saved_tensor_hooks(refused.value)
    assert not _compat.refuses_saved_tensor_hooks(RuntimeError("another one"))


def test_saved_tensors_are_hooked_inside_of_hooks():
    found = [_compat.saved_tensors_are_hooked()]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        found.append(_compat.saved_tensors_are_hooked())
    assert [*found, _compat.saved_tensors_are_hooked()] == [False, True, False]


def test_the_next_number_is_that_of_the_node_that_is_recorded_next():
    before = _compat.next_number()
    node: Any = torch.ones((), requires_grad=True).view(()).grad_fn
    assert _compat.recorded_at(node) == before
    assert _compat.next_number() == before + 1


def test_a_recurrent_layer_lists_its_weights_in_the_attributes_that_are_named():
    layer = torch.nn.LSTM(2, 3)
    assert vars(layer).keys() >= _compat.FLAT_WEIGHTS
    assert _compat.first_weight(layer) is layer.weight_ih_l0
    _compat.forget_weights(layer)
    assert _compat.first_weight(layer) is None
    assert layer(torch.ones(1, 2))[0].shape == (1, 3)


def test_functions_are_found_where_they_are_kept():
    assert _compat.FUNCTIONS.matmul is torch.matmul
    assert _compat.NN_FUNCTIONS.gelu is torch.nn.functional.gelu
    assert _compat.SPARSE_FUNCTIONS.sparse_sampled_addmm is torch.sparse.sampled_addmm
    assert _compat.packet_name(torch.ops.aten.add) == "aten::add"


def test_neither_modes_nor_classes_are_asked_where_that_is_disabled():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise ZeroDivisionError

    loud = torch.ones(1).as_subclass(Loud)
    with pytest.raises(ZeroDivisionError):
        torch.neg(loud)
    with _compat.DisableTorchFunction():
        assert float(torch.neg(loud)) == -1.0
