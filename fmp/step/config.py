"""What a train step is made of, and how its parts are keyed.

One loss and one optimizer are the common case of several: inside, everything is keyed by the name of a loss or of a
group of parameters, and the key is taken off again where the user gave none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmp.optim import GradientTransformation
from fmp.placement import Placement
from fmp.policy import Policy
from fmp.scaling import LossScale
from fmp.step.loss import Loss

Tree = Any
ONLY = ""  # the key of the only loss, and of the only group of parameters


@dataclass(frozen=True)
class StepConfig:
    """The checked arguments of `fmp.train_step`, which describes them."""

    losses: Mapping[str, Loss]
    optimizers: Mapping[str, GradientTransformation]
    scalers: Mapping[str, LossScale]
    skips: Mapping[str, bool]
    uses: Mapping[str, Sequence[str]]
    policy: Policy | None
    accumulate: int
    microbatch_weight: Callable[[Tree], torch.Tensor] | None
    clip_norm: float | None
    ema: float | None
    placement: Placement

    @property
    def master_form(self) -> str | None:
        """The form of the masters, a key of `fmp.master.FORMS`; None without masters."""
        return None if self.policy is None else self.policy.master_form

    def takes(self, keyword: str) -> bool:
        """Says whether a loss takes `buffers`, `seed` or `frozen`."""
        return any(keyword in loss.keywords for loss in self.losses.values())

    def by_group(self, part: Tree) -> Mapping[str, Any]:
        """Keys a part of the state by group of parameters."""
        return {ONLY: part} if ONLY in self.optimizers else part

    def from_groups(self, by_group: Mapping[str, Any]) -> Any:
        """Takes the key of the only group off again."""
        return by_group[ONLY] if ONLY in self.optimizers else dict(by_group)

    def by_loss(self, part: Any) -> Mapping[str, Any]:
        """Keys a part of the state by loss."""
        return {ONLY: part} if ONLY in self.losses else part

    def from_losses(self, by_loss: Mapping[str, Any]) -> Any:
        """Takes the key of the only loss off again."""
        return by_loss[ONLY] if ONLY in self.losses else dict(by_loss)
