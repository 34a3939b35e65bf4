"""Donated states: the same results, and an error for whoever uses the old one."""

import copy
import pickle
import weakref

import pytest
import torch

import fmp
from fmp import tree
from fmp.distributed import Checkpoints
from fmp.donation import give_away
from fmp.errors import DonatedStateError
from tests.bits import same_bits


def loss_fn(params, batch):
    return ((params["w"] * batch).float() ** 2).sum()


def step_that(donate, **options):
    return fmp.train_step(
        loss_fn, fmp.optim.adamw(0.1), policy=fmp.opt_level("O2"), loss_scale=64.0, ema=0.9, donate=donate, **options
    )


def donated_state():
    step = step_that(donate=True)
    state = step.init({"w": torch.ones(2)})
    step(state, torch.ones(2))
    return state


def test_results_are_those_without_donation():
    keeping, donating = step_that(donate=False), step_that(donate=True)
    kept, given = keeping.init({"w": torch.ones(2)}), donating.init({"w": torch.ones(2)})
    for batch in (torch.ones(2), torch.tensor([1.0, float("inf")]), torch.full((2,), 3.0)):
        kept, expected = keeping(kept, batch)
        given, metrics = donating(given, batch)
        assert same_bits((given, metrics), (kept, expected))


@pytest.mark.parametrize("name", ["step", "params", "opt_state", "seed", "anything", "_private"])
def test_every_attribute_of_a_donated_state_raises(name):
    with pytest.raises(DonatedStateError, match=f"'{name}' is gone; use the state that the step returned"):
        getattr(donated_state(), name)


@pytest.mark.parametrize(
    "use",
    [
        lambda state: step_that(donate=True)(state, torch.ones(2)),
        lambda state: step_that(donate=False)(state, torch.ones(2)),
        lambda state: step_that(donate=False).extend(state, {"v": torch.ones(1)}),
        lambda state: tree.replace(state, params=None),
        lambda state: tree.map(lambda leaf: leaf.clone(), state),
        lambda state: fmp.master.merge(state.params, state.master),
        give_away,
    ],
)
def test_every_use_of_a_donated_state_raises(use):
    with pytest.raises(DonatedStateError):
        use(donated_state())


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"run": [3, state]}])
@pytest.mark.parametrize(
    "use",
    [
        lambda state, folder: fmp.checkpoint.save(state, folder / "state"),
        lambda state, folder: fmp.checkpoint.load(state, folder / "saved"),
        lambda state, folder: Checkpoints(folder).save(state, 1),
        lambda state, folder: Checkpoints(folder).save_async(state, 1),
        lambda state, folder: Checkpoints(folder).load(state),
    ],
)
def test_no_checkpoint_takes_a_donated_state(tmp_path, use, wrap):
    fmp.checkpoint.save({"w": 1}, tmp_path / "saved")
    Checkpoints(tmp_path).save({"w": 1}, 0)
    state = wrap(donated_state())
    name = "run/1" if isinstance(state, dict) else "this state"
    with pytest.raises(DonatedStateError, match=f"^{name} was already given to a donating step; use the state that"):
        use(state, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-step-0", "saved"]


def test_a_donated_state_can_be_printed():
    assert repr(donated_state()) == "<a state that was given to a donating step>"
    assert str(donated_state()) == repr(donated_state())


def test_all_names_of_a_state_are_given_away_together():
    step = step_that(donate=True)
    state = step.init({"w": torch.ones(2)})
    alias, holder = state, {"best": state}
    step(state, torch.ones(2))
    for name in (alias, holder["best"]):
        with pytest.raises(DonatedStateError):
            _ = name.params


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_outlives_its_donated_original(copied):
    step = step_that(donate=True)
    first = step.init({"w": torch.ones(2)})
    twin = copied(first)
    state, _ = step(first, torch.ones(2))
    again, _ = step(twin, torch.ones(2))
    assert same_bits(state, again)
    # What the step returns is an ordinary state.
    assert type(state) is fmp.TrainState
    assert same_bits(copied(state), state)


def test_the_old_tensors_are_freed_though_the_old_state_still_has_a_name():
    step = step_that(donate=True)
    state = step.init({"w": torch.ones(2)})
    old = [weakref.ref(leaf) for leaf in (state.params["w"], state.master["w"], state.ema["w"], state.step)]
    after, _ = step(state, torch.ones(2))
    assert [reference() for reference in old] == [None] * 4
    assert after.step == 1


def test_giving_away_moves_the_fields():
    state = step_that(donate=True).init({"w": torch.ones(2)})
    weight = state.params["w"]
    owner = give_away(state)
    assert owner.params["w"] is weight
    assert vars(state) == {}


def test_states_are_frozen_before_and_after():
    step = step_that(donate=True)
    state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    with pytest.raises(AttributeError):
        state.__setattr__("step", torch.tensor(3))


def test_an_error_in_the_loss_leaves_a_donated_state_with_its_owner():
    step = fmp.train_step(lambda w, b: (w @ b).sum(), fmp.optim.sgd(0.1), donate=True)
    state = step.init(torch.ones(2))
    with pytest.raises(RuntimeError):
        step(state, torch.ones(3))
    state, _ = step(state, torch.ones(2))
    assert state.step == 1
