"""The global state of torch, Python and numpy: looking at it, and putting it back."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def global_state() -> dict[str, Any]:
    """Returns what of the global state a pure function leaves alone, by what to call it; generators come as bytes."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]
    generators = {
        "the random number generator of the CPU": torch.get_rng_state().numpy().tobytes(),
        "Python's random number generator": repr(random.getstate()).encode(),
        "numpy's random number generator": pickle.dumps(np.random.get_state()),
    }
    if torch.cuda.is_initialized():
        generators["the random number generator of the GPU"] = torch.cuda.get_rng_state().numpy().tobytes()
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
    """Puts the random number generators, grad mode, autocast and default dtype back afterwards; those of the CPU."""
    generator, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    grad_mode, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_rng_state(generator)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_grad_enabled(grad_mode)
        torch.set_default_dtype(dtype)
        torch.set_autocast_enabled("cpu", autocast)


@contextmanager
def recorded() -> Iterator[None]:
    """Lets autograd record, also where the caller has turned it off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
