"""Gradients that a backward pass leaves where no `scale_loss` looks after them: none is used with a wrong scale."""

from typing import Any

import pytest
import torch
from torch import nn

from fmp.compat import amp

X = torch.ones(1, 2)
LEVELS = ["O0", "O1", "O2", "O3"]


def start(*args: Any, **kwargs: Any) -> Any:
    return amp.initialize(*args, **{"verbosity": 0} | kwargs)


def pair(level: str) -> tuple[Any, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns a model of two layers of ones, and an optimizer for each."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    for param in model.parameters():
        nn.init.ones_(param)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.125) for layer in model)
    start(model, [first, second], opt_level=level, loss_scale=8.0)
    return model, first, second


def backward(model: Any, optimizers: Any, **kwargs: Any) -> None:
    with amp.scale_loss(model(X).sum(), optimizers, **kwargs) as scaled:
        scaled.backward()


def grads(*optimizers: Any) -> list[Any]:
    return [
        None if p.grad is None else p.grad.float().flatten().tolist()
        for item in optimizers
        for p in amp.master_params(item)
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_was_not_given_does_not_step_with_scaled_gradients(level):
    model, first, second = pair(level)
    backward(model, first)
    first.step()
    with pytest.raises(RuntimeError, match=r"with this optimizer|not given this optimizer"):
        second.step()
    assert torch.equal(model[1].weight.float(), torch.ones(1, 2))


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_it_steps_when_they_were_cleared(level, set_to_none):
    model, first, second = pair(level)
    backward(model, first)
    model.zero_grad(set_to_none=set_to_none)
    second.step()
    assert torch.equal(model[1].weight.float(), torch.ones(1, 2))
    backward(model, second)
    second.step()
    assert torch.equal(model[1].weight.float(), torch.full((1, 2), 0.75))


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_its_next_pass_unscales_them_as_torch_would_have_added_them(level):
    model, first, second = pair(level)
    backward(model, second)
    backward(model, first)
    backward(model, second)
    assert grads(second) == [[6.0, 6.0]]
    second.step()
    assert torch.equal(model[1].weight.float(), torch.full((1, 2), 0.25))


def test_half_gradients_of_masters_are_dropped_as_by_apex():
    model, first, second = pair("O2")
    backward(model, second)
    backward(model, first)
    backward(model, second)
    assert grads(second) == [[4.0, 4.0]]


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_leaves_the_gradients_of_all_optimizers_as_they_were(level):
    model, first, second = pair(level)
    backward(model, second)
    before = grads(first, second)
    with pytest.raises(KeyError), amp.scale_loss(model(X).sum(), first) as scaled:
        raise KeyError(scaled.backward())
    assert grads(first, second) == before
    second.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_blocks_inside_of_one_another_keep_their_scales_apart(level):
    model, first, second = pair(level)
    with amp.scale_loss(model(X).sum(), first) as outer:
        outer.backward(retain_graph=True)
        backward(model, second)
        outer.backward()
    assert grads(first) == [[3.0] * 4]
    with pytest.raises(RuntimeError, match="still scaled"):
        second.step()
    backward(model, second)
    assert grads(second) == [[8.0, 8.0]]  # twice of each pass: two of the outer one, one, and one more


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_parameters_that_join_after_a_pass_have_no_scaled_gradients(level):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    for param in model.parameters():
        nn.init.ones_(param)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.125)
    start(model, optimizer, opt_level=level, loss_scale=8.0)
    backward(model, optimizer)
    optimizer.add_param_group({"params": model[1].parameters()})
    with pytest.raises(RuntimeError, match="still scaled"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer)
    assert grads(optimizer) == [[1.0] * 4, [2.0, 2.0]]


def test_a_gradient_made_by_plain_backward_after_clearing_is_not_taken_for_a_scaled_one():
    model, first, second = pair("O0")
    backward(model, first)
    second.zero_grad()
    model(X).sum().backward()
    second.step()
    assert torch.equal(model[1].weight, torch.full((1, 2), 0.75))


def test_a_plain_backward_is_refused_with_masters():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    start(model, optimizer, opt_level="O2", half_dtype="bf16")
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"backward inside of `with amp\.scale_loss"):
        optimizer.step()
    model.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_without_a_new_pass_is_none_with_masters(clip):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    start(model, optimizer, opt_level="O2", loss_scale=8.0)
    for _ in range(2):
        backward(model, optimizer)
        if clip:  # of what no step uses
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        before = model.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert torch.equal(before, model.weight)


def test_gradients_set_on_the_masters_are_used():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    start(model, optimizer, opt_level="O2")
    nn.init.ones_(next(amp.master_params(optimizer)))
    next(amp.master_params(optimizer)).grad = torch.ones(1, 2)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((1, 2), 0.875))


@pytest.mark.parametrize("optimizers", [[], ()])
def test_a_pass_for_no_optimizer_leaves_nothing_to_step_with(optimizers):
    model, first, second = pair("O1")
    backward(model, optimizers)
    for optimizer in (first, second):
        with pytest.raises(RuntimeError, match="still scaled"):
            optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_a_block_that_cannot_begin_inside_of_another_one_changes_nothing(level):
    model, first, second = pair(level)
    backward(model, second)
    before = grads(second)
    with amp.scale_loss(model(X).sum(), first):
        with pytest.raises(RuntimeError, match="leave the first block"):
            backward(model, first)
        with pytest.raises(KeyError), amp.scale_loss(model(X).sum(), second):
            raise KeyError
    assert grads(second) == before
    second.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_shutdown_unscales_what_is_left_anywhere(level):
    model, first, _ = pair(level)
    backward(model, first)
    amp.shutdown()
    assert model[0].weight.grad.flatten().tolist() == [1.0] * 4
    assert model[1].weight.grad.flatten().tolist() == [2.0] * 2
