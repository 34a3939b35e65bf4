"""Apex 1.11: recurrent networks under O1 and O2: cells, stacked, in both directions, on packed sequences."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fmp
from fmp import tree

HALVES = [torch.float16, torch.bfloat16]
LEVELS = ["O1", "O2"]
KINDS = [nn.RNN, nn.GRU, nn.LSTM]
CELLS = [nn.RNNCell, nn.GRUCell, nn.LSTMCell]
SHAPES = {
    "one layer": {},
    "stacked": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "stacked in both directions": {"num_layers": 2, "bidirectional": True},
}


class Unrolled(nn.Module):
    """A cell, called once for each time."""

    def __init__(self, cell: type):
        super().__init__()
        self.cell = cell(4, 5)

    def forward(self, x: torch.Tensor) -> Any:
        state, outputs = None, []
        for now in x:
            state = self.cell(now) if state is None else self.cell(now, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs), state


class Tagger(nn.Module):
    """A linear layer, a recurrent one, and a linear one: the middle one is given 16 bits."""

    def __init__(self, recurrent: nn.Module, width: int):
        super().__init__()
        self.embed, self.recurrent, self.head = nn.Linear(3, 4), recurrent, nn.Linear(width, 2)

    def forward(self, x: Any) -> Any:
        packed = isinstance(x, PackedSequence)
        out, state = self.recurrent(PackedSequence(self.embed(x.data), *x[1:]) if packed else self.embed(x))
        return self.head(out.data if packed else out), out, state


def dtypes(value: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}


def check(module: nn.Module, x: Any, level: str, half: torch.dtype) -> None:
    """Trains two steps and compares with float32: loss, gradient norm and new parameters; looks at dtypes inside."""
    model = fmp.functionalize(module)
    seen: list[set[torch.dtype]] = []

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        (scores, out, state), _ = model.apply(params, {}, batch)
        seen.append(dtypes((scores, out, state)))
        return scores.float().square().mean() + scores.float().mean()

    def run(policy: fmp.Policy, scale: float | None) -> tuple[Any, Any]:
        step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy, loss_scale=scale)
        state, metrics = step.init(model.params), None
        for _ in range(2):
            state, metrics = step(state, x)
        return fmp.master.merge(state.params, state.master, form=policy.master_form or "f32"), metrics

    params, metrics = run(fmp.opt_level(level, half), 1024.0)
    assert seen == [{half}] * 2  # outputs and states are half, as by Apex
    assert dtypes(params) == {torch.float32}
    expected, reference = run(fmp.opt_level("O0"), None)
    tolerance = 8 * torch.finfo(half).eps
    torch.testing.assert_close(metrics.loss, reference.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(metrics.grad_norm, reference.grad_norm, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(params, expected, rtol=0.0, atol=0.1 * tolerance)
    assert any(not torch.equal(params[name], model.params[name]) for name in params if "weight_hh" in name)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_sequences_padded_and_packed(shape, kind, level, half):
    torch.manual_seed(0)
    options = SHAPES[shape]
    module = Tagger(kind(4, 5, **options), 10 if "bidirectional" in options else 5)
    x = torch.randn(6, 3, 3)
    check(module, x, level, half)
    check(module, pack_padded_sequence(x, [6, 4, 2]), level, half)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cell", CELLS)
def test_cells(cell, level, half):
    torch.manual_seed(0)
    check(Tagger(Unrolled(cell), 5), torch.randn(4, 3, 3), level, half)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_packing_gives_what_each_sequence_gives_alone(kind, level):
    torch.manual_seed(0)
    model = fmp.functionalize(kind(3, 5, bidirectional=True))
    policy = fmp.opt_level(level, "bf16", cast_model_outputs="bf16")
    call = fmp.autocast(lambda p, x: model.apply(p, {}, x)[0][0], policy)
    params = policy.cast_to_param(model.params)
    lengths, x = [6, 4, 2], torch.randn(6, 3, 3)
    padded, _ = pad_packed_sequence(call(params, pack_padded_sequence(x, lengths)))
    for index, length in enumerate(lengths):
        alone = call(params, x[:length, index : index + 1])
        torch.testing.assert_close(padded[:length, index : index + 1], alone, rtol=2.0**-7, atol=2.0**-9)


@pytest.mark.parametrize("level", LEVELS)
def test_masters_of_a_recurrent_network_are_float32(level):
    model = fmp.functionalize(nn.LSTM(3, 5, num_layers=2))
    policy = fmp.opt_level(level, "bf16")
    loss_fn = lambda params, x: model.apply(params, {}, x)[0][0].float().square().mean()
    step = fmp.train_step(loss_fn, fmp.optim.adamw(0.01), policy=policy)
    state, _ = step(step.init(model.params), torch.randn(4, 2, 3))
    assert dtypes(state.params) == {torch.bfloat16 if level == "O2" else torch.float32}
    assert dtypes(state.master) == ({torch.float32} if level == "O2" else set())
    assert dtypes(state.opt_state) == {torch.float32}
