"""Every op that Apex or torch lists for CUDA, cast op by op: eager, mapped, differentiated and compiled."""

import copy
import json
import operator
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import fmp
from tests.policy.samples import WITHOUT_SAMPLE, Sample, sampled, samples

BF16, F32 = torch.bfloat16, torch.float32
LISTS = pathlib.Path(__file__).parents[1] / "data" / "op_lists.json"

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:at..(frobenius|nuclear)_norm is deprecated:UserWarning"),
]

# Python's in-place operators write into their first operand, so the result has its dtype. `**=` is not among them:
# float32 cannot be written into 16 bits, so Python falls back to `**`.
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"}

# torch computes a number divided by a tensor by way of `reciprocal`, which is on the list of full precision.
BY_RECIPROCAL = {"__rdiv__", "__rtruediv__"}

# What returns no floating-point number.
COMPARISONS = {
    *("eq", "ge", "gt", "le", "lt", "ne", "equal"),
    *("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"),
}

# What plain torch cannot do, and why.
VMAP_REFUSES = {
    "chain_matmul": "has no batching rule",
    "equal": "returns a Python bool",
    "lstm_cell": "has no batching rule",
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "has no batching rule"),
}
GRAD_REFUSES = {"ctc_loss": "reads the memory of its input, which a transform has hidden"}
COMPILE_REFUSES = {"ctc_loss": "the size of its output depends on the data", "equal": "returns a Python bool"}

# torch.compile shows a mode only what torch lists as overridable, which these are not when called by their own names.
COMPILE_HIDES = {
    *("_convolution", "nll_loss2d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
}

# Losses with a floating-point target or weight that torch takes for a constant.
CONSTANT_AFTER_FIRST = {"soft_margin_loss", "nll_loss", "cross_entropy", "multi_margin_loss"}


def listed() -> Iterator[tuple[str, str, str]]:
    """Yields (rule set, op, kind) for every name on a list, as the lists have them."""
    lists = json.loads(LISTS.read_text())
    apex, cuda = lists["apex"], lists["torch_cuda"]["base_names"]
    for space in ("functional", "torch", "tensor_explicit"):
        for heading, kind in {
            "FP16_FUNCS": "low",
            "FP32_FUNCS": "full",
            "CASTS": "promote",
            "SEQUENCE_CASTS": "promote",
            "BANNED_FUNCS": "banned",
        }.items():
            yield from (("apex", name, kind) for name in apex[space].get(heading, ()))
    yield from (("apex", name, "low") for name in apex["rnn_half"] + apex["rnn_cells_half_cached"])
    for heading, kind in {
        "lower_precision_fp": "low",
        "fp32": "full",
        "fp32_set_opt_dtype": "full",
        "fp32_append_dtype": "full",
        "promote": "promote",
        "banned": "banned",
    }.items():
        yield from (("torch", name, kind) for name in cuda[heading])


LISTED = sorted(set(listed()))
CASES = [case for case in LISTED if case[2] != "banned" and case[1] not in WITHOUT_SAMPLE]
every_op = pytest.mark.parametrize(("rules", "name", "kind"), CASES, ids=["-".join(case) for case in CASES])
DIFFERENTIABLE = [case for case in CASES if case[1] not in COMPARISONS]
every_differentiable_op = pytest.mark.parametrize(
    ("rules", "name", "kind"), DIFFERENTIABLE, ids=["-".join(case) for case in DIFFERENTIABLE]
)


def policy(rules: str) -> Any:
    return fmp.Policy("f32", "bf16", None, op_rules=fmp.OpRules.apex() if rules == "apex" else fmp.OpRules.torch())


# --- calls as functions of their floating-point tensors


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def floats(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in floats(item)]
    return [value] if is_floating(value) else []


def replaced(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([replaced(item, tensors) for item in value])
    return next(tensors) if is_floating(value) else value


def arguments(sample: Sample) -> list[torch.Tensor]:
    return floats((sample.args, tuple(sample.kwargs.values())))


def call(fn: Callable[..., Any], sample: Sample, tensors: Iterable[Any]) -> Any:
    """Calls `fn` as the sample does, with other floating-point tensors."""
    remaining = iter(tensors)
    args = replaced(sample.args, remaining)
    return fn(*args, **{key: replaced(value, remaining) for key, value in sample.kwargs.items()})


def variants(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the arguments in float32, in bfloat16, and with both dtypes, either of them first."""
    patterns = [(F32, F32), (BF16, BF16)] + ([(F32, BF16), (BF16, F32)] if len(tensors) > 1 else [])
    return [[tensor.to(pattern[i % 2]) for i, tensor in enumerate(tensors)] for pattern in patterns]


def expected_dtype(name: str, kind: str, tensors: list[torch.Tensor]) -> torch.dtype:
    if name in IN_PLACE:
        return tensors[0].dtype
    if kind == "promote" and name not in BY_RECIPROCAL:
        return F32 if F32 in dtypes(tensors) else BF16
    return BF16 if kind == "low" else F32


def cases(name: str) -> Iterator[tuple[Sample, list[torch.Tensor]]]:
    for sample in samples(name):
        yield from ((sample, tensors) for tensors in variants(arguments(sample)))


def leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else [value]


def dtypes(value: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in floats(value)]


def assert_same(left: Any, right: Any) -> None:
    """Asserts that two results have the same bits, dtypes included."""
    torch.testing.assert_close(leaves(left), leaves(right), rtol=0, atol=0, equal_nan=True)


def cast_by_hand(fn: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Wraps `fn` to convert all of its floating-point arguments before."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        converted = iter([tensor.to(dtype) for tensor in floats((args, tuple(kwargs.values())))])
        args = replaced(args, converted)
        return fn(*args, **{key: replaced(value, converted) for key, value in kwargs.items()})

    return wrapped


# --- the lists


def test_every_listed_op_has_samples_or_a_reason():
    names = {name for _, name, _ in LISTED}
    assert names == sampled() | set(WITHOUT_SAMPLE)
    assert not sampled() & set(WITHOUT_SAMPLE)
    assert all(samples(name) for name in sampled())


def test_samples_are_float32_finite_and_left_alone():
    for name in sorted(sampled()):
        for sample, again in zip(samples(name), samples(name), strict=True):
            tensors = arguments(sample)
            outputs = sample.fn(*sample.args, **sample.kwargs)
            assert set(dtypes(tensors)) == {F32}, name
            assert all(output.isfinite().all() for output in floats(outputs)), name
            assert_same(tensors, arguments(again))


# --- eager


@every_op
def test_eager_dtypes_are_those_of_the_lists(rules, name, kind):
    for sample, tensors in cases(name):
        outputs = call(fmp.autocast(sample.fn, policy(rules)), sample, tensors)
        dtype = expected_dtype(name, kind, tensors)
        assert set(dtypes(outputs)) == (set() if name in COMPARISONS else {dtype})
        assert_same(outputs, call(cast_by_hand(sample.fn, dtype), sample, tensors))


def test_full_precision_is_not_written_into_a_16_bit_tensor():
    x = torch.full((2,), 3.0, dtype=BF16)
    with pytest.raises(fmp.BannedOpError, match="pow"):
        fmp.autocast(torch.Tensor.pow_, policy("apex"))(x, 2)
    power = fmp.autocast(operator.ipow, policy("apex"))(x, 2)
    assert_same((x, power), (torch.full((2,), 3.0, dtype=BF16), torch.full((2,), 9.0)))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rules", ["apex", "torch"])
def test_banned_ops(rules, dtype):
    assert {name for _, name, kind in LISTED if kind == "banned"} == {"binary_cross_entropy"}
    for sample in samples("binary_cross_entropy"):
        tensors = [tensor.to(dtype) for tensor in arguments(sample)]
        cast = fmp.autocast(sample.fn, policy(rules))
        if rules == "apex" and dtype == F32:
            assert_same(call(cast, sample, tensors), call(sample.fn, sample, tensors))
        else:
            with pytest.raises(fmp.BannedOpError, match="binary_cross_entropy_with_logits"):
                call(cast, sample, tensors)


# --- mapped


@every_op
def test_vmap_gives_the_dtypes_of_eager(rules, name, kind):
    for sample, tensors in cases(name):
        cast = fmp.autocast(sample.fn, policy(rules))
        plain = cast_by_hand(sample.fn, expected_dtype(name, kind, tensors))
        stacked = [torch.stack([tensor, tensor]) for tensor in tensors]
        if name in VMAP_REFUSES:
            with pytest.raises(RuntimeError, match="Batching rule not implemented"):
                mapped(plain, sample, stacked)
            continue
        outputs = mapped(cast, sample, stacked)
        assert dtypes(outputs) == dtypes(call(cast, sample, tensors))
        assert_same(outputs, mapped(plain, sample, stacked))


def mapped(fn: Callable[..., Any], sample: Sample, stacked: list[torch.Tensor]) -> Any:
    return torch.func.vmap(lambda *tensors: call(fn, sample, tensors))(*stacked)


# --- differentiated


@every_differentiable_op
def test_gradients_pass_the_casts(rules, name, kind):
    for sample, tensors in cases(name):
        count = 1 if name in CONSTANT_AFTER_FIRST else len(tensors)
        inputs, constants = tensors[:count], tensors[count:]
        cast = fmp.autocast(sample.fn, policy(rules))
        plain = cast_by_hand(sample.fn, expected_dtype(name, kind, tensors))
        loss = lambda *inputs: weighted(call(cast, sample, (*inputs, *constants)))
        plain_loss = lambda *inputs: weighted(call(plain, sample, (*inputs, *constants)))

        grads = by_autograd(loss, inputs)
        assert dtypes(grads) == dtypes(inputs)
        assert all(grad.isfinite().all() for grad in grads)
        assert any(grad.any() for grad in grads)
        assert_same(grads, by_autograd(plain_loss, inputs))

        if name in GRAD_REFUSES:
            with pytest.raises(RuntimeError, match="doesn't have storage"):
                by_func(plain_loss, inputs)
            continue
        func_grads, outputs = by_func(loss, inputs)
        assert dtypes(outputs) == dtypes(call(cast, sample, tensors))
        assert_same(func_grads, by_func(plain_loss, inputs)[0])
        # torch differentiates some ops by other formulas under its transforms.
        tolerance = 2.0**-5 if BF16 in dtypes([*outputs, *grads]) else 1e-5
        assert dtypes(func_grads) == dtypes(grads)
        torch.testing.assert_close(func_grads, grads, rtol=tolerance, atol=tolerance)


def weighted(value: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sums numbers in float32, each with its own weight, so that no gradient cancels; returns the numbers too."""
    total = torch.zeros(())
    for tensor in floats(value):
        total = total + (tensor.float() * torch.arange(tensor.numel()).cos().reshape(tensor.shape)).sum()
    return total, floats(value)


def by_func(loss: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    grads, outputs = torch.func.grad(loss, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)
    return list(grads), outputs


def by_autograd(loss: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    return list(torch.autograd.grad(loss(*inputs)[0], inputs, materialize_grads=True))


# --- compiled


@pytest.mark.parametrize("name", COMPILE_REFUSES)
def test_what_torch_refuses_to_compile(name):
    for sample in samples(name):
        fn = sample.fn
        with pytest.raises(RuntimeError, match="operator"):
            call(compiled(lambda *args, **kwargs: fn(*args, **kwargs)), sample, arguments(sample))


COMPILED = [case for case in CASES if case[1] not in COMPILE_REFUSES]


@pytest.mark.parametrize("start", range(0, len(COMPILED), 24), ids=lambda start: "-".join(COMPILED[start]))
def test_compiled_equals_eager(start):
    """One function calls 24 ops, so that there are few compilations."""
    names, casts, calls = [], [], []
    for rules, name, kind in COMPILED[start : start + 24]:
        for sample in samples(name):
            if hidden(sample.fn):
                assert name in COMPILE_HIDES
                continue
            names.append(name)
            casts.append(fmp.autocast(sample.fn, policy(rules)))
            calls.append(call(with_arguments, sample, most_telling(name, kind, arguments(sample))))
    run = lambda calls: [cast(*args, **kwargs) for cast, (args, kwargs) in zip(casts, calls, strict=True)]
    # An operator in place writes into its operand, so each run has its own.
    found, expected = compiled(run)(copy.deepcopy(calls)), run(copy.deepcopy(calls))
    for name, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(
            leaves(one), leaves(other), rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def with_arguments(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def hidden(fn: Callable[..., Any]) -> bool:
    """Says whether `fn` is an op of torch that torch does not list as overridable."""
    if not isinstance(fn, types.BuiltinFunctionType) or fn.__module__ == operator.add.__module__:
        return False
    return all(fn not in functions for functions in torch.overrides.get_overridable_functions().values())


def most_telling(name: str, kind: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Chooses the dtypes of arguments of which the most must be cast."""
    return max(variants(tensors), key=lambda variant: dtypes(variant).count(other(expected_dtype(name, kind, variant))))


def other(dtype: torch.dtype) -> torch.dtype:
    return F32 if dtype == BF16 else BF16


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="eager", fullgraph=True)
