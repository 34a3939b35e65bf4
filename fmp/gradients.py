"""Gradients of functions over pytrees, at the memory cost of ordinary backpropagation.

`torch.func.grad` always differentiates with `create_graph=True`, which keeps every intermediate of the backward pass
alive to the end. Here the graph is kept only when something outside can differentiate the result:

    no transform active      torch.autograd.grad on detached leaves
    inside vmap, grad, jvp   torch.func.vjp, with create_graph if a reverse-mode transform or graph lies outside
    inside torch.compile     torch.func.vjp; the compiler removes what is not needed
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch

from fmp import _compat, tree

Tree = Any


@overload
def value_and_grad(
    fn: Callable[..., torch.Tensor], argnums: int | Sequence[int] = 0, has_aux: Literal[False] = False
) -> Callable[..., tuple[torch.Tensor, Tree]]: ...
@overload
def value_and_grad(
    fn: Callable[..., tuple[torch.Tensor, Any]], argnums: int | Sequence[int] = 0, *, has_aux: Literal[True]
) -> Callable[..., tuple[tuple[torch.Tensor, Any], Tree]]: ...
@overload
def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Tree]]: ...
def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Tree]]:
    """Transforms a function into one that returns its value together with its gradient.

    The values are those of `torch.autograd.grad`, bit for bit when no transform is active. It nests under every
    torch.func transform and under `torch.compile`.

    Tensors that require grad, among the arguments or closed over, stay connected while grad mode is on, as with
    `torch.func.grad`: differentiating the returned gradients with respect to them is right. When nothing outside
    requires grad, or under `torch.no_grad()`, all results are detached and no graph outlives the call.

    A custom `torch.autograd.Function` has its own backward called everywhere, inside `torch.compile` too, but with two
    limits of torch 2.13: compiled, its gradient raises under vmap, and its second derivative is zero.

    Args:
        fn: Returns a real scalar tensor, or a pair of it and any auxiliary output if `has_aux`.
        argnums: Position, or positions, of the arguments to differentiate with respect to. Each may be any pytree.
        has_aux: Whether `fn` returns a pair. Tensors in the auxiliary output are detached like the value.

    Returns:
        A function with `fn`'s arguments. It returns `(value, grads)`, or `((value, aux), grads)` if `has_aux`.
        `grads` has the structure of the argument (a tuple of them for a sequence `argnums`); a leaf that cannot be
        differentiated (an integer or boolean tensor, None, a Python object) has the gradient None, and one that the
        value does not depend on has zeros.

    Raises:
        TypeError: If `fn` does not return a real floating-point tensor, or not a pair although `has_aux`, or if
            `argnums` is not made of ints.
        ValueError: If the value is not a scalar, `argnums` is out of range, or a gradient is sparse.

    Example:
        >>> loss = lambda params, x: ((params["w"] * x) ** 2).sum()
        >>> value_and_grad(loss)({"w": torch.tensor(3.0), "steps": 7}, torch.tensor(2.0))
        (tensor(36.), {'w': tensor(24.), 'steps': None})
    """

    @functools.wraps(fn)
    @_compat.compiled_on_its_own
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        numbers = _checked_argnums(argnums, len(args))
        leaves, spec = tree.flatten(tuple(args[number] for number in numbers))
        at = [index for index, leaf in enumerate(leaves) if _differentiable(leaf)]

        def call(*variables: torch.Tensor) -> tuple[torch.Tensor, Any]:
            filled = list(leaves)
            for index, variable in zip(at, variables, strict=True):
                filled[index] = variable
            call_args = list(args)
            for number, argument in zip(numbers, tree.unflatten(spec, filled), strict=True):
                call_args[number] = argument
            return _checked_output(fn(*call_args, **kwargs), has_aux)

        variables = [leaves[index] for index in at]
        differentiate = _by_vjp if _needs_vjp(variables) else _by_autograd
        value, aux, grads = differentiate(call, variables)

        all_grads: list[torch.Tensor | None] = [None] * len(leaves)
        for index, grad in zip(at, grads, strict=True):
            all_grads[index] = grad
        if any(grad.layout != torch.strided for grad in grads):
            _refuse_sparse(tree.unflatten(spec, all_grads), numbers)
        result = tree.unflatten(spec, all_grads)
        return (value, aux) if has_aux else value, result if isinstance(argnums, Sequence) else result[0]

    return value_and_grad_fn


def grad(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Transforms a function into one that returns its gradient.

    Args:
        fn: As for `value_and_grad`.
        argnums: As for `value_and_grad`.
        has_aux: As for `value_and_grad`.

    Returns:
        A function with `fn`'s arguments that returns `grads`, or `(grads, aux)` if `has_aux`.

    Example:
        >>> grad(lambda x: x**3)(torch.tensor(2.0))
        tensor(12.)
    """
    differentiated = value_and_grad(fn, argnums, has_aux)

    @functools.wraps(fn)
    @_compat.compiled_on_its_own
    def grad_fn(*args: Any, **kwargs: Any) -> Any:
        value, grads = differentiated(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fn


def _needs_vjp(leaves: list[torch.Tensor]) -> bool:
    if torch.compiler.is_compiling():
        return True
    _compat.check_inference_mode()
    if _compat.transform_active():
        return True
    # autograd records nothing in inference mode, and refuses what was made there; functorch's wrappers do neither.
    return torch.is_inference_mode_enabled() or any(leaf.is_inference() for leaf in leaves)


def _by_autograd(
    call: Callable[..., tuple[torch.Tensor, Any]], leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, Any, Sequence[torch.Tensor]]:
    keep_outer = torch.is_grad_enabled()
    with torch.enable_grad():
        # A leaf that requires grad belongs to an outer graph: an alias keeps the connection, a detached leaf cuts it.
        variables = [
            _alias(leaf) if keep_outer and leaf.requires_grad else leaf.detach().requires_grad_() for leaf in leaves
        ]
        value, aux = call(*variables)
    keep_outer = keep_outer and _reaches_other_leaf([value, *tree.leaves(aux)], variables)
    if value.requires_grad and variables:
        grads = torch.autograd.grad(value, variables, create_graph=keep_outer, materialize_grads=True)
    else:
        grads = [torch.zeros_like(leaf) for leaf in leaves]
    if not keep_outer:
        value, aux = value.detach(), _detach(aux)
    for variable in variables:
        if variable.is_leaf:
            # An enclosing call must not take it for something outside that wants a gradient.
            variable.requires_grad_(False)
    return value, aux, grads


def _by_vjp(
    call: Callable[..., tuple[torch.Tensor, Any]], leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, Any, Sequence[torch.Tensor]]:
    aux: Any = None
    aux_spec: Any = None

    def tensors_only(*variables: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        # torch.func.vjp unwraps tensors in the auxiliary output and refuses everything else there.
        nonlocal aux, aux_spec
        if torch.compiler.is_compiling():
            # The compiler's record of these tensors still says that they do not require grad, and it would trace an
            # autograd.Function applied to one of them without its backward. The record of a fresh view is right.
            variables = tuple(variable.view_as(variable) for variable in variables)
        value, aux_tree = call(*variables)
        aux, aux_spec = tree.flatten(aux_tree)
        return value, [leaf for leaf in aux if isinstance(leaf, torch.Tensor)]

    if not leaves:
        value, aux_tree = call()
        return value, aux_tree, []
    vjp: Any = torch.func.vjp  # annotated by torch as returning one of two tuple lengths
    value, pull, aux_tensors = vjp(tensors_only, *leaves, has_aux=True)
    if torch.compiler.is_compiling():
        grads = pull(torch.ones_like(value))
    else:
        grads = pull(torch.ones_like(value), retain_graph=False, create_graph=_compat.differentiated_outside(value))
    unwrapped = iter(aux_tensors)
    filled = [next(unwrapped) if isinstance(leaf, torch.Tensor) else leaf for leaf in aux]
    return value, tree.unflatten(aux_spec, filled), grads


def _alias(leaf: torch.Tensor) -> torch.Tensor:
    # A view that autograd refuses to change in place; a plain one would let the function overwrite its argument.
    return leaf.unsqueeze(0).unbind(0)[0]


def _reaches_other_leaf(outputs: list[Any], variables: list[torch.Tensor]) -> bool:
    """Walks the graph of some outputs and says whether it ends in a tensor other than the given ones."""
    own = {id(variable) for variable in variables}
    tensors = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    if any(tensor.grad_fn is None and id(tensor) not in own for tensor in tensors):
        return True
    return any(leaf.requires_grad and id(leaf) not in own for leaf in graph_leaves(tensors))


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)


def _detach(aux: Any) -> Any:
    return tree.map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, aux)


def _checked_argnums(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"argnums must be an int or a sequence of them, got {argnums!r}")
        if not -count <= number < count:
            raise ValueError(
                f"argnums={argnums!r} is out of range for {count} positional arguments; "
                "arguments to differentiate must be passed by position"
            )
    numbers = tuple(number % count for number in numbers)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"argnums={argnums!r} names an argument twice")
    return numbers


def _checked_output(output: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    aux = None
    if has_aux:
        if not isinstance(output, tuple) or len(output) != 2:
            raise TypeError(f"has_aux=True: the function must return (value, aux), got {type(output).__name__}")
        output, aux = output
    if not isinstance(output, torch.Tensor):
        hint = "; pass has_aux=True if it returns (value, aux)" if isinstance(output, tuple) else ""
        raise TypeError(f"the function must return a scalar tensor, got {type(output).__name__}{hint}")
    if not output.dtype.is_floating_point:
        raise TypeError(f"the function must return a real floating-point scalar, got {tree.describe(output)}")
    if output.ndim:
        raise ValueError(f"the function must return a scalar, got {tree.describe(output)}; reduce it, e.g. .mean()")
    return output, aux


def _refuse_sparse(grads: tuple[Tree, ...], numbers: tuple[int, ...]) -> None:
    for number, argument in zip(numbers, grads, strict=True):
        for path, leaf in tree.items(argument):
            if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
                raise ValueError(
                    f"the gradient of argument {number}, leaf {path!r}, is sparse ({leaf.layout}); "
                    "use dense gradients, for example sparse=False in the embedding"
                )


def graph_leaves(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Walks the graph of some tensors and yields the leaves at its ends, each once, as they are met."""
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        todo.extend(parent for parent, _ in node.next_functions)
