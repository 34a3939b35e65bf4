"""`fmp.df11.frozen`: functions of compressed weights, which are decoded for the call and again for its gradient."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fmp import _compat
from fmp.df11.trees import decompress
from fmp.rematerialization.guards import DeterminismCheck
from fmp.rematerialization.saveable import Dots, Names, Nothing, Saveable, check_saveable, nothing
from fmp.rematerialization.transform import remat

Fn = TypeVar("Fn", bound=Callable[..., Any])

_aten: Any = torch.ops.aten
_decode: Any = torch.ops.fmp.df11_decode.default
# What these return are the weights, as decoded, copied or cast.
_WEIGHTS = frozenset((_decode, _aten.clone.default, _aten._to_copy.default))


def frozen(
    fn: Callable[..., Any] | None = None,
    saveable: Saveable = nothing,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
) -> Callable[..., Any]:
    """Transforms a function of weights into one that takes them compressed, and never keeps them decoded.

    forward:   weights = decode(compressed);  y = fn(weights, x)                 the weights are freed
    backward:  weights = decode(compressed);  y = fn(weights, x), dx = dy/dx     they are freed again

    It is `fmp.remat` of the function after `fmp.df11.decompress`. So values are those with bf16 weights, and so are all
    gradients: of inputs, adapters, and weights that are not compressed. Whatever `fmp.remat` offers holds here:
    transforms, closures, policies and seeds around, `torch.compile`.

    Use it on each block of a model: the weights of one block at a time take memory, all of them while the block runs.
    Blocks inside of a frozen block get decoded weights, so put `fmp.remat`, not `frozen`, around several of them.

    Args:
        fn: Any function, or an `nn.Module`. A `CompressedTensor` anywhere in its arguments, those of a
            `functools.partial` included, arrives as a tensor; one that is there twice is decoded once. Those that the
            function closes over stay as they are. Without it, frozen returns a decorator.
        saveable: What to keep besides the arguments, as for `fmp.remat`. Decoded weights, and what only copies or casts
            a tensor, are never kept, unless by a name given to them.
        preserve_rng_state: As for `fmp.remat`.
        determinism_check: As for `fmp.remat`.
        debug: As for `fmp.remat`.

    Returns:
        A function with `fn`'s arguments.

    Raises:
        TypeError: If `fn` or `saveable` cannot be called.
        ValueError: If `determinism_check` is unknown; when called, if a node is damaged or mapped over by `vmap`.
        RematError: As for `fmp.remat`.

    References:
        T. Zhang et al., 70% Size, 100% Accuracy (DFloat11), arXiv 2504.11651; T. Chen et al., Training Deep Nets with
        Sublinear Memory Cost, arXiv 1604.06174.

    Example:
        >>> @fmp.df11.frozen
        ... def block(weights, x, scale):
        ...     return torch.tanh(x @ weights["kernel"]) * scale
        >>> weights = {"kernel": torch.full((64, 64), 0.01, dtype=torch.bfloat16)}
        >>> x, scale = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
        >>> loss = lambda weights, scale: block(weights, block(weights, x, scale), scale).sum()
        >>> plain, small = [torch.func.grad(loss, 1)(w, scale) for w in (weights, fmp.df11.compress(weights))]
        >>> torch.equal(plain, small)
        True
    """
    options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state, "debug": debug}
    options |= {"saveable": _without_weights(saveable), "determinism_check": determinism_check}
    return functools.partial(_frozen, options) if fn is None else _frozen(options, fn)


@dataclasses.dataclass(frozen=True)
class ButWeights:
    """Keeps what another policy keeps, without decoded weights, copies and casts.

    Attributes:
        saveable: The other policy.
    """

    saveable: Saveable

    def __call__(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Says whether what an operator returns is kept."""
        return op not in _WEIGHTS and self.saveable(op, args)


def _frozen(options: dict[str, Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(fn):
        raise TypeError(f"frozen transforms a function, got {fn!r}")
    bound_args, bound_kwargs = (fn.args, fn.keywords) if isinstance(fn, functools.partial) else ((), {})
    inner = fn.func if isinstance(fn, functools.partial) else fn

    @functools.wraps(fn, _compat.described_by(fn), updated=())
    def on_decoded(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = decompress(((*bound_args, *args), {**bound_kwargs, **kwargs}))
        return inner(*args, **kwargs)

    return remat(on_decoded, **options)


def _without_weights(saveable: Saveable) -> Saveable:
    check_saveable(saveable)
    # These choose no operator that decodes; remat knows them by their types.
    return saveable if isinstance(saveable, Nothing | Dots | Names) else ButWeights(saveable)
