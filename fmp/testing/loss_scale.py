"""check_loss_scale: whether a loss scaler can stand in for one of fmp's own."""

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from fmp import _compat, tree
from fmp.scaling import LossScale
from fmp.testing import strategies
from fmp.testing.bits import assert_close, assert_same_bits, assert_same_kind, pickled, tensors, with_tensors
from fmp.testing.invariants import Broken, check_counts, for_all, run_laws
from fmp.testing.pure import assert_function
from fmp.testing.trajectory import Case, scale_of, verdict, walk

T = TypeVar("T")
Tree = Any

_HALVES = (torch.float16, torch.bfloat16)


def check_loss_scale(
    make: Callable[[], LossScale],
    *,
    examples: int = 25,
    steps: int = 2500,
    hysteresis: int = 1,
    vmap: bool = True,
    compile: bool = True,
    invariants: Collection[str] | None = None,
) -> None:
    """Checks that a loss scaler keeps the laws that a train step relies on.

    Args:
        make: Returns a fresh scaler: an object with the methods of `fmp.scaling.LossScale`. Give it a short growth
            interval, so that growth is seen.
        examples: How many drawn histories and gradients to try for each invariant.
        steps: How many finite, and non-finite, steps in a row to drive it through, to the ends of its range.
        hysteresis: How many non-finite steps in a row it may take until it backs off.
        vmap: Whether it works under `torch.func.vmap`.
        compile: Whether `torch.compile` takes it.
        invariants: Names of the invariants to check, as `INVARIANTS["check_loss_scale"]` has them; None for all.

    Raises:
        AssertionError: If an invariant is broken; the message names it, the leaf and the values.
        TypeError: If `make` is not a function, or what it returns is no scaler.
        ValueError: If `invariants` has an unknown name, or `examples`, `steps` or `hysteresis` is not a whole number of
            at least 1.

    Example:
        >>> check_loss_scale(lambda: fmp.DynamicLossScale(growth_interval=2), compile=False, examples=5)
    """
    check_counts(examples=examples, steps=steps, hysteresis=hysteresis)
    if not callable(make) or (isinstance(make, LossScale) and not isinstance(make, type)):
        raise TypeError(
            f"make must be a function that returns a fresh scaler, such as `lambda: {make!r}`, got {make!r}"
        )
    scaler = make()
    if not isinstance(scaler, LossScale) or isinstance(scaler, type):
        raise TypeError(f"make() must return an object with scale, unscale and adjust, got {scaler!r}")
    off = [members_under_vmap_equal_a_loop] * (not vmap) + [compiled_equals_eager] * (not compile)
    case = Case(make, examples, steps, hysteresis)
    run_laws("check_loss_scale", LAWS, case, only=invariants, off=off)


def is_a_pytree_that_travels(case: Case) -> None:
    """Flattened, pickled or deep-copied, it comes back with the same bits and scales as before; leaves are tensors."""
    for scaler in case.reached:
        if _is_leaf(scaler):
            raise Broken(f"{type(scaler).__name__} is no pytree; decorate it with fmp.tree.dataclass")
        for path, leaf in tree.items(scaler):
            if not (leaf is None or isinstance(leaf, torch.Tensor)):
                raise Broken(f"the leaf is {leaf!r}, not a tensor; mark metadata with fmp.tree.static()", path)
        rebuilt = tree.unflatten(tree.structure(scaler), tree.leaves(scaler))
        for way, moved in {
            "rebuilt from its leaves": rebuilt,
            "pickled": pickled(scaler),
            "deep-copied": copy.deepcopy(scaler),
        }.items():
            assert_same_bits(moved, scaler, f"the scaler, {way},")
            expected = _attempt(lambda scaler=scaler: _use(scaler))
            if expected is not None:
                assert_same_bits(_use(moved), expected, f"what it computes, {way},")


def adjust_keeps_structure_and_dtypes(case: Case) -> None:
    """The next scaler has the structure, shapes and dtypes of this one, whatever the verdict."""
    for scaler in case.states:
        for finite in (True, False):
            assert_same_kind(scaler.adjust(verdict(finite)), scaler, f"the scaler after finite={finite}")


def methods_are_pure(case: Case) -> None:
    """Its methods change neither the scaler, nor their arguments, nor global state, and repeat bit for bit."""
    for scaler in case.reached:
        if _is_leaf(scaler):
            continue  # of no pytree there is nothing to compare
        _assert_pure(lambda scaler: scaler.adjust(verdict(True)), scaler)
        _assert_pure(lambda scaler: scaler.adjust(verdict(False)), scaler)
        for dtype in _FORMATS.values():
            loss, grads = torch.tensor(1.5, dtype=dtype), {"g": torch.tensor([1.0, 2.0], dtype=dtype)}
            _assert_pure(lambda scaler, loss: scaler.scale(loss), scaler, loss)
            _assert_pure(lambda scaler, grads: scaler.unscale(grads), scaler, grads)


def scale_stays_positive_and_finite(case: Case) -> None:
    """After any history the scale lies within (0, inf), and so does its inverse."""

    def law(history: Sequence[bool]) -> None:
        for scaler in walk(case.make(), history):
            scale_of(scaler)

    for scaler in (*case.rising, *case.falling):
        scale_of(scaler)
    for_all(strategies.histories(20), law, examples=case.examples)


def never_grows_after_a_non_finite_step(case: Case) -> None:
    """A step with non-finite gradients never raises the scale."""

    def law(history: Sequence[bool]) -> None:
        scaler = case.make()
        for step, finite in enumerate(history):
            before, scaler = scale_of(scaler), scaler.adjust(verdict(finite))
            if not finite and scale_of(scaler) > before:
                raise Broken(f"step {step} of {list(history)} raised the scale from {before} to {scale_of(scaler)}")

    for_all(strategies.histories(20), law, examples=case.examples)


def backs_off_after_a_non_finite_step(case: Case) -> None:
    """A scale above its floor, the one after many non-finite steps, is lowered by a non-finite step."""
    floor = scale_of(case.falling[-1])
    scales = [scale_of(scaler) for scaler in case.rising]
    changed = [i for i in range(len(scales)) if i == 0 or scales[i] != scales[i - 1]]
    for index in {*changed, len(scales) - 1}:
        scaler = case.rising[index]
        for _ in range(case.hysteresis):
            scaler = scaler.adjust(verdict(False))
        if scales[index] > floor and not scale_of(scaler) < scales[index]:
            raise Broken(
                f"after {index + 1} finite steps the scale is {scales[index]}, and {scale_of(scaler)} after "
                f"{case.hysteresis} non-finite ones; its floor is {floor}"
            )


def unscale_undoes_scale(case: Case) -> None:
    """unscale(scale(g)) is g, exactly if the scale is a power of two, else up to rounding."""

    def law(drawn: tuple[float, float]) -> None:
        mantissa, position = drawn
        for scaler in case.states:
            factor = scale_of(scaler)
            # Neither g nor the scaled g may leave float32's normal range.
            low, high = -125 - min(math.log2(factor), 0.0), 126 - max(math.log2(factor), 0.0)
            value = math.ldexp(mantissa, math.ceil(low) + int(position * (math.floor(high) - math.ceil(low))))
            for dtype in (torch.float32, torch.float64):
                given = torch.tensor([value, -value], dtype=dtype)
                found = scaler.unscale({"g": scaler.scale(given)})
                what = f"unscale(scale(g)) at the scale {factor}"
                if math.frexp(factor)[0] == 0.5:
                    assert_same_bits(found, {"g": given}, what)
                else:
                    assert_close(found, {"g": given}, what, absolute=0.0)
                # However a scale that is no power of two is rounded, it multiplies a number and its nearest float32.
                nearest = given.float().to(dtype)
                ratio = found["g"] / scaler.unscale({"g": scaler.scale(nearest)})["g"] - 1.0
                assert_close(ratio, given / nearest - 1.0, f"what float32 cannot hold of {what}", absolute=1e-12)

    mantissas = st.sampled_from([2.0 - 2.0**-52, 2.0 - 2.0**-23, 1.5, 1.0]) | st.floats(1.0, 2.0, exclude_max=True)
    for_all(st.tuples(mantissas, st.floats(0.0, 1.0)), law, examples=case.examples)


def scale_upcasts_a_half_loss(case: Case) -> None:
    """A loss in 16 bits is scaled in float32 or wider, with dimensions and without."""
    for scaler in case.states:
        factor = scale_of(scaler)
        for dtype in _HALVES:
            for shape in ((), (2,), (0,)):
                loss = torch.full(shape, 1.5, dtype=dtype)
                found = scaler.scale(loss)
                if factor == 1.0 and found.dtype == dtype:
                    found = found.float()
                _assert_values(found, loss.double() * factor, f"the scaled {tree.describe(loss)} of 1.5")


def scaled_loss_leads_back_to_the_loss(case: Case) -> None:
    """The derivative of the scaled loss with respect to the loss is the scale."""
    for scaler in case.states:
        for dtype in (torch.float32, torch.float64):
            loss = torch.full((), 1.5, dtype=dtype, requires_grad=True)
            with torch.enable_grad():
                scaled = scaler.scale(loss)
            if not scaled.requires_grad:
                raise Broken(f"the scaled {tree.describe(loss)} is cut off from the loss, so nothing would be trained")
            (found,) = torch.autograd.grad(scaled, loss)
            expected = torch.full_like(loss.detach(), scale_of(scaler))
            assert_close(found, expected, f"the derivative of the scaled {tree.describe(loss)}", absolute=0.0)


def unscale_keeps_the_tree(case: Case) -> None:
    """Unscaled gradients have the structure and shapes of the scaled ones; None and integers pass through."""

    def law(grads: Tree) -> None:
        for scaler in case.states:
            found = scaler.unscale(grads)
            plain = tree.map(_without_dtype, found)
            assert_same_bits(plain, tree.map(_without_dtype, grads), "what unscale keeps")

    law({"g": torch.ones(2), "hole": None})
    drawn = strategies.params().flatmap(lambda like: strategies.gradients(like, nonfinite=None))
    integers = drawn.map(lambda grads: {"grads": grads, "ids": torch.arange(2), "count": 3})
    for_all(integers, law, examples=case.examples)


def half_gradients_do_not_overflow_or_underflow(case: Case) -> None:
    """Gradients in 16 bits are unscaled in float32 or wider."""

    def law(grads: Tree) -> None:
        for scaler in case.states:
            factor = scale_of(scaler)
            for path, grad in tree.items(grads):
                expected = grad.double() / factor
                size = expected.abs()
                fits = (size <= torch.finfo(torch.float32).max) & (
                    (size >= torch.finfo(torch.float32).smallest_normal) | (size == 0.0)
                )
                found = scaler.unscale({path: grad})[path]
                if factor == 1.0 and found.dtype == grad.dtype:
                    found = found.float()
                what = f"the unscaled {tree.describe(grad)} at the scale {factor}"
                _assert_values(torch.where(fits, found, 0.0), torch.where(fits, expected, 0.0), what)

    for_all(st.fixed_dictionaries({"g": strategies.tensors(_HALVES)}), law, examples=case.examples)


def non_finite_gradients_stay_non_finite(case: Case) -> None:
    """An inf or NaN is still inf or NaN after unscale, so that the check for finite gradients sees it."""

    def law(grads: Tree) -> None:
        for scaler in case.states:
            for (path, new), old in zip(tree.items(scaler.unscale(grads)), tree.leaves(grads), strict=True):
                if old is not None and (old.isfinite() < new.isfinite()).any():
                    raise Broken(f"unscale made {old.tolist()} finite: {new.tolist()}", path)

    like = {name: torch.zeros(2, dtype=dtype) for name, dtype in _FORMATS.items()} | {"scalar": torch.zeros(())}
    for_all(strategies.gradients(like, nonfinite=True), law, examples=case.examples)


def members_under_vmap_equal_a_loop(case: Case) -> None:
    """Under torch.func.vmap with one scale a member, every method gives each member what it gives it alone."""
    states = [case.make(), case.make().adjust(verdict(False)), case.make().adjust(verdict(True))]
    members = [
        (_scaled_state(state, 2.0**-index), torch.tensor(1.0 + index), torch.tensor(finite))
        for index, (state, finite) in enumerate([(state, flag) for state in states for flag in (True, False)])
    ]
    columns = zip(*[tensors(member) for member in members], strict=True)
    found = torch.func.vmap(lambda *flat: tensors(_step(*with_tensors(members[0], flat))))(
        *[torch.stack(column) for column in columns]
    )
    for index, member in enumerate(members):
        expected = _step(*member)
        assert_close(
            with_tensors(expected, [leaf[index] for leaf in found]), expected, f"what member {index} gets", absolute=0.0
        )


def compiled_equals_eager(case: Case) -> None:
    """torch.compile takes it as one graph, with the same results, and does not compile again as the scale moves."""
    compiled = torch.compile(_compat.compiled_on_its_own(_step), backend="aot_eager", fullgraph=True)
    scaler = expected = case.make()
    for index, finite in enumerate([True, True, False, True, False, False]):
        given = (torch.tensor(1.5 + index), torch.tensor(finite))
        with torch.compiler.set_stance("fail_on_recompile" if index else "default"):
            *results, scaler = compiled(scaler, *given)
        *expected_results, expected = _step(expected, *given)
        assert_close([results, scaler], [expected_results, expected], f"the compiled step {index}", absolute=0.0)


# The first one broken is reported, so what others build on comes before them.
LAWS = (
    methods_are_pure,
    is_a_pytree_that_travels,
    adjust_keeps_structure_and_dtypes,
    unscale_keeps_the_tree,
    scale_stays_positive_and_finite,
    never_grows_after_a_non_finite_step,
    backs_off_after_a_non_finite_step,
    unscale_undoes_scale,
    scale_upcasts_a_half_loss,
    scaled_loss_leads_back_to_the_loss,
    half_gradients_do_not_overflow_or_underflow,
    non_finite_gradients_stay_non_finite,
    members_under_vmap_equal_a_loop,
    compiled_equals_eager,
)
_FORMATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def _attempt(fn: Callable[[], T]) -> T | None:
    """Calls a function of the part, or returns None if it raises: a law that needs its result says so."""
    try:
        return fn()
    except Exception:
        return None


def _is_leaf(scaler: LossScale) -> bool:
    return any(leaf is scaler for leaf in tree.leaves(scaler))


def _assert_pure(fn: Callable[..., Any], *args: Any) -> None:
    """Raises `Broken` if a call is impure, and is silent about one that raises: another law has more to say of it."""
    try:
        assert_function(fn, *args)
    except (Broken, dataclasses.FrozenInstanceError):
        raise
    except Exception:
        return


def _step(scaler: LossScale, loss: torch.Tensor, finite: torch.Tensor) -> tuple[Any, Any, LossScale]:
    grads = {"half": loss.half().reshape(1), "full": loss}
    return scaler.scale(loss), scaler.unscale(grads), scaler.adjust(finite)


def _use(scaler: LossScale) -> tuple[Any, Any, LossScale]:
    return _step(scaler, torch.tensor(1.5), verdict(False))


def _scaled_state(scaler: LossScale, factor: float) -> LossScale:
    return tree.map(lambda leaf: leaf * factor if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, scaler)


def _without_dtype(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return torch.zeros(leaf.shape)
    return leaf


def _assert_values(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if found.dtype not in (torch.float32, torch.float64):
        raise Broken(f"{what} is {tree.describe(found)}, expected f32 or wider")
    assert_close(found, expected.to(found.dtype), what, absolute=0.0)
