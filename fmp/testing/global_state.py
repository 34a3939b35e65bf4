"""torch's global state: looking at it, and putting it back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def global_state() -> dict[str, Any]:
    """Returns what of torch's global state a pure function leaves alone, by what to call it."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]
    generators = {"the random number generator of the CPU": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        generators["the random number generator of the GPU"] = torch.cuda.get_rng_state()
    return {
        **generators,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        **{f"autocast for {device}": torch.is_autocast_enabled(device) for device in devices},
    }


@contextmanager
def restored() -> Iterator[None]:
    """Puts the CPU's random number generator, grad mode, autocast and default dtype back afterwards."""
    generator, grad_mode = torch.get_rng_state(), torch.is_grad_enabled()
    dtype, autocast = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    try:
        yield
    finally:
        torch.set_rng_state(generator)
        torch.set_grad_enabled(grad_mode)
        torch.set_default_dtype(dtype)
        torch.set_autocast_enabled("cpu", autocast)
