"""Policies around and inside of each other, with and without op rules, and `fmp.autocast` itself."""

import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.utils.checkpoint import CheckpointError, checkpoint

import fmp
from fmp.policy import OpRules, Policy

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
APEX = Policy("f32", "bf16", None, op_rules="apex")
HALF = Policy("f32", "f16", None, op_rules="apex")
OFF = Policy(None, None, None)


def x() -> torch.Tensor:
    return torch.ones(4, 4)


def kinds(w: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of a product and of a softmax."""
    low = w @ w
    return low.dtype, low.softmax(-1).dtype


def attend(w: torch.Tensor, heads: int = 2) -> torch.Tensor:
    w = w[:, None]
    in_weight, in_bias, out_weight, out_bias = torch.ones(12, 4), torch.zeros(12), torch.ones(4, 4), torch.zeros(4)
    out, _ = F.multi_head_attention_forward(
        w, w, w, 4, heads, in_weight, in_bias, None, None, False, 0.0, out_weight, out_bias
    )
    return out


# --- nested policies


def test_the_inner_policy_wins_and_the_outer_one_returns():
    seen = []

    def run(w):
        seen.append(kinds(w))
        fmp.autocast(lambda w: seen.append(kinds(w)), HALF)(w)
        seen.append(kinds(w))
        fmp.autocast(lambda w: seen.append(fmp.autocast(kinds, APEX)(w)), OFF)(w)
        seen.append(kinds(w))

    fmp.autocast(run, APEX)(x())
    assert seen == [(BF16, F32), (F16, F32), (BF16, F32), (BF16, F32), (BF16, F32)]
    assert kinds(x()) == (F32, F32)


def test_a_policy_that_casts_nothing_switches_casting_off():
    run = lambda w: (kinds(w), fmp.autocast(kinds, OFF)(w), kinds(w))
    assert fmp.autocast(run, APEX)(x()) == ((BF16, F32), (F32, F32), (BF16, F32))


def test_a_policy_without_op_rules_inside_one_with():
    inner = Policy("f32", "f16", "f32")
    run = lambda w: (kinds(w), fmp.autocast(lambda w: (kinds(w), w @ w), inner)(w), kinds(w))
    before, ((low, softmax), out), after = fmp.autocast(run, APEX)(x())
    assert before == after == (BF16, F32)
    assert (low, softmax, out.dtype) == (F16, F16, F32)
    outer = Policy("f32", "f16", None)
    assert fmp.autocast(lambda w: (w.dtype, fmp.autocast(kinds, APEX)(w), kinds(w)), outer)(x()) == (
        F16, (BF16, F32), (F16, F16),
    )  # fmt: skip


@pytest.mark.parametrize("inner", [HALF, OFF, Policy("f32", "f16", "f32")])
def test_the_outer_policy_returns_after_an_exception(inner):
    def fail(w):
        raise ZeroDivisionError

    def run(w):
        with pytest.raises(ZeroDivisionError):
            fmp.autocast(fail, inner)(w)
        return kinds(w)

    assert fmp.autocast(run, APEX)(x()) == (BF16, F32)
    with pytest.raises(ZeroDivisionError):
        fmp.autocast(fail, APEX)(x())
    assert kinds(x()) == (F32, F32)


def test_an_exception_in_a_torch_function_leaves_casting_on():
    def run(w):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.matmul(w, torch.ones(3, 3))
        with pytest.raises(fmp.BannedOpError):
            F.binary_cross_entropy(w.half(), w)
        with pytest.raises(AssertionError):
            attend(w, heads=3)
        return kinds(w)

    assert fmp.autocast(run, APEX)(x()) == (BF16, F32)
    assert kinds(x()) == (F32, F32)


class Switching(torch.autograd.Function):
    """Computes a product under whatever policy its caller is, and one under a policy of its own."""

    generate_vmap_rule = True
    inner: Policy = OFF
    seen: list[Any] = []  # noqa: RUF012

    @staticmethod
    def forward(w):
        Switching.seen.append((kinds(w), fmp.autocast(kinds, Switching.inner)(w), kinds(w)))
        return w * 2.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 2.0


@pytest.mark.parametrize(("inner", "expected"), [(HALF, (F16, F32)), (OFF, (F32, F32))])
def test_a_policy_inside_of_a_custom_function(inner, expected, monkeypatch):
    monkeypatch.setattr(Switching, "inner", inner)
    run = fmp.autocast(lambda w: Switching.apply(w).sum(), APEX)
    outside = fmp.autocast(grad(lambda w: Switching.apply(w).sum()), APEX)
    for call in (run, grad(run), vmap(run), vmap(grad(run)), outside):
        monkeypatch.setattr(Switching, "seen", [])
        call(torch.ones(2, 4, 4))
        assert set(Switching.seen) == {((BF16, F32), expected, (BF16, F32))}


def test_policies_around_a_composite_and_within_a_subclass_of_tensor():
    seen = []

    class Lazy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append((kinds(x()), fmp.autocast(kinds, HALF)(x()), kinds(x())))
            return super().__torch_function__(func, types, args, kwargs or {})

    covered = fmp.autocast(attend, OFF)
    run = lambda w: (attend(w).dtype, covered(w).dtype, attend(w).dtype, fmp.autocast(attend, HALF)(w).dtype)
    assert fmp.autocast(run, APEX)(x()) == (BF16, F32, BF16, F16)
    fmp.autocast(lambda w: w.as_subclass(Lazy) @ w, APEX)(x())
    assert {record[1] for record in seen} == {(F16, F32)}


@pytest.mark.parametrize("order", [(APEX, HALF, OFF), (OFF, HALF, APEX)])
def test_one_function_under_several_policies(order):
    expected = {APEX: (BF16, F32), HALF: (F16, F32), OFF: (F32, F32)}
    functions = [(fmp.autocast(kinds, policy), policy) for policy in order]
    for _ in range(2):
        for fn, policy in functions:
            assert fn(x()) == expected[policy]


def test_a_function_that_was_transformed_twice_runs_by_the_inner_policy():
    assert fmp.autocast(fmp.autocast(kinds, HALF), APEX)(x()) == (F16, F32)


def test_checkpointing_goes_around_autocast():
    body = lambda w: torch.tanh(w @ w).softmax(-1).square()
    w = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(fmp.autocast(body, APEX)(w).sum(), w)
    inside = checkpoint(fmp.autocast(body, APEX), w, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(inside.sum(), w)[0], expected[0])
    outside = fmp.autocast(lambda w: checkpoint(body, w, use_reentrant=False), APEX)(w)
    with pytest.raises(CheckpointError):
        torch.autograd.grad(outside.sum(), w)


def test_two_threads_with_policies_of_their_own():
    barrier = threading.Barrier(2)
    found: dict[Policy, set[Any]] = {APEX: set(), HALF: set()}

    def work(policy):
        def run(w):
            for _ in range(50):
                barrier.wait(timeout=30)
                found[policy].add(kinds(w))
            return w

        fmp.autocast(run, policy)(x())

    threads = [threading.Thread(target=work, args=(policy,)) for policy in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {APEX: {(BF16, F32)}, HALF: {(F16, F32)}}


# --- autocast itself


def test_switched_off_it_returns_the_function_itself():
    assert fmp.autocast(kinds, APEX, enabled=False) is kinds
    assert fmp.autocast(kinds, APEX, enabled=True)(x()) == (BF16, F32)


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"policy must be a Policy, got 'O1'; see fmp\.opt_level"):
        fmp.autocast(kinds, "O1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="autocast transforms a function, got 3"):
        fmp.autocast(3, APEX)  # pyright: ignore[reportArgumentType]


def test_it_keeps_name_and_signature():
    def documented(w, *, scale=1.0):
        """Says something."""
        return w * scale

    cast = fmp.autocast(documented, APEX)
    assert (cast.__name__, cast.__doc__) == ("documented", "Says something.")
    assert torch.equal(cast(x(), scale=3.0), x() * 3.0)


@pytest.mark.parametrize("rules", [None, "apex"])
def test_the_output_is_cast(rules):
    policy = Policy("f32", "bf16", "f64", op_rules=rules)
    out = fmp.autocast(lambda w: {"low": w @ w, "n": 3, "ids": torch.arange(2), "name": "w", "none": None}, policy)(x())
    assert (out["low"].dtype, out["ids"].dtype, out["n"], out["name"], out["none"]) == (F64, torch.int64, 3, "w", None)
    assert fmp.autocast(lambda w: w @ w, APEX)(x()).dtype == BF16
    assert fmp.autocast(lambda: (), policy)() == ()
    assert fmp.autocast(lambda tree: tree, policy)({"a": [], "b": ()}) == {"a": [], "b": ()}
    assert fmp.autocast(lambda n: n + 1, policy)(1) == 2
    assert fmp.autocast(lambda: None, policy)() is None


def test_without_op_rules_the_arguments_are_cast():
    policy = Policy("f32", "bf16", "f32", keep_full="*norm*")
    params = {"w": x(), "norm": {"scale": torch.ones(4)}, "ids": torch.arange(4), "hole": None, "rate": 0.5}

    def run(params, batch, *, extra, norm):
        dtypes = {path: leaf.dtype for path, leaf in fmp.tree.items(params) if isinstance(leaf, torch.Tensor)}
        return dtypes, batch.dtype, extra["norm"].dtype, norm.dtype, params["rate"], batch @ params["w"]

    dtypes, *others, rate, out = fmp.autocast(run, policy)(params, x(), extra={"norm": x()}, norm=x())
    assert dtypes == {"w": BF16, "norm/scale": F32, "ids": torch.int64}
    assert others == [BF16, F32, BF16]  # a name is that in its argument
    assert (rate, out.dtype) == (0.5, F32)


def test_with_op_rules_the_arguments_are_left_alone():
    same = x()
    assert fmp.autocast(lambda a, *, b: (a["w"] is same, b is same), APEX)({"w": same}, b=same) == (True, True)


def test_a_module_as_the_function():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1), nn.Linear(4, 2))
    seen = []
    for layer in module:
        layer.register_forward_hook(lambda layer, args, out: seen.append(out.dtype))
    assert fmp.autocast(module, APEX)(x()).dtype == BF16
    assert seen == [BF16, F32, F32, BF16]
    out = fmp.autocast(module, Policy("f32", "bf16", "f64", op_rules="torch"))(x())
    assert out.dtype == F64
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == F32 for p in module.parameters())


def test_methods_partials_and_builtins_as_the_function():
    class Net:
        def run(self, w):
            return kinds(w)

    assert fmp.autocast(Net().run, APEX)(x()) == (BF16, F32)
    assert fmp.autocast(torch.matmul, APEX)(x(), x()).dtype == BF16
    assert fmp.autocast(torch.Tensor.softmax, APEX)(x().half(), -1).dtype == F32


# --- the policy's field


def test_policies_with_op_rules_have_a_string_form():
    for name, rules in {"apex": OpRules.apex(), "torch": OpRules.torch()}.items():
        policy = Policy("f32", "bf16", "f32", op_rules=rules)
        assert str(policy) == f"params=f32,compute=bf16,output=f32,ops={name}"
        assert Policy.parse(str(policy)) == policy == Policy("f32", "bf16", "f32", op_rules=f" {name.upper()} ")
        full = Policy("f32", "f16", None, keep_full=["*.norm"], master_weights=True, loss_scale=8, op_rules=rules)
        assert Policy.parse(str(full)) == full
    assert Policy.parse("p=f32,c=bf16,o=f32,ops=none").op_rules is None


@pytest.mark.parametrize(
    "rules", [OpRules(), OpRules.apex().full("relu"), OpRules().low("mm"), OpRules.torch().leave("mm")]
)
def test_rules_of_ones_own_have_none(rules):
    policy = Policy("f32", "bf16", "f32", op_rules=rules)
    with pytest.raises(ValueError, match=r"op rules of your own has no string form; keep the Python that builds it"):
        str(policy)
    assert repr(policy).startswith("Policy(")


def test_equality_hash_and_copies():
    rules = OpRules.apex().full("relu")
    policy = Policy("f32", "bf16", None, op_rules=rules)
    twin = Policy("f32", "bf16", None, op_rules=OpRules.apex().full(F.relu))
    assert policy == twin
    assert len({policy, twin, APEX, Policy("f32", "bf16", None)}) == 3
    for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), dataclasses.replace(policy)):
        assert copied == policy
        assert fmp.autocast(lambda w: w.half().relu().dtype, copied)(x()) == F32
    assert dataclasses.replace(APEX, op_rules=None) == Policy("f32", "bf16", None)
    assert dataclasses.replace(APEX, op_rules="torch").op_rules == OpRules.torch()
    assert policy.with_output_dtype("f32").op_rules is rules


@pytest.mark.parametrize(("value", "error"), [("apx", ValueError), ("", ValueError), (1, TypeError), ([], TypeError)])
def test_wrong_op_rules(value, error):
    with pytest.raises(error, match="op_rules"):
        Policy("f32", "bf16", None, op_rules=value)
    with pytest.raises(ValueError, match="sets op_rules twice"):
        Policy.parse("p=f32,c=bf16,o=f32,ops=apex,ops=torch")


def test_with_op_rules_nothing_is_cast_to_compute_beforehand():
    policy = Policy("bf16", "f16", "f32", keep_full="norm", op_rules="apex")
    params = {"w": x(), "norm": x()}
    assert policy.cast_to_compute(params) is params
    assert {name: leaf.dtype for name, leaf in policy.cast_to_param(params).items()} == {"w": BF16, "norm": F32}
    assert policy.cast_to_output(x()).dtype == F32


def test_a_module_is_not_cast_halfway():
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"Linear has parameters in f32, .* computes in bf16 .*functionalize"):
        fmp.autocast(layer, Policy.parse("bf16"))
    for policy in (Policy.parse("f32"), Policy(None, None, None)):
        assert torch.equal(fmp.autocast(layer, policy)(x()), layer(x()))
    assert fmp.autocast(layer.bfloat16(), Policy.parse("bf16"))(x()).dtype == BF16


def test_op_rules_without_a_compute_dtype_cast_nothing():
    assert fmp.autocast(kinds, Policy(None, None, None, op_rules="apex"))(x().half()) == (F16, F16)
