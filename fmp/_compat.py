"""Every private torch or optree name that fmp needs, in one place; tests/test_compat.py notices when one changes."""

import operator
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import optree
import optree.registry
import torch
import torch.utils._pytree as torch_pytree
from torch._C._dynamo import eval_frame as _eval_frame  # pyright: ignore[reportMissingModuleSource]
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

T = TypeVar("T")

_VERSION: Any = torch.__version__
_autocast_is_on: Any = cast(Any, torch._C)._is_any_autocast_enabled
_functorch: Any = cast(Any, torch._C)._functorch
_is_wrapped: Any = _functorch.is_functorch_wrapped_tensor
_begin_mapping: Any = cast(Any, torch._C)._vmapmode_increment_nesting
_end_mapping: Any = cast(Any, torch._C)._vmapmode_decrement_nesting
_autograd: Any = cast(Any, torch._C)._autograd

# What torch.optim launches for `fused=True`; they write parameters and moments in place.
fused_adam_: Any = cast(Any, torch)._fused_adam_
fused_adamw_: Any = cast(Any, torch)._fused_adamw_
fused_sgd_: Any = cast(Any, torch)._fused_sgd_

_dispatch_mode: Any = cast(Any, torch._C)._get_dispatch_mode
_PROXY: Any = cast(Any, torch._C)._TorchDispatchModeKey.PROXY
_SIDE_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"

# `register_pytree_node(..., namespace="")` is refused, yet only nodes of the global registry are seen by every
# caller of optree, torch.compile's tracer included.
_GLOBAL: Any = cast(Any, optree.registry).__GLOBAL_NAMESPACE


def register_pytree(
    cls: type,
    *,
    fields: tuple[str, ...],
    flatten: Callable[[Any], tuple[tuple[Any, ...], Hashable]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Makes a class a pytree node for optree (in every namespace) and for torch's own pytree.

    Args:
        cls: The class to register.
        fields: Names of the child fields, in the order in which `flatten` returns them.
        flatten: Maps an instance to its children and its static data.
        unflatten: Maps static data and children back to an instance.
    """
    optree.register_pytree_node(
        cls,
        lambda node: (*flatten(node), fields),
        unflatten,
        path_entry_type=optree.DataclassEntry,
        namespace=_GLOBAL,
    )

    # torch.func.vmap refuses None among its inputs and outputs. Taking the node apart down to its leaves, and keeping
    # the holes in the context, hides them from it. (By torch's own pytree: Dynamo fails on optree's dictionaries here.)
    def flatten_leaves_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, static = flatten(node)
        pairs, spec = torch_pytree.tree_flatten_with_path(dict(zip(fields, children, strict=True)))
        context = (spec, tuple(leaf is None for _, leaf in pairs), static)
        keyed = [(torch_pytree.GetAttrKey(torch_pytree.keystr(path)), leaf) for path, leaf in pairs if leaf is not None]
        return keyed, context

    def flatten_leaves(node: Any) -> tuple[list[Any], Any]:
        children, static = flatten(node)
        leaves, spec = torch_pytree.tree_flatten(dict(zip(fields, children, strict=True)))
        return [leaf for leaf in leaves if leaf is not None], (spec, tuple(leaf is None for leaf in leaves), static)

    def unflatten_leaves(leaves: Any, context: Any) -> Any:
        spec, holes, static = context
        remaining = iter(leaves)
        children = torch_pytree.tree_unflatten([None if hole else next(remaining) for hole in holes], spec)
        return unflatten(static, tuple(children.values()))

    torch_pytree.register_pytree_node(
        cls,
        flatten_leaves,
        unflatten_leaves,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_leaves_with_keys,
    )


def constant_while_tracing(fn: T) -> T:
    """Marks a function whose result torch.compile may take for a constant.

    `torch.compiler.assume_constant_result` does the same, but loads the whole compiler to do it.
    """
    fn._dynamo_marked_constant = True  # pyright: ignore[reportAttributeAccessIssue]
    return fn


_SKIPPED = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def never_traced(fn: T) -> T:
    """Hides a function, and what it calls, from torch.compile: it runs as it is, below compiled code, too.

    `torch.compiler.disable` does the same, but loads the whole compiler to do it.
    """
    _eval_frame.set_code_exec_strategy(cast(Any, fn).__code__, _SKIPPED)
    return fn


def compiled_on_its_own(fn: T) -> T:
    """Copies a function, so that torch.compile counts its compilations apart from those of other copies.

    torch.compile allows a code object a few compilations. All functions that a transformation returns would share them.
    """
    if torch.compiler.is_compiling():
        return fn
    function: Any = fn
    code, closure = function.__code__.replace(), function.__closure__
    copied = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return cast(T, copied)


@constant_while_tracing
def autocast_depth() -> int:
    """Counts the `torch.autocast` contexts around the caller, those with `enabled=False` included."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@constant_while_tracing
def autocast_devices() -> tuple[str, ...]:
    """Lists the types of device for which `torch.autocast` is on around the caller."""
    devices = ("cpu", "cuda", "xpu", "mps", "hpu") if _autocast_is_on() else ()
    return tuple([device for device in devices if torch.is_autocast_enabled(device)])


def registered_op(op: Any) -> Any:
    """Returns the operator that `torch.library.custom_op` registered; anything else as it is."""
    return op._opoverload if isinstance(op, CustomOpDef) else op


def is_compiled(fn: Any) -> bool:
    """Says whether a function came from torch.compile."""
    return hasattr(fn, "_torchdynamo_orig_callable")


def original(fn: Any) -> Any:
    """Returns the function that torch.compile was given for one that it returned."""
    return fn._torchdynamo_orig_callable


def check_inference_mode() -> None:
    """Refuses to differentiate in inference mode where torch would return zeros.

    Raises:
        RuntimeError: In inference mode, with a torch older than 2.13.
    """
    if torch.is_inference_mode_enabled() and _VERSION < (2, 13):
        raise RuntimeError(
            f"torch {torch.__version__} gives zero gradients in inference mode; use torch.no_grad() or torch 2.13"
        )


def transform_active() -> bool:
    """Says whether a torch.func transform, or forward-mode differentiation, is in progress around the caller."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def transform_level() -> int | None:
    """Returns the level of the innermost torch.func transform around the caller; None without one."""
    return _functorch.maybe_current_level()


def forward_mode_active() -> bool:
    """Says whether forward-mode differentiation is in progress around the caller."""
    return forward_ad._current_level >= 0


def wrapped_by_transform(tensor: torch.Tensor) -> bool:
    """Says whether a tensor belongs to a torch.func transform, so that its own flags do not tell what tracks it."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def function_modes() -> list[TorchFunctionMode]:
    """Lists the function modes that are on, the innermost last; works while torch.compile traces, too."""
    return _get_current_function_mode_stack()


def remove_function_mode(mode: TorchFunctionMode) -> bool:
    """Takes a function mode off the stack of modes, wherever in it; says whether it was there."""
    stack = function_modes()
    if mode not in stack:
        return False
    above = [_pop_mode() for _ in range(len(stack) - stack.index(mode))][:-1]
    for other in reversed(above):
        _push_mode(other)
    return True


def reverse_mode_active() -> bool:
    """Says whether a reverse-mode transform (`torch.func.grad`, `vjp`, ...) is in progress around the caller."""
    return any(level.key() == _functorch.TransformType.Grad for level in _functorch.get_interpreter_stack() or ())


def differentiated_outside(value: torch.Tensor) -> bool:
    """Says whether anything outside a finished vjp can still differentiate its value.

    That is so when a reverse-mode transform is active around the caller, or when the tensor below all functorch
    wrappers belongs to an ordinary autograd graph.

    Args:
        value: The value that `torch.func.vjp` returned.
    """
    if reverse_mode_active():
        return True
    while _functorch.is_functorch_wrapped_tensor(value):
        value = _functorch.get_unwrapped(value)
    return value.requires_grad


@contextmanager
def replaced_function_modes() -> Iterator[None]:
    """Empties the stack of function modes, and puts it back as it was afterwards."""
    outer = [_pop_mode() for _ in function_modes()]
    try:
        yield
    finally:
        for _ in function_modes():
            _pop_mode()
        for mode in reversed(outer):
            _push_mode(mode)


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Puts a mode on the stack without running its `__enter__`; `replaced_function_modes` takes it off again."""
    _push_mode(mode)


def transforms() -> tuple[Any, ...]:
    """Lists the kinds of the torch.func transforms in progress around the caller, the outermost first."""
    return tuple([level.key() for level in _functorch.get_interpreter_stack() or ()])


VMAP: Any = _functorch.TransformType.Vmap
JVP: Any = _functorch.TransformType.Jvp


_NO_VALUES = torch.empty(0)


class Mapping(NamedTuple):
    """A `vmap` in progress.

    Attributes:
        level: Which transform it is, from 0.
        mark: A tensor that ends together with it.
    """

    level: int
    mark: torch.Tensor


def mappings() -> tuple[Mapping, ...]:
    """Takes note of the `vmap`s in progress around the caller, the outermost first."""
    levels = [level for level, kind in enumerate(transforms()) if kind == VMAP]
    return tuple([Mapping(level, _functorch._wrap_for_grad(_NO_VALUES, level + 1)) for level in levels])


def levels_of(noted: Sequence[Mapping]) -> list[int]:
    """Finds out which of the transforms in progress, from 0, are the `vmap`s that were in progress at another time.

    Args:
        noted: What `mappings` returned then. Where that was inside of the vmap rule of a torch.autograd.Function, these
            have ended, and torch has begun others in their place before it called the backward pass.
    """
    has_ended = [_functorch.is_dead_tensor_wrapper(mapping.mark) for mapping in noted]
    begun = iter(range(len(transforms()) - sum(has_ended), len(transforms())))
    return [next(begun) if ended else mapping.level for mapping, ended in zip(noted, has_ended, strict=True)]


def mapped_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Finds the `vmap`s that map over any of some tensors: which transforms, from 0, and how many members they have."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        while _is_wrapped(tensor):
            dim, level = _functorch.maybe_get_bdim(tensor), _functorch.maybe_get_level(tensor)
            is_batched, tensor = _functorch.is_batchedtensor(tensor), _functorch.get_unwrapped(tensor)
            if is_batched:
                sizes[level - 1] = tensor.shape[dim]
    return sizes


def repeated(tensor: torch.Tensor, level: int, count: int) -> torch.Tensor:
    """Lets a tensor be one that a `vmap` maps over, with the same values for each of its members."""
    ones = below_transforms(torch.ones(count, dtype=tensor.dtype, device=tensor.device))
    return tensor * _functorch._add_batch_dim(ones, 0, level + 1)


@constant_while_tracing
def tracing_a_transform() -> bool:
    """Says whether a torch.func transform is in progress, while torch.compile traces."""
    return transform_active()


# Of a tensor of zeros that has no memory, as forward mode makes them for tangents.
is_zero_tensor: Any = cast(Any, torch.Tensor)._is_zerotensor


def unwrap_if_dead(tensor: torch.Tensor) -> torch.Tensor:
    """Takes the wrappers of finished torch.func transforms off a tensor."""
    return _functorch.unwrap_if_dead(tensor)


def ended_twice(tensor: torch.Tensor) -> bool:
    """Says whether a tensor bears the wrappers of two finished transforms, of which torch can take off only one."""
    is_dead: Any = _functorch.is_dead_tensor_wrapper
    return is_dead(tensor) and is_dead(_functorch.get_unwrapped(tensor))


def unwrap_in_place(tensor: torch.Tensor) -> None:
    """Takes the wrappers of finished transforms off a tensor, for whoever holds it."""
    inner = tensor
    while _functorch.is_dead_tensor_wrapper(inner):
        inner = _functorch.get_unwrapped(inner)
    cast(Any, torch._C)._swap_tensor_impl(tensor, inner.detach())


def below_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor below all wrappers of torch.func."""
    while _is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def differentiated(tensor: torch.Tensor) -> bool:
    """Says whether autograd, or a reverse-mode transform at any level around the caller, tracks a tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def level_of(tensor: torch.Tensor) -> int:
    """Returns which of the transforms in progress has wrapped a tensor last, from 1; less for none or an ended one."""
    return _functorch.maybe_get_level(tensor)


def belongs_to_ended_level(tensor: torch.Tensor, kinds: tuple[Any, ...]) -> bool:
    """Says whether a tensor carries the wrapper of a transform that is not among those in progress.

    Args:
        tensor: Any tensor.
        kinds: What `transforms` returns here.
    """
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return False
    level = _functorch.maybe_get_level(tensor)
    if level < 1:
        return False  # its transform has returned: the wrapper means nothing any more
    return level > len(kinds) or (kinds[level - 1] == VMAP) != _functorch.is_batchedtensor(tensor)


@contextmanager
def levels_up_to(count: int) -> Iterator[None]:
    """Begins transforms that change nothing, until so many are in progress; ends them afterwards."""
    missing = max(count - len(transforms()), 0)
    for _ in range(missing):
        _functorch._grad_increment_nesting()
    try:
        yield
    finally:
        for _ in range(missing):
            _functorch._grad_decrement_nesting()


def parametrizations_are_cached() -> bool:
    """Says whether `torch.nn.utils.parametrize.cached` is around the caller."""
    return parametrize._cache_enabled > 0


@contextmanager
def parametrization_cache(is_on: bool) -> Iterator[None]:
    """Gives parametrized modules an empty cache, or none; afterwards they have the one that they had."""
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = int(is_on), {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before


def gradients_are_batched() -> bool:
    """Says whether autograd pulls back many cotangents at once (`is_grads_batched`)."""
    return _depth_of_batched_gradients() > 0


@contextmanager
def without_batched_gradients() -> Iterator[None]:
    """Suspends the mapping by which autograd pulls back many cotangents at once (`is_grads_batched`)."""
    depth = _depth_of_batched_gradients()
    for _ in range(depth):
        _end_mapping()
    try:
        yield
    finally:
        for _ in range(depth):
            _begin_mapping()


@contextmanager
def without_transforms() -> Iterator[None]:
    """Suspends all torch.func transforms in progress, and the mapping of batched gradients."""
    stack: list[Any] = []
    while _functorch.peek_interpreter_stack() is not None:
        stack.append(_functorch.pop_dynamic_layer_stack())
    try:
        with without_batched_gradients():
            yield
    finally:
        while stack:
            _functorch.push_dynamic_layer_stack(stack.pop())


def wrapped_above(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """Makes a tensor one of all transforms in progress but the first so many, as it is if it is their argument.

    Args:
        tensor: Any tensor.
        level: How many transforms are left out; the others must be of reverse mode.
    """
    for above in range(level + 1, len(transforms()) + 1):
        tensor = _functorch._wrap_for_grad(tensor, above)
    return tensor


def unwrapped_to(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """Takes off a tensor the wrappers of all transforms that are not among the first so many."""
    while _functorch.is_functorch_wrapped_tensor(tensor) and not 0 < _functorch.maybe_get_level(tensor) <= level:
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def saved_tensors_hooks_allowed() -> bool:
    """Says whether saved-tensor hooks may be set here."""
    return _autograd._saved_tensors_hooks_is_enabled()


@contextmanager
def counting_changes() -> Iterator[None]:
    """Lets a view that a dispatch mode makes count its changes together with the tensor that it shows."""
    with cast(Any, torch._C)._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        yield


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Switches off all dispatch modes, and on again afterwards."""
    return _disable_current_modes()


def dispatch_modes() -> list[Any]:
    """Lists the dispatch modes that are on, the innermost last."""
    return _get_current_dispatch_mode_stack()


def pop_function_mode() -> None:
    """Takes off the innermost function mode."""
    _pop_mode()


@constant_while_tracing
def allow_side_effects_in_checkpoint(allowed: bool) -> bool:
    """Sets whether torch.compile lets a checkpointed function have side effects: once, as the forward pass has them.

    Such are the function modes that it enters, and the count of what a mode has drawn.

    Returns:
        What it was before.
    """
    config: Any = sys.modules["torch._dynamo.config"]
    before = getattr(config, _SIDE_EFFECTS, False)
    if hasattr(config, _SIDE_EFFECTS):
        setattr(config, _SIDE_EFFECTS, allowed)
    return before


@constant_while_tracing
def compiler_name() -> str | None:
    """Returns the name of the backend for which torch.compile traces; None if it has none."""
    translator: Any = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator
    backend = translator.current_tx().output.compiler_fn
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", None)


def making_a_graph() -> bool:
    """Says whether the operators that run here are put into a graph."""
    return _dispatch_mode(_PROXY) is not None


def tag_maker(key: str, value: Any) -> None:
    """Tags the operator that made what the last operator has taken, which may be a view, in the graph being made."""
    mode: Any = _dispatch_mode(_PROXY)
    if mode is None:
        return
    node = next(reversed(mode.tracer.graph.nodes)).args[0]
    while getattr(node, "op", None) == "call_function":
        schema = getattr(node.target, "_schema", None)  # what picks one of several results has none
        if schema is not None and not any(argument.alias_info for argument in schema.arguments):
            for made in (node, *[user for user in node.users if user.target is operator.getitem]):
                made.meta[key] = value
            return
        node = node.args[0]


def recorded_at(node: Any) -> int:
    """Returns the place of a node of autograd in the order in which they were recorded."""
    return node._sequence_nr()


def saved_data(node: Any) -> Iterator[Any]:
    """Yields what a node of autograd saves, packed as it is; to unpack it might recompute it."""
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            value = getattr(node, attribute)
            for raw in value if isinstance(value, list | tuple) else (value,):
                yield raw.data


def _depth_of_batched_gradients() -> int:
    _begin_mapping()
    return _end_mapping()
