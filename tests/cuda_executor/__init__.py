"""Runs CUDA C on the CPU, so that kernels are tested where there is no GPU.

The unmodified text of a .cu file is compiled by g++, and each CUDA thread becomes a fiber. Threads run in an order that
the test chooses. In the mode "checked" every access of memory is looked at: bounds, races, alignment, reads of shared
memory that nobody wrote. Barriers that not all threads reach, and kernels that never end, are found in either mode.

What it is not: a model of time, or of a GPU's `expf` and the like. A `__threadfence` orders nothing here: a kernel in
which the last block collects what the others wrote is reported as a race; make it two kernels.
"""

from tests.cuda_executor.build import MODES, missing
from tests.cuda_executor.module import SCHEDULES, LaunchError, Module

__all__ = ["MODES", "SCHEDULES", "LaunchError", "Module", "missing"]
