import pytest
import torch

from fmp import optim, tree
from fmp.dtypes import is_castable
from fmp.testing import INVARIANTS, check_optimizer
from tests.optim import battery

GOOD = optim.sgd(0.1, momentum=0.9)
MIXED = {False: [], True: [pytest.mark.mixed_dtypes]}
# Each third row, and all that torch's code is behind.
SAMPLE = [(i, row) for i, row in enumerate(battery.ROWS) if i % 3 == 0 or row.cannot]
LAWS = {
    "test_update_is_differentiable": "differentiable",
    battery.AT_ZERO: "differentiable",
    "test_vmap_is_a_loop": "vmap",
    "test_compiled_is_eager_and_compiles_once": "compile",
}


def changed(update=None, init=None):
    """Makes an optimizer that differs from a good one in what its functions return."""

    def new_update(grads, state, params):
        found = GOOD.update(grads, state, params)
        return found if update is None else update(*found, grads, state, params)

    def new_init(params):
        state = GOOD.init(params)
        return state if init is None else init(state, params)

    return optim.GradientTransformation(new_init, new_update)


def each(fn):
    return lambda of: tree.map(lambda leaf: fn(leaf) if is_castable(leaf) else leaf, of)


def narrow_moments():
    return changed(init=lambda state, params: tree.cast(state, torch.bfloat16))


def widening():
    return changed(lambda updates, state, *given: (updates, tree.cast(state, torch.float64)))


def narrow_updates():
    return changed(lambda updates, state, *given: (tree.cast(updates, torch.bfloat16), state))


def scalar_updates():
    return changed(lambda updates, state, *given: (each(torch.sum)(updates), state))


def no_holes():
    fill = lambda update, param: torch.zeros(param.shape) if update is None and is_castable(param) else update
    return changed(lambda updates, state, grads, old, params: (tree.map(fill, updates, params), state))


def forgetful():
    """Lets the moments of a leaf decay although it has no gradient."""
    return changed(lambda updates, state, *given: (updates, each(lambda leaf: leaf * 0.5)(state)))


def needs_a_leaf():
    def update(updates, state, *given):
        norms = torch.stack([leaf.sum() for leaf in tree.leaves(updates) if leaf is not None])
        return updates, tree.replace(state, count=state.count + norms.isnan().any())

    return changed(update)


def in_place():
    """Writes its moments into the old state."""

    def update(updates, new_state, grads, state, params):
        tree.map(lambda old, new: old.copy_(new) if is_castable(old) else old, state, new_state)
        return updates, new_state

    return changed(update)


def noisy():
    return changed(lambda updates, state, *given: (each(lambda leaf: leaf * torch.rand(()))(updates), state))


def shared_result():
    return changed(lambda updates, state, *given: (state.momentum, state))


def shared_state():
    view = lambda leaf: leaf[...] if is_castable(leaf) else None
    return changed(init=lambda state, params: tree.replace(state, momentum=tree.map(view, params)))


def host_bound():
    def update(updates, state, grads, old, params):
        return each(lambda leaf: leaf * (2.0 if leaf.sum() > 0 else 1.0))(updates), state

    return changed(update)


def counting():
    """Counts in Python, so that each step compiles anew."""

    def update(grads, state, params):
        updates, inner = GOOD.update(grads, state["inner"], params)
        return updates, {"inner": inner, "count": state["count"] + 1}

    return optim.GradientTransformation(lambda params: {"inner": GOOD.init(params), "count": 0}, update)


def cut_off():
    return changed(lambda updates, state, *given: (each(torch.Tensor.detach)(updates), state))


def rooted():
    root = lambda update, grad: None if grad is None else update * (grad * grad).sqrt()
    return changed(lambda updates, state, grads, *given: (tree.map(root, updates, grads), state))


def unpicklable():
    update = lambda grads, state, params: (GOOD.update(grads, state[0], params)[0], state)
    return optim.GradientTransformation(lambda params: (GOOD.init(params), lambda: None), update)


BROKEN = [
    (
        "state_keeps_structure_and_dtypes",
        widening,
        "at momentum/empty: the state for f16 parameters is f64[0,2], expected",
    ),
    ("updates_are_wide", narrow_updates, "at empty: the update of f16[0,2] is bf16[0,2]"),
    ("updates_are_wide", scalar_updates, "at empty: the update of f16[0,2] is f32[]"),
    ("moments_are_wide", narrow_moments, "at momentum/empty: the state is bf16[0,2] for parameters in f16"),
    ("zero_gradients_change_nothing", lambda: optim.sgd(0.1, weight_decay=0.1), "for a gradient of zeros"),
    (
        "leaves_without_gradient_are_left_alone",
        no_holes,
        "at empty: the update is f32[0,2] though the gradient is None",
    ),
    ("leaves_without_gradient_are_left_alone", forgetful, "the state of a leaf whose gradient is None is"),
    ("empty_trees_work", needs_a_leaf, "RuntimeError: stack expects a non-empty"),
    ("update_is_pure", in_place, "at 1/momentum/layer/bias: element [0] of an argument is"),
    ("update_is_pure", noisy, "of the result of a second call is"),
    ("nothing_is_aliased", shared_result, "at 0/layer/bias: a result shares its memory with the one at 1/momentum/"),
    ("nothing_is_aliased", shared_state, "at 0/momentum/layer/bias: the state shares its memory with the one at 1/"),
    ("members_under_vmap_equal_a_loop", host_bound, "RuntimeError: vmap"),
    ("compiled_equals_eager", host_bound, "Unsupported"),
    ("compiled_equals_eager", counting, "Detected recompile"),
    ("update_is_differentiable", cut_off, "Jacobian mismatch"),
    ("derivative_at_zero_is_finite", rooted, "at layer/bias: the derivative by a gradient of zeros is [nan, nan]"),
    ("state_travels", unpicklable, "pickle"),
    ("skipped_step_leaves_the_state", in_place, "at opt_state/momentum/layer/bias: element [0] of the state after"),
]


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize(("name", "make", "message"), BROKEN, ids=[f"{row[0]}-{row[1].__name__}" for row in BROKEN])
def test_each_broken_optimizer_is_found(name, make, message):
    with pytest.raises(AssertionError) as caught:
        check_optimizer(make(), examples=10, invariants=[name])
    assert f"check_optimizer: {name} is broken. {INVARIANTS['check_optimizer'][name]}\n" in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(AssertionError, match="check_optimizer: "):
        check_optimizer(make(), examples=10)


def test_every_invariant_has_a_broken_optimizer():
    assert {name for name, *_ in BROKEN} == INVARIANTS["check_optimizer"].keys()


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
