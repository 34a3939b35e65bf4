"""Whether a kernel does on the card at hand what its source says: it is tried once, before its first use."""

import threading
import warnings

import torch

from fmp import _compat
from fmp.kernels.trials import TRIALS

# What has been found out: what is wrong with a kernel, or None. It is compiled once for a process and a card, and so it
# is tried once.
_verdicts: dict[tuple[str, torch.device], str | None] = {}
_lock = threading.RLock()


def agrees(kernel: str, device: torch.device) -> bool:
    """Says whether a kernel agrees with what else does its work on a device, bit for bit, on a few small tensors.

    The first time it is tried, for which the host waits; not while a CUDA graph is captured, where nothing can wait.

    Args:
        kernel: A key of `fmp.kernels.trials.TRIALS`.
        device: The device.

    Returns:
        Whether it does; false, too, where it cannot be compiled or launched. A `RuntimeWarning` then says so, once.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (kernel, device)
    with _lock:
        if key not in _verdicts:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            _verdicts[key] = problem = _problem(kernel, device)
            if problem is not None:
                _warn(kernel, device, problem)
        return _verdicts[key] is None


def found(kernel: str) -> dict[torch.device, str | None]:
    """Says what trials of a kernel have found: for each device on which it was tried the problem, or None."""
    return {device: problem for (name, device), problem in _verdicts.items() if name == kernel}


def _problem(kernel: str, device: torch.device) -> str | None:
    try:
        # What is tried is the kernel; modes around the caller, such as autocast, would change what torch computes.
        with torch.no_grad(), _compat.replaced_function_modes(), torch.autocast(device.type, enabled=False):
            return None if TRIALS[kernel](device) else "returns wrong numbers"
    except Exception as error:
        return f"cannot run ({type(error).__name__}: {error})"


def _warn(kernel: str, device: torch.device, problem: str) -> None:
    instead = "the host decodes" if kernel.startswith("df11") else "torch's operators do its work"
    warnings.warn(
        f"the kernel {kernel!r} {problem} on {device}, so {instead}; please report card and driver",
        RuntimeWarning,
        stacklevel=4,
    )
