"""Steps whose optimizer has a one-pass form: the same results up to rounding, and nothing overwritten that is seen."""

import copy

import pytest
import torch

import fmp
from fmp import tree
from tests.bits import same_bits

CASES = {
    "o0": {},
    "o2": {"policy": fmp.opt_level("O2"), "loss_scale": "dynamic"},
    "bf16 and some f32": {"policy": fmp.opt_level("O2", half_dtype=torch.bfloat16, keep_full=["b"]), "loss_scale": 8.0},
    "pure bf16": {"policy": fmp.Policy.parse("params=bf16,compute=bf16,output=f32")},
    "remainder": {"policy": fmp.Policy.parse("params=bf16,compute=bf16,output=f32,master=remainder")},
    "stochastic": {"policy": fmp.Policy.parse("params=bf16,compute=bf16,output=f32,master=stochastic")},
    "kahan": {"policy": fmp.Policy.parse("params=bf16,compute=bf16,output=f32,master=kahan"), "loss_scale": "dynamic"},
    "clip": {"clip_norm": 0.1, "loss_scale": 8.0},
    "ema": {"ema": 0.9, "accumulate": 2, "loss_scale": "dynamic"},
}
ROUNDING = {"pure bf16": 0.02, "stochastic": 0.02, "kahan": 0.02}
PARAMS = {"w": torch.linspace(-1, 1, 12).reshape(4, 3), "b": torch.zeros(3)}
BATCHES = [torch.linspace(0, 1, 8).reshape(2, 4) + i for i in range(3)]
BATCHES[1] = torch.full((2, 4), float("inf"))


def loss_fn(params, batch):
    return (batch.float() @ params["w"].float() + params["b"].float() - 1.0).abs().mean()


def steps(case, optimizer=fmp.optim.adamw, **options):
    fused, plain = (
        fmp.train_step(loss_fn, optimizer(0.01, fused=flag), **CASES[case], **options) for flag in (True, False)
    )
    return fused, plain


def assert_close(found, expected, case):
    for (path, a), b in zip(tree.items(found), tree.leaves(expected), strict=True):
        if a is not None:
            assert a.dtype == b.dtype, path
            rounding = ROUNDING.get(case, 0.0)
            # The rest of a bf16 parameter is a matter of its last digits.
            if not (case in ("remainder", "kahan", "stochastic") and path.startswith("master")):
                torch.testing.assert_close(a, b, rtol=1e-4 + rounding, atol=1e-5 + rounding, equal_nan=True, msg=path)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_up_to_rounding(case, donate):
    fused, plain = steps(case, donate=donate)
    found, expected = fused.init(PARAMS), plain.init(PARAMS)
    skips = "loss_scale" in CASES[case]
    for batch in BATCHES if skips else BATCHES[::2]:
        found, metrics = fused(found, batch)
        expected, expected_metrics = plain(expected, batch)
        assert_close(found, expected, case)
        assert_close(metrics, expected_metrics, case)
    assert int(found.skip_count) == skips


@pytest.mark.parametrize("case", CASES)
def test_donation_changes_no_bit(case):
    keeping, donating = steps(case)[0], steps(case, donate=True)[0]
    kept, given = keeping.init(PARAMS), donating.init(PARAMS)
    for batch in BATCHES:
        before = copy.deepcopy(kept)
        old = kept
        kept, expected = keeping(kept, batch)
        assert same_bits(old, before)
        given, metrics = donating(given, batch)
        assert same_bits((given, metrics), (kept, expected))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if "loss_scale" in CASES[case]])
def test_a_skipped_step_leaves_every_bit(case, donate):
    step = steps(case, donate=donate)[0]
    state, _ = step(step.init(PARAMS), BATCHES[0])
    before = copy.deepcopy(state)
    after, metrics = step(state, BATCHES[1])
    assert bool(metrics.skipped)
    for part in ("step", "params", "master", "opt_state", "ema"):
        assert same_bits(getattr(after, part), getattr(before, part))


def test_memory_is_reused_by_a_donating_step_only():
    for donate in (False, True):
        step = steps("o2", fmp.optim.sgd, donate=donate)[0]
        state = step.init(PARAMS)
        old = state.master["w"]
        assert (step(state, BATCHES[0])[0].master["w"] is old) == donate


@pytest.mark.parametrize("what", ["aux", "frozen", "batch", "ema"])
def test_what_outlives_the_step_is_not_overwritten(what):
    seen = []

    def shows(params, batch, *, frozen=None):
        batch = batch["x"] if isinstance(batch, dict) else batch
        seen.append(params["w"])
        return loss_fn(params, batch), params["w"][0]

    step = fmp.train_step(shows, fmp.optim.sgd(0.1, fused=True), has_aux=True, donate=True, ema=0.5)
    state = step.init(PARAMS)
    if what == "ema":
        state = tree.replace(state, ema=state.params)
    given = {"frozen": {"w": state.params["w"]}} if what == "frozen" else {}
    batch = {"x": BATCHES[0], "p": state.params["w"]} if what == "batch" else BATCHES[0]
    after, metrics = step(state, batch, **given)
    moved = after.params["w"] - PARAMS["w"]
    assert moved.abs().max() > 1e-3
    assert torch.equal(metrics.aux, PARAMS["w"][0])
    torch.testing.assert_close(after.ema["w"], PARAMS["w"] + 0.5 * moved)
    if what in ("frozen", "batch"):
        assert torch.equal(seen[0], PARAMS["w"])


def test_groups_that_share_memory_do_not_overwrite_each_other():
    def both(params, batch):
        return loss_fn(params["a"], batch) - loss_fn(params["b"], batch)

    step = fmp.train_step(both, {"a": fmp.optim.sgd(0.1, fused=True), "b": fmp.optim.sgd(0.1, fused=True)}, donate=True)
    expected, _ = step(step.init({"a": PARAMS, "b": PARAMS}), BATCHES[0])
    state = step.init({"a": PARAMS, "b": PARAMS})
    state = tree.replace(state, params={"a": state.params["a"], "b": state.params["a"]})
    assert same_bits(step(state, BATCHES[0])[0].params, expected.params)


@pytest.mark.parametrize("case", ["o0", "o2", "remainder"])
def test_compiled(case):
    fused, plain = steps(case)
    state = plain.init(PARAMS)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert_close(compiled(state, BATCHES[0]), plain(state, BATCHES[0]), case)


@pytest.mark.parametrize("case", ["o0", "o2", "remainder"])
def test_mapped(case):
    plain = steps(case)[1]
    state = plain.init(PARAMS)
    expected = plain(state, BATCHES[0])
    stack = lambda leaf: leaf if leaf is None else torch.stack([leaf, leaf])
    for donate in (False, True):
        mapping = steps(case, donate=donate)[0]
        mapped = torch.func.vmap(mapping)(tree.map(stack, state), torch.stack([BATCHES[0]] * 2))
        assert_close(tree.map(lambda leaf: leaf if leaf is None else leaf[1], mapped), expected, case)
