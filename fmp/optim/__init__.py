"""Optimizers as pairs of pure functions, and the parts to build them from."""

from fmp.optim import schedules as schedules
from fmp.optim.adam import AdamState as AdamState, adam as adam, adamw as adamw
from fmp.optim.base import GradientTransformation as GradientTransformation, apply_updates as apply_updates
from fmp.optim.chain import chain as chain
from fmp.optim.clip import clip_by_global_norm as clip_by_global_norm, clip_to_norm as clip_to_norm
from fmp.optim.freeze import freeze as freeze
from fmp.optim.inject import InjectHyperparamsState as InjectHyperparamsState, inject_hyperparams as inject_hyperparams
from fmp.optim.partition import PartitionState as PartitionState, partition as partition
from fmp.optim.sgd import SgdState as SgdState, sgd as sgd

__all__ = [
    "AdamState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "PartitionState",
    "SgdState",
    "adam",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "clip_to_norm",
    "freeze",
    "inject_hyperparams",
    "partition",
    "schedules",
    "sgd",
]
