import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fmp
from fmp import tree
from fmp.testing import INVARIANTS, check_loss_scale, strategies
from fmp.testing.invariants import for_all


@tree.dataclass
class Good:
    """A small scaler that keeps all laws; each broken one below differs from it in one place."""

    value: torch.Tensor

    def scale(self, loss):
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.value

    def unscale(self, grads):
        return tree.map(self.unscale_leaf, grads)

    def unscale_leaf(self, grad):
        if not (isinstance(grad, torch.Tensor) and grad.is_floating_point()):
            return grad
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.value

    def adjust(self, grads_finite):
        return tree.replace(self, value=self.next(grads_finite))

    def next(self, finite):
        return torch.where(finite, self.value * 2, self.value / 2).clamp(1.0, 2.0**24)


@tree.dataclass
class UnscalesTwice(Good):
    def unscale_leaf(self, grad):
        return super().unscale_leaf(super().unscale_leaf(grad))


@tree.dataclass
class Unbounded(Good):
    def next(self, finite):
        return torch.where(finite, self.value * 2, self.value / 2)


@tree.dataclass
class AlwaysGrows(Good):
    def next(self, finite):
        return (self.value * 2).clamp(1.0, 2.0**24)


@tree.dataclass
class NeverBacksOff(Good):
    def next(self, finite):
        return torch.where(finite, self.value * 2, self.value).clamp(1.0, 2.0**24)


@tree.dataclass
class InPlace(Good):
    def adjust(self, grads_finite):
        self.value.copy_(self.next(grads_finite))
        return self


@tree.dataclass
class Widens(Good):
    def next(self, finite):
        return super().next(finite).double()


class NoTree(Good):
    pass


@tree.dataclass
class Hidden(Good):
    """Keeps a number outside its fields."""

    if TYPE_CHECKING:
        factor: float

    def __init__(self, value):
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "factor", 2.0)

    def scale(self, loss):
        return super().scale(loss) * self.factor

    def unscale_leaf(self, grad):
        found = super().unscale_leaf(grad)
        return found / self.factor if isinstance(found, torch.Tensor) else found


@tree.dataclass
class LooksAtTheHost(Good):
    def next(self, finite):
        return (self.value * 2 if finite else self.value / 2).clamp(1.0, 2.0**24)


@tree.dataclass
class Counts(Good):
    """Counts its steps in Python, so that each step compiles anew."""

    steps: int = tree.static(default=0)

    def adjust(self, grads_finite):
        return tree.replace(self, value=self.next(grads_finite), steps=self.steps + 1)


@tree.dataclass
class ScalesInHalf(Good):
    def scale(self, loss):
        return loss * self.value.to(loss.dtype)


@tree.dataclass
class CutsOff(Good):
    def scale(self, loss):
        return super().scale(loss.detach())


@tree.dataclass
class UnscalesInHalf(Good):
    def unscale_leaf(self, grad):
        return (super().unscale_leaf(grad)).to(grad.dtype) if isinstance(grad, torch.Tensor) else grad


@tree.dataclass
class UnscalesInSingle(Good):
    def unscale_leaf(self, grad):
        found = super().unscale_leaf(grad)
        return found.float().to(found.dtype) if isinstance(found, torch.Tensor) and grad.is_floating_point() else found


@tree.dataclass
class ScalesInSingle(Good):
    def scale(self, loss):
        found = super().scale(loss)
        return found.float().to(found.dtype)


@tree.dataclass
class UnscalesInPlace(Good):
    def unscale_leaf(self, grad):
        if isinstance(grad, torch.Tensor) and grad.dtype == torch.float64:
            return grad.div_(self.value)
        return super().unscale_leaf(grad)


@tree.dataclass
class HidesNan(Good):
    def unscale_leaf(self, grad):
        return grad if grad is None else super().unscale_leaf(torch.nan_to_num(grad))


@tree.dataclass
class FillsHoles(Good):
    def unscale_leaf(self, grad):
        return torch.zeros(()) if grad is None else super().unscale_leaf(grad)


@tree.dataclass
class ForgetsHoles(Good):
    def unscale_leaf(self, grad):
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.value


@tree.dataclass
class Raises(Good):
    def scale(self, loss):
        raise ZeroDivisionError("scale")


@tree.dataclass
class RaisesInAdjust(Good):
    def next(self, finite):
        raise ZeroDivisionError("adjust")


@tree.dataclass
class Assigns(Good):
    def adjust(self, grads_finite):
        self.value = self.next(grads_finite)  # type: ignore[misc]
        return self


@tree.dataclass
class Draws(Good):
    def next(self, finite):
        return super().next(finite) * torch.rand(())


BROKEN = [
    ("unscale_undoes_scale", UnscalesTwice, "at g: element [0] of unscale(scale(g)) at the scale 256.0 is"),
    ("unscale_undoes_scale", UnscalesInSingle, "at g: element [0] of unscale(scale(g)) at the scale 256.0 is"),
    ("unscale_undoes_scale", ScalesInSingle, "at g: element [0] of unscale(scale(g)) at the scale 256.0 is"),
    ("scale_stays_positive_and_finite", Unbounded, "the scale is inf and its inverse 0.0"),
    ("never_grows_after_a_non_finite_step", AlwaysGrows, "raised the scale from 256.0 to 512.0"),
    ("backs_off_after_a_non_finite_step", NeverBacksOff, "after 1 finite steps the scale is 512.0, and 512.0 after 1"),
    ("methods_are_pure", Assigns, "FrozenInstanceError: cannot assign to field 'value'"),
    ("methods_are_pure", InPlace, "at 0/value: an argument is 512.0, expected 256.0, in f32[]"),
    (
        "methods_are_pure",
        UnscalesInPlace,
        "at 1/g: element [0] of an argument is 0.00390625, expected 1.0, in f64[2]",
    ),
    ("adjust_keeps_structure_and_dtypes", Widens, "at value: the scaler after finite=True is f64[], expected f32[]"),
    ("adjust_keeps_structure_and_dtypes", Counts, "the scaler after finite=True has the structure"),
    ("is_a_pytree_that_travels", NoTree, "NoTree is no pytree; decorate it with fmp.tree.dataclass"),
    ("is_a_pytree_that_travels", Hidden, "AttributeError: 'Hidden' object has no attribute 'factor'"),
    ("members_under_vmap_equal_a_loop", LooksAtTheHost, "RuntimeError: vmap"),
    ("compiled_equals_eager", LooksAtTheHost, "Unsupported"),
    ("compiled_equals_eager", Counts, "Detected recompile"),
    ("scale_upcasts_a_half_loss", ScalesInHalf, "the scaled f16[] of 1.5 is f16[], expected f32 or wider"),
    ("scaled_loss_leads_back_to_the_loss", CutsOff, "is cut off from the loss, so nothing would be trained"),
    ("half_gradients_do_not_overflow_or_underflow", UnscalesInHalf, "is f16["),
    ("non_finite_gradients_stay_non_finite", HidesNan, "unscale made ["),
    ("unscale_keeps_the_tree", ForgetsHoles, "return None for it"),
    ("unscale_keeps_the_tree", FillsHoles, "what unscale keeps is f32[], expected NoneType"),
]


@pytest.mark.parametrize(("name", "scaler", "message"), BROKEN, ids=[f"{row[0]}-{row[1].__name__}" for row in BROKEN])
@pytest.mark.mixed_dtypes
def test_each_broken_scaler_is_found(name, scaler, message):
    make = lambda: scaler(torch.tensor(256.0))
    with pytest.raises(AssertionError) as caught:
        check_loss_scale(make, examples=10, steps=200, invariants=[name])
    assert f"check_loss_scale: {name} is broken. {INVARIANTS['check_loss_scale'][name]}\n" in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(AssertionError, match="check_loss_scale: "):
        check_loss_scale(make, examples=10, steps=200, compile=name == "compiled_equals_eager")  # else it takes long


@pytest.mark.parametrize(
    ("name", "scaler", "message"),
    [
        ("methods_are_pure", InPlace, "an argument is 512.0, expected 256.0"),
        ("methods_are_pure", UnscalesInPlace, "of an argument is"),
        ("methods_are_pure", Assigns, "cannot assign to field 'value'"),
        ("methods_are_pure", Draws, "the result of a second call"),
        ("is_a_pytree_that_travels", NoTree, "NoTree is no pytree"),
        ("adjust_keeps_structure_and_dtypes", RaisesInAdjust, "ZeroDivisionError: adjust"),
        ("unscale_keeps_the_tree", ForgetsHoles, "'NoneType' object has no attribute"),
        ("unscale_keeps_the_tree", FillsHoles, "expected NoneType"),
        ("scale_stays_positive_and_finite", Raises, "ZeroDivisionError: scale"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_law_that_is_named_is_about_what_is_wrong(name, scaler, message):
    with pytest.raises(AssertionError) as caught:
        check_loss_scale(lambda: scaler(torch.tensor(256.0)), examples=10, steps=200, compile=False)
    assert str(caught.value).startswith(f"check_loss_scale: {name} is broken. ")
    assert message in str(caught.value)


@tree.dataclass
class Constant:
    """Keeps the scale of another scaler."""

    inner: Good

    def scale(self, loss):
        return self.inner.scale(loss)

    def unscale(self, grads):
        return self.inner.unscale(grads)

    def adjust(self, grads_finite):
        return self


@pytest.mark.parametrize("scaler", [UnscalesInSingle, ScalesInSingle])
def test_lost_digits_are_found_at_any_scale(scaler):
    check_loss_scale(lambda: Constant(Good(torch.tensor(0.3))), invariants=["unscale_undoes_scale"])
    with pytest.raises(AssertionError, match=r"what float32 cannot hold of unscale\(scale\(g\)\) at the scale 0\.3"):
        check_loss_scale(lambda: Constant(scaler(torch.tensor(0.3))), invariants=["unscale_undoes_scale"])


def test_every_invariant_has_a_broken_scaler():
    assert {name for name, *_ in BROKEN} == INVARIANTS["check_loss_scale"].keys()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Good(torch.tensor(256.0)),
        fmp.NoOpLossScale,
        lambda: fmp.StaticLossScale(1024.0),
        lambda: fmp.StaticLossScale(0.3),
        fmp.DynamicLossScale,
        lambda: fmp.DynamicLossScale(growth_interval=2),
        lambda: fmp.DynamicLossScale(3.0, 1.7, 0.3, 1, 2.0**-126, 2.0**126),
    ],
    ids=["good", "no-op", "static", "static 0.3", "dynamic", "dynamic 2", "dynamic wide"],
)
def test_good_scalers_pass(make):
    check_loss_scale(make)


def test_scalers_at_the_edges_pass():
    check = lambda scaler: check_loss_scale(lambda: scaler, examples=2, steps=30, compile=False)
    for_all(strategies.loss_scales(), check, examples=10)


@tree.dataclass
class Patient(Good):
    """Backs off at the second overflow in a row, as Megatron's scaler may."""

    bad: torch.Tensor

    def adjust(self, grads_finite):
        bad = torch.where(grads_finite, 0, self.bad + 1)
        lower = torch.where(bad > 1, self.value / 2, self.value)
        return Patient(torch.where(grads_finite, self.value * 2, lower).clamp(1.0, 2.0**24), bad)


def test_hysteresis_is_allowed_on_request():
    make = lambda: Patient(torch.tensor(256.0), torch.tensor(0))
    check_loss_scale(make, hysteresis=2, compile=False)
    with pytest.raises(AssertionError, match="backs_off_after_a_non_finite_step"):
        check_loss_scale(make, compile=False)


@pytest.mark.parametrize("option", ["vmap", "compile"])
def test_what_a_scaler_cannot_do_can_be_left_out(option):
    name = {"vmap": "members_under_vmap_equal_a_loop", "compile": "compiled_equals_eager"}[option]
    make = lambda: LooksAtTheHost(torch.tensor(256.0))
    check_loss_scale(make, invariants=[name], **{option: False})
    check_loss_scale(make, vmap=False, compile=False)


def test_the_same_part_fails_in_the_same_way():
    messages = set()
    for _ in range(2):
        with pytest.raises(AssertionError) as caught:
            check_loss_scale(
                lambda: AlwaysGrows(torch.tensor(math.pi)), invariants=["never_grows_after_a_non_finite_step"]
            )
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_what_is_no_scaler_is_refused():
    nothing: Any
    for nothing in (None, fmp.DynamicLossScale, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="must return an object with scale, unscale and adjust, got"):
            check_loss_scale(lambda nothing=nothing: nothing)


def test_a_scaler_in_place_of_its_maker_is_refused():
    scaler: Any
    for scaler in (fmp.StaticLossScale(2.0), None):
        with pytest.raises(TypeError, match=r"make must be a function that returns a fresh scaler, such as `lambda: "):
            check_loss_scale(scaler)


@pytest.mark.parametrize("name", ["examples", "steps", "hysteresis"])
@pytest.mark.parametrize("count", [0, 1.5, True])
def test_bad_counts_are_refused(name, count):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {count}"):
        check_loss_scale(fmp.NoOpLossScale, **{name: count})
