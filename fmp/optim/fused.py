"""The one-pass form of an optimizer, on kernels that overwrite parameters and moments in place.

In plain Python, on leaves that nobody else holds:

    for param, grad, moment in zip(params, grads, moments):
        if finite:
            kernel(param, grad, moment)      # reads each once, writes each once

`update` and `apply_updates` walk over the same memory about six times. The result is the same up to rounding, since a
kernel orders its arithmetic in its own way.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from fmp import _compat, tree
from fmp.dtypes import full_precision
from fmp.optim.base import apply_updates, check_trainable

Tree = Any
Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


class Launch(NamedTuple):
    """What one launch of a kernel works on: leaves of one device and dtype, each in the same layout as its moments.

    Attributes:
        indices: The places of the leaves in the tree.
        params: The parameters, to be overwritten.
        grads: Their gradients.
        moments: For each tree of moments the tensors, to be overwritten.
        skip: f32[], 1 where everything must stay as it is, else 0; None for never.
    """

    indices: list[int]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: tuple[list[torch.Tensor], ...]
    skip: torch.Tensor | None


def one_pass(update: Update, kernel: Callable[..., tuple[Tree, Tree]]) -> Callable[..., tuple[Tree, Tree, Tree]]:
    """Makes the `fused` function of a `fmp.optim.GradientTransformation`.

    Args:
        update: Its `update`, which does the work wherever a kernel cannot: under a torch.func transform, under
            torch.compile, where autograd records, and for anything but plain tensors on a CPU or CUDA device.
        kernel: `kernel(grads, state, params, finite=, donate=) -> (params, state)`, for the rest; `overwrite` helps.

    Returns:
        `fused(grads, state, params, *, inv_scale=None, clip=None, finite=None, cast_dtype=None, donate=False) ->
        (params, low, state)`.
    """

    def fused(
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        inv_scale: torch.Tensor | None = None,
        clip: torch.Tensor | None = None,
        finite: torch.Tensor | None = None,
        cast_dtype: torch.dtype | None = None,
        donate: bool = False,
    ) -> tuple[Tree, Tree, Tree]:
        for factor in (inv_scale, clip):
            grads = grads if factor is None else _scaled(grads, factor)
        if finite is not None:
            tree.check_flag("finite", finite)
        if is_plain((grads, state, params)):
            new_params, new_state = kernel(grads, state, params, finite=finite, donate=donate)
        else:
            updates, new_state = update(grads, state, params)
            new_params = apply_updates(params, updates)
            if finite is not None:
                new_params, new_state = tree.select(finite, (new_params, new_state), (params, state))
        return new_params, None if cast_dtype is None else tree.cast(new_params, cast_dtype), new_state

    return fused


def is_plain(trees: Tree) -> bool:
    """Says whether a kernel may read and write the tensors of some trees without anyone but us noticing."""
    if torch.compiler.is_compiling() or _compat.transform_active():
        return False
    recording = torch.is_grad_enabled()
    for leaf in tree.leaves(trees):
        if leaf is None:
            continue
        if type(leaf) is not torch.Tensor and type(leaf) is not torch.nn.Parameter:
            return False
        if not (leaf.is_cpu or leaf.is_cuda) or leaf.layout != torch.strided or leaf.is_neg():
            return False
        if recording and leaf.requires_grad:
            return False
    return True


def overwrite(
    kernel: Callable[..., None],
    grads: Tree,
    params: Tree,
    *moments: Tree,
    kinds: Sequence[Hashable] | None = None,
    finite: torch.Tensor | None,
    donate: bool,
) -> tuple[Tree, ...]:
    """Runs a kernel over whole trees of plain tensors, with one launch for each device, dtype and kind.

    Args:
        kernel: `kernel(launch)`, or `kernel(launch, kind)` if there are kinds; see `Launch`.
        grads: The gradients. Where one is None, the leaf is left out.
        params: The parameters. One narrower than float32 is computed on in float32, and rounded once at the end.
        *moments: Trees of moments, which have the dtype in which parameters are computed on.
        kinds: For each leaf, what may differ between launches.
        finite: bool[], false where nothing may change; None for always true.
        donate: Whether the kernel may overwrite parameters and moments; otherwise it gets copies. Those that share
            memory with one another are always copied.

    Returns:
        The new parameters, then the new trees of moments.

    Raises:
        TypeError: If a leaf that has a gradient is not a floating-point tensor, or its gradient is complex.
        ValueError: If a gradient or a moment has not the shape of its parameter.
    """
    grad_leaves, spec = tree.flatten(grads)
    columns: list[list[Any]] = [list(spec.flatten_up_to(other)) for other in (params, *moments)]
    check_trainable(grads, grad_leaves, columns[0])
    _check_shapes(grads, grad_leaves, columns)
    donate = donate and not shares_memory([leaf for column in columns for leaf in column], grads)
    groups: dict[Any, list[int]] = {}
    for index, (grad, param) in enumerate(zip(grad_leaves, columns[0], strict=True)):
        if grad is not None:
            kind = () if kinds is None else (kinds[index],)
            groups.setdefault((param.device, full_precision(param.dtype), kind), []).append(index)
    for (device, dtype, kind), indices in groups.items():
        old = [columns[0][index] for index in indices]
        new = [_writable(param, dtype, donate) for param in old]
        launch = Launch(
            indices,
            new,
            [_laid_out_as(param, grad_leaves[index], donate=True) for param, index in zip(new, indices, strict=True)],
            tuple(
                [_laid_out_as(param, column[index], donate) for param, index in zip(new, indices, strict=True)]
                for column in columns[1:]
            ),
            skip=None if finite is None else (~finite).to(device, torch.float32),
        )
        kernel(launch, *kind)
        launched = [[_narrowed(*pair, finite) for pair in zip(new, old, strict=True)], *launch.moments]
        for column, leaves in zip(columns, launched, strict=True):
            for index, leaf in zip(indices, leaves, strict=True):
                column[index] = leaf
    return tuple(tree.unflatten(spec, column) for column in columns)


def counted(counts: Tree, grads: Tree, finite: torch.Tensor | None) -> Tree:
    """Adds 1 to the counts of updates of those parameters that have a gradient, unless the update was skipped.

    Args:
        counts: i32[] a parameter.
        grads: The gradients.
        finite: bool[], false for a skipped update; None for none.
    """
    leaves, spec = tree.flatten(grads)
    old = spec.flatten_up_to(counts)
    due = [count for count, grad in zip(old, leaves, strict=True) if grad is not None]
    new = iter(_compat.foreach_add(due, 1 if finite is None else finite.to(torch.int32)) if due else ())
    return tree.unflatten(spec, [c if grad is None else next(new) for c, grad in zip(old, leaves, strict=True)])


def check_numbers(**options: Any) -> None:
    """Raises a `TypeError` for a hyper-parameter that is a tensor: a kernel would have to wait for its value."""
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            raise TypeError(f"fused=True takes {name} as a number, got {tree.describe(value)}; use fused=False")


def shares_memory(leaves: Sequence[Any], *others: Tree) -> bool:
    """Says whether two of some leaves, or one of them and a tensor elsewhere, lie in the same storage.

    Args:
        leaves: Leaves, each of them looked at once.
        *others: Trees that may share memory among themselves.

    Returns:
        Whether they do; true under a torch.func transform, where nobody can tell.
    """
    if _compat.transform_active():
        return True
    inside = _addresses(leaves)
    found = set(inside)
    return len(found) < len(inside) or not found.isdisjoint(_addresses(tree.leaves(others)))


def _addresses(leaves: Sequence[Any]) -> list[int]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
    return [address for leaf in tensors if (address := leaf.untyped_storage().data_ptr())]  # 0: nothing is stored


def _scaled(grads: Tree, factor: torch.Tensor) -> Tree:
    def scale(grad: Any) -> Any:
        if grad is None:
            return None
        wide = grad.to(full_precision(grad.dtype))
        return wide * factor.to(wide.dtype)

    return tree.map(scale, grads)


def _check_shapes(grads: Tree, grad_leaves: list[Any], columns: list[list[Any]]) -> None:
    # A kernel reads and writes as many numbers as the parameter has, wherever they lie.
    for index, (grad, param, *moments) in enumerate(zip(grad_leaves, *columns, strict=True)):
        if grad is None:
            continue
        for what, other in (("gradient", grad), *(("moment", moment) for moment in moments)):
            if not isinstance(other, torch.Tensor) or other.shape != param.shape:
                raise ValueError(
                    f"{tree.paths(grads)[index] or 'params'}: the {what} is {tree.describe(other)}, the parameter "
                    f"{tree.describe(param)}; both must have one shape"
                )


def _writable(param: torch.Tensor, dtype: torch.dtype, donate: bool) -> torch.Tensor:
    # A kernel sees memory, not strides: entries must neither overlap nor leave gaps. A copy never does.
    if param.dtype != dtype:
        param, donate = param.to(dtype), True
    dense = param.is_contiguous() or param.is_contiguous(memory_format=torch.channels_last)
    return param if donate and dense else param.detach().clone(memory_format=torch.contiguous_format)


def _laid_out_as(param: torch.Tensor, other: torch.Tensor, donate: bool) -> torch.Tensor:
    if donate and other.dtype == param.dtype and other.stride() == param.stride():
        return other
    return torch.empty_like(param).copy_(other)


def _narrowed(new: torch.Tensor, old: torch.Tensor, finite: torch.Tensor | None) -> torch.Tensor:
    if new.dtype == old.dtype:
        return new
    narrow = new.to(old.dtype)
    return narrow if finite is None else torch.where(finite, narrow, old)
