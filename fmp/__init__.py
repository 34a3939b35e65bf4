"""fmp: functional mixed-precision training for PyTorch.

A train step is a pure function `(state, batch) -> (state, metrics)` over pytrees. Nothing is patched, nothing is
global, nothing is mutated.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fmp import (
    checkpoint as checkpoint,
    df11 as df11,
    errors as errors,
    kernels as kernels,
    master as master,
    memory as memory,
    numerics as numerics,
    optim as optim,
    random as random,
    tree as tree,
)
from fmp.errors import BannedOpError as BannedOpError, RematError as RematError
from fmp.foreign_names import unknown_name as _unknown_name
from fmp.gradients import grad as grad, value_and_grad as value_and_grad
from fmp.module import Model as Model, functionalize as functionalize
from fmp.policy import (
    Explanation as Explanation,
    OpRules as OpRules,
    Policy as Policy,
    autocast as autocast,
    explain as explain,
    full_precision as full_precision,
    low_precision as low_precision,
    opt_level as opt_level,
    promote as promote,
)
from fmp.reductions import all_finite as all_finite, global_norm as global_norm
from fmp.rematerialization import (
    checkpoint_name as checkpoint_name,
    remat as remat,
    remat_sequential as remat_sequential,
    saveable as saveable,
)
from fmp.scaling import (
    DynamicLossScale as DynamicLossScale,
    NoOpLossScale as NoOpLossScale,
    StaticLossScale as StaticLossScale,
    loss_scale as loss_scale,
)
from fmp.step import (
    Metrics as Metrics,
    TrainState as TrainState,
    TrainStep as TrainStep,
    train_step as train_step,
)
from fmp.tree import cast as cast, select as select

if TYPE_CHECKING:
    from fmp import compat as compat, distributed as distributed, testing as testing

__version__ = "0.1.0"

__all__ = [
    "BannedOpError",
    "DynamicLossScale",
    "Explanation",
    "Metrics",
    "Model",
    "NoOpLossScale",
    "OpRules",
    "Policy",
    "RematError",
    "StaticLossScale",
    "TrainState",
    "TrainStep",
    "all_finite",
    "autocast",
    "cast",
    "checkpoint",
    "checkpoint_name",
    "df11",
    "errors",
    "explain",
    "full_precision",
    "functionalize",
    "global_norm",
    "grad",
    "kernels",
    "loss_scale",
    "low_precision",
    "master",
    "memory",
    "numerics",
    "opt_level",
    "optim",
    "promote",
    "random",
    "remat",
    "remat_sequential",
    "saveable",
    "select",
    "train_step",
    "tree",
    "value_and_grad",
]

# What not everyone needs, and takes long to load or needs a package that is not installed everywhere.
_ON_FIRST_USE = ("compat", "distributed", "testing")


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"fmp.{name}")
    raise _unknown_name("fmp", name, __dir__())


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
