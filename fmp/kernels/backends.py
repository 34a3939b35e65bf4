"""Which implementation runs for tensors of each kind of device, and why."""

from typing import NamedTuple

import torch

from fmp.df11_codec import acceleration
from fmp.kernels import launch, trust

# What torch does where the kernel cannot.
_WORK = {
    "unscale and norm": "scale",
    "axpby": "axpby",
    "adam": "adam",
    "adam with a remainder": "adam_remainder",
    "adam rounded stochastically": "adam_stochastic",
    "sgd": "sgd",
    "sgd with a remainder": "sgd_remainder",
    "sgd rounded stochastically": "sgd_stochastic",
    "loss scale": "loss_scale",
}
# What the host does.
_DECODING = {"df11": "df11", "published df11": "df11_published"}


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
        published df11 on cpu
        unscale and norm on cpu
        axpby on cpu
        adam on cpu
        adam with a remainder on cpu
        adam rounded stochastically on cpu
        sgd on cpu
        sgd with a remainder on cpu
        sgd rounded stochastically on cpu
        loss scale on cpu
        >>> backends()["adam on cpu"]
        torch: the kernels are for NVIDIA GPUs
    """
    host = Backend("numba", "it is installed") if acceleration.has_numba() else Backend("numpy", "numba is not usable")
    found = {}
    for work, kernel in _DECODING.items():
        found[f"{work} on cpu"] = host
        found[f"{work} on cuda"] = _on_cuda(kernel, instead=host.name, note="on the host, with copies: ")
    for work, kernel in _WORK.items():
        found[f"{work} on cpu"] = Backend("torch", "the kernels are for NVIDIA GPUs")
        found[f"{work} on cuda"] = _on_cuda(kernel, instead="torch")
    return found


def _on_cuda(kernel: str, *, instead: str, note: str = "") -> Backend:
    reason = launch.missing()
    if reason is not None:
        return Backend(instead, f"{note}{reason}")
    tried = trust.found(kernel)
    problems = [f"the kernel {problem} on {device}" for device, problem in tried.items() if problem is not None]
    if problems:
        return Backend(instead, note + "; ".join(problems))
    card = torch.cuda.get_device_name()
    return Backend("cuda", f"compiled for {card}, and tried" if tried else f"for {card}; tried before its first use")
