"""What a train step knows about a loss function: which keywords it takes, what it returns, how to differentiate it."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fmp import _compat, tree
from fmp.dtypes import full_precision, is_castable
from fmp.gradients import graph_leaves, value_and_grad
from fmp.policy import Policy, casting
from fmp.scaling import LossScale, NoOpLossScale

Tree = Any
LossFn = Callable[..., Any]


class LossOutput(NamedTuple):
    """What one evaluation of a loss gives besides its gradient.

    Attributes:
        loss: The loss, unscaled.
        buffers: The buffers after it.
        aux: The auxiliary output; None without.
        excess: f32[], by what the gradient was divided because the scale was too large for it; None for nothing.
    """

    loss: torch.Tensor
    buffers: Tree
    aux: Tree
    excess: torch.Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """A loss function with its conventions looked up once.

    Attributes:
        fn: `fn(params, batch, *, buffers=, seed=, frozen=)`; each keyword only if the function names it. It returns
            `loss`, `(loss, aux)`, or, if it takes buffers, `(loss, buffers)` or `(loss, buffers, aux)`.
        has_aux: Whether the function returns auxiliary output.
        keywords: Those of `buffers`, `seed` and `frozen` that the function names.
        where: What to call it in messages: `['name']` if it is one of several.
        needs_frozen: Whether it cannot be called without `frozen`.
    """

    fn: LossFn
    has_aux: bool
    keywords: frozenset[str]
    where: str = ""
    needs_frozen: bool = False

    @classmethod
    def of(cls, fn: LossFn, has_aux: bool, where: str = "") -> "Loss":
        """Looks up the keywords of a loss function.

        Raises:
            TypeError: If `fn` is not callable, or an nn.Module.
        """
        if isinstance(fn, torch.nn.Module):
            raise TypeError(
                f"loss_fn{where} is an nn.Module, which has parameters of its own; make a function of it: "
                "model = fmp.functionalize(module), and in loss_fn(params, batch) call model.apply(params, ...)"
            )
        if not callable(fn):
            raise TypeError(f"loss_fn{where} must be a function (params, batch) -> loss, got {fn!r}")
        try:
            given = dict(list(inspect.signature(fn).parameters.items())[2:])  # after params and batch, by any name
        except ValueError:  # some functions written in C
            given = {}
        # What a partial has filled in already is the caller's choice, not ours.
        bound = fn.keywords if isinstance(fn, functools.partial) else {}
        names = frozenset({"buffers", "seed", "frozen"} & (given.keys() - bound.keys()))
        needs_frozen = "frozen" in names and given["frozen"].default is inspect.Parameter.empty
        return cls(fn, has_aux, names, where, needs_frozen)

    def __call__(self, params: Tree, batch: Tree, **available: Any) -> LossOutput:
        """Evaluates the loss with those of the available keywords that it takes."""
        output = self.fn(params, batch, **{name: available[name] for name in sorted(self.keywords)})
        takes_buffers = "buffers" in self.keywords
        expected = 1 + takes_buffers + self.has_aux
        parts: tuple[Any, ...] = output if isinstance(output, tuple) else (output,)
        if len(parts) != expected:
            names = ["loss", *["buffers"] * takes_buffers, *["aux"] * self.has_aux]
            wanted = f"({', '.join(names)})" if len(names) > 1 else "the loss alone"
            raise TypeError(
                f"loss_fn{self.where} must return {wanted} as it {'takes' if takes_buffers else 'does not take'} "
                f"buffers and has_aux={self.has_aux}; it returned {len(parts)} value(s)"
            )
        loss = parts[0]
        if not is_castable(loss):
            raise TypeError(
                f"loss_fn{self.where} must return the loss as a floating-point scalar tensor, got {tree.describe(loss)}"
            )
        buffers = parts[1] if takes_buffers else available["buffers"]
        return LossOutput(loss, buffers, parts[-1] if self.has_aux else None)


def differentiate(
    loss: Loss,
    params: Tree,
    batch: Tree,
    *,
    policy: Policy | None,
    scaler: LossScale,
    buffers: Tree,
    seed: torch.Tensor,
    frozen: Tree,
    wrt: Sequence[str] | None = None,
    may_be_constant: bool = False,
) -> tuple[LossOutput, Tree]:
    """Computes a loss and its gradient, still scaled.

    Args:
        loss: The loss.
        params: The parameters, already in the dtype to compute in.
        batch: The batch; its floating-point leaves are cast to the policy's compute dtype.
        policy: Casts batch, buffers and auxiliary output, or op by op inside the loss; None leaves everything as it is.
        scaler: Scales the loss. A loss that comes in float16 is scaled by 2^15 at most, the largest power of two that
            can enter its backward pass; a loss reduced in float32 has no such limit.
        buffers: Passed to the loss if it takes them. The new ones come back with the dtypes of these.
        seed: i64[], passed to the loss if it takes it.
        frozen: Passed to the loss if it takes it, cast like the parameters.
        wrt: The top-level keys of `params` to differentiate with respect to; None for all.
        may_be_constant: Whether the loss may depend on none of what is differentiated. This is not looked for while
            torch.compile traces.

    Returns:
        What the loss gave, and the gradients in the structure of what was differentiated. `unscale` takes these.

    Raises:
        ValueError: If the loss depends on none of the parameters and may not.
    """

    def scaled(variables: Tree, batch: Tree, buffers_in: Tree, frozen: Tree) -> tuple[torch.Tensor, Any]:
        full = variables if wrt is None else {**params, **variables}
        # A module may write into its buffers, as BatchNorm does; these are copies.
        own_buffers = tree.map(_clone, buffers_in) if "buffers" in loss.keywords else buffers_in
        with contextlib.nullcontext() if policy is None else casting(policy, full, batch, own_buffers, frozen):
            value, new_buffers, aux, _ = loss(full, batch, buffers=own_buffers, seed=seed, frozen=frozen)
        if not may_be_constant and not _depends(value, variables):
            raise ValueError(
                f"loss_fn{loss.where} does not depend on params, so nothing would be trained; compute the loss with "
                "the params that it is given. One that calls a module uses the module's own: call "
                "model.apply(params, ...) of model = fmp.functionalize(module) instead"
            )
        new_buffers = _with_dtypes_of(buffers, new_buffers) if "buffers" in loss.keywords else buffers
        aux = aux if policy is None else policy.cast_to_output(aux)
        excess = _excess_of(scaler, value)
        scaled_value = scaler.scale(value) if excess is None else scaler.scale(value) / excess
        return scaled_value, LossOutput(value, new_buffers, aux, excess)

    # `keep_full` names parameters and buffers; a batch that has one of these names by chance is still cast.
    dtype = None if policy is None or policy.op_rules is not None else policy.compute_dtype
    batch = tree.map(lambda leaf: leaf, batch) if dtype is None else tree.cast(batch, dtype)
    frozen = frozen if policy is None else policy.cast_to_compute(frozen)
    buffers_in = buffers if policy is None else policy.cast_to_compute(buffers)
    variables = params if wrt is None else {key: params[key] for key in wrt}
    (_, output), grads = value_and_grad(scaled, has_aux=True)(variables, batch, buffers_in, frozen)
    return output._replace(loss=output.loss.to(full_precision(output.loss.dtype))), grads


def unscale(scaler: LossScale, grads: Tree, excess: torch.Tensor | None) -> Tree:
    """Makes the gradients that a loss has without a scale.

    Args:
        scaler: What scaled the loss.
        grads: The gradients, as `differentiate` returns them.
        excess: By what they were divided then, as `LossOutput` says; None for nothing.
    """
    grads = scaler.unscale(grads)
    if excess is None:
        return grads
    return tree.map(lambda grad: None if grad is None else grad * excess.to(grad.dtype), grads)


def _excess_of(scaler: LossScale, value: torch.Tensor) -> torch.Tensor | None:
    """Returns by what factor, at least 1, a scale exceeds what can enter the backward pass of a float16 loss.

    That pass begins with the scale itself, cast to the dtype of the loss, and 2^16 is infinite there. None for a loss
    in another dtype, or that is not scaled.
    """
    if value.dtype != torch.float16 or isinstance(scaler, NoOpLossScale):
        return None
    return (scaler.scale(torch.ones((), dtype=torch.float32, device=value.device)) / 2.0**15).clamp(min=1.0)


def _with_dtypes_of(old: Tree, new: Tree) -> Tree:
    if tree.structure(old) != tree.structure(new):
        raise ValueError(
            f"loss_fn must return buffers of the structure it was given: {tree.describe(old)}; "
            f"it returned {tree.describe(new)}"
        )
    return tree.map_with_path(_with_dtype_of, old, new)


def _with_dtype_of(path: str, old: Any, new: Any) -> Any:
    alike = isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) and new.shape == old.shape
    if alike and is_castable(old) and is_castable(new):
        return new.to(old.dtype)
    if (alike and new.dtype == old.dtype) or (new is None and old is None):
        return new
    raise ValueError(f"loss_fn must return buffer {path!r} as {tree.describe(old)}, it returned {tree.describe(new)}")


def _depends(value: torch.Tensor, variables: Tree) -> bool:
    """Says whether a loss depends on any of some variables; true where nobody can tell, or there are none."""
    if torch.compiler.is_compiling():  # whose record of what requires grad is not reliable
        return True
    # Inside of a transform, the flag is that of the innermost one, which differentiates by these variables alone.
    if value.requires_grad and _compat.transform_active():
        return True
    leaves = tree.leaves(variables)
    own = {id(leaf) for leaf in leaves}
    # It is met soon, unless there is none.
    if value.requires_grad and (id(value) in own or any(id(leaf) in own for leaf in graph_leaves([value]))):
        return True
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    # Variables in the middle of somebody else's graph are not told apart from what they come from.
    return not wanted or (value.requires_grad and not all(leaf.is_leaf for leaf in wanted))


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
