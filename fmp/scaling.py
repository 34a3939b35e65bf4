"""Loss scaling: keeps small fp16 gradients from underflowing to zero.

Three scalers with the same three methods, so that they swap without an `if`. Their state is tensors, and nothing here
looks at a value on the host; a scaler therefore works inside a compiled step, and under vmap with one scale a member.

Regularization goes before `scale`, clipping after `unscale`.
"""

import math
from typing import Any, Protocol, cast, runtime_checkable

import torch

from fmp import _compat, tree
from fmp.dtypes import full_precision, is_castable
from fmp.kernels import loss_scale as loss_scale_kernel, multi_tensor
from fmp.kernels.eligible import are_plain, usable

Tree = Any

_RULE = ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")


@runtime_checkable
class LossScale(Protocol):
    """What a loss scaler does. It is a pytree whose leaves are all of its state."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to differentiate: in float32 or wider if it is scaled."""
        ...

    def unscale(self, grads: Tree) -> Tree:
        """Returns the gradients of the original loss: in float32 or wider if they were scaled.

        The tree keeps its structure. None, where there is no gradient, and integers are returned as they are.
        """
        ...

    def adjust(self, grads_finite: torch.Tensor) -> "LossScale":
        """Returns the scaler for the next step, of the same structure; bool[] says whether all gradients are finite."""
        ...


@tree.dataclass
class NoOpLossScale:
    """Scales nothing: for float32 and bfloat16, whose exponent range needs no help.

    Example:
        >>> scaler = NoOpLossScale()
        >>> scaler.scale(torch.tensor(2.0)), scaler.adjust(torch.tensor(False))
        (tensor(2.), NoOpLossScale())
    """

    @property
    def loss_scale(self) -> torch.Tensor:
        """f32[], one."""
        return torch.ones((), dtype=torch.float32)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss as it is."""
        return loss

    def unscale(self, grads: Tree) -> Tree:
        """Returns the gradients as they are."""
        return grads

    def adjust(self, grads_finite: torch.Tensor) -> "NoOpLossScale":
        """Returns the scaler itself."""
        return self


@tree.dataclass
class StaticLossScale:
    """Multiplies the loss by a constant.

    Args:
        value: The factor, a number or a floating-point tensor without dimensions; it is rounded to float32.

    Attributes:
        loss_scale: f32[], the factor.

    Raises:
        TypeError: If `value` is neither.
        ValueError: If `value` is not positive, or it or its inverse is not finite in float32.

    Example:
        >>> scaler = StaticLossScale(1024.0)
        >>> scaler.scale(torch.tensor(1.5, dtype=torch.float16))
        tensor(1536.)
        >>> scaler.unscale({"w": torch.tensor(512.0, dtype=torch.float16)})
        {'w': tensor(0.5000)}
    """

    loss_scale: torch.Tensor

    def __init__(self, value: float | torch.Tensor):
        object.__setattr__(self, "loss_scale", torch.tensor(_checked_scale("value", value), dtype=torch.float32))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies the loss, after casting it to float32 or wider."""
        return _scale(loss, self.loss_scale)

    def unscale(self, grads: Tree) -> Tree:
        """Casts the gradients to float32 or wider, then divides out the scale."""
        return _unscale(grads, self.loss_scale)

    def adjust(self, grads_finite: torch.Tensor) -> "StaticLossScale":
        """Returns the scaler itself."""
        return self


@tree.dataclass
class DynamicLossScale:
    """Finds the largest usable scale by itself: halves it on overflow, doubles it after a run of good steps.

    The algorithm, in plain Python (the real one uses `torch.where`, so it never waits for the device):

        def adjust(self, grads_finite):
            if not grads_finite:
                loss_scale = max(loss_scale * backoff_factor, min_scale)
                growth_count = 0
            elif growth_count + 1 >= growth_interval:
                loss_scale = min(loss_scale * growth_factor, max_scale)
                growth_count = 0
            else:
                growth_count = growth_count + 1

    So the scale grows on exactly the `growth_interval`-th finite step in a row, and always stays finite within
    `[min_scale, max_scale]`.

    Args:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by when it grows; above 1.
        backoff_factor: What it is multiplied by on overflow; between 0 and 1.
        growth_interval: How many finite steps in a row make it grow; at least 1.
        min_scale: The floor.
        max_scale: The ceiling.

    Attributes:
        loss_scale: f32[], the current scale.
        growth_count: i32[], the finite steps since the last change.

    Raises:
        ValueError: If an argument is out of its range, or `init_scale` outside `[min_scale, max_scale]`.
        TypeError: If an argument is not a number.

    References:
        Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2; defaults of `torch.amp.GradScaler`
        with the bounds of Apex amp.

    Example:
        >>> scaler = DynamicLossScale(init_scale=1024.0, growth_interval=2)
        >>> scaler = scaler.adjust(torch.tensor(False))
        >>> scaler.loss_scale
        tensor(512.)
        >>> scaler.adjust(torch.tensor(True)).adjust(torch.tensor(True)).loss_scale
        tensor(1024.)
    """

    loss_scale: torch.Tensor
    growth_count: torch.Tensor
    growth_factor: float = tree.static()
    backoff_factor: float = tree.static()
    growth_interval: int = tree.static()
    min_scale: float = tree.static()
    max_scale: float = tree.static()

    def __init__(
        self,
        init_scale: float | torch.Tensor = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ):
        init_scale = _checked_scale("init_scale", init_scale)
        min_scale = _checked_scale("min_scale", min_scale)
        max_scale = _checked_scale("max_scale", max_scale)
        growth_factor = _checked_number("growth_factor", growth_factor)
        backoff_factor = _checked_number("backoff_factor", backoff_factor)
        if min_scale > max_scale:
            raise ValueError(f"min_scale={min_scale} is above max_scale={max_scale}")
        if not min_scale <= init_scale <= max_scale:
            raise ValueError(f"init_scale={init_scale} is outside [min_scale, max_scale] = [{min_scale}, {max_scale}]")
        if not 1.0 < _rounded(growth_factor) < math.inf:
            raise ValueError(f"growth_factor must be finite and above 1 in float32, got {growth_factor}")
        if not 0.0 < _rounded(backoff_factor) < 1.0:
            raise ValueError(f"backoff_factor must lie between 0 and 1 in float32, got {backoff_factor}")
        if not isinstance(growth_interval, int) or isinstance(growth_interval, bool):
            raise TypeError(f"growth_interval must be an int, got {growth_interval!r}")
        if not 1 <= growth_interval < 2**31:
            raise ValueError(f"growth_interval must be at least 1 and fit 32 bits, got {growth_interval}")
        for name, value in {
            "loss_scale": torch.tensor(init_scale, dtype=torch.float32),
            "growth_count": torch.tensor(0, dtype=torch.int32),
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }.items():
            object.__setattr__(self, name, value)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies the loss, after casting it to float32 or wider."""
        return _scale(loss, self.loss_scale)

    def unscale(self, grads: Tree) -> Tree:
        """Casts the gradients to float32 or wider, then divides out the scale."""
        return _unscale(grads, self.loss_scale)

    def adjust(self, grads_finite: torch.Tensor) -> "DynamicLossScale":
        """Returns the scaler for the next step.

        Args:
            grads_finite: bool[], whether all unscaled gradients of this step are finite.

        Raises:
            TypeError: If `grads_finite` is not a boolean tensor.
            ValueError: If it is not a scalar.
        """
        tree.check_flag("grads_finite", grads_finite)
        if _kernel_adjusts(grads_finite, self.loss_scale, self.growth_count):
            rule = {name: getattr(self, name) for name in _RULE}
            scale, count = loss_scale_kernel.adjust(grads_finite, self.loss_scale, self.growth_count, **rule)
            return tree.replace(self, loss_scale=scale, growth_count=count)
        count = torch.where(grads_finite, self.growth_count + 1, 0)
        grow = count >= self.growth_interval
        grown = (self.loss_scale * self.growth_factor).clamp(max=self.max_scale)
        shrunk = (self.loss_scale * self.backoff_factor).clamp(min=self.min_scale)
        loss_scale = torch.where(grads_finite, torch.where(grow, grown, self.loss_scale), shrunk)
        return tree.replace(self, loss_scale=loss_scale, growth_count=torch.where(grow, 0, count))


def loss_scale(value: "str | float | torch.Tensor | LossScale | None") -> LossScale:
    """Makes a loss scaler from what a command line or a config file gives.

    Args:
        value: `"dynamic"`, a number, a 0-dim tensor, a number's string (`"128.0"`), None or `"none"` for no scaling,
            or a scaler.

    Returns:
        The scaler.

    Raises:
        ValueError: If a string is neither `"dynamic"`, `"none"` nor a positive number, or a number is not positive, or
            it or its inverse is not finite in float32.
        TypeError: If `value` is of another type.

    Example:
        >>> loss_scale("128.0")
        StaticLossScale(loss_scale=tensor(128.))
        >>> loss_scale(None)
        NoOpLossScale()
    """
    if value is None:
        return NoOpLossScale()
    if isinstance(value, str):
        name = value.strip().lower()
        if name == "dynamic":
            return DynamicLossScale()
        if name == "none":
            return NoOpLossScale()
        try:
            return StaticLossScale(float(name))
        except ValueError as error:
            raise ValueError(f"loss scale {value!r}: use 'dynamic', 'none' or a positive number") from error
    if _is_scalar(value) or (isinstance(value, int | float) and not isinstance(value, bool)):
        _checked_scale("loss_scale", value)
        return StaticLossScale(cast(Any, value))
    if isinstance(value, LossScale) and not isinstance(value, type):
        if any(leaf is value for leaf in tree.leaves(value)):
            raise TypeError(
                f"{type(value).__name__} is no pytree, so its state would be lost; decorate it with fmp.tree.dataclass"
            )
        return value
    raise TypeError(
        "loss scale must be 'dynamic', a number, None or a scaler with the methods scale, unscale and adjust, "
        f"got {value!r}"
    )


def _scale(loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # A 0-dim float32 factor would not upcast a half-precision loss that has dimensions.
    return loss.to(full_precision(loss.dtype)) * factor


def _unscale(grads: Tree, factor: torch.Tensor) -> Tree:
    leaves, spec = tree.flatten(grads)
    places = [place for place, leaf in enumerate(leaves) if _is_gradient(leaf)]
    numbers = [leaves[place] for place in places]
    if usable("scale", numbers, numbers=[factor]):
        quotients, _, _ = multi_tensor.unscale(numbers, factor)
    else:
        quotients = [grad.to(full_precision(grad.dtype)) / factor for grad in numbers]
    for place, quotient in zip(places, quotients, strict=True):
        leaves[place] = quotient
    return tree.unflatten(spec, leaves)


def _is_gradient(leaf: Any) -> bool:
    return is_castable(leaf) or (isinstance(leaf, torch.Tensor) and leaf.dtype.is_complex)


def _kernel_adjusts(finite: torch.Tensor, scale: torch.Tensor, count: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or not are_plain([finite, scale, count]):
        return False
    fits = scale.dtype == torch.float32 and count.dtype == torch.int32 and scale.ndim == count.ndim == 0
    return fits and usable("loss_scale", [scale])


def _is_scalar(value: Any) -> bool:
    """Says whether a value is a number in a tensor, as `fmp.numerics.suggest_scale` returns it."""
    is_tensor = isinstance(value, torch.Tensor) and not _compat.wrapped_by_transform(value)
    return is_tensor and value.ndim == 0 and value.is_floating_point()


def _checked_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got an integer beyond its range") from None


def _checked_scale(name: str, value: Any) -> float:
    number = _checked_number(name, value.item() if _is_scalar(value) else value)
    smallest = torch.finfo(torch.float32).tiny
    # Both the scale and its inverse must be normal float32 numbers.
    if not smallest <= number <= 1.0 / smallest:
        raise ValueError(f"{name} must be positive and finite, with a finite inverse in float32, got {value!r}")
    return _rounded(number)


def _rounded(number: float) -> float:
    # On the CPU, whatever the default device: the value is needed now.
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()
