import itertools
import random

import numpy as np
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


def ask_for_gradients(x):
    x.requires_grad_()
    return x.detach() * 2


def set_grad(x):
    x.grad = torch.ones_like(x)
    return x * 2


def write_around_autograd(x):
    x.data.mul_(2)
    return x * 2


def counting():
    calls = itertools.count(1)
    return lambda x: {"y": x * next(calls)}


BROKEN = [
    ("inputs_stay_unchanged", lambda x: x.mul_(2), "at 0: element [0] of an argument is 2.0, expected 1.0, in f32[2]"),
    ("inputs_stay_unchanged", write_what_is_there, "at 0: the argument was written to in place"),
    (
        "inputs_stay_unchanged",
        write_around_autograd,
        "at 0: element [0] of an argument is 2.0, expected 1.0, in f32[2]",
    ),
    ("inputs_stay_unchanged", ask_for_gradients, "at 0: requires_grad of the argument went from False to True"),
    ("inputs_stay_unchanged", set_grad, "at 0: the .grad of the argument is f32[2], expected NoneType"),
    ("same_call_gives_the_same_bits", counting(), "at y: element [0] of the result of a second call is 2.0, expected"),
    ("same_call_gives_the_same_bits", lambda x: x * torch.rand(()), "element [0] of the result of a second call is"),
    ("global_state_stays", lambda x: x * torch.rand(()), "the random number generator of the CPU has advanced"),
    ("global_state_stays", lambda x: x * random.random(), "Python's random number generator has advanced"),
    ("global_state_stays", lambda x: x * float(np.random.rand()), "numpy's random number generator has advanced"),
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


def test_gradients_added_to_those_of_the_caller_are_found():
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.ones(2)

    def differentiate(x):
        with torch.enable_grad():
            (x * 2).sum().backward()

    with pytest.raises(
        AssertionError, match=r"at 0: element \[0\] of the \.grad of the argument is 3\.0, expected 1\.0"
    ):
        check_pure(differentiate, x)


OTHER_TENSORS = {
    "numpy": lambda: np.ones(3),
    "numpy scalar": lambda: np.float32(3.0),
    "numpy objects": lambda: np.array(["a", None], dtype=object),
    "coo": lambda: torch.eye(3).to_sparse(),
    "f8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "u32": lambda: torch.ones(3).to(torch.uint32),
    "c64": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "meta": lambda: torch.ones(3, device="meta"),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_arguments_and_results_of_other_kinds(name):
    copy = lambda x: x.clone() if isinstance(x, torch.Tensor) else x.copy()
    check_pure(copy, OTHER_TENSORS[name]())


def test_float8_under_vmap():
    check_pure(lambda x: x.clone(), torch.ones(3).to(torch.float8_e5m2), vmap=True)


@pytest.mark.parametrize(
    ("name", "fn", "message"),
    [
        (
            "numpy",
            lambda x: np.multiply(x, 2, out=x),
            "an argument is array([2., 2., 2.]), expected array([1., 1., 1.])",
        ),
        ("numpy", lambda x: x[1:], "a result shares its memory with the argument at 0"),
        ("numpy", lambda x: torch.from_numpy(x)[1:], "a result shares its memory with the argument at 0"),
        ("numpy", lambda x: (y := x * 2, y[1:]), "at 0: a result shares its memory with the one at 1"),
        ("coo", lambda x: x.mul_(2), "at 0: element [0] of an argument is 2.0, expected 1.0"),
        ("coo", lambda x: x, "a result shares its memory with the argument at 0"),
        ("coo", lambda x: x.copy_(torch.zeros(3, 3).to_sparse()), "an argument has f32[0] entries, expected f32[3]"),
        ("f8", lambda x: x.copy_(x.float() * 2), "an argument is 2.0, expected 1.0, in f8e4m3[3]"),
        ("jagged", lambda x: x.mul_(2), "an argument is 2.0, expected 1.0"),
    ],
)
def test_arguments_of_other_kinds_are_looked_at(name, fn, message):
    with pytest.raises(AssertionError) as caught:
        check_pure(fn, OTHER_TENSORS[name]())
    assert message in str(caught.value)


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
    generator, of_python, of_numpy = torch.get_rng_state(), random.getstate(), repr(np.random.get_state(legacy=False))
    with pytest.raises(AssertionError, match="same_call_gives_the_same_bits"):
        check_pure(lambda x: change_default_dtype(x) * torch.rand((), dtype=x.dtype), torch.ones(2))
    with pytest.raises(AssertionError, match="same_call_gives_the_same_bits"):
        check_pure(lambda x: x * random.random() * float(np.random.rand()), torch.ones(2))
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == of_python
    assert repr(np.random.get_state(legacy=False)) == of_numpy


def test_bad_arguments():
    with pytest.raises(ValueError, match="vmap=True needs a tensor among the arguments"):
        check_pure(lambda x: x, 1.0, vmap=True)
    with pytest.raises(ValueError, match=r"invariants=\['speed'\] must be a list of some of \['inputs_stay_unchanged'"):
        check_pure(lambda x: x, 1.0, invariants=["speed"])
    with pytest.raises(ValueError, match="must be a list"):
        check_pure(lambda x: x, 1.0, invariants="global_state_stays")
