"""One call of a function given to remat: how it runs first, how it runs again, and what it returned.

The result is any tree, but what passes through an autograd.Function is a tuple of tensors. The plan says how the
leaves of the result are made of it:

    operand i     the function returned one of its operands as it is
    tensor j      a result; one that is returned twice is there once
    constant      everything else
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fmp import _compat, tree
from fmp.errors import RematError
from fmp.rematerialization.early_stop import Attempt
from fmp.rematerialization.results import check_constants

# What torch says of a change in place, within a transform, of a tensor that is not one of the transform's, or that is
# one of its variables.
_REFUSED = ("would mutate a captured Tensor", "a leaf Variable that requires grad")


class Source(NamedTuple):
    """Where a leaf of the result comes from."""

    kind: Literal["operand", "tensor", "constant"]
    value: Any


class Plan(NamedTuple):
    """The structure of a result.

    Attributes:
        spec: The structure of the tree.
        sources: Where each leaf comes from.
        differentiable: Whether each tensor that passes through the Function can be differentiated.
    """

    spec: tree.Spec
    sources: tuple[Source, ...]
    differentiable: tuple[bool, ...]

    def result(self, operands: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Puts a result together."""
        found = {"operand": operands, "tensor": tensors}
        leaves = [
            source.value if source.kind == "constant" else found[source.kind][source.value] for source in self.sources
        ]
        return tree.unflatten(self.spec, leaves)


def differentiable(tensor: Tensor) -> bool:
    """Says whether the dtype of a tensor has derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


def tracked(tensors: Sequence[Tensor]) -> list[int]:
    """Finds the tensors that autograd or a transform tracks, and so all that can get a gradient."""
    with _compat.replaced_function_modes():
        return [place for place, each in enumerate(tensors) if differentiable(each) and _compat.differentiated(each)]


def first_in_a_vjp(
    call: Callable[[Sequence[Tensor]], Any], operands: Sequence[Tensor], at: Sequence[int], levels: int
) -> Any:
    """Calls a function as it will be called when it is recomputed, inside of a vjp; returns the result below of it.

    So it runs the same operators, draws the same numbers, and finds that the same tensors require grad. Under a
    reverse-mode transform, torch takes composite operators apart that `vmap` alone could not map, and by which of their
    arguments require grad: `x @ w` is one product of matrices, or a batch of them. Under any, it fills a tensor with
    random numbers in the order of its entries; else, as by `dropout`, in the order in which they lie in memory.

    Args:
        call: The function.
        operands: Its tensors.
        at: Which of them require grad.
        levels: How many transforms were in progress at the call, of which some are no more.
    """
    depth = len(_compat.transforms())
    try:
        # Or a tensor of one of these transforms, which the function must not read, would count as one of this vjp.
        with _compat.levels_up_to(levels if at else levels + 1):
            result = call_in_vjp(call, operands, at) if at else call(operands)
    except RuntimeError as error:
        if any(refused in str(error) for refused in _REFUSED):
            with _compat.levels_up_to(levels + 1):
                call([_compat.wrapped_above(operand, depth) for operand in operands])  # is not refused, so it counts
        raise
    return tree.map(lambda leaf: _compat.unwrapped_to(leaf, depth) if isinstance(leaf, Tensor) else leaf, result)


def call_in_vjp(call: Callable[[Sequence[Tensor]], Any], operands: Sequence[Tensor], at: Sequence[int]) -> Any:
    """Calls a function of tensors of which some, at least one, require grad; returns what it computes without that."""
    found: Any = None

    def noted(*variables: Tensor) -> tuple[Tensor, list[Tensor]]:
        nonlocal found
        filled = list(operands)
        for place, variable in zip(at, variables, strict=True):
            filled[place] = variable
        original = {id(new): old for new, old in zip(filled, operands, strict=True)}
        leaves, spec = tree.flatten(call(filled))
        computed = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in original]
        found = [original.get(id(leaf), leaf) for leaf in leaves], spec, {id(leaf) for leaf in computed}
        return variables[0], computed

    vjp: Any = torch.func.vjp
    tensors = iter(vjp(noted, *(operands[place] for place in at), has_aux=True)[2])
    leaves, spec, computed = found
    return tree.unflatten(spec, [next(tensors) if id(leaf) in computed else leaf for leaf in leaves])


class Region:
    """Something that is computed from operands now, and perhaps again later.

    Attributes:
        levels: The kinds of the transforms that were in progress when the user made the call.
        plan: How the first result is made of the tensors that `first` returns.
        tracked: Which operands require grad in every pass, so that all passes run the same operators.
    """

    def __init__(self, levels: tuple[Any, ...]):
        self.levels = levels
        self.plan: Plan | None = None
        self.tracked: Sequence[int] = ()

    def first(self, *operands: Tensor) -> Any:
        """Computes the result for the first time."""
        raise NotImplementedError

    def again(self, *operands: Tensor) -> Any:
        """Computes the result once more."""
        raise NotImplementedError

    def attempt(self) -> Attempt | None:
        """Returns what leaves out of one recomputation the values that no gradient needs; None if none are known."""
        return None

    def again_in(self, attempt: Attempt, *operands: Tensor) -> Any:
        """Computes the result once more, without values that no gradient needs; `attempt` then knows if one did."""
        raise NotImplementedError

    def run(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Computes the result for the first time; returns its tensors, and sets the plan by which to use them."""
        return self.taken_apart(operands, self.first(*operands))

    def taken_apart(self, operands: Sequence[Tensor], result: Any) -> tuple[Tensor, ...]:
        """Takes a result apart; sets the plan by which to put it together."""
        leaves, spec = tree.flatten(result)
        place_of_operand = {id(operand): place for place, operand in enumerate(operands)}
        place_of_tensor: dict[int, int] = {}
        tensors: list[Tensor] = []
        sources: list[Source] = []
        check_constants(leaves, spec)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                sources.append(Source("constant", leaf))
            elif id(leaf) in place_of_operand:
                sources.append(Source("operand", place_of_operand[id(leaf)]))
            else:
                if id(leaf) not in place_of_tensor:
                    place_of_tensor[id(leaf)] = len(tensors)
                    tensors.append(leaf)
                sources.append(Source("tensor", place_of_tensor[id(leaf)]))
        self.plan = Plan(spec, tuple(sources), tuple(map(differentiable, tensors)))
        # A Function must return something; what is no floating point number needs no tangent.
        return tuple(tensors) or (torch.empty(0, dtype=torch.int64),)

    def tensors_again(self, *operands: Tensor, attempt: Attempt | None = None) -> tuple[Tensor, ...]:
        """Computes the result once more; returns the tensors that `run` returned."""
        assert self.plan is not None
        leaves = tree.leaves(self.again_in(attempt, *operands) if attempt else self.again(*operands))
        if len(leaves) != len(self.plan.sources):
            raise RematError(
                f"remat: the function returned {len(self.plan.sources)} leaves at first and {len(leaves)} when it was "
                "recomputed; it must not depend on state that changes"
            )
        tensors: dict[int, Tensor] = {}
        for leaf, source in zip(leaves, self.plan.sources, strict=True):
            if source.kind == "tensor":
                tensors[source.value] = leaf
        return tuple([tensors[place] for place in range(len(tensors))])
