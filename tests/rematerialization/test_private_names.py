"""The private names of torch that remat needs, and what they must go on doing."""

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from fmp import _compat
from fmp.dropout import SeededRandomness

X = torch.ones(2, 3)


def test_the_kinds_of_transforms_outermost_first():
    seen = []

    def look(x):
        seen.append(_compat.transforms())
        return x.sum()

    vmap(grad(look))(X)
    jvp(look, (X,), (X,))
    kinds, (forward,) = seen
    assert _compat.transforms() == ()
    assert kinds[0] == _compat.VMAP
    assert kinds[1] not in (_compat.VMAP, _compat.JVP)
    assert forward == _compat.JVP


def test_wrappers_of_transforms_that_are_not_in_progress():
    kept = []

    def keep(x):
        kept.append(x)
        assert not _compat.belongs_to_ended_level(x, _compat.transforms())
        assert _compat.belongs_to_ended_level(x, ())
        assert _compat.belongs_to_ended_level(x, (_compat.VMAP,))
        assert _compat.below_transforms(x).data_ptr() == X.data_ptr()
        return x.sum()

    grad(keep)(X)
    assert not _compat.belongs_to_ended_level(kept[0], ())
    assert not _compat.wrapped_by_transform(_compat.unwrap_if_dead(kept[0]))


def test_what_a_transform_around_the_caller_differentiates():
    def look(x, y):
        assert (_compat.differentiated(x), _compat.differentiated(y)) == (True, False)
        return x.sum() + y.sum()

    grad(look)(X, X)
    vmap(grad(look))(X, X)
    grad(lambda x: vmap(look, (0, None))(x, X).sum())(X)
    grad(lambda x: grad(lambda y: look(x, X) * y.sum())(X).sum())(X)
    look(X.clone().requires_grad_(), X)


def test_replaced_function_modes():
    with SeededRandomness(0) as outer, SeededRandomness(1) as inner:
        before = _compat.function_modes()
        with _compat.replaced_function_modes():
            assert _compat.function_modes() == []
            _compat.push_function_mode(inner)
            assert _compat.function_modes() == [inner]
        assert _compat.function_modes() == before
        assert before[-2:] == [outer, inner]


def test_a_view_made_by_a_dispatch_mode_counts_changes():
    kept = []

    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.sin.default:
                with _compat.counting_changes():
                    kept.append(output.detach())
            return output

    with Keep() as mode:
        assert mode in _compat.dispatch_modes()
        y = torch.sin(X)
    before = kept[0]._version
    y.mul_(2)
    assert kept[0]._version == before + 1


def test_saved_tensors_hooks():
    assert _compat.saved_tensors_hooks_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not _compat.saved_tensors_hooks_allowed()
    assert _compat.saved_tensors_hooks_allowed()


def test_what_is_asked_while_compiling():
    seen = {}

    def look(x):
        seen["names"] = _compat.compiler_name()
        seen["before"] = _compat.allow_side_effects_in_checkpoint(True)
        seen["after"] = _compat.allow_side_effects_in_checkpoint(False)
        return x + 1

    for backend in ("eager", "aot_eager"):
        torch.compile(look, backend=backend, fullgraph=True)(X)
        assert seen == {"names": backend, "before": False, "after": True}
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint


def test_tags_in_a_graph():
    def named(x):
        y = torch.sin(x).t()[:2]
        _ = torch.ops.aten.alias(y)
        assert _compat.making_a_graph()
        _compat.tag_maker("kept", "this")
        return torch.cos(y)

    assert not _compat.making_a_graph()
    _compat.tag_maker("kept", "nothing")  # does nothing
    nodes = make_fx(named)(X).graph.nodes
    assert [str(node.target) for node in nodes if node.meta.get("kept") == "this"] == ["aten.sin.default"]


def test_transforms_that_do_nothing():
    x = torch.ones(2)
    with _compat.levels_up_to(2):
        y = x * 1
        assert len(_compat.transforms()) == _compat.level_of(y) == 2
        with _compat.levels_up_to(1):
            assert len(_compat.transforms()) == 2
        assert _compat.level_of(_compat.unwrapped_to(y, 1)) == 1
    assert _compat.transforms() == ()
    assert _compat.level_of(y) < 1
    assert not _compat.wrapped_by_transform(_compat.unwrapped_to(y, 0))


def test_batched_gradients_and_transforms_are_suspended():
    seen = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            seen.append(_compat.gradients_are_batched())
            with _compat.without_transforms():
                seen.append(_compat.gradients_are_batched() or _compat.transform_active())
                torch.rand(1)
            seen.append(_compat.gradients_are_batched() or _compat.transform_active())
            return grads[0]

    x = X.clone().requires_grad_()
    torch.autograd.grad(Looking.apply(x), x, torch.ones(2, 2, 3), is_grads_batched=True)
    y: torch.Tensor = Looking.apply(x)  # pyright: ignore[reportAssignmentType]
    vmap(lambda row: torch.autograd.grad(y, x, row)[0])(torch.ones(2, 2, 3))
    assert seen == [True, False, True, False, False, True]
    assert not _compat.gradients_are_batched()


def test_the_cache_of_parametrizations():
    linear = parametrizations.weight_norm(torch.nn.Linear(3, 3))
    assert not _compat.parametrizations_are_cached()
    with parametrize.cached():
        weight = linear.weight
        assert _compat.parametrizations_are_cached()
        with _compat.parametrization_cache(True):
            assert linear.weight is not weight
            assert linear.weight is linear.weight
        with _compat.parametrization_cache(False):
            assert linear.weight is not linear.weight
        assert linear.weight is weight


def test_tensors_of_transforms_that_do_nothing():
    with _compat.levels_up_to(2):
        wrapped = _compat.wrapped_above(X, 0)
        assert _compat.level_of(wrapped) == 2
        wrapped.add_(0)  # refused for a tensor of none
        assert _compat.unwrapped_to(wrapped, 0) is X


class NeverRead(torch.Tensor):
    """A class that is asked for each operator, and refuses."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise LookupError


READERS = {
    "operator": lambda tensor: tensor.sin(),
    "without classes": lambda tensor: without_classes(tensor),
    "numbers": lambda tensor: tensor.tolist(),
    "array": lambda tensor: tensor.numpy(),
    "address": lambda tensor: tensor.data_ptr(),
    "storage": lambda tensor: tensor.untyped_storage().data_ptr(),
    "DLPack": lambda tensor: tensor.__dlpack__(),
}


def without_classes(tensor):
    with torch._C._DisableTorchDispatch():
        return tensor.sin()


@pytest.mark.parametrize("reader", READERS)
def test_nothing_reads_a_tensor_without_memory(reader):
    tensor = _compat.without_memory(NeverRead, X.T.shape, X.T.stride(), torch.bfloat16, X.device)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (X.T.shape, X.T.stride(), torch.bfloat16)
    assert not tensor.is_contiguous()
    with pytest.raises((LookupError, RuntimeError)):
        READERS[reader](tensor)


def test_what_holds_a_tensor_and_its_memory():
    tensor = X.clone()
    assert (_compat.count_holders(tensor), _compat.count_tensors(tensor)) == (1, 1)
    view = tensor[0]
    assert _compat.base_of(view) is tensor
    assert _compat.base_of(tensor) is None
    assert (_compat.count_holders(tensor), _compat.count_tensors(tensor)) == (2, 2)
    detached = view.detach()
    assert (_compat.count_holders(tensor), _compat.count_tensors(detached)) == (2, 3)
    del view, detached
    assert (_compat.count_holders(tensor), _compat.count_tensors(tensor)) == (1, 1)
    held = []
    grad(lambda x: held.append(x) or x.sum())(tensor)
    assert _compat.count_holders(tensor) == 2
    held.clear()
    assert _compat.count_holders(tensor) == 1
