"""The contract of an optimizer, and the few helpers that every optimizer is written with."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from fmp import _compat, members, tree
from fmp.dtypes import full_precision, is_castable
from fmp.optim import checks

T = TypeVar("T")
Tree = Any
Schedule = Callable[[torch.Tensor], torch.Tensor]
Scalar = float | torch.Tensor
ScalarOrSchedule = Scalar | Schedule


class GradientTransformation(NamedTuple):
    """An optimizer, or a part of one: a pair of pure functions, and optionally a one-pass form of them.

    A part of a `chain` that only looks at gradients says so by `observe`; the optimizer behind it keeps its one-pass
    form.

    Attributes:
        init: `init(params) -> state`. The state is a pytree of tensors, in float32 or wider.
        update: `update(grads, state, params) -> (updates, state)`. Gradients are unscaled, `params` are the masters,
            and updates are meant to be *added*, by `apply_updates`. A leaf whose gradient is None has the update None
            and keeps its state.
        fused: `fused(grads, state, params, **keywords) -> (params, low, state)`, or None. It computes, in one pass over
            memory and up to rounding, what `update` and `apply_updates` compute. Each keyword may be left out:

            - `inv_scale`: the gradients are multiplied by it first; a number or f32[].
            - `clip`: they are multiplied by it next; a number or f32[].
            - `finite`: bool[]; where it is false, parameters and state keep every bit.
            - `cast_dtype`: the returned `low` is the new parameters in this dtype. Without it, and without the next
              keyword, it is None, which `vmap` cannot return.
            - `low`: the present casts of the parameters, None where there is none. The returned ones have their dtypes,
              and keep every bit where `finite` is false. It excludes `cast_dtype`.
            - `donate`: whether the memory of the old parameters, the old state and the old casts may be overwritten.
              False if left out: nothing that is given changes. Gradients never do.
            - `form`: the form of `fmp.master` that the parameters are in. `params` and `low` are then what
              `fmp.master.split` returns, on the way in and on the way out, and what is updated is
              `fmp.master.merge(params, low, form=form)`. It excludes `cast_dtype`.
            - `seed`: i64[], what `fmp.master.split` draws by in a form that rounds by chance.
        observe: `observe(grads, state, read) -> state`, or None. It is for an `update` that returns the gradients as
            they came, and is the rest of it: the new state, by gradients alone. Where gradients are still to be
            unscaled and clipped, `read(grad)` is what `update` would be given for a leaf, and None for None. It may
            be a copy in float32, so let go of one before you read the next.
        entrywise: Whether `fused` updates each entry by itself, so that it may be given parts of leaves, as a layout
            with zero=1 or 3 has them. If not, `update` takes its place there.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    fused: Callable[..., tuple[Tree, Tree, Tree]] | None = None
    observe: Callable[[Tree, Tree, Callable[[Any], Any]], Tree] | None = None
    entrywise: bool = True


def check_transformation(name: str, value: Any) -> None:
    """Checks an argument that must be an optimizer, or a part of one.

    Args:
        name: What it is called in the message.
        value: The argument.

    Raises:
        TypeError: If it is something else, such as the function that makes an optimizer.

    Example:
        >>> check_transformation("optimizer", 0.1)
        Traceback (most recent call last):
        TypeError: optimizer must be a GradientTransformation such as fmp.optim.adamw(1e-3), or
            fmp.optim.from_torch(torch.optim.AdamW, lr=1e-3), got 0.1
    """
    if not isinstance(value, GradientTransformation):
        hint = "; call it to make one" if callable(value) and not isinstance(value, type) else ""
        raise TypeError(
            f"{name} must be a GradientTransformation such as fmp.optim.adamw(1e-3), or "
            f"fmp.optim.from_torch(torch.optim.AdamW, lr=1e-3), got {checks.shown(value)}{hint}"
        )


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds updates to parameters.

    Args:
        params: The parameters.
        updates: A tree of the same structure; None leaves the parameter as it is.

    Returns:
        The new parameters, each with its old dtype. The sum is taken in float32 or wider.

    Raises:
        ValueError: If an update has not the shape of its parameter.

    Example:
        >>> apply_updates({"w": torch.ones(2), "ids": torch.arange(2)}, {"w": torch.full((2,), 0.5), "ids": None})
        {'w': tensor([1.5000, 1.5000]), 'ids': tensor([0, 1])}
    """

    def add(param: Any, update: Any) -> Any:
        if update is None:
            return param
        if update.shape != param.shape:
            pairs = zip(tree.items(params), tree.leaves(updates), strict=True)
            path = next(path for (path, leaf), other in pairs if leaf is param and other is update)
            raise ValueError(f"{path}: the update is {tree.describe(update)}, the parameter {tree.describe(param)}")
        wide = full_precision(param.dtype)
        return (param.to(wide) + update.to(wide)).to(param.dtype)

    return tree.map(add, params, updates)


def zeros(params: Tree) -> Tree:
    """Makes the first moments: zeros in float32 or wider for each floating-point leaf, None for the others.

    Example:
        >>> tree.describe(zeros({"w": torch.ones(2, dtype=torch.bfloat16), "ids": torch.arange(2)}))
        "{'w': f32[2], 'ids': None}"
    """
    return tree.map(
        lambda leaf: torch.zeros_like(leaf, dtype=full_precision(leaf.dtype)) if is_castable(leaf) else None, params
    )


def zero_count(params: Tree) -> torch.Tensor:
    """Makes the count of updates: i32[], zero, on the device of the first tensor among the parameters.

    Under `vmap` it is a count for each member, like the counts that an update returns.
    """
    device = next((leaf.device for leaf in tree.leaves(params) if isinstance(leaf, torch.Tensor)), None)
    return members.apart(torch.zeros((), dtype=torch.int32, device=device), params)


def zero_ages(params: Tree) -> Tree:
    """Makes the ages of parameters, the numbers of updates that each has had: i32[], zero; None for ints and None.

    Example:
        >>> zero_ages({"w": torch.ones(2), "ids": torch.arange(2)})
        {'w': tensor(0, dtype=torch.int32), 'ids': None}
    """
    return tree.map(lambda leaf: zero_count(leaf) if is_castable(leaf) else None, params)


def update_leaves(
    fn: Callable[..., tuple[Any, ...]], grads: Tree, params: Tree, *states: Tree, given: Sequence[Sequence[Any]] = ()
) -> tuple[Tree, ...]:
    """Runs the update of one leaf over whole trees.

    Args:
        fn: `fn(grad, param, *state, *given) -> (update, *state)`. The gradient comes in the dtype of the moments, which
            is the parameter's or float32, whichever is wider.
        grads: The gradients. Where one is None, the update is None and the state stays as it is.
        params: The parameters.
        *states: The trees of state that `fn` takes and returns.
        given: What else `fn` takes, such as a mask: sequences with an entry for each leaf.

    Returns:
        The tree of updates, then the new trees of state.

    Raises:
        TypeError: If a leaf that has a gradient is not a floating-point tensor, or its gradient is complex; or if there
            are gradients and no parameters.
    """

    def update_leaf(grad: Any, param: Any, *rest: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None, *rest[: len(states)])
        return fn(grad.to(full_precision(param.dtype)), param, *rest)

    checks.params_match(grads, params)
    grad_leaves, spec = tree.flatten(grads)
    columns = [spec.flatten_up_to(other) for other in (params, *states)]
    check_trainable(grads, grad_leaves, columns[0])
    results = [update_leaf(*row) for row in zip(grad_leaves, *columns, *given, strict=True)]
    return tuple(tree.unflatten(spec, [result[i] for result in results]) for i in range(1 + len(states)))


def check_trainable(grads: Tree, grad_leaves: list[Any], param_leaves: list[Any]) -> None:
    """Raises a `TypeError` if a gradient, or the leaf that it belongs to, is not a dense real floating-point tensor.

    Args:
        grads: The gradients, which give the leaf its path.
        grad_leaves: Their leaves.
        param_leaves: The leaves of the parameters.
    """
    for index, (grad, param) in enumerate(zip(grad_leaves, param_leaves, strict=True)):
        if grad is None:
            continue
        if not isinstance(grad, torch.Tensor) or grad.layout != torch.strided:
            raise TypeError(
                f"{tree.paths(grads)[index]}: a gradient must be a dense tensor or None, got {_kind(grad)}; convert "
                "it, for example with torch.as_tensor(grad) or grad.to_dense()"
            )
        if not is_castable(param) or grad.dtype.is_complex:
            raise TypeError(
                f"{tree.paths(grads)[index]}: a leaf {tree.describe(param)} has the gradient {tree.describe(grad)}, "
                "but only real floats are trained; freeze it, or split it into its real and imaginary parts"
            )


def _kind(value: Any) -> str:
    return f"a tensor with layout {value.layout}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def per_dtype(fn: Callable[[torch.dtype], T], params: Tree) -> dict[torch.dtype, T]:
    """Computes what is the same for all leaves of one dtype once, not once a leaf.

    Args:
        fn: Called with the dtype of the moments: the parameter's or float32, whichever is wider.
        params: The parameters.

    Returns:
        The results by dtype.
    """
    dtypes = dict.fromkeys(full_precision(leaf.dtype) for leaf in tree.leaves(params) if is_castable(leaf))
    return {dtype: fn(dtype) for dtype in dtypes}


def scheduled(value: ScalarOrSchedule, count: torch.Tensor) -> Scalar:
    """Returns the value of a hyper-parameter at a step, whether it is a number, a tensor or a schedule.

    Args:
        value: The number, 0-dim tensor, or schedule.
        count: i32[], the number of updates made so far.

    Raises:
        TypeError: If a schedule returns neither a number nor a tensor.
        ValueError: If it returns a tensor with dimensions, which would change the shape of 0-dim parameters.
    """
    if not callable(value):
        return value
    found = value(count)
    checks.number("the value of a schedule", found)
    return found


def in_dtype(value: Scalar, dtype: torch.dtype) -> Scalar:
    """Casts a hyper-parameter if it is a tensor; a Python number has no dtype that could widen or narrow a result."""
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def is_off(value: Scalar) -> bool:
    """Says whether a hyper-parameter is the Python number zero, so that its term can be left out."""
    return not isinstance(value, torch.Tensor) and value == 0


def bias_correction(decay: Scalar, count: torch.Tensor) -> torch.Tensor:
    """Computes `1 - decay**count`, the part of a moment that is not still its initial zero.

    The difference of two numbers close to 1 would lose 3 of float32's 7 digits for `decay=0.999`; `expm1` does not.

    Args:
        decay: The decay rate of the moment, in [0, 1).
        count: The number of updates made, this one included, in the moment's dtype.

    Returns:
        A 0-dim tensor of the count's dtype.

    Example:
        >>> f"{bias_correction(0.999, torch.tensor(1.0)):.8f}"
        '0.00100000'
    """
    if isinstance(decay, torch.Tensor):
        decay = decay.to(count.dtype)
        is_zero = decay == 0
        # The logarithm of 0 is never taken, not even in the branch that is not chosen, so derivatives stay finite.
        power = torch.expm1(count * torch.log(torch.where(is_zero, 1.0, decay)))
        return torch.where(is_zero, 1.0 - decay**count, -power)
    return -torch.expm1(count * (math.log(decay) if decay else -math.inf))


def add_scaled(x: torch.Tensor, scale: Scalar, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes `x + scale * y` in one pass."""
    if isinstance(scale, torch.Tensor):
        return torch.addcmul(x, y.to(x.dtype), scale.to(x.dtype), out=out)
    return torch.add(x, y.to(x.dtype), alpha=scale, out=out)


def blend(weight: Scalar, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes `weight * x + (1 - weight) * y`.

    Not by `torch.lerp`, which takes the difference: that of two large finite numbers may overflow, and that of two
    infinite ones is NaN.

    Args:
        weight: The weight of `x`, in [0, 1].
        x: Any numbers.
        y: Others, of the same dtype.

    Example:
        >>> blend(0.75, torch.tensor([3e38]), torch.tensor([-3e38]))
        tensor([1.5000e+38])
    """
    return add_scaled(y * (1.0 - in_dtype(weight, y.dtype)), weight, x)


def mean_of_squares(moment: torch.Tensor, grad: torch.Tensor, weight: Scalar) -> torch.Tensor:
    """Computes `(1 - weight) * moment + weight * grad**2`, in torch's order.

    A square that overflows makes the moment inf for good, and the step zero. Interpolated, as `lerp` does it, the next
    moment would be inf - inf, and the parameter NaN.
    """
    kept = moment * (1.0 - weight)
    if isinstance(weight, torch.Tensor) or grad.is_cuda:  # with a number, CUDA squares first and multiplies then
        return torch.addcmul(kept, weight * grad, grad)
    return torch.addcmul(kept, grad, grad, value=weight, out=reusable(kept, grad))


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Computes the square root, with the derivative 0 at 0, where it would be infinite.

    Without that, one gradient of exactly zero would make the gradient through an update NaN.

    Args:
        x: Numbers of at least zero.
    """
    if reusable(x) is not None:  # nothing is differentiated
        return torch.sqrt(x)
    is_zero = x == 0
    return torch.where(is_zero, 0.0, torch.sqrt(torch.where(is_zero, 1.0, x)))


def reusable(fresh: torch.Tensor, *operands: Any) -> torch.Tensor | None:
    """Says where the next elementwise results may be written: over a fresh tensor, or None for new memory.

    Passed as `out=`, it saves up to a sixth of an update's time on large leaves, and changes no bit. Nothing is
    overwritten under a transform, where the operands may have batch dimensions that `fresh` lacks, nor where autograd
    records.

    Args:
        fresh: A tensor that the caller has just computed and needs no longer.
        *operands: All other tensors that the results depend on.
    """
    if torch.compiler.is_compiling() or _compat.transform_active():
        return None
    if type(fresh) not in (torch.Tensor, _compat.FakeTensor):
        return None
    tensors = (fresh, *(operand for operand in operands if isinstance(operand, torch.Tensor)))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    return fresh
