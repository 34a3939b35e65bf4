"""The update of a whole state on a kernel: the kernel does parameters and moments, and the counts are done here.

A state has the fields `count` and `ages`, the latter None where nothing goes by them, and fields of moments.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fmp import tree
from fmp.optim.base import Scalar
from fmp.optim.columns import advance
from fmp.optim.fused import Request, Trees, counted, together
from fmp.optim.one_launch import Leaves, in_one_launch
from fmp.optim.torch_kernel import Launch, overwrite

Tree = Any


def on_fmps_kernel(
    kernel: str,
    run: Callable[[Leaves, Any], None],
    grads: Tree,
    state: Tree,
    params: Tree,
    request: Request,
    *,
    moments: Sequence[str],
    numbers: Sequence[Any],
) -> Trees | None:
    """Updates parameters and state on a kernel of `fmp.kernels`.

    Args:
        kernel: Its source, `cuda/<kernel>.cu`.
        run: `run(leaves, ages)` launches it. The ages are i32[n], those from before the update, or None.
        grads: The gradients.
        state: The state.
        params: The parameters.
        request: What is asked for besides.
        moments: The names of the fields of moments, in the order in which `leaves` has them.
        numbers: The hyper-parameters; those that are tensors may be anywhere.

    Returns:
        The new parameters, casts and state; or None, with nothing done, if the kernel cannot work on these tensors.
    """
    ages, spec = tree.flatten(state.ages)

    def run_and_count(on: Leaves) -> None:
        run(on, None if state.ages is None else advance(ages, on.indices, request.finite))

    old = [getattr(state, name) for name in moments]
    counts = [state.count, *[age for age in ages if age is not None]]
    found = in_one_launch(kernel, run_and_count, grads, params, *old, counts=counts, numbers=numbers, request=request)
    if found is None:
        return None
    params, low, *new = found
    changes = dict(zip(moments, new, strict=True))
    count = counted(state.count, request.finite)
    return params, low, tree.replace(state, count=count, ages=tree.unflatten(spec, ages), **changes)


def on_torchs_kernel(
    run: Callable[..., None],
    grads: Tree,
    state: Tree,
    params: Tree,
    *,
    moments: Sequence[str],
    rate: Scalar,
    kinds: Sequence[Hashable] | None = None,
    finite: torch.Tensor | None,
    donate: bool,
) -> tuple[Tree, Tree] | None:
    """Updates parameters and state on a fused kernel of torch.

    Args:
        run: `run(launch, ages)`, or `run(launch, ages, kind)` if there are kinds, launches it. The ages are as above.
        grads: The gradients.
        state: The state.
        params: The parameters.
        moments: The names of the fields of moments, in the order in which `launch` has them.
        rate: The learning rate, which the kernel reads.
        kinds: For each leaf, what may differ between launches.
        finite: bool[], false where nothing may change; None for always true.
        donate: Whether parameters and moments may be overwritten.

    Returns:
        The new parameters and state; or None, with nothing done, if the kernel cannot work on these tensors.
    """
    ages, spec = tree.flatten(state.ages)
    kept = together(ages)
    whole = kept[0] if len(kept) < len(ages) else None

    def run_and_count(on: Launch, *kind: Any) -> None:
        run(on, None if state.ages is None else advance(ages, on.indices, finite, whole=whole), *kind)

    found = overwrite(
        run_and_count,
        grads,
        params,
        *[getattr(state, name) for name in moments],
        others=(rate, state.count, *kept),
        kinds=kinds,
        finite=finite,
        donate=donate,
    )
    if found is None:
        return None
    params, *new = found
    changes = dict(zip(moments, new, strict=True))
    return params, tree.replace(state, count=counted(state.count, finite), ages=tree.unflatten(spec, ages), **changes)


def rate_on(device: torch.device, rate: Scalar) -> Scalar:
    """Brings a learning rate to a device, as torch's kernels want it; a number stays one."""
    return rate.to(device) if isinstance(rate, torch.Tensor) else rate
