import inspect
import re

import pytest
import torch

from fmp import optim, tree
from fmp.testing import INVARIANTS, check_optimizer
from tests.optim import battery
from tests.testing.broken_optimizers import (
    GOOD,
    always_half,
    counting,
    cut_off,
    does_more_than_look,
    does_not_read,
    forgetful,
    half_gradients,
    half_steps,
    host_bound,
    in_place,
    in_place_on_half,
    looking,
    moments_as_parameters,
    narrow_moments,
    narrow_updates,
    needs_a_leaf,
    never_skips,
    never_unscales,
    no_holes,
    noisy,
    rooted,
    scalar_updates,
    shared_result,
    shared_state,
    takes_what_is_not_given,
    unnamed_and_forgetful,
    unpicklable,
    widening,
)

MIXED = {False: [], True: [pytest.mark.mixed_dtypes]}
# Each third row, and all that torch's code is behind.
SAMPLE = [(i, row) for i, row in enumerate(battery.ROWS) if i % 3 == 0 or row.cannot]
LAWS = {
    "test_update_is_differentiable": "differentiable",
    battery.AT_ZERO: "differentiable",
    "test_vmap_is_a_loop": "vmap",
    "test_compiled_is_eager_and_compiles_once": "compile",
}


BROKEN = [
    (
        "state_keeps_structure_and_dtypes",
        widening,
        "at momentum/empty: the state of f16 parameters after gradients in f32 is f64[0,2], expected",
    ),
    (
        "state_keeps_structure_and_dtypes",
        moments_as_parameters,
        "at momentum/empty: the state of f16 parameters after gradients in f32 is f32[0,2], expected f16[0,2], as init",
    ),
    ("updates_are_wide", narrow_updates, "at empty: the update of f16[0,2] is bf16[0,2]"),
    ("updates_are_wide", scalar_updates, "at empty: the update of f16[0,2] is f32[]"),
    ("half_precision_changes_no_update", half_steps, "the update of f16 by a gradient in f16 is"),
    ("half_precision_changes_no_update", half_gradients, "the update of f16 by a gradient in f32 is"),
    ("moments_are_wide", narrow_moments, "at momentum/empty: the state is bf16[0,2] for parameters in f16"),
    ("zero_gradients_change_nothing", lambda: optim.sgd(0.1, weight_decay=0.1), "for a gradient of zeros"),
    (
        "leaves_without_gradient_are_left_alone",
        no_holes,
        "at empty: the update is f32[0,2] though the gradient is None",
    ),
    ("leaves_without_gradient_are_left_alone", forgetful, "the state of a leaf whose gradient is None is"),
    (
        "leaves_without_gradient_are_left_alone",
        unnamed_and_forgetful,
        "at 1/4: it is the state of layer/weight, which had no gradient, and was [[",
    ),
    ("empty_trees_work", needs_a_leaf, "RuntimeError: stack expects a non-empty"),
    ("update_is_pure", in_place, "at 1/momentum/layer/bias: element [0] of an argument is"),
    ("update_is_pure", in_place_on_half, "at 0/empty: the argument was written to in place"),
    ("update_is_pure", noisy, "of the result of a second call is"),
    ("nothing_is_aliased", shared_result, "at 0/layer/bias: a result shares its memory with the one at 1/momentum/"),
    ("nothing_is_aliased", shared_state, "at 0/momentum/layer/bias: the state shares its memory with the one at 1/"),
    ("members_under_vmap_equal_a_loop", host_bound, "RuntimeError: vmap"),
    ("compiled_equals_eager", host_bound, "Unsupported"),
    ("compiled_equals_eager", counting, "Detected recompile"),
    ("update_is_differentiable", cut_off, "Jacobian mismatch"),
    ("update_is_differentiable", always_half, "Jacobian mismatch"),
    ("derivative_at_zero_is_finite", rooted, "at layer/bias: the derivative by a gradient of zeros is [nan, nan]"),
    ("state_travels", unpicklable, "pickle"),
    ("skipped_step_leaves_the_state", in_place, "at opt_state/momentum/layer/bias: element [0] of the state after"),
    ("fused_means_update", never_skips, "of the result of a skipped fused with donate=False for"),
    ("fused_means_update", never_unscales, "of the result of fused with donate=False for"),
    ("fused_means_update", takes_what_is_not_given, "of what fused was given with donate=False for"),
    ("observe_means_update", does_more_than_look, "of what update makes of a gradient, with observe, for f16 param"),
    ("observe_means_update", does_not_read, "the state of observe, of doubled gradients, for f16 parameters is"),
]


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize(("name", "make", "message"), BROKEN, ids=[f"{row[0]}-{row[1].__name__}" for row in BROKEN])
def test_each_broken_optimizer_is_found(name, make, message):
    with pytest.raises(AssertionError) as caught:
        check_optimizer(make(), examples=10, invariants=[name])
    assert f"check_optimizer: {name} is broken. {INVARIANTS['check_optimizer'][name]}\n" in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(AssertionError, match="check_optimizer: "):
        check_optimizer(make(), examples=10, compile=name == "compiled_equals_eager")  # else it takes long


def test_what_the_optimizer_raises_is_shown_with_its_line_and_advice():
    with pytest.raises(AssertionError) as caught:
        check_optimizer(host_bound(), examples=5, invariants=["members_under_vmap_equal_a_loop"])
    message = str(caught.value)
    assert re.search(r"\nat \S+broken_optimizers\.py:\d+ in \S+: .*if ", message)
    assert message.endswith("choose by torch.where, which takes both branches.")


def test_every_exception_of_a_row_has_its_option():
    options = inspect.signature(check_optimizer).parameters
    for row in battery.ROWS:
        for law in row.cannot:
            assert law in LAWS, f"no option turns off {law}, which {row.name} cannot keep"
            assert LAWS[law] in options


def test_every_invariant_has_a_broken_optimizer():
    assert {name for name, *_ in BROKEN} == INVARIANTS["check_optimizer"].keys()


@pytest.mark.parametrize(
    "tx",
    [optim.sgd(0.1, fused=True), optim.sgd(0.1, momentum=0.9, fused=True), optim.adam(0.1, fused=True)],
    ids=["sgd", "momentum", "adam"],
)
def test_fmps_one_pass_forms_pass(tx):
    check_optimizer(tx, compile=False, examples=5)


def test_a_part_that_only_looks_passes():
    check_optimizer(looking(), compile=False, examples=5)


@pytest.mark.parametrize("index", [pytest.param(i, id=row.name, marks=MIXED[row.mixes]) for i, row in SAMPLE])
def test_fmps_optimizers_pass(index):
    row = battery.ROWS[index]
    # Compiling takes the most time, and tests/optim/test_laws.py compiles every row.
    options = {"compile": index % 9 == 0, **{LAWS[law]: False for law in row.cannot}}
    params = {"layer": {"weight": torch.ones(3, 2), "bias": torch.ones(2)}, "hole": None}
    check_optimizer(row.make(), decays=row.decays, examples=5, params=params, **options)


@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        ("zero_gradients_change_nothing", {"decays": True}, lambda: optim.adamw(0.1)),
        ("members_under_vmap_equal_a_loop", {"vmap": False}, host_bound),
        ("compiled_equals_eager", {"compile": False}, host_bound),
        ("update_is_differentiable", {"differentiable": False}, cut_off),
    ],
)
def test_what_an_optimizer_cannot_do_can_be_left_out(name, options, make):
    check_optimizer(make(), invariants=[name], **options)
    with pytest.raises(AssertionError, match=name):
        check_optimizer(make(), invariants=[name])


def test_the_parameters_can_be_chosen():
    tx = optim.chain(optim.freeze(["backbone.*"]), optim.adam(0.1))
    with pytest.raises(AssertionError, match=r"none of the patterns \['backbone\.\*'\] matches"):
        check_optimizer(tx, invariants=["update_is_pure"])
    check_optimizer(tx, params={"backbone.w": torch.ones(2), "head.w": torch.ones(2)}, compile=False, examples=5)


@pytest.mark.parametrize("dtypes", [[], (), [torch.int32], torch.float16, [torch.float8_e4m3fn], ["f16"]])
def test_bad_dtypes_are_refused(dtypes):
    with pytest.raises(ValueError, match=r"dtypes must be a list of some of \['f16', 'bf16', 'f32', 'f64'\], got"):
        check_optimizer(GOOD, dtypes=dtypes)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"tx must be a fmp\.optim\.GradientTransformation, got"):
        check_optimizer(optim.sgd)  # pyright: ignore[reportArgumentType]  # refused is what is tested
    with pytest.raises(ValueError, match=r"params has no floating-point tensor: \{'ids': i64\[2\]\}"):
        check_optimizer(GOOD, params={"ids": torch.arange(2)})
    with pytest.raises(ValueError, match="examples must be a whole number of at least 1, got 0"):
        check_optimizer(GOOD, examples=0)


def test_parameters_may_share_the_end_of_their_paths():
    params = {"weight": torch.ones(2), "layer": {"weight": torch.ones(2)}, "count": torch.ones(3)}
    check_optimizer(optim.adam(0.1), params=params, invariants=["leaves_without_gradient_are_left_alone"])


def test_an_optimizer_that_forgets_none_is_told_so():
    def update(grads, state, params):
        return tree.map(lambda grad: -grad.float(), grads), state

    tx = optim.GradientTransformation(lambda params: (), update)
    with pytest.raises(AssertionError, match="passes it like any leaf; return None for it"):
        check_optimizer(tx)
