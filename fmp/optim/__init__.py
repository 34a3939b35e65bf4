"""Optimizers as pairs of pure functions, and the parts to build them from."""

from typing import TYPE_CHECKING, Any

from fmp.foreign_names import unknown_name as _unknown_name
from fmp.optim import schedules as schedules
from fmp.optim.accumulate import AccumulateState as AccumulateState, accumulate as accumulate
from fmp.optim.adafactor import AdafactorState as AdafactorState, adafactor as adafactor
from fmp.optim.adam import AdamState as AdamState, adam as adam, adamw as adamw
from fmp.optim.base import GradientTransformation as GradientTransformation, apply_updates as apply_updates
from fmp.optim.chain import chain as chain, named_chain as named_chain
from fmp.optim.clip import (
    clip_by_global_norm as clip_by_global_norm,
    clip_by_value as clip_by_value,
    clip_factor as clip_factor,
    clip_to_norm as clip_to_norm,
)
from fmp.optim.ema import EmaState as EmaState, ema as ema
from fmp.optim.freeze import freeze as freeze
from fmp.optim.inject import InjectHyperparamsState as InjectHyperparamsState, inject_hyperparams as inject_hyperparams
from fmp.optim.lamb import LambState as LambState, lamb as lamb
from fmp.optim.larc import LarcState as LarcState, larc as larc
from fmp.optim.lion import LionState as LionState, lion as lion
from fmp.optim.masked import MaskedState as MaskedState, masked as masked
from fmp.optim.partition import PartitionState as PartitionState, partition as partition
from fmp.optim.rmsprop import RmspropState as RmspropState, rmsprop as rmsprop
from fmp.optim.sgd import SgdState as SgdState, sgd as sgd
from fmp.optim.torch_bridge import FromTorchState as FromTorchState, from_torch as from_torch

__all__ = [
    "AccumulateState",
    "AdafactorState",
    "AdamState",
    "EmaState",
    "FromTorchState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "LambState",
    "LarcState",
    "LionState",
    "MaskedState",
    "PartitionState",
    "RmspropState",
    "SgdState",
    "accumulate",
    "adafactor",
    "adam",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "clip_factor",
    "clip_to_norm",
    "ema",
    "freeze",
    "from_torch",
    "inject_hyperparams",
    "lamb",
    "larc",
    "lion",
    "masked",
    "named_chain",
    "partition",
    "rmsprop",
    "schedules",
    "sgd",
]

if not TYPE_CHECKING:  # a type checker is to see which names there are

    def __getattr__(name: str) -> Any:
        raise _unknown_name("fmp.optim", name, globals())
