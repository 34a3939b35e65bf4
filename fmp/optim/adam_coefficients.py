"""What the update of a leaf by Adam needs besides tensors: few operations on a vector, however many leaves."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fmp.dtypes import full_precision, is_castable
from fmp.optim.base import Scalar, bias_correction, in_dtype
from fmp.optim.one_launch import as_rows


class Coefficients(NamedTuple):
    """What the update of a leaf needs: numbers, or 0-dim tensors of the moments' dtype."""

    first_weight: Scalar
    second_weight: Scalar
    step_size: torch.Tensor
    eps: Scalar
    shrink: Scalar


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


def coefficient_rows(
    ages: torch.Tensor, rate: Scalar, b1: Scalar, b2: Scalar, eps: Scalar, decay: Scalar, coupled_decay: Scalar
) -> torch.Tensor:
    """Computes the coefficients of many leaves as `fmp.kernels.adam` takes them.

    Args:
        ages: i32[n], how many updates they have had.
        rate: The learning rate.
        b1: The decay rate of the first moment.
        b2: The decay rate of the second moment.
        eps: What is added to the denominator.
        decay: The decoupled weight decay.
        coupled_decay: The factor of the parameter in the gradient.

    Returns:
        f32[n, 8], on the device of the ages.
    """
    of = _together(ages, torch.float32, rate, b1, b2, eps, decay)
    kept = 1.0 - of.second_weight
    row = (of.first_weight, of.second_weight, kept, of.step_size, of.eps, of.shrink, coupled_decay, 0.0)
    return as_rows(row, like=of.step_size)


def _together(
    ages: torch.Tensor, dtype: torch.dtype, rate: Scalar, b1: Scalar, b2: Scalar, eps: Scalar, decay: Scalar
) -> Coefficients:
    """Computes the coefficients of leaves of one dtype; those that differ between leaves are vectors."""
    typed_rate = in_dtype(rate, dtype)
    count = ages.to(dtype) + 1
    # The correction of the second moment moves out of the square root, from every entry into two scalars:
    # m / (sqrt(v / c) + eps) = sqrt(c) * m / (sqrt(v) + sqrt(c) * eps).
    root_correction = bias_correction(b2, count).sqrt()
    return Coefficients(
        first_weight=1.0 - in_dtype(b1, dtype),
        second_weight=1.0 - in_dtype(b2, dtype),
        step_size=root_correction / bias_correction(b1, count) * -typed_rate,
        eps=root_correction * in_dtype(eps, dtype),
        shrink=-typed_rate * in_dtype(decay, dtype),
    )
