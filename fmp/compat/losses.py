"""The loss scalers of a session: one a loss, each an immutable scaler of fmp with what Apex counts beside it."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fmp import reductions, tree
from fmp.scaling import DynamicLossScale, StaticLossScale

FIRST_SCALE = 2.0**16
# Without a floor, Apex halves down to 0; its inverse would be infinite. This is the smallest with a finite inverse.
LOWEST_SCALE = torch.finfo(torch.float32).tiny


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss scaling of one loss.

    Attributes:
        scaler: The scaler.
        static_updates: How often a static scaler was asked, which is all that its state dict has to tell.
    """

    scaler: DynamicLossScale | StaticLossScale
    static_updates: int = 0

    @property
    def is_dynamic(self) -> bool:
        """Whether overflow changes the scale."""
        return isinstance(self.scaler, DynamicLossScale)

    @property
    def scale(self) -> float:
        """The scale as a number."""
        return float(self.scaler.loss_scale)

    def changes_gradients(self, checks: bool, masters: bool | None) -> bool:
        """Says whether a backward pass has more to do than without amp."""
        return checks or bool(masters) or self.is_dynamic or self.scale != 1.0

    def adjust(self, grads_finite: Tensor) -> "Loss":
        """Returns the loss scaling after one more backward pass."""
        return Loss(self.scaler.adjust(grads_finite), self.static_updates + (not self.is_dynamic))

    def state_dict(self) -> dict[str, float | int]:
        """Returns what Apex saves of a loss scaler."""
        updates = int(self.scaler.growth_count) if isinstance(self.scaler, DynamicLossScale) else self.static_updates
        return {"loss_scale": self.scale, "unskipped": updates}

    def load(self, scale: float, unskipped: int) -> "Loss":
        """Returns the same kind of scaler with another state."""
        if isinstance(self.scaler, StaticLossScale):
            return Loss(StaticLossScale(scale), unskipped)
        count = torch.tensor(unskipped, dtype=torch.int32)
        value = torch.tensor(scale, dtype=torch.float32)
        return Loss(tree.replace(self.scaler, loss_scale=value, growth_count=count))


def make_loss(loss_scale: float | str, min_loss_scale: Any, max_loss_scale: Any) -> Loss:
    """Makes the loss scaling of one loss.

    Args:
        loss_scale: `"dynamic"` or a number.
        min_loss_scale: The floor of a dynamic scale; None and 0 are none.
        max_loss_scale: Its ceiling.

    Raises:
        ValueError: If a scale is not positive and finite, or the floor lies above the ceiling.
        TypeError: If a bound is not a number.

    Example:
        >>> make_loss("dynamic", None, 2.0**12).scale
        4096.0
    """
    if not isinstance(loss_scale, str):
        try:
            return Loss(StaticLossScale(loss_scale))
        except ValueError as error:
            raise ValueError(str(error).replace("value", "loss_scale", 1)) from None
    no_floor = min_loss_scale is None or (min_loss_scale == 0 and not isinstance(min_loss_scale, bool))
    floor = LOWEST_SCALE if no_floor else _bound("min_loss_scale", min_loss_scale)
    ceiling = _bound("max_loss_scale", max_loss_scale)
    if floor > ceiling:
        raise ValueError(f"min_loss_scale={floor} is above max_loss_scale={ceiling}")
    first = min(max(FIRST_SCALE, floor), ceiling)
    return Loss(DynamicLossScale(init_scale=first, min_scale=floor, max_scale=ceiling))


def read_state(name: str, entry: Any) -> tuple[float, int]:
    """Reads one entry of a state dict, Apex's or ours.

    Raises:
        ValueError: If it is not the state of a loss scaler.
    """
    try:
        scale, unskipped = float(entry["loss_scale"]), int(entry["unskipped"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"state_dict[{name!r}] must be {{'loss_scale': number, 'unskipped': integer}}, got {entry!r}"
        ) from None
    if not LOWEST_SCALE <= scale <= 1.0 / LOWEST_SCALE or not 0 <= unskipped < 2**31:
        raise ValueError(f"state_dict[{name!r}] has a scale or a count out of range: {entry!r}")
    return scale, unskipped


def finite(grads: Iterable[Tensor]) -> Tensor:
    """Says whether all gradients are finite, on whatever devices they are.

    Returns:
        bool[], on the CPU if there are several devices.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad.coalesce().values() if grad.is_sparse else grad)
    flags = [reductions.all_finite(group) for group in by_device.values()]
    if len(flags) == 1:
        return flags[0]
    return torch.tensor(all(bool(flag) for flag in flags))


def _bound(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if math.isnan(value) or not LOWEST_SCALE <= value <= 1.0 / LOWEST_SCALE:
        raise ValueError(f"{name} must be positive and finite, with a finite inverse in float32, got {value!r}")
    return float(value)
