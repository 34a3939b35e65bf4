"""The laws of an optimizer's one-pass form, what it returns, keeps and overwrites, and of a part that only looks."""

from collections.abc import Callable
from typing import Any

import torch

from fmp import master, tree
from fmp.dtypes import full_precision, is_castable, short_name
from fmp.optim import apply_updates
from fmp.optim.fused import reader
from fmp.testing.bits import assert_close, assert_same_bits, assert_same_kind, snapshot
from fmp.testing.optimizer_case import Case

Tree = Any


def fused_means_update(case: Case) -> None:
    """The one-pass form, if any, gives what update gives, skips bit for bit, and overwrites only what is donated."""
    fused = case.tx.fused
    if fused is None:
        return
    for dtype in case.dtypes:
        params = case.params(dtype)
        state, grads = case.advanced(params), case.grads(params, torch.float32)
        updates, expected_state = case.tx.update(grads, state, params)
        expected = apply_updates(params, updates)
        doubled = tree.map(lambda grad: None if grad is None else grad * 2.0, grads)
        before = snapshot((doubled, state, params))
        half, one = torch.tensor(0.5), torch.tensor(1.0)
        for donate in (False, True):
            what = f"with donate={donate} for {short_name(dtype)} parameters"
            for inv_scale, clip in ((half, one), (one, half), (half, None), (None, half)):
                given, given_state, given_params = snapshot(before)
                found, low, found_state = fused(
                    given,
                    given_state,
                    given_params,
                    inv_scale=inv_scale,
                    clip=clip,
                    finite=torch.tensor(True),
                    cast_dtype=torch.bfloat16,
                    donate=donate,
                )
                if not donate:
                    assert_same_bits((given, given_state, given_params), before, f"what fused was given {what}")
                assert_same_kind((found, found_state), (expected, expected_state), f"the result of fused {what}")
                if dtype == full_precision(dtype):  # narrower ones may round to a neighbor
                    assert_close((found, found_state), (expected, expected_state), f"the result of fused {what}")
                assert_same_bits(low, tree.cast(found, torch.bfloat16), f"`low` {what}")
            given, given_state, given_params = snapshot(before)
            options = {"inv_scale": None, "clip": None, "cast_dtype": None}
            found, low, found_state = fused(
                given, given_state, given_params, finite=torch.tensor(False), donate=donate, **options
            )
            assert_same_bits((found, found_state), (before[2], before[1]), f"the result of a skipped fused {what}")
            assert_same_bits(low, None, f"`low` without a cast_dtype {what}")
            _keeps_casts(fused, before, donate, what)
            for form in [form for form in master.FORMS if dtype in master.FORMS[form].dtypes]:
                _means_it_in_form(fused, before, donate, form, f"in the form {form!r} {what}")


def observe_means_update(case: Case) -> None:
    """A part with `observe` passes gradients on, and observe gives the state that update gives, of unread ones too."""
    observe = case.tx.observe
    if observe is None:
        return
    for dtype in case.dtypes:
        params = case.params(dtype)
        state, grads = case.advanced(params), case.grads(params, torch.float32)
        passed, expected = case.tx.update(grads, state, params)
        name = short_name(dtype)
        assert_same_bits(passed, grads, f"what update makes of a gradient, with observe, for {name} parameters")
        doubled = tree.map(lambda grad: None if grad is None else grad * 2.0, grads)
        before = snapshot((doubled, state))
        found = observe(doubled, state, reader(0.5, None))
        assert_same_bits((doubled, state), before, f"what observe was given for {name} parameters")
        assert_same_bits(found, expected, f"the state of observe, of doubled gradients, for {name} parameters")


def _keeps_casts(fused: Callable[..., Any], before: Tree, donate: bool, what: str) -> None:
    casts = tree.map(lambda param: param.to(torch.bfloat16) if is_castable(param) else None, before[2])
    for finite in (True, False):
        grads, state, params, given = snapshot((*before, casts))
        options = {"inv_scale": None, "clip": None, "cast_dtype": None, "donate": donate}
        found, low, _ = fused(grads, state, params, finite=torch.tensor(finite), low=given, **options)
        expected = tree.map(_cast, grads, casts, found)
        assert_same_bits(low, expected, f"the casts that fused keeps {what}")
        if not donate:
            assert_same_bits(given, casts, f"the casts that fused was given {what}")


def _means_it_in_form(fused: Callable[..., Any], before: Tree, donate: bool, form: str, what: str) -> None:
    """Parameters in a form get the update of the numbers that they stand for, taken apart again."""
    stored, masters = before[2], master.init(before[2], form=form)
    seed = torch.tensor(5) if master.FORMS[form].takes_seed else None
    options = {"inv_scale": torch.tensor(0.5), "clip": None, "cast_dtype": None, "donate": donate}
    full = snapshot(master.merge(stored, masters, form=form))
    full, _, state = fused(*snapshot(before[:2]), full, **options, finite=None)
    expected = *master.split(full, stored, masters, form=form, seed=seed), state
    for finite, wanted in ((True, expected), (False, (stored, masters, before[1]))):
        grads, given_state, params, low = given = snapshot((*before, masters))
        options |= {"low": low, "form": form, "seed": seed, "finite": torch.tensor(finite)}
        found = fused(grads, given_state, params, **options)
        assert_same_bits(found, wanted, f"the result of fused {'' if finite else 'that skips '}{what}")
        if not donate:
            assert_same_bits(given, (*before, masters), f"what fused was given {what}")


def _cast(grad: Any, cast: Any, new: Any) -> Any:
    return cast if grad is None or cast is None else new.to(cast.dtype)
