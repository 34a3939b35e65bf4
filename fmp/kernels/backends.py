"""Which implementation runs for tensors of each kind of device, and why."""

from typing import NamedTuple

import torch

from fmp.df11 import acceleration
from fmp.kernels import launch, trust

_WORK = {
    "unscale and norm": "scale",
    "axpby": "axpby",
    "adam": "adam",
    "sgd": "sgd",
    "loss scale": "loss_scale",
}


class Backend(NamedTuple):
    """What does a piece of work.

    Attributes:
        name: `cuda` for the kernels of fmp, `torch` for its operators, `numba` or `numpy` on the host.
        why: The reason.
    """

    name: str
    why: str

    def __repr__(self) -> str:
        return f"{self.name}: {self.why}"


def backends() -> dict[str, Backend]:
    """Says what does each piece of work on each kind of device, and why it is not something faster.

    Returns:
        For each work on each kind of device, such as `adam on cuda`, the implementation and the reason.

    Example:
        >>> for work in backends():
        ...     if work.endswith("cpu"):
        ...         print(work)
        df11 on cpu
        unscale and norm on cpu
        axpby on cpu
        adam on cpu
        sgd on cpu
        loss scale on cpu
        >>> backends()["adam on cpu"]
        torch: the kernels are for NVIDIA GPUs
    """
    host = Backend("numba", "it is installed") if acceleration.has_numba() else Backend("numpy", "numba is not usable")
    reason = launch.missing()
    if reason is None:
        device = Backend("cuda", f"compiled for {torch.cuda.get_device_name()}")
    else:
        device = Backend(host.name, f"on the host, with copies: {reason}")
    found = {"df11 on cpu": host, "df11 on cuda": device}
    for work, kernel in _WORK.items():
        found[f"{work} on cpu"] = Backend("torch", "the kernels are for NVIDIA GPUs")
        found[f"{work} on cuda"] = _on_cuda(kernel, reason)
    return found


def _on_cuda(kernel: str, reason: str | None) -> Backend:
    if reason is not None:
        return Backend("torch", reason)
    if trust.was_refused(kernel):
        return Backend("torch", "the kernel was tried and could not be used; the warning had the reason")
    return Backend("cuda", f"compiled for {torch.cuda.get_device_name()}")
