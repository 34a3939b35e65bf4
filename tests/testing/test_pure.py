import itertools

import pytest
import torch

import fmp
from fmp import _compat
from fmp.testing import INVARIANTS, check_pure


def write_what_is_there(x):
    x.add_(0.0)
    return x * 2


def change_default_dtype(x):
    torch.set_default_dtype(torch.float64)
    return x * 2


def stop_recording(x):
    torch.set_grad_enabled(False)
    return x * 2


def return_twice(x):
    y = x * 2
    return {"a": y, "b": y[:1]}


def counting():
    calls = itertools.count(1)
    return lambda x: {"y": x * next(calls)}


BROKEN = [
    ("inputs_stay_unchanged", lambda x: x.mul_(2), "at 0: element [0] of an argument is 2.0, expected 1.0, in f32[2]"),
    ("inputs_stay_unchanged", write_what_is_there, "at 0: the argument was written to in place"),
    ("same_call_gives_the_same_bits", counting(), "at y: element [0] of the result of a second call is 2.0, expected"),
    ("same_call_gives_the_same_bits", lambda x: x * torch.rand(()), "element [0] of the result of a second call is"),
    ("global_state_stays", lambda x: x * torch.rand(()), "the random number generator of the CPU has advanced"),
    ("global_state_stays", change_default_dtype, "the default dtype went from torch.float32 to torch.float64"),
    ("global_state_stays", stop_recording, "grad mode went from True to False"),
    ("outputs_do_not_alias_inputs", lambda x: {"y": x[:1]}, "at y: a result shares its memory with the argument at 0"),
    ("outputs_do_not_alias_inputs", lambda x: x, "a result shares its memory with the argument at 0"),
    ("outputs_do_not_alias_each_other", return_twice, "at a: a result shares its memory with the one at b"),
    ("vmap_gives_each_member_the_same", lambda x: x * 2 if x.sum() > 0 else x * 3, "RuntimeError"),
    (
        "vmap_gives_each_member_the_same",
        lambda x: x * (3.0 if _compat.transform_active() else 2.0),
        "at 0: element [0] of a mapped result is 3.0, expected 2.0",
    ),
]


@pytest.mark.parametrize(("name", "fn", "message"), BROKEN, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BROKEN)])
def test_each_broken_function_is_found(name, fn, message):
    with pytest.raises(AssertionError) as caught:
        check_pure(fn, torch.ones(2), vmap=True, invariants=[name])
    assert f"check_pure: {name} is broken. {INVARIANTS['check_pure'][name]}\n" in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(AssertionError, match="check_pure: "):
        check_pure(fn, torch.ones(2), vmap=True)


def test_every_invariant_has_a_broken_function():
    assert {name for name, *_ in BROKEN} == INVARIANTS["check_pure"].keys()


def test_a_container_that_grows_is_found():
    with pytest.raises(AssertionError, match=r"inputs_stay_unchanged.*\n.*an argument has the structure"):
        check_pure(lambda values: values.append(1), [torch.ones(1)])


@pytest.mark.parametrize("vmap", [False, True])
def test_fmps_own_functions_are_pure(vmap):
    params = {"w": torch.ones(2, dtype=torch.float16), "b": torch.tensor([float("nan"), -0.0])}
    check_pure(lambda params: fmp.tree.map(lambda leaf: leaf + 1, params), params, vmap=vmap)
    check_pure(fmp.global_norm, params, vmap=vmap)
    check_pure(fmp.all_finite, params, vmap=vmap)
    check_pure(fmp.cast, params, torch.float16, vmap=vmap, may_alias=True)
    check_pure(fmp.value_and_grad(lambda params: (params["w"] ** 2).sum()), params, vmap=vmap)


def test_a_whole_train_step_is_pure():
    step = fmp.train_step(
        lambda params, batch: (params["w"] * batch).sum(), fmp.optim.adam(0.1), policy=fmp.opt_level("O2")
    )
    state = step.init({"w": torch.ones(3)})
    check_pure(step, state, torch.ones(3), may_alias=True)
    check_pure(lambda step, value: step.init(value), step, {"w": torch.ones(3)})


def test_sharing_is_allowed_on_request():
    check_pure(lambda x: (x, x[:1]), torch.ones(2), may_alias=True)


def test_global_state_is_put_back():
    generator = torch.get_rng_state()
    with pytest.raises(AssertionError, match="same_call_gives_the_same_bits"):
        check_pure(lambda x: change_default_dtype(x) * torch.rand((), dtype=x.dtype), torch.ones(2))
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), generator)


def test_bad_arguments():
    with pytest.raises(ValueError, match="vmap=True needs a tensor among the arguments"):
        check_pure(lambda x: x, 1.0, vmap=True)
    with pytest.raises(KeyError, match=r"invariants=\['speed'\] must be a list of some of \['inputs_stay_unchanged'"):
        check_pure(lambda x: x, 1.0, invariants=["speed"])
    with pytest.raises(KeyError, match="must be a list"):
        check_pure(lambda x: x, 1.0, invariants="global_state_stays")
