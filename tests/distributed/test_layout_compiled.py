"""A whole train step of several processes as one compiled graph."""

import functools
from typing import Any

import pytest
import torch

from fmp import optim
from tests.distributed import layout_cases as cases
from tests.distributed.processes import run
from tests.distributed.test_layout import clipped_adamw

OPTIMIZERS = {
    "adamw": functools.partial(optim.adamw, 1e-2),
    "sgd": functools.partial(optim.sgd, 0.1),
    "clip": clipped_adamw,
    "from_torch": functools.partial(optim.from_torch, torch.optim.AdamW, lr=1e-2),
    "adafactor": functools.partial(optim.adafactor, 1e-2),
}


@pytest.mark.parametrize(
    ("zero", "optimizer", "backend", "options"),
    [
        (0, "adamw", "aot_eager", {"clip_norm": 0.5}),
        (1, "clip", "aot_eager", {"ema": 0.9}),
        (1, "adafactor", "aot_eager", {"clip_norm": 0.5}),
        (1, "from_torch", "aot_eager", {}),
        (3, "adamw", "aot_eager", {"accumulate": 2, "donate": True}),
        (1, "sgd", "inductor", {}),
    ],
)
def test_a_step_of_two_ranks_compiles_as_one_graph(
    zero: int, optimizer: str, backend: str, options: dict[str, Any]
) -> None:
    make = OPTIMIZERS[optimizer]
    expected = run(1, functools.partial(cases.train, None, make, steps=3, **options))[0]
    results = run(2, functools.partial(cases.train, zero, make, steps=3, backend=backend, **options), timeout=200.0)
    for found in results:
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0.0)
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-5, atol=0.0)
        assert found["graphs"] == 1
