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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fmp import _compat
from fmp.rematerialization.early_stop import Attempt
from fmp.rematerialization.region import Region, call_in_vjp, differentiable

Pull = Callable[..., Any]
MapKey = tuple[str, int]  # "whole" or "pulls", and the place among these


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
        ctx.mappings = _compat.mappings()
        ctx.drawn = {}
        if ctx.mappings:
            given = _compat.mapped_sizes(operands)
            ctx.drawn = {level: size for level, size in _compat.mapped_sizes(output).items() if level not in given}
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
            levels = _compat.levels_of(ctx.mappings)
            mapped = frozenset(levels)
            pullback = Pullback(linearize, len(operands), region.levels, mapped)
            pulled = [cotangents[j] for j in given]
            for mapping, level in zip(ctx.mappings, levels, strict=True):
                if mapping.level in ctx.drawn:  # random numbers only are mapped over; they shall be so again
                    pulled[0] = _compat.repeated(pulled[0], level, ctx.drawn[mapping.level])
                if _compat.has_ended(mapping):
                    pulled = _counted_once(pulled, level)
            all_operands = (*operands, *pulled)
            # A Function that is given batched gradients would not be recorded, without a word.
            if _is_last_derivative(region.levels, mapped) or _compat.gradients_are_batched():
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
        dims = in_dims[1:]
        level = len(_compat.transforms())  # the one that is mapped is off already
        if level in pullback.mapped or any(dim is not None for dim in dims[: pullback.count]):
            mapped = pullback.mapped_over(dims, info.batch_size, info.randomness)
        else:
            mapped = pullback.pulled_many_times(dims, info.batch_size, info.randomness)
            operands = tuple(
                [each if dim is None else each.movedim(dim, 0) for each, dim in zip(operands, dims, strict=True)]
            )
        outputs = invoke(mapped, operands, RecomputedPullback)
        if pullback.is_mapped:  # so it is run by none but this rule
            outputs = pullback.taken_apart((), outputs)
        # A gradient of which torch is told that each member has its own is added up over the members.
        return outputs, tuple([0 if is_spread else None for is_spread in mapped.spreads_over()])


class Map(NamedTuple):
    """A mapping of a backward pass, or of its second part.

    Attributes:
        dims: Over which dimensions of the operands.
        size: How many members it has.
        randomness: As for `torch.func.vmap`.
        newer: How many mappings of the second part began later, whose dimensions stand in front of its own.
    """

    dims: tuple[int | None, ...]
    size: int
    randomness: str
    newer: int = 0


class Pullback(Region):
    """A backward pass in two parts: `linearize(*primals)` recomputes, what it returns pulls cotangents back.

    Args:
        linearize: The first part.
        count: How many of the operands are primals; the others are cotangents.
        levels: As for `Region`.
        mapped: Which of the transforms in progress, counted from 0, are mappings that the call was in.
        whole: Mappings of both parts, the innermost first.
        pulls: Mappings of the second part, likewise; they are inside of the others.
        newest: Which mapping was added last.
        spread: For each mapping whether each gradient depends on what it maps, so that it has a dimension of its own;
            filled by a run, of this one or of what is made of it.
        origin: The same without mappings; it learns how the result is made of tensors.
    """

    def __init__(
        self,
        linearize: Callable[..., Pull],
        count: int,
        levels: tuple[Any, ...],
        mapped: frozenset[int] = frozenset(),
        whole: tuple[Map, ...] = (),
        pulls: tuple[Map, ...] = (),
        newest: MapKey | None = None,
        spread: dict[MapKey, tuple[bool, ...]] | None = None,
        origin: "Pullback | None" = None,
    ):
        super().__init__(levels)
        self.linearize = linearize
        self.count = count
        self.mapped = mapped
        self._whole, self._pulls = whole, pulls
        self._newest = newest
        self._spread = {} if spread is None else spread
        self._origin = origin

    @property
    def is_mapped(self) -> bool:
        """Whether it has mappings."""
        return self._origin is not None

    def first(self, *operands: Tensor) -> Any:
        """Runs the backward pass."""
        if not self.is_mapped:
            return self.linearize(*operands[: self.count])(*operands[self.count :])
        run: Callable[..., Any] = self._pulled
        for place, each in enumerate(self._whole):
            run = self._mapped(run, each, ("whole", place))
        return run(*operands)

    again = first

    def mapped_over(self, dims: tuple[int | None, ...], size: int, randomness: str) -> "Pullback":
        """Maps both parts."""
        return self._with((*self._whole, Map(dims, size, randomness)), self._pulls, ("whole", len(self._whole)))

    def pulled_many_times(self, dims: tuple[int | None, ...], size: int, randomness: str) -> "Pullback":
        """Maps the second part over the first dimension of the operands for which one is given."""
        # Those that map both parts are around it, and so see one dimension more, the first.
        whole = [
            each._replace(dims=tuple(map(_behind_a_new_one, each.dims, dims)), newer=each.newer + 1)
            for each in self._whole
        ]
        pulled = tuple([None if dim is None else 0 for dim in dims[self.count :]])
        newest = ("pulls", len(self._pulls))
        return self._with(tuple(whole), (*self._pulls, Map(pulled, size, randomness)), newest)

    def spreads_over(self) -> tuple[bool, ...]:
        """Says, after a run, which of the gradients depend on what the newest mapping maps."""
        assert self._newest is not None
        return self._spread[self._newest]

    def _with(self, whole: tuple[Map, ...], pulls: tuple[Map, ...], newest: MapKey) -> "Pullback":
        spread = self._spread if self.is_mapped else {}
        mappings = whole, pulls, newest, spread
        return Pullback(self.linearize, self.count, self.levels, self.mapped, *mappings, self._origin or self)

    def _mapped(self, run: Callable[..., Any], each: Map, key: MapKey) -> Callable[..., tuple[Tensor, ...]]:
        """Maps a function that returns tensors; those that do not depend on what is mapped get no dimension for it."""

        def mapped(*operands: Tensor) -> tuple[Tensor, ...]:
            outputs, dims = _compat.mapped_as_it_falls(run, each.dims, each.size, each.randomness)(*operands)
            self._spread[key] = tuple([dim is not None for dim in dims])
            count = len(self._pulls)
            in_front = [self._spread["pulls", place] for place in range(count - each.newer, count)]
            return tuple(
                [
                    output if dim is None else output.movedim(dim, sum(has_it[i] for has_it in in_front))
                    for i, (output, dim) in enumerate(zip(outputs, dims, strict=True))
                ]
            )

        return mapped

    def _pulled(self, *operands: Tensor) -> tuple[Tensor, ...]:
        primals, origin = operands[: self.count], self._origin
        assert origin is not None
        linear = self.linearize(*primals)

        def pull(*cotangents: Tensor) -> tuple[Tensor, ...]:
            return origin.taken_apart((*primals, *cotangents), linear(*cotangents))

        run: Callable[..., Any] = pull
        for place, each in enumerate(self._pulls):
            run = self._mapped(run, each, ("pulls", place))
        return run(*operands[self.count :])


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
        computed = _computed_again(self._again, primals, self._moved, self._wanted)
        with torch.enable_grad():  # as at the call; some formulas of torch can be differentiated only then
            return torch.func.jvp(computed, tuple([primals[i] for i in self._moved]), tangents)[1]

    again = first

    def _again(self, operands: Sequence[Tensor]) -> Any:
        """Recomputes the region with operands that require grad where they did at first."""
        region = self._region
        if not region.tracked:
            return region.tensors_again(*operands)
        return call_in_vjp(lambda filled: region.tensors_again(*filled), operands, region.tracked)


def invoke(region: Region, operands: Sequence[Tensor], function: type[Recomputed] = Recomputed) -> Any:
    """Runs a region so that it is recomputed where it is differentiated; returns its result."""
    # Function modes cannot follow into it; the region itself restores those that were there at the call.
    with _compat.replaced_function_modes():
        tensors: Any = function.apply(region, *operands)
    assert region.plan is not None
    return region.plan.result(operands, tensors)


def _computed_again(
    again: Callable[[Sequence[Tensor]], Any], primals: Sequence[Tensor], at: list[int], wanted: list[int]
) -> Callable[..., Any]:
    """The tensors of a region as a function of some of its operands."""

    def computed(*variables: Tensor) -> tuple[Tensor, ...]:
        filled = list(primals)
        for i, variable in zip(at, variables, strict=True):
            filled[i] = variable
        tensors = again(filled)
        return tuple([tensors[j] for j in wanted])

    return computed


def _linearize(region: Region, wanted: list[int], given: list[int], *primals: Tensor) -> Pull:
    # What the function computes may depend on what requires grad, so that must not depend on what is wanted now.
    at = sorted({*region.tracked, *wanted})
    nothing_records = not (torch.is_grad_enabled() or _compat.forward_mode_active())
    if nothing_records:
        primals = tuple([primal.detach() for primal in primals])
    graph = _graph(region, wanted, given, at, primals, region.attempt() if nothing_records else None)
    if graph is None:
        graph = _graph(region, wanted, given, at, primals, None)
    assert graph is not None
    variables, outputs = graph

    # What torch.func.vjp returns would make zeros for each operand that is not used: for a method of a large module,
    # that is all of the module's parameters.
    def pull(*cotangents: Tensor) -> tuple[Tensor | None, ...]:
        if not outputs:
            return (None,) * len(variables)
        return torch.autograd.grad(
            list(outputs.values()),
            variables,
            [cotangents[place] for place in outputs],
            create_graph=torch.is_grad_enabled(),
            retain_graph=False,
            allow_unused=True,
        )

    return pull


def _graph(
    region: Region,
    wanted: list[int],
    given: list[int],
    at: list[int],
    primals: Sequence[Tensor],
    attempt: Attempt | None,
) -> tuple[list[Tensor], dict[int, Any]] | None:
    """Recomputes a region inside of a vjp; returns the wanted variables, and those of its results that depend on them.

    None, if an attempt to leave values out has failed: with whatever error, for what reads memory may raise its own.
    """
    again = functools.partial(region.tensors_again, attempt=attempt)
    computed = _computed_again(lambda filled: again(*filled), primals, at, given)
    noted: list[Any] = []

    def note(*variables: Tensor) -> tuple[Tensor, ...]:
        tensors = computed(*variables)
        edges = {place: get_gradient_edge(tensor) for place, tensor in enumerate(tensors) if tensor.requires_grad}
        noted.extend((variables, edges))
        return tensors

    vjp: Any = torch.func.vjp
    try:
        with _compat.without_batched_gradients(), torch.enable_grad():  # what some kernels keep depends on it
            vjp(note, *(primals[i] for i in at))
    except Exception:
        if attempt is None:
            raise
        attempt.fail()
        return None
    variables, outputs = noted
    if attempt is not None and attempt.has_failed():
        return None
    return [variable for i, variable in zip(at, variables, strict=True) if i in wanted], outputs


def _is_expanded(tensor: Tensor) -> bool:
    sized = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ()
    return any(step == 0 and size > 1 for size, step in sized)


def _is_last_derivative(levels: tuple[Any, ...], mapped: frozenset[int]) -> bool:
    """Says whether nothing around a backward pass can differentiate it, or map it in a way that the call was not."""
    kinds = _compat.transforms()
    if torch.is_grad_enabled() or kinds not in ((), levels[:-1]):
        return False
    return all(level in mapped for level, kind in enumerate(kinds) if kind == _compat.VMAP)


def _counted_once(cotangents: list[Tensor], level: int) -> list[Tensor]:
    """Makes torch, which adds up the gradients of all members of a mapping, count once what belongs to all of them.

    That is the cotangent of a result that does not depend on what is mapped. By itself it gives such a gradient; added
    to one that differs from member to member, it would count as often as there are members.
    """
    sizes = [_compat.mapped_sizes([each]).get(level) for each in cotangents]
    count = next((size for size in sizes if size is not None), None)
    if count is None:
        return cotangents
    return [
        _compat.for_one_member(each, level, count) if size is None else each
        for each, size in zip(cotangents, sizes, strict=True)
    ]


def _behind_a_new_one(dim: int | None, new: int | None) -> int | None:
    return dim if dim is None or new is None else dim + 1
