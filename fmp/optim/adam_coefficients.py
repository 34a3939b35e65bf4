"""What the update of a leaf by Adam needs besides tensors: few operations on a vector, however many leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fmp.dtypes import full_precision, is_castable
from fmp.optim.base import Scalar, ScalarOrSchedule, bias_correction, in_dtype
from fmp.optim.one_launch import as_rows

Tree = Any


@dataclass(frozen=True)
class Hyperparams:
    """What Adam and AdamW are made with; `fmp.optim.adamw` describes the numbers.

    Attributes:
        decoupled: Whether the decay goes past the moments into the update, as that of AdamW.
        select: Says for each leaf of a tree whether it decays, as far as AdamW is concerned.
        has_mask: Whether some leaves may not.
    """

    learning_rate: ScalarOrSchedule
    b1: Scalar
    b2: Scalar
    eps: Scalar
    weight_decay: Scalar
    decoupled: bool
    select: Callable[[Tree], list[bool]]
    has_mask: bool

    @property
    def coupled_decay(self) -> Scalar:
        """The factor of the parameter in its gradient."""
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def decoupled_decay(self) -> Scalar:
        """The factor of the parameter in the update."""
        return self.weight_decay if self.decoupled else 0.0


class Coefficients(NamedTuple):
    """What the update of a leaf needs: numbers, or 0-dim tensors of the moments' dtype."""

    first_weight: Scalar
    second_weight: Scalar
    step_size: torch.Tensor
    eps: Scalar
    shrink: Scalar


def bias_corrected(count: torch.Tensor, b1: Scalar, b2: Scalar, eps: Scalar) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the two numbers by which the moments of Adam need no correction of their own, entry by entry.

        m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) = scale * m / (sqrt(v) + scaled_eps)

    Args:
        count: The number of updates made, this one included, in the moments' dtype; 0-dim, or a vector for many leaves.
        b1: The decay rate of the first moment.
        b2: The decay rate of the second moment.
        eps: What is added to the denominator.

    Returns:
        `scale` and `scaled_eps`, of the count's shape and dtype.

    Example:
        >>> bias_corrected(torch.tensor(1.0), b1=0.5, b2=0.75, eps=1.0)
        (tensor(1.), tensor(0.5000))
    """
    root_correction = bias_correction(b2, count).sqrt()
    return root_correction / bias_correction(b1, count), root_correction * in_dtype(eps, count.dtype)


def coefficients_of(
    leaves: Sequence[Any], ages: Sequence[Any], rate: Scalar, b1: Scalar, b2: Scalar, eps: Scalar, decay: Scalar
) -> list[Coefficients | None]:
    """Computes the coefficients of every leaf, as one vector for each dtype and device.

    Args:
        leaves: The parameters; None comes out for those that are no real floats.
        ages: i32[] each, how many updates they have had.
        rate: The learning rate.
        b1: The decay rate of the first moment.
        b2: The decay rate of the second moment.
        eps: What is added to the denominator.
        decay: The decoupled weight decay.
    """
    found: list[Coefficients | None] = [None] * len(leaves)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if is_castable(leaf):
            groups.setdefault((full_precision(leaf.dtype), ages[index].device), []).append(index)
    for (dtype, _), indices in groups.items():
        together = _together(torch.stack([ages[index] for index in indices]), dtype, rate, b1, b2, eps, decay)
        rows = zip(indices, together.step_size.unbind(), torch.as_tensor(together.eps).unbind(), strict=True)
        for index, step_size, eps_of_leaf in rows:
            found[index] = together._replace(step_size=step_size, eps=eps_of_leaf)
    return found


def coefficient_rows(ages: torch.Tensor, rate: Scalar, of: Hyperparams) -> torch.Tensor:
    """Computes the coefficients of many leaves as `fmp.kernels.adam` takes them.

    Args:
        ages: i32[n], how many updates they have had.
        rate: The learning rate at this update.
        of: The hyper-parameters.

    Returns:
        f32[n, 8], on the device of the ages.
    """
    use = _together(ages, torch.float32, rate, of.b1, of.b2, of.eps, of.decoupled_decay)
    kept = 1.0 - use.second_weight
    row = (use.first_weight, use.second_weight, kept, use.step_size, use.eps, use.shrink, of.coupled_decay, 0.0)
    return as_rows(row, like=use.step_size)


def _together(
    ages: torch.Tensor, dtype: torch.dtype, rate: Scalar, b1: Scalar, b2: Scalar, eps: Scalar, decay: Scalar
) -> Coefficients:
    """Computes the coefficients of leaves of one dtype; those that differ between leaves are vectors."""
    typed_rate = in_dtype(rate, dtype)
    scale, typed_eps = bias_corrected(ages.to(dtype) + 1, b1, b2, eps)
    return Coefficients(
        first_weight=1.0 - in_dtype(b1, dtype),
        second_weight=1.0 - in_dtype(b2, dtype),
        step_size=scale * -typed_rate,
        eps=typed_eps,
        shrink=-typed_rate * in_dtype(decay, dtype),
    )
