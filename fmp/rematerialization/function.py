"""Recomputation under the transforms of torch.func, as a torch.autograd.Function.

    forward(operands)           run the region below all transforms: none of them records what happens inside
    backward(cotangents)        a region of its own: run the first one again, pull the cotangents back through it
    jvp(tangents)               likewise: run it again, push the tangents through it

That the backward pass is itself such a region is what saves memory. `torch.func.grad` differentiates with
create_graph=True, so it would record the recomputation and keep it. Recorded as one more region, it keeps nothing; and
so it goes on for derivatives of any order.

Of the backward pass `vmap` has a rule of its own. A mapping that began after the call, such as that of jacrev over the
rows of the identity, shall map the pulling back only: mapped too, the recomputation would draw other random numbers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmp import _compat
from fmp.rematerialization.region import Region, differentiable

Pull = Callable[..., Any]


class Recomputed(torch.autograd.Function):
    """A region that is recomputed where it is differentiated: `apply(region, *operands)`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(region: Region, *operands: Tensor) -> tuple[Tensor, ...]:
        """Runs the region."""
        tensors = region.run(*operands)
        if _compat.forward_mode_active():  # which gives a result a tangent of the same layout, and writes to it
            return tuple([tensor.clone() if _is_expanded(tensor) else tensor for tensor in tensors])
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the operands and nothing else."""
        region, *operands = inputs
        ctx.region = region
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        """Recomputes the region, and pulls the cotangents back through it."""
        region, operands = ctx.region, ctx.saved_tensors
        wanted = [i for i, operand in enumerate(operands) if ctx.needs_input_grad[i + 1] and differentiable(operand)]
        given = [j for j, cotangent in enumerate(cotangents) if cotangent is not None]
        grads: list[Tensor | None] = [None] * len(operands)
        if wanted and given:
            linearize = functools.partial(_linearize, region, wanted, given)
            pullback = Pullback(linearize, len(operands), region.levels)
            all_operands = (*operands, *(cotangents[j] for j in given))
            # A Function that is given batched gradients would not be recorded, without a word.
            if _is_last_derivative(region.levels) or _compat.gradients_are_batched():
                found = pullback.first(*map(_compat.unwrap_if_dead, all_operands))
            else:
                found = invoke(pullback, all_operands, RecomputedPullback)
            for i, grad in zip(wanted, found, strict=True):
                grads[i] = grad
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Tensor | None, ...]:
        """Recomputes the region, and pushes the tangents through it."""
        region, operands = ctx.region, ctx.saved_tensors
        moved = [i for i, operand in enumerate(operands) if tangents[i] is not None and differentiable(operand)]
        wanted = [j for j, possible in enumerate(region.plan.differentiable) if possible]
        pushed: list[Tensor | None] = [None] * max(len(region.plan.differentiable), 1)
        if moved and wanted:
            pushforward = Pushforward(region, moved, wanted, len(operands))
            found = invoke(pushforward, (*operands, *(tangents[i] for i in moved)), Recomputed)
            for j, tangent in zip(wanted, found, strict=True):
                pushed[j] = tangent
        return tuple(pushed)


class RecomputedPullback(Recomputed):
    """A backward pass that is recomputed where it is differentiated."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, pullback: "Pullback", *operands: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """Maps the whole backward pass, or only the pulling back if the mapping began after the call."""
        dims, count = in_dims[1:], pullback.count
        level = len(_compat.transforms())  # the one that is mapped is off already
        at_the_call = level < len(pullback.levels) and pullback.levels[level] == _compat.VMAP
        mapped = functools.partial(torch.func.vmap, randomness=info.randomness)
        if at_the_call or any(dim is not None for dim in dims[:count]):
            whole = Mapped(lambda *given: mapped(pullback.run, tuple(dims))(*given), pullback.levels)
            outputs = invoke(whole, operands, Recomputed)
        else:

            def linearize(*primals: Tensor) -> Pull:
                pull = pullback.linearize(*primals)

                def pull_one(*cotangents: Tensor) -> tuple[Tensor, ...]:
                    return pullback.taken_apart((*primals, *cotangents), pull(*cotangents))

                return mapped(pull_one, tuple(dims[count:]))

            outputs = invoke(Pullback(linearize, count, pullback.levels), operands, RecomputedPullback)
        return outputs, (0,) * len(outputs)


class Pullback(Region):
    """A backward pass in two parts: `linearize(*primals)` recomputes, what it returns pulls cotangents back.

    Args:
        linearize: The first part.
        count: How many of the operands are primals; the others are cotangents.
        levels: As for `Region`.
    """

    def __init__(self, linearize: Callable[..., Pull], count: int, levels: tuple[Any, ...]):
        super().__init__(levels)
        self.linearize = linearize
        self.count = count

    def first(self, *operands: Tensor) -> Any:
        """Runs the backward pass."""
        return self.linearize(*operands[: self.count])(*operands[self.count :])

    again = first


class Pushforward(Region):
    """A forward-mode pass over a region.

    Args:
        region: The region.
        moved: Which of its operands have tangents; these follow after the operands.
        wanted: Which of its tensors shall have some.
        count: How many operands it has.
    """

    def __init__(self, region: Region, moved: list[int], wanted: list[int], count: int):
        super().__init__(())
        self._region, self._moved, self._wanted, self._count = region, moved, wanted, count

    def first(self, *operands: Tensor) -> Any:
        """Runs the pass."""
        primals, tangents = operands[: self._count], operands[self._count :]
        computed = _computed_again(self._region, primals, self._moved, self._wanted)
        return torch.func.jvp(computed, tuple([primals[i] for i in self._moved]), tangents)[1]

    again = first


class Mapped(Region):
    """A function of operands that is mapped over some of them."""

    def __init__(self, fn: Callable[..., Any], levels: tuple[Any, ...]):
        super().__init__(levels)
        self.first = self.again = fn


def invoke(region: Region, operands: Sequence[Tensor], function: type[Recomputed] = Recomputed) -> Any:
    """Runs a region so that it is recomputed where it is differentiated; returns its result."""
    # Function modes cannot follow into it; the region itself restores those that were there at the call.
    with _compat.replaced_function_modes():
        tensors: Any = function.apply(region, *operands)
    assert region.plan is not None
    return region.plan.result(operands, tensors)


def _computed_again(region: Region, primals: Sequence[Tensor], at: list[int], wanted: list[int]) -> Callable[..., Any]:
    """The tensors of a region as a function of some of its operands."""

    def computed(*variables: Tensor) -> tuple[Tensor, ...]:
        filled = list(primals)
        for i, variable in zip(at, variables, strict=True):
            filled[i] = variable
        tensors = region.tensors_again(*filled)
        return tuple([tensors[j] for j in wanted])

    return computed


def _linearize(region: Region, wanted: list[int], given: list[int], *primals: Tensor) -> Pull:
    # torch takes composite functions apart by what requires grad. Where values are kept, that must not depend on what
    # is wanted now.
    at = wanted if region.tracked is None else sorted({*region.tracked, *wanted})
    if not (torch.is_grad_enabled() or _compat.forward_mode_active()):
        primals = tuple([primal.detach() for primal in primals])  # nothing else around records
    noted: list[Any] = []
    computed = _computed_again(region, primals, at, given)

    def note(*variables: Tensor) -> tuple[Tensor, ...]:
        tensors = computed(*variables)
        noted.extend((variables, tensors))
        return tensors

    vjp: Any = torch.func.vjp
    with _compat.without_batched_gradients(), torch.enable_grad():  # what some kernels keep depends on it
        vjp(note, *(primals[i] for i in at))
    variables, tensors = noted
    variables = [variable for i, variable in zip(at, variables, strict=True) if i in wanted]
    reached = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]

    # What torch.func.vjp returns would make zeros for each operand that is not used: for a method of a large module,
    # that is all of the module's parameters.
    def pull(*cotangents: Tensor) -> tuple[Tensor | None, ...]:
        if not reached:
            return (None,) * len(variables)
        return torch.autograd.grad(
            [tensors[place] for place in reached],
            variables,
            [cotangents[place] for place in reached],
            create_graph=torch.is_grad_enabled(),
            retain_graph=False,
            allow_unused=True,
        )

    return pull


def _is_expanded(tensor: Tensor) -> bool:
    sized = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ()
    return any(step == 0 and size > 1 for size, step in sized)


def _is_last_derivative(levels: tuple[Any, ...]) -> bool:
    """Says whether nothing around a backward pass can differentiate it, or map it in a way that the call was not."""
    return not torch.is_grad_enabled() and _compat.transforms() in ((), levels[:-1])
