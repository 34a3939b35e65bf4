"""The private names of torch that remat needs, and what they must go on doing."""

import torch
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
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
