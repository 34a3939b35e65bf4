"""`fmp.remat`: chooses how a call is recomputed.

torch.compile, no transform     torch.utils.checkpoint, which the compiler understands          (compiled.py)
torch.compile, transform        the function itself: the compiler decides what to keep
no gradient wanted              the function itself
lazy modules, at first          the function itself
mapped, no derivative in torch  the function itself
nested forward mode             the function itself: forward mode keeps nothing anyway
no transform                    torch.utils.checkpoint                                          (plain.py)
transforms                      an autograd.Function whose backward pass is rematerialized too  (function.py)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from fmp import _compat
from fmp.ambient import Ambient, check_devices, random_state, set_random_state
from fmp.errors import RematError
from fmp.rematerialization.capture import Capture
from fmp.rematerialization.compiled import passes_of, traced
from fmp.rematerialization.early_stop import Unread, Usefulness
from fmp.rematerialization.function import invoke
from fmp.rematerialization.guards import Determinism, DeterminismCheck, check_layouts, check_no_autograd_inside
from fmp.rematerialization.plain import HooksRefused, checkpointed
from fmp.rematerialization.recording import Kept
from fmp.rematerialization.region import tracked
from fmp.rematerialization.results import is_unfinished, unchangeable
from fmp.rematerialization.saveable import Everything, Nothing, Saveable, check_saveable, nothing
from fmp.rematerialization.user_call import UserCall

Fn = TypeVar("Fn", bound=Callable[..., Any])


def remat(
    fn: Callable[..., Any] | None = None,
    saveable: Saveable = nothing,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    **unknown: Any,
) -> Callable[..., Any]:
    """Transforms a function into one that keeps no intermediate values for its gradient, and computes them again.

    Values and gradients are those of the function itself, under plain autograd, every torch.func transform and any
    nesting of them. Use it on a block of some milliseconds: keeping track costs a fraction of one.

    Arguments and results may be any pytrees. Tensors that the function reaches in another way get their gradients like
    arguments: closures, default arguments, partials, bound methods, global variables that the function names, helper
    functions, modules with their attributes, and containers of these. Under a transform, a tracked tensor that is an
    attribute of another object raises. Without one, the recomputation reads it late, when it may have changed.

    The recomputation reads variables, attributes of modules, and lists and dictionaries as they were at the call.
    Attributes of other objects, and what the function itself sets by `nonlocal` or `global`, it reads late.

    Under a transform, tensors leave the function only in its result: one that it puts into a module, list, dictionary
    or variable raises, and so does a result that holds tensors and is no pytree. What it puts into other objects, and
    what becomes of a tensor's `.data`, is not noticed. A result that shares its memory with an argument or another
    result cannot be changed in place. That torch refuses; in forward mode nothing does, and the tangent is wrong.

    What surrounds the call surrounds the recomputation: `fmp.autocast`, seeded dropout and other function modes,
    `torch.autocast`, the default device and dtype, and the state of torch's generators. Python's and numpy's `random`
    do not belong to it.

    The function must not change tensors in place that it did not make, nor call a module made by `torch.jit`. For
    modules with BatchNorm in training mode, use `fmp.functionalize(module).apply`, which returns the new statistics.

    Without a transform this is `torch.utils.checkpoint`, which stops recomputing where nothing more is needed. Under
    one the whole function runs again, but for the products of matrices and convolutions that no gradient reads, as the
    last one of most blocks; with another `determinism_check` than "default", `debug` or a `saveable`, all run. A tensor
    that is used several times inside and outside of the function may there get a gradient that differs in the last bit,
    since the uses inside are added up first. So may one for which torch has another formula if `torch.func.grad`
    records it, as of layer norm. Inside of a module that is applied with a seed, and with
    `determinism_check="bitwise"`, it works as under a transform. There torch adds up some linear layers in another
    order, and fills what is not contiguous with random numbers in another order. Nested forward mode runs the function
    as it is, and so does `vmap` where torch can map it, but not its derivative.

    One thread at a time runs a call of a module; others wait. Code that is not under remat must not use the module
    meanwhile in another thread.

    With `torch.compile`, put `remat` inside of a compiled loss that is differentiated outside, or around compiled
    blocks. In a transform that is compiled too, as in a whole train step, the function runs as it is: there the
    compiler decides what to keep. The compiler honors `saveable`; of what has a name it keeps that value, and offloads
    none. It traces the function once, so that side effects happen once, and nothing is checked or shown there.

    Args:
        fn: Any function, an `nn.Module`, or a static or class method. Without it, remat returns a decorator.
        saveable: What to keep all the same; one of `fmp.saveable`, or a function `(op, args) -> bool`.
        preserve_rng_state: Whether the recomputation draws the same random numbers from torch's generators.
        determinism_check: What must be the same the second time: "default" shapes, dtypes and devices, "bitwise" also
            the results' bits, for which they are kept, or "none". Without a transform, the first is asked of what
            autograd saves, else of the results.
        debug: Whether an error because of something else the second time shows the operators of both passes.
        **unknown: Must be empty; jax's `policy` is answered with `saveable`.

    Returns:
        A function with `fn`'s arguments.

    Raises:
        TypeError: If `fn` or `saveable` cannot be called, there are unknown arguments, or `fn` is a generator or async
            function; when called, if it reaches a module from FSDP, or under a transform one from DDP.
        ValueError: If `determinism_check` is none of the three.
        RematError: When called or differentiated, if the function changes what it was given, reads a tracked tensor
            that cannot be found, leaves one elsewhere than in its result, or computes something else the second time.
            Without a transform, and unless `determinism_check="bitwise"`, the latter is torch's own
            `torch.utils.checkpoint.CheckpointError`.

    References:
        T. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; `jax.checkpoint`.

    Example:
        >>> @fmp.remat
        ... def block(x, w):
        ...     return torch.tanh(torch.tanh(x @ w) @ w)
        >>> def loss(w):
        ...     return block(block(torch.ones(2, 2), w), w).sum()
        >>> w = torch.full((2, 2), 0.1)
        >>> plain = lambda w: torch.tanh(torch.tanh(torch.tanh(torch.tanh(torch.ones(2, 2) @ w) @ w) @ w) @ w).sum()
        >>> torch.allclose(torch.func.grad(loss)(w), torch.func.grad(plain)(w))
        True
    """
    if unknown:
        advice = "; jax's policy is saveable here, one of fmp.saveable" if "policy" in unknown else ""
        raise TypeError(f"remat takes no {next(iter(unknown))!r}{advice}")
    if fn is None:
        options: dict[str, Any] = {"saveable": saveable, "preserve_rng_state": preserve_rng_state}
        return functools.partial(remat, **options, determinism_check=determinism_check, debug=debug)
    if isinstance(fn, staticmethod | classmethod):
        kind: Any = type(fn)
        return kind(remat(fn.__func__, saveable, preserve_rng_state, determinism_check, debug))
    if not callable(fn):
        raise TypeError(f"remat transforms a function, got {fn!r}")
    if is_unfinished(fn):
        raise TypeError(
            f"remat: {fn!r} is a generator or async function, which runs only after the call; pass one that returns"
        )
    check_saveable(saveable)
    if determinism_check not in get_args(DeterminismCheck):
        raise ValueError(f"determinism_check must be one of {get_args(DeterminismCheck)}, got {determinism_check!r}")
    usefulness = Usefulness()
    uses_transforms, keeps_all = False, isinstance(saveable, Everything)
    passes = functools.partial(passes_of, saveable)

    @functools.wraps(fn, _compat.described_by(fn), updated=())
    @_compat.compiled_on_its_own
    def remat_fn(*args: Any, **kwargs: Any) -> Any:
        nonlocal uses_transforms
        if torch.compiler.is_compiling():
            if keeps_all or not torch.is_grad_enabled() or _compat.tracing_a_transform():
                return fn(*args, **kwargs)
            return traced(fn, args, kwargs, saveable, passes)
        if keeps_all or not torch.is_grad_enabled() or _forward_mode_is_nested():
            return fn(*args, **kwargs)
        capture = Capture((fn, args, kwargs))
        if capture.is_lazy:  # this call makes its parameters
            return fn(*args, **kwargs)
        kept = None if isinstance(saveable, Nothing) else Kept(saveable)
        # These need what torch.utils.checkpoint does not offer.
        special = uses_transforms or determinism_check == "bitwise" or not _compat.saved_tensors_hooks_allowed()
        if not special and not _compat.transform_active():
            try:
                return checkpointed(capture, preserve_rng_state, determinism_check, debug, kept)
            except HooksRefused:
                uses_transforms = True
        leaves_out = kept is None and determinism_check == "default" and not debug
        unread = Unread(usefulness) if leaves_out else None
        return _under_transforms(capture, preserve_rng_state, determinism_check, debug, kept, unread)

    return remat_fn


def _under_transforms(
    capture: Capture,
    preserve_rng_state: bool,
    determinism_check: DeterminismCheck,
    debug: bool,
    kept: Kept | None,
    unread: Unread | None,
) -> Any:
    check_layouts(capture)
    start = random_state(capture.tensors, capture.generators)
    ambient = Ambient(start if preserve_rng_state else None)
    operands = [*capture.tensors, *ambient.seeds]
    kinds = _compat.transforms()
    function, args, kwargs = capture.value
    if not operands or not _is_differentiated(kinds, capture.tensors) or _is_mapped_sparse(kinds, capture.tensors):
        with capture.exclusive():
            return function(*args, **kwargs)
    call = UserCall(capture, ambient, Determinism(determinism_check), kept, unread, kinds, debug)
    try:
        result = unchangeable(invoke(call, operands), operands)
    except RematError:
        raise
    except RuntimeError as error:
        check_no_autograd_inside(error)
        if _compat.VMAP not in kinds or isinstance(error, torch.OutOfMemoryError):
            raise
        # torch can map some functions, such as nn.GRUCell, but not their derivatives.
        set_random_state(start)
        return function(*args, **kwargs)
    ambient.settle(call.draws)
    if preserve_rng_state:
        check_devices(start)
    if capture.left:
        result, left = result
        capture.leave(left)
    capture.forget()
    return result


def _is_differentiated(kinds: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    is_mapped_only = all(kind == _compat.VMAP for kind in kinds) and not _compat.forward_mode_active()
    return not is_mapped_only or bool(tracked(tensors))


def _is_mapped_sparse(kinds: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Says whether torch could map the function, but not its derivative."""
    return _compat.VMAP in kinds and any(tensor.layout == torch.sparse_coo for tensor in tensors)


def _forward_mode_is_nested() -> bool:
    """Says whether forward mode is active in a way that torch.autograd.Function cannot follow (pytorch#197867)."""
    if not _compat.forward_mode_active():
        return False
    levels = _compat.transforms()
    return levels.count(_compat.JVP) != 1
