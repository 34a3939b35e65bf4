"""Which implementation runs for tensors of each kind of device, and why."""

from typing import NamedTuple

import torch

from fmp.df11 import acceleration
from fmp.kernels import launch


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
    """Says what decodes DF11 on each kind of device, and why it is not something faster.

    Returns:
        For `df11 on cpu` and `df11 on cuda` the implementation and the reason.

    Example:
        >>> sorted(backends())
        ['df11 on cpu', 'df11 on cuda']
        >>> backends()["df11 on cpu"].name in ("numba", "numpy")
        True
    """
    host = Backend("numba", "it is installed") if acceleration.has_numba() else Backend("numpy", "numba is not usable")
    reason = launch.missing()
    if reason is None:
        device = Backend("cuda", f"compiled for {torch.cuda.get_device_name()}")
    else:
        device = Backend(host.name, f"on the host, with copies: {reason}")
    return {"df11 on cpu": host, "df11 on cuda": device}
