"""watch_gradients: a part of an optimizer that leaves gradients as they are, and measures them leaf by leaf."""

from collections.abc import Callable
from typing import Any

import torch

from fmp import _compat, tree
from fmp.dtypes import full_precision, is_castable
from fmp.numerics.formats import Format, number_format
from fmp.numerics.parts import of_parts
from fmp.numerics.scale_argument import Scale, scale_as_number
from fmp.optim import GradientTransformation
from fmp.optim.base import check_trainable, zero_count
from fmp.tree.wholes import check_whole, is_dtensor

Tree = Any

MEASURES = ("amax", "underflow", "zeros")
_PIECE = 2**17  # numbers, 512 KiB of float32


@tree.dataclass
class WatchState:
    """What `watch_gradients` has measured.

    Attributes:
        count: i32[], the number of measurements. It stands still in a skipped step.
        measured: For each leaf f32[3], as `measure` returns it, of the last update that it had a gradient in; NaN
            before. None for a leaf that is not a floating-point tensor.
        dtype: The format.
        scale: What gradients are multiplied by before they are rounded.
    """

    count: torch.Tensor
    measured: Tree
    dtype: torch.dtype = tree.static()
    scale: float = tree.static()

    @property
    def amax(self) -> Tree:
        """For each leaf f32[], the largest magnitude."""
        return self._each(0)

    @property
    def underflow(self) -> Tree:
        """For each leaf f32[], the fraction of its nonzero entries that the format would round to zero."""
        return self._each(1)

    @property
    def zeros(self) -> Tree:
        """For each leaf f32[], the fraction of its entries that are zero as they come."""
        return self._each(2)

    def _each(self, index: int) -> Tree:
        return tree.map(lambda row: None if row is None else fractions(row)[..., index], self.measured)


def watch_gradients(dtype: torch.dtype | str = torch.float16, *, scale: Scale = 1.0) -> GradientTransformation:
    """Makes a transformation that measures each gradient, and passes it on as it is.

    For each leaf, of what reaches the transformation:

        amax        max |g|
        underflow   (number of g != 0 with scale * g rounded to zero in the format) / (number of g != 0)
        zeros       (number of g == 0) / (number of g)

    A train step hands no gradients out, but it hands them to the optimizer, and keeps the optimizer's state. So to
    measure them there needs no change of the step, and is as pure, and as often donated, mapped, compiled, saved and
    resumed, as the moments are. A skipped step keeps the old state, and with it the old measurements.

    In a chain it stands first, to see gradients unscaled, before anything changes them (`clip_norm` of
    `fmp.train_step` comes before the optimizer; `fmp.optim.clip_by_global_norm` can stand behind). Gradients that
    were computed in float16 have lost what they lose on the way: these come as zeros, and `underflow` says what more
    would be lost without the loss scale. Gradients from bfloat16 or float32 have not, and `underflow` foretells what
    float16 would lose of them at any scale. An optimizer right behind watchers keeps its one-pass form, such as that of
    adamw with `fused=True`; behind anything else it takes its usual form.

    Args:
        dtype: The format: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32, or a name of one.
        scale: What gradients are multiplied by before they are rounded: a positive number, or a scalar tensor, whose
            value is read here.

    Returns:
        The transformation; its state is a `WatchState`.

    Raises:
        ValueError: If the format is another one, or the scale is out of range; in `update`, if the state is that of a
            watcher with another format or scale, as from an older checkpoint.
        TypeError: If the scale is neither a number nor a scalar tensor; in `update`, if gradients are `LocalShard`s, of
            which other ranks have other rows.

    Example:
        >>> tx = fmp.optim.chain(watch_gradients("fp16"), fmp.optim.sgd(0.1))
        >>> params = {"w": torch.zeros(4)}
        >>> updates, state = tx.update({"w": torch.tensor([0.0, 1e-9, 1e-3, -2.0])}, tx.init(params), params)
        >>> state[0].amax, state[0].underflow, state[0].zeros
        ({'w': tensor(2.)}, {'w': tensor(0.3333)}, {'w': tensor(0.2500)})
    """
    target = number_format(dtype)
    scale = scale_as_number(scale)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> WatchState:
        def unknown(leaf: Any) -> Any:
            if not is_castable(leaf):
                return None
            return torch.full((len(MEASURES),), torch.nan, dtype=torch.float32, device=leaf.device)

        return WatchState(zero_count(params), tree.map(unknown, params), target.dtype, scale)

    @_compat.compiled_on_its_own
    def observe(grads: Tree, state: WatchState, read: Callable[[Any], Any]) -> WatchState:
        if (state.dtype, state.scale) != (target.dtype, scale):
            raise ValueError(
                f"the state is that of watch_gradients({state.dtype}, scale={state.scale:g}), and this one measures by "
                f"{target.dtype}, scale={scale:g}; use the same format, or move the numbers of the whole state into a "
                "new one: fmp.tree.unflatten(fmp.tree.structure(step.init(params)), fmp.tree.leaves(state))"
            )
        check_whole(grads, "what is measured")
        leaves, spec = tree.flatten(grads)
        kept = spec.flatten_up_to(state.measured)
        check_trainable(grads, leaves, leaves)
        measured = [
            old if grad is None else measure(read(grad), target, scale) for grad, old in zip(leaves, kept, strict=True)
        ]
        return tree.replace(state, count=state.count + 1, measured=tree.unflatten(spec, measured))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: WatchState, params: Tree) -> tuple[Tree, WatchState]:
        return grads, observe(grads, state, lambda grad: grad)

    return GradientTransformation(init, update, observe=observe)


def measure(leaf: torch.Tensor, target: Format, scale: float = 1.0) -> torch.Tensor:
    """Measures one leaf, with as few operators as it takes.

    Args:
        leaf: Floating-point numbers.
        target: The format.
        scale: What they are multiplied by before they are rounded.

    Returns:
        f32[3]: the largest magnitude, the fraction of entries that are not zero, and the fraction that the format
        would not make zero either. NaN and infinities make the first NaN or infinite, and are among what is not
        zero. Of no numbers it is [0, 1, 1], so that no zeros and no underflow are told.

    Example:
        >>> measure(torch.tensor([0.0, 1e-9, 3.0, 4.0]), number_format("fp16"))
        tensor([4.0000, 0.7500, 0.5000])
    """
    numel = leaf.numel()
    if numel == 0:
        # Made on the device: nothing is copied there, which would wait for it.
        return torch.arange(len(MEASURES), dtype=torch.float32, device=leaf.device).clamp(max=1.0)
    values, limit = leaf.detach(), target.zero_up_to / scale
    if is_dtensor(values):
        amax, nonzero, kept = _together(of_parts(lambda part: torch.stack(_counts(part, limit)), values))
    elif values.device.type != "cpu" or numel <= _PIECE or torch.compiler.is_compiling():
        amax, nonzero, kept = _counts(values, limit)
    else:
        # What is in between stays in the cache, which makes it up to ten times as fast.
        counts = [torch.stack(_counts(piece, limit)) for piece in values.reshape(-1).split(_PIECE)]
        amax, nonzero, kept = _together(torch.stack(counts))
    return torch.stack([amax, nonzero / numel, kept / numel]).float()


def _together(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Puts together what `_counts` returned of several pieces, [pieces, 3]."""
    return counts[:, 0].amax(), counts[:, 1].sum(), counts[:, 2].sum()


def _counts(values: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the largest magnitude, and how many magnitudes exceed zero and the limit; NaN exceeds both."""
    values = values.to(full_precision(values.dtype))
    if not values.numel():  # a rank without rows of a tensor
        return values.sum(), values.sum(), values.sum()
    magnitude = values.abs()
    amax = magnitude.amax()
    return amax, _nonzero(magnitude), _nonzero(torch.nn.functional.hardshrink(values, limit))


def _nonzero(values: torch.Tensor) -> torch.Tensor:
    """Counts what is not zero, in values that nobody else has."""
    if _compat.transform_active():
        return values.ne(0.0).to(values.dtype).sum()  # what is in place has no batching rule
    # It makes ones and zeros in floating point, several times as fast as bools are made and counted.
    return values.ne_(0.0).sum()


def fractions(measured: torch.Tensor) -> torch.Tensor:
    """Turns what `measure` returns, [..., 3], into amax, underflow and zeros.

    Example:
        >>> fractions(torch.tensor([4.0, 0.75, 0.5]))
        tensor([4.0000, 0.3333, 0.2500])
    """
    amax, nonzero, kept = measured.unbind(-1)
    underflow = torch.where(nonzero == 0, 0.0, (nonzero - kept) / torch.where(nonzero == 0, 1.0, nonzero))
    return torch.stack([amax, underflow, 1.0 - nonzero], -1)
