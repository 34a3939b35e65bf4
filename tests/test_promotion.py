import operator

import pytest
import torch
import torch.nn.functional as F

from tests.promotion import MixedDtypesError, StrictPromotion, compile_unwatched, unwatched

HALF, FULL = torch.ones(3, dtype=torch.float16), torch.ones(3)
WIDE_SCALAR = torch.tensor(2.0)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: HALF + FULL,
        lambda: FULL - HALF,
        lambda: HALF * WIDE_SCALAR,
        lambda: WIDE_SCALAR * HALF,
        lambda: HALF / WIDE_SCALAR,
        lambda: WIDE_SCALAR / HALF,
        lambda: HALF**WIDE_SCALAR,
        lambda: FULL % HALF,
        lambda: FULL // HALF,
        lambda: HALF.bfloat16() + HALF,
        lambda: FULL + FULL.double(),
        lambda: FULL * WIDE_SCALAR.double(),
        lambda: FULL.clone().add_(HALF),
        lambda: operator.imul(FULL.clone(), HALF),
        lambda: torch.sub(FULL, HALF),
        lambda: torch.add(FULL, other=HALF),
        lambda: torch.where(FULL > 0, FULL, HALF),
        lambda: torch.where(FULL > 0, HALF, WIDE_SCALAR),
        lambda: torch.lerp(FULL, FULL, HALF[0]) + torch.addcmul(FULL, HALF, HALF),
        lambda: torch.maximum(FULL, HALF),
        lambda: HALF.clamp(min=WIDE_SCALAR),
        lambda: torch.cat([HALF, FULL]),
        lambda: torch.stack((HALF, FULL)),
        lambda: torch.func.vmap(lambda a, b: a * b)(torch.ones(2, 3), HALF.expand(2, 3)),
        lambda: torch.func.grad(lambda a: (a * HALF).sum())(FULL),
    ],
)
def test_raises_where_torch_promotes_or_fails_to(mixed):
    with pytest.raises(MixedDtypesError, match="mixes floating-point dtypes"):
        mixed()


@pytest.mark.parametrize(
    "fine",
    [
        lambda: HALF + HALF,
        lambda: HALF * 2.0 + 1,
        lambda: 2.0 - HALF,
        lambda: HALF.float() * WIDE_SCALAR,
        lambda: FULL * WIDE_SCALAR.half(),
        lambda: WIDE_SCALAR.half() * WIDE_SCALAR,
        lambda: HALF > FULL,
        lambda: FULL * torch.arange(3),
        lambda: torch.where(FULL > 0, HALF, 0.0),
        lambda: FULL.copy_(HALF),
        lambda: torch.allclose(FULL, FULL),
        lambda: torch.func.vmap(lambda a, b: a * b)(torch.ones(2, 3), torch.ones(2)),
    ],
)
def test_lets_the_rest_pass(fine):
    assert fine() is not None


def test_message_names_operation_dtypes_and_shapes():
    with pytest.raises(MixedDtypesError, match=r"mul .* float16\[3\], float32\[\]; cast explicitly"):
        _ = HALF * WIDE_SCALAR


@pytest.mark.mixed_dtypes
def test_marker_turns_it_off():
    assert (HALF + FULL).dtype == torch.float32
    with StrictPromotion(), pytest.raises(MixedDtypesError):
        _ = HALF + FULL


def test_unwatched_keeps_other_modes_and_restores_all():
    calls = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Recorder():
        with unwatched():
            _ = HALF + FULL
        assert calls == ["add"]
        with pytest.raises(MixedDtypesError):
            _ = HALF + FULL
    with pytest.raises(ZeroDivisionError), unwatched():
        _ = 1 / 0
    with pytest.raises(MixedDtypesError):
        _ = HALF + FULL


def test_compiled_functions_run_without_it():
    def product(a, b):
        return a * b

    compiled = torch.compile(product, backend="eager", fullgraph=True)
    assert compiled(HALF, FULL).dtype == torch.float32
    outer = torch.compile(lambda a, b: compiled(a, b) + 1, backend="eager", fullgraph=True)
    assert outer(HALF, FULL).dtype == torch.float32

    @torch.compile(backend="eager")
    def decorated(a, b):
        return a * b

    assert decorated(HALF, FULL).dtype == torch.float32
    assert compiled.__name__ == "product"


def test_compile_unwatched_leaves_modules_alone():
    module = torch.nn.Linear(2, 2)
    assert compile_unwatched(lambda model, **_: model)(module) is module


def test_it_is_on_under_functional_modules_too():
    with pytest.raises(MixedDtypesError):
        _ = F.gelu(HALF.float()) + HALF
