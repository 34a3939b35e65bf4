"""A law: without casts, any order of passes, steps and clearing trains as plain torch does, or it is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from fmp.compat import amp
from tests.bits import same_bits

# Which of three parts each optimizer has; the first part is shared by two losses, in the last case by two optimizers.
OWNERS = {"one": [[0, 1, 2]], "two": [[0, 1], [2]], "three": [[0], [1], [2]], "shared": [[0, 1], [0, 2]]}

PASSES = st.tuples(
    st.just("pass"),
    st.sampled_from([1, 2]),  # the head
    st.sets(st.integers(0, 2), min_size=1),  # for which optimizers
    st.integers(0, 1),  # the loss scaler
    st.sampled_from([False, False, False, True]),  # delayed
)
STEPS = st.tuples(st.just("step"), st.integers(0, 2))
OTHERS = st.one_of(
    st.tuples(st.just("zero_grad"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("model.zero_grad"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("raise"), st.integers(0, 2)),
)
SCRIPTS = st.lists(st.one_of(PASSES, PASSES, STEPS, STEPS, OTHERS), min_size=8, max_size=24)


class Training:
    """Three parts and their optimizers."""

    def __init__(self, parts: list[nn.Module], owners: list[list[int]]):
        self.parts = parts
        self.optimizers = [
            torch.optim.SGD([p for index in owned for p in parts[index].parameters()], lr=2.0**-7, momentum=0.5)
            for owned in owners
        ]

    def loss(self, head: int, index: int) -> torch.Tensor:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(index))
        return self.parts[head](self.parts[0](x)).square().sum()


@settings(max_examples=150, deadline=None)
@given(owners=st.sampled_from(sorted(OWNERS)), scale=st.sampled_from([8.0, "dynamic"]), script=SCRIPTS)
def test_a_script_trains_as_in_plain_torch(owners, scale, script):
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)]
    plain, scaled = (Training(copy.deepcopy(parts), OWNERS[owners]) for _ in range(2))
    count = len(scaled.optimizers)
    amp.initialize(
        scaled.parts,
        scaled.optimizers,
        opt_level="O0",
        loss_scale=scale,
        num_losses=2,
        max_loss_scale=2.0**12,
        verbosity=0,
    )
    try:
        for index, (action, *args) in enumerate(script):
            follow(action, args, index, plain, scaled, count)
            assert same_bits(*([p.detach() for part in t.parts for p in part.parameters()] for t in (plain, scaled)))
    finally:
        amp.shutdown()
    for part, other in zip(plain.parts, scaled.parts, strict=True):
        for param, same in zip(part.parameters(), other.parameters(), strict=True):
            zero = torch.zeros_like(param)
            assert torch.equal(zero if param.grad is None else param.grad, zero if same.grad is None else same.grad)


def follow(action: str, args: list[Any], index: int, plain: Training, scaled: Training, count: int) -> None:
    """Does one thing in both trainings."""
    if action == "pass":
        head, optimizers, loss_id, delayed = args
        given = [scaled.optimizers[number % count] for number in sorted(optimizers)]
        with amp.scale_loss(scaled.loss(head, index), given, loss_id, delay_unscale=delayed) as loss:
            loss.backward()
        plain.loss(head, index).backward()
    elif action == "step":
        refusal = ""
        try:
            scaled.optimizers[args[0] % count].step()
            plain.optimizers[args[0] % count].step()
        except RuntimeError as error:
            refusal = str(error)
        assert not refusal or "still scaled" in refusal
    elif action == "raise":
        with pytest.raises(KeyError), amp.scale_loss(scaled.loss(1, index), scaled.optimizers[args[0] % count]) as loss:
            raise KeyError(loss.backward())
    else:
        for training in (plain, scaled):
            holders: list[Any] = training.parts if action.startswith("model") else training.optimizers
            clear: Callable[..., None] = holders[args[0] % len(holders)].zero_grad
            clear(set_to_none=args[1])
