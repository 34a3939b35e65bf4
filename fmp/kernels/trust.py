"""Whether a kernel does on the card at hand what its source says: it is tried once, before its first use."""

import warnings

import torch

from fmp import _compat
from fmp.kernels.trials import TRIALS

# What has been found out. A kernel is compiled once for a process and a card, and so it is tried once.
_verdicts: dict[tuple[str, torch.device], bool] = {}


def agrees(kernel: str, device: torch.device) -> bool:
    """Says whether a kernel agrees with torch on a device, bit for bit, on a few small tensors.

    The first time it is tried, for which the host waits; not while a CUDA graph is captured, where nothing can wait.

    Args:
        kernel: A key of `fmp.kernels.trials.TRIALS`.
        device: The device.

    Returns:
        Whether it does; false, too, where it cannot be compiled or launched. A `RuntimeWarning` then says so, once.
    """
    key = (kernel, device)
    if key not in _verdicts:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        _verdicts[key] = _tried(kernel, device)
    return _verdicts[key]


def was_refused(kernel: str) -> bool:
    """Says whether a kernel was tried on some device, and could not be used."""
    return any(name == kernel and not verdict for (name, _), verdict in _verdicts.items())


def _tried(kernel: str, device: torch.device) -> bool:
    try:
        # What is tried is the kernel; modes around the caller, such as autocast, would change what torch computes.
        with torch.no_grad(), _compat.replaced_function_modes(), torch.autocast(device.type, enabled=False):
            if TRIALS[kernel](device):
                return True
        problem = "returns wrong numbers"
    except Exception as error:
        problem = f"cannot run ({type(error).__name__}: {error})"
    warnings.warn(
        f"the kernel {kernel!r} {problem} on {device}, so torch's operators do its work; please report card and driver",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
