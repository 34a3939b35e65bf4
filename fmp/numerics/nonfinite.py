"""`fmp.numerics.find_nonfinite`: the op that made the first inf or NaN, in the forward or in the backward pass."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fmp import _compat
from fmp.live_memory import uncompiled
from fmp.numerics.keeping import copied_states, keeping, layers
from fmp.numerics.named import Named, leaves_of, named_tensors
from fmp.numerics.nonfinite_report import NonfiniteReport
from fmp.numerics.nonfinite_watch import NonfiniteWatch
from fmp.numerics.parts import own_part


def find_nonfinite(
    fn: Callable[..., Any], /, *args: Any, ignore: str | Sequence[str] = (), ops_before: int = 20, **kwargs: Any
) -> NonfiniteReport | None:
    """Calls a function once, and finds the op, forward or backward, that made the first inf or NaN.

    The ops are watched below autograd and torch.func, so any function will do: a loss, a gradient by `fmp.grad` or
    `torch.func.grad`, a call of `.backward()`, a train step, a module; in any nesting with vmap and `fmp.remat`. Each
    op waits for its result, so a call takes several times as long as otherwise.

    What counts as a mistake:

        NaN in a result, and in no argument         always
        inf in a result, of finite numbers          unless a number given to the op is inf: torch.full(..., -inf),
                                                    masked_fill(..., -inf) and torch.where(..., -inf) mean it
        inf in a result, of a mask of -inf          if it reaches the result
        inf or NaN that other ops leave out         only a warning, if nothing else is found
        inf or NaN in an argument to begin with     if it reaches the result without another mistake; -inf alone is
                                                    taken for a mask, and NaN of what measures a run for unknown
        within 2 % of the largest number            only a warning, if nothing else is found; not in 8-bit formats

    An op that computes each number out of those in the same place is judged place by place: an overflow beside a mask
    is a mistake. Any other op, such as a matrix product, is called again with 1 in place of what is not finite in its
    arguments, to see whether it makes inf itself.

    Args:
        fn: The function, or an `nn.Module`. A function from `torch.compile`, and a step with `compile=True`, run
            eagerly. A step with `donate=True` leaves the state to its owner, also in `fmp.numerics.record` or
            `functools.partial`. Any other function gets copies of the train states and histories among its arguments,
            because it may call a donating step; a state that it does not get as an argument is donated.
        *args: Its arguments.
        ignore: Ops whose inf and NaN are meant: names of ops (`"log"`), of nodes of autograd (`"LogBackward0"`), of
            modules (`"blocks.0.attn"`) or lines (`"model.py:12"`).
        ops_before: How many of the ops before to show.
        **kwargs: Its keyword arguments. For one called `ignore` or `ops_before`, wrap `fn`.

    Returns:
        The report, of which `str` makes a page. None if the result is finite and no op came near an overflow, or all
        inf in it are meant. Looked into are trees, mappings, dataclasses and lists. If the function raises after an inf
        or NaN, that is reported, with the error.

    Raises:
        RuntimeError: Inside of a torch.func transform.
        Exception: What `fn` raises, if all was finite until then.

    References:
        The rows of the ops before are those of `transformers.debug_utils.DebugUnderflowOverflow`; to name the forward
        op for an op of the backward pass is the idea of `torch.autograd.detect_anomaly`.

    Example:
        >>> def loss(w, x):
        ...     return torch.sqrt(torch.relu(x @ w)).sum()
        >>> report = find_nonfinite(fmp.grad(loss), torch.zeros(2), torch.ones(3, 2))
        >>> report.kind, report.op, report.phase, report.node
        ('inf', 'div', 'backward', 'SqrtBackward0')
        >>> find_nonfinite(fmp.grad(loss), torch.ones(2), torch.ones(3, 2)) is None
        True
    """
    if _compat.transform_active():
        raise RuntimeError("find_nonfinite watches a whole call; call it outside of torch.func transforms")
    was_compiled = any(
        _compat.is_compiled(part) for layer in layers(fn) for part in (layer, getattr(layer, "advance", None))
    )
    fn = keeping(fn)
    args, kwargs = copied_states(fn, (args, kwargs))
    names = list(named_tensors(fn, args, kwargs))
    grads = _gradients(names)
    watch = NonfiniteWatch(_call.__code__, (ignore,) if isinstance(ignore, str) else tuple(ignore), ops_before)
    given = [*names, *[Named(path, grad) for path, grad, _ in grads]]
    begun_with = watch.begin([replace(item, tensor=own_part(item.tensor)) for item in given])
    result, error = None, ""
    # The engine is to run all of the backward pass in this thread, where nodes have numbers of one row.
    with uncompiled(), torch.autograd.set_multithreading_enabled(False), watch:
        try:
            result = _call(fn, args, kwargs)
        except Exception as raised:
            if not watch.has_failed():
                raise
            error = f"{type(raised).__name__}: {raised}"
    stale = {(id(grad), version) for _, grad, version in grads}
    written = [grad for _, grad, version in _gradients(names) if (id(grad), version) not in stale]
    leaves = [leaf for _, leaf in leaves_of(result)]
    tensors = [own_part(leaf) for leaf in (*leaves, *written) if isinstance(leaf, Tensor)]
    found = watch.culprit(tensors, [leaf for leaf in leaves if isinstance(leaf, float)], failed=bool(error))
    if found is None:
        return None
    return replace(found, begun_with=begun_with, was_compiled=was_compiled, error=error)


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def _gradients(names: Iterable[Named]) -> list[tuple[str, Tensor, int]]:
    """Lists the gradients of some tensors with their names, and with how often each was written."""
    found = [(f"{item.path}.grad", item.tensor.grad) for item in names if item.tensor.is_leaf]
    return [(path, grad, 0 if grad.is_inference() else grad._version) for path, grad in found if grad is not None]
