"""A whole donating train step as a CUDA graph; and what keeps one from being captured, found out without a GPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fmp
from fmp import tree
from fmp.optim import schedules
from tests.bits import same_bits, snapshot
from tests.gpu.steps import captured, in_place, make_batch, make_params, make_step
from tests.host import NoHostSync

OVERFLOWS = [False, False, False, True, False, True, True, False, False, False]


@pytest.mark.parametrize(
    "optimizer",
    [None, fmp.optim.sgd(schedules.linear(0.1, 0.01, 5), momentum=0.9, weight_decay=0.1)],
    ids=["adamw", "sgd"],
)
def test_replays_are_the_steps(device, optimizer):
    step = make_step(optimizer)
    state, batch = step.init(make_params(device)), make_batch(0, device)
    reference, first = step.init(make_params(device)), snapshot(state)
    replay, metrics = captured(device, lambda: in_place(step, state, batch))
    tree.map(lambda there, value: value if value is None else there.copy_(value), state, first)
    scales = []
    for seed, overflow in enumerate(OVERFLOWS):
        given = make_batch(seed, device, overflow)
        for there, value in zip(batch, given, strict=True):
            there.copy_(value)
        replay()
        reference, wanted = step(reference, given)
        assert same_bits(metrics, wanted), seed
        assert same_bits(state, reference), seed
        assert metrics.skipped.item() == overflow
        scales.append(metrics.loss_scale.item())
    assert scales == [1024, 1024, 2048, 2048, 1024, 1024, 512, 256, 256, 512]


class NoCopies(TorchDispatchMode):
    """Raises where an operation sees tensors of two devices: most such copies cannot be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs one operation, then looks at its operands and results."""
        results = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree.leaves((args, kwargs, results)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            raise AssertionError(f"{func.name()} goes from one device to another")
        return results


def not_from_the_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # The mode does not see what these copy.
    def made(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(data, *args, **kwargs)
        assert isinstance(data, torch.Tensor) or tensor.device.type == "cpu", f"{make.__name__} copies from the host"
        return tensor

    return made


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (None, {}),
        (None, {"ema": 0.9, "accumulate": 2}),
        (None, {"loss_scale": 128.0}),
        (None, {"policy": fmp.opt_level("O2", half_dtype=torch.bfloat16), "loss_scale": None}),
        (fmp.optim.adamw(1e-3, mask=["weight"], fused=True), {}),
        (fmp.optim.sgd(0.1), {}),
        (fmp.optim.sgd(schedules.piecewise_constant([0.1, 0.01], [3]), momentum=0.9, dampening=0.1), {}),
        (fmp.optim.sgd(schedules.join([schedules.linear(0.0, 0.1, 2), schedules.constant(0.1)], [2])), {}),
        (fmp.optim.lamb(1e-3), {}),
        (fmp.optim.lion(1e-3), {}),
        (fmp.optim.rmsprop(1e-3), {}),
        (fmp.optim.adafactor(1e-3), {}),
    ],
)
def test_a_step_neither_waits_for_the_device_nor_copies_to_it(optimizer, options):
    """The device is `meta`, where tensors have no values: whoever asks for one cannot get it."""
    step = make_step(optimizer, **options)
    state, batch = step.init(make_params("meta")), make_batch(0, "meta")
    with (
        mock.patch.object(torch, "tensor", not_from_the_host(torch.tensor)),
        mock.patch.object(torch, "as_tensor", not_from_the_host(torch.as_tensor)),
        NoHostSync(),
        NoCopies(),
    ):
        in_place(step, state, batch)


def test_the_watch_sees_a_copy():
    with pytest.raises(AssertionError, match="one device to another"), NoCopies():
        torch.ones(3).to("meta")
