"""The one-pass form of an optimizer, on kernels that overwrite parameters and moments in place.

In plain Python, on leaves that nobody else holds:

    for param, grad, moment in zip(params, grads, moments):
        if finite:
            kernel(param, grad, moment)      # reads each once, writes each once

`update` and `apply_updates` walk over the same memory about six times. fmp's own kernels, on a GPU, give the same bits;
torch's, on any device, the same result up to rounding, since they order their arithmetic in their own way.

Parameters may be in a form of `fmp.master`. A kernel then merges and splits number by number, in registers; elsewhere

    full = merge(params, low)
    full = update of full
    params, low = split(full)
"""

from collections.abc import Callable
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch

from fmp import _compat, master, random, tree
from fmp.dtypes import full_precision
from fmp.held import Held
from fmp.optim import checks
from fmp.optim.base import apply_updates, in_dtype

Tree = Any
Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
Trees = tuple[Tree, Tree, Tree]


class Request(NamedTuple):
    """What a one-pass form is asked for besides an update; `fmp.optim.GradientTransformation` describes each.

    Attributes:
        low: The present casts of the parameters, None where there is none; None for no casts at all. Of parameters in
            a form, what is kept beside them.
        inv_scale: What gradients are multiplied by first; None for 1.
        clip: What they are multiplied by then; None for 1.
        finite: bool[], false where nothing may change; None for always true.
        donate: Whether what is given may be overwritten.
        form: The form of `fmp.master` in which the parameters are; None for numbers that stand for themselves.
        seed: i64[], what a form that rounds by chance draws by; None to round to nearest.
    """

    low: Tree = None
    inv_scale: torch.Tensor | float | None = None
    clip: torch.Tensor | float | None = None
    finite: torch.Tensor | None = None
    donate: bool = False
    form: str | None = None
    seed: random.Seed | None = None


Launcher = Callable[[Tree, Tree, Tree, Request], Trees | None]


def one_pass(
    update: Update, launch: Launcher, torch_kernel: Callable[..., tuple[Tree, Tree] | None] | None = None
) -> Callable[..., Trees]:
    """Makes the `fused` function of a `fmp.optim.GradientTransformation`.

    Args:
        update: Its `update`, which does the work wherever a kernel cannot: under a torch.func transform, under
            torch.compile, where autograd records, and for anything but plain tensors.
        launch: `launch(grads, state, params, request) -> (params, low, state)`, on fmp's kernel. It returns None for
            tensors or forms that it cannot work on; `fmp.optim.one_launch` helps.
        torch_kernel: `torch_kernel(grads, state, params, finite=, donate=) -> (params, state)`, on torch's kernel, for
            what is left; it returns None as well. `fmp.optim.torch_kernel` helps.

    Returns:
        `fused(grads, state, params, *, inv_scale=None, clip=None, finite=None, cast_dtype=None, low=None,
        donate=False, form=None, seed=None) -> (params, low, state)`.
    """

    def on_full(held: Held, request: Request) -> Trees:
        grads, state, params = held.take("grads"), held.take("state"), held.take("params")
        low, finite, is_traced = request.low, request.finite, _is_traced()
        found = None if is_traced else launch(grads, state, params, request)
        if found is not None:
            return found
        for factor in (request.inv_scale, request.clip):
            grads = grads if factor is None else _scaled(grads, factor)
        kept = (
            None
            if is_traced or torch_kernel is None
            else torch_kernel(grads, state, params, finite=finite, donate=request.donate)
        )
        if kept is not None:
            new_low = _cast_as(low, kept[0])
            return kept[0], new_low if finite is None else tree.select(finite, new_low, low), kept[1]
        updates, new_state = update(grads, state, params)
        del grads
        old = None if finite is None else (params, low, state)
        del state
        params = apply_updates(params, updates)
        del updates
        found = params, _cast_as(low, params), new_state
        return found if finite is None else tree.select(finite, found, old)

    def in_form(held: Held, request: Request) -> Trees:
        grads, state, params = held.take("grads"), held.take("state"), held.take("params")
        low, form, finite = request.low, request.form, request.finite
        found = None if _is_traced() else launch(grads, state, params, request)
        if found is not None:
            return found
        held = Held(grads=grads, state=state, params=master.merge(params, low, form=form))
        del grads, state
        full, _, state = on_full(held, request._replace(low=None, form=None, seed=None))
        new = master.split(full, params, low, form=form, seed=request.seed)
        if finite is not None:
            new = select_rest(finite, new, (params, low), chosen=full)
        return *new, state

    def fused(
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        inv_scale: torch.Tensor | float | None = None,
        clip: torch.Tensor | float | None = None,
        finite: torch.Tensor | None = None,
        cast_dtype: torch.dtype | None = None,
        low: Tree = None,
        donate: bool = False,
        form: str | None = None,
        seed: random.Seed | None = None,
    ) -> Trees:
        request = _checked(Request(low, inv_scale, clip, finite, donate, form, seed), cast_dtype)
        held = Held(grads=grads, state=state, params=params)
        del grads, state, params, low
        if form is not None:
            return in_form(held, request)
        found = on_full(held, request)
        return found if cast_dtype is None else (found[0], tree.cast(found[0], cast_dtype), found[2])

    return fused


def run_fused(
    fused: Callable[..., Trees], held: Held, request: Request, cast_dtype: torch.dtype | None = None
) -> Trees:
    """Calls a one-pass form so that it alone holds gradients, state and parameters.

    Args:
        fused: The `fused` of a `fmp.optim.GradientTransformation`.
        held: `grads`, `state` and `params`.
        request: What is asked for besides.
        cast_dtype: The dtype of the casts to return, if the request has no present ones.

    Returns:
        What `fused` returns.
    """
    return fused(
        held.take("grads"),
        held.take("state"),
        held.take("params"),
        inv_scale=request.inv_scale,
        clip=request.clip,
        finite=request.finite,
        cast_dtype=cast_dtype,
        low=request.low,
        donate=request.donate,
        form=request.form,
        seed=request.seed,
    )


def reader(inv_scale: torch.Tensor | float | None, clip: torch.Tensor | float | None) -> Callable[[Any], Any]:
    """Makes the `read` that the `observe` of a `fmp.optim.GradientTransformation` takes.

    Args:
        inv_scale: What gradients are multiplied by first; None for 1.
        clip: What they are multiplied by then; None for 1.

    Raises:
        TypeError: If one of them is neither a number nor a tensor, or is complex.
        ValueError: If it is a tensor with dimensions.

    Example:
        >>> reader(0.5, None)(torch.tensor([2.0], dtype=torch.float16)), reader(None, None)(None)
        (tensor([1.]), None)
    """
    _check_factors(inv_scale, clip)

    def read(grad: Any) -> Any:
        for factor in (inv_scale, clip):
            grad = grad if factor is None else _product(grad, factor)
        return grad

    return read


def select_rest(finite: torch.Tensor, new: Tree, old: Tree, *, chosen: Tree) -> Tree:
    """Selects as `fmp.tree.select` does, but for leaves of `new` in which a one-pass form has chosen already.

    Args:
        finite: bool[], false where nothing may change.
        new: The new tree.
        old: The old one.
        chosen: What the one-pass form has returned. A new leaf that is among its leaves stays, without a copy.
    """
    if not _compat.can_tell_tensors_apart():
        return tree.select(finite, new, old)  # the same numbers, chosen twice
    leaves = {id(leaf) for leaf in tree.leaves(chosen)}
    return tree.select(finite, new, tree.map(lambda a, b: a if id(a) in leaves else b, new, old))


def counted(count: torch.Tensor, finite: torch.Tensor | None) -> torch.Tensor:
    """Adds 1 to counts of updates, unless the update was skipped."""
    return count + 1 if finite is None else count + finite.to(count.device)


def together(counts: list[Any]) -> list[torch.Tensor]:
    """Finds counts of many parameters in the one vector that they were taken out of, as those of the last update were.

    Returns:
        The vector; the counts themselves if there is none.

    Example:
        >>> vector = torch.arange(3)
        >>> together(list(vector.unbind()))[0] is vector
        True
    """
    vector = counts[0]._base if counts and type(counts[0]) is torch.Tensor else None
    if vector is None or (vector.shape, vector.dtype) != ((len(counts),), counts[0].dtype):
        return counts
    if {torch.Tensor} != set(map(type, counts)) or any(map(is_not, map(_BASE, counts), repeat(vector))):
        return counts
    in_order = list(map(torch.Tensor.storage_offset, counts)) == list(range(len(counts)))
    return [vector] if in_order else counts


def stacked(counts: list[torch.Tensor]) -> torch.Tensor:
    """Stacks the counts of many parameters, or finds their stack: to make it takes as long as a small update."""
    found = together(counts)
    return found[0] if len(found) < len(counts) else torch.stack(counts)


def check_numbers(**options: Any) -> None:
    """Raises a `TypeError` for a hyper-parameter that is a tensor: a kernel would have to wait for its value."""
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            raise TypeError(f"fused=True takes {name} as a number, got {tree.describe(value)}; use fused=False")


_BASE = attrgetter("_base")


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or _compat.transform_active()


def _checked(request: Request, cast_dtype: torch.dtype | None) -> Request:
    """Raises for a request that cannot be met, before anything is overwritten."""
    checks.flag("donate", request.donate)
    if cast_dtype is not None:
        tree.cast((), cast_dtype)
        if request.low is not None:
            raise ValueError("fused takes either low, whose dtypes say what to cast to, or cast_dtype; leave one out")
        if request.form is not None:
            raise ValueError(f"parameters in the form {request.form!r} have no casts beside them; leave cast_dtype out")
    if request.seed is not None:
        random.as_seed(request.seed)
        if request.form is None:
            raise ValueError("only parameters in a form draw by a seed; pass form, or leave seed out")
    _check_factors(request.inv_scale, request.clip)
    if request.finite is not None:
        tree.check_flag("finite", request.finite)
    return request


def _check_factors(inv_scale: torch.Tensor | float | None, clip: torch.Tensor | float | None) -> None:
    for name, factor in (("inv_scale", inv_scale), ("clip", clip)):
        if factor is not None:
            checks.number(name, factor)


def _cast_as(low: Tree, params: Tree) -> Tree:
    """Casts parameters to the dtypes of other casts of them."""
    if low is None:
        return None
    return tree.map(lambda cast, param: None if cast is None else param.to(cast.dtype), low, params)


def _scaled(grads: Tree, factor: torch.Tensor | float) -> Tree:
    return tree.map(lambda grad: _product(grad, factor), grads)


def _product(grad: Any, factor: torch.Tensor | float) -> Any:
    if not isinstance(grad, torch.Tensor):
        return grad
    wide = grad.to(full_precision(grad.dtype))
    return wide * in_dtype(factor, wide.dtype)
