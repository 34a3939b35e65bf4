"""peft's LoRA layers around compressed weights; runs where peft is installed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fmp
from tests.bits import same_bits

peft = pytest.importorskip("peft", reason="peft is not installed")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(96, 64), nn.Linear(64, 128), nn.Linear(128, 96)

    def forward(self, x):
        return self.second(torch.tanh(self.first(self.embed(x))))


@pytest.mark.filterwarnings("ignore")  # by peft's own dependencies
@pytest.mark.mixed_dtypes  # peft keeps its matrices in float32
def test_training_is_that_on_plain_weights(tmp_path):
    base, x = Model().bfloat16(), torch.randint(0, 96, (4, 9))

    def train(base: nn.Module) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["first", "second", "embed"], lora_dropout=0.1)
        model = peft.get_peft_model(copy.deepcopy(base), config)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], 1e-2)
        losses = []
        for _ in range(4):
            loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, peft.get_peft_model_state_dict(model), model

    losses, adapters, _ = train(base)
    small_losses, small_adapters, small = train(fmp.df11.wrap(base))
    assert losses[-1] < losses[0]
    assert same_bits((small_losses, small_adapters), (losses, adapters))
    assert sum(isinstance(param, fmp.df11.FrozenWeight) for param in small.parameters()) == 3
    small.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fmp.df11.wrap(base), tmp_path)
    assert same_bits(again(x), small.eval()(x))
