"""A CPU that stands in for a GPU: the product launches its kernels there, on the executor."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fmp.kernels import eligible, launch, source, trust
from tests.cuda_executor import Module


@functools.cache
def module(of: str, mode: str = "fast") -> Module:
    return Module(source.folder() / f"{of}.cu", mode)


@contextmanager
def on_executor(mode: str = "fast") -> Iterator[torch.device]:
    """Lets the product launch its kernels on the CPU.

    Args:
        mode: `fast`, or `checked` where all memory that kernels may touch is named to the executor.
    """
    with (
        mock.patch.object(launch, "module_on", lambda device, of: module(of, mode)),
        mock.patch.object(eligible, "has_kernels", lambda device: device.type == "cpu"),
        mock.patch.dict(trust._verdicts),
    ):
        yield torch.device("cpu")
