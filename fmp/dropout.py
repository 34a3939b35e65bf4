"""Dropout from a seed: a mode under which a module's random draws are a pure function of one integer.

torch's generators are global state, which `torch.compile` and `torch.func.vmap` will not let a function seed. Inside
`SeededRandomness` each draw takes its numbers from `fmp.random` instead, under a seed of its own: that of the mode
together with the number of draws made so far. What no mode can reach (the dropout inside `nn.LSTM`) and what has no
seeded form here raises, so nothing random escapes the seed silently.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any, Never

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fmp import random
from fmp.dtypes import full_precision

# Seeds are derived for this many draws at once: one derivation costs a few dozen tiny operations, whatever its size.
_BLOCK = 16


class SeededRandomness(TorchFunctionMode):
    """Takes the random numbers of every torch function called inside from a seed.

    Covered: all dropout functions, in place or not; the dropout of `scaled_dot_product_attention`, for which the
    attention weights are written out, in float32 or wider; `multi_head_attention_forward`; `rrelu`, `gumbel_softmax`,
    `bernoulli`, `bernoulli_`, `exponential_`, `rand`, `randn` and their `_like` forms. Other random functions raise.

    Args:
        seed: An integer, or i64[].
        calls: How many draws came before, to go on in the middle: `SeededRandomness(mode.seed, mode.calls)`
            draws what `mode` would draw next.

    Raises:
        TypeError: If `seed` is not an integer or an integer tensor.
        ValueError: If `seed` has dimensions.

    Example:
        >>> x = torch.ones(1000)
        >>> with SeededRandomness(7):
        ...     first, second = torch.nn.functional.dropout(x), torch.nn.functional.dropout(x)
        >>> with SeededRandomness(7):
        ...     again = torch.nn.functional.dropout(x)
        >>> torch.equal(first, again), torch.equal(first, second)
        (True, False)
    """

    def __init__(self, seed: random.Seed, calls: int = 0):
        super().__init__()
        self.seed = random.as_seed(seed)
        self.calls = calls
        self._block: tuple[int, tuple[torch.Tensor, ...]] = (-1, ())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs one torch function."""
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, *args, **(kwargs or {}))

    def next_seed(self) -> torch.Tensor:
        """Derives the seed of the next draw."""
        number, place = divmod(self.calls, _BLOCK)
        if self._block[0] != number:
            calls = torch.arange(number * _BLOCK, (number + 1) * _BLOCK, device=self.seed.device)
            self._block = (number, random.fold_in(self.seed, calls).unbind(-1))
        self.calls += 1
        return self._block[1][place]


def _dropout(
    mode: SeededRandomness, input: torch.Tensor, p: float, train: bool, *, channels: bool = False, inplace: bool = False
) -> torch.Tensor:
    if not train or p == 0.0:
        return input
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    output = torch.where(_keep(mode, input, p, channels), input * scale, 0.0)
    return input.copy_(output) if inplace else output


def _alpha_dropout(
    mode: SeededRandomness, input: torch.Tensor, p: float, train: bool, *, channels: bool = False, inplace: bool = False
) -> torch.Tensor:
    """Dropout that keeps mean and variance (Klambauer et al., Self-Normalizing Neural Networks, arXiv 1706.02515)."""
    if not train or p == 0.0:
        return input
    if p == 1.0:
        return _dropout(mode, input, p, train, channels=channels, inplace=inplace)
    alpha = 1.7580993408473766
    scale = 1.0 / math.sqrt((alpha**2 * p + 1.0) * (1.0 - p))
    shift = alpha * scale * p
    output = torch.where(_keep(mode, input, p, channels), input * scale + shift, shift - alpha * scale)
    return input.copy_(output) if inplace else output


def _keep(mode: SeededRandomness, input: torch.Tensor, p: float, channels: bool) -> torch.Tensor:
    if channels and input.ndim < 2:
        raise ValueError(f"feature dropout needs an input of 2 or more dimensions, got {input.ndim}")
    shape = (*input.shape[:2], *[1] * (input.ndim - 2)) if channels else input.shape
    return random.keep_mask(mode.next_seed(), shape, p, device=input.device)


def _attention(
    mode: SeededRandomness,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask must be None with is_causal=True")
    full = full_precision(query.dtype)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()

    scores = query.to(full) @ key.to(full).transpose(-2, -1) * (scale or 1.0 / math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        masked = attn_mask.logical_not() if attn_mask.dtype == torch.bool else None
        scores = scores + attn_mask.to(full) if masked is None else scores.masked_fill(masked, -math.inf)
    # A query that may look at nothing gets zeros. Softmax must not see it, or its gradient is NaN.
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return (_dropout(mode, weights, dropout_p, True) @ value.to(full)).to(query.dtype)


def _rrelu(
    mode: SeededRandomness,
    input: torch.Tensor,
    lower: float = 1.0 / 8.0,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    *,
    inplace: bool = False,
) -> torch.Tensor:
    if training:
        slope = random.uniform(mode.next_seed(), input.shape, dtype=input.dtype, device=input.device)
        slope = slope * (upper - lower) + lower
    else:
        slope = (lower + upper) / 2.0
    output = torch.where(input >= 0.0, input, input * slope)
    return input.copy_(output) if inplace else output


def _bernoulli(
    mode: SeededRandomness,
    input: torch.Tensor,
    p: float | torch.Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    _refuse_generator(torch.bernoulli, generator)
    if p is None:
        p = 0.5 if inplace else input
    number = random.uniform(mode.next_seed(), input.shape, device=input.device)
    ones = number < p
    return input.copy_(ones) if inplace else ones.to(input.dtype)


def _exponential_(
    mode: SeededRandomness, input: torch.Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    _refuse_generator(torch.Tensor.exponential_, generator)
    return input.copy_(random.exponential(mode.next_seed(), input.shape, device=input.device) / lambd)


def _filled(
    draw: Callable[..., torch.Tensor],
    make: Callable[..., torch.Tensor],
    mode: SeededRandomness,
    *args: Any,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Draws numbers in the shape, dtype and place that `torch.empty` or `torch.empty_like` gives to the arguments."""
    _refuse_generator(draw, generator)
    form = make(*args, **kwargs)
    return draw(mode.next_seed(), form.shape, dtype=form.dtype, device=form.device)


def _recurrent(func: Callable[..., Any], mode: SeededRandomness, *args: Any) -> Any:
    # Padded input: (input, hx, params, has_biases, ...); packed: (data, batch_sizes, hx, params, has_biases, ...).
    rest = args[4:] if isinstance(args[3], bool) else args[5:]
    num_layers, dropout, train = rest[:3]
    if train and dropout > 0.0 and num_layers > 1:
        raise ValueError(
            f"torch.{func.__name__} draws its mask (dropout={dropout}) where no seed reaches; set dropout=0 and "
            "put nn.Dropout between single-layer modules, or call the model without seed"
        )
    return func(*args)


def _refused(func: Callable[..., Any], mode: SeededRandomness, *args: Any, **kwargs: Any) -> Never:
    raise ValueError(
        f"{func.__name__} has no seeded form; draw with torch.rand, torch.randn, torch.rand_like or torch.randn_like, "
        "pass the numbers in as an argument, or call the model without seed"
    )


def _refuse_generator(func: Callable[..., Any], generator: torch.Generator | None) -> None:
    if generator is not None:
        raise ValueError(f"{func.__name__}: a generator and a seed exclude each other; leave one out")


def _inside(body: Callable[..., Any], mode: SeededRandomness, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return body(*args, **kwargs)


def _body(func: types.FunctionType) -> types.FunctionType:
    """Copies a function of torch.nn.functional without its check for overrides.

    A mode is off while it handles a function; turned on again, the function's first act would be to hand itself to
    the mode once more. Without that check, the mode reaches what the function calls.
    """
    globals_without_check = func.__globals__ | {
        name: _no_override for name in func.__code__.co_names if name.startswith("has_torch_function")
    }
    return types.FunctionType(func.__code__, globals_without_check, func.__name__, func.__defaults__, func.__closure__)


def _no_override(*args: Any) -> bool:
    return False


def _unflatten(mode: SeededRandomness, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # Inside any mode, torch.compile cannot trace the method; this function is the same.
    return torch.unflatten(input, *args, **kwargs)


_COMPOSITES: list[Any] = [
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.rrelu,
    F.gumbel_softmax,
    F.multi_head_attention_forward,
]
_WITHOUT_SEED: list[Any] = [
    torch.native_dropout,
    torch.binomial,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.randint,
    torch.randint_like,
    torch.randperm,
    torch.Tensor.cauchy_,
    torch.Tensor.geometric_,
    torch.Tensor.log_normal_,
    torch.Tensor.multinomial,
    torch.Tensor.normal_,
    torch.Tensor.random_,
    torch.Tensor.uniform_,
    F.fractional_max_pool2d_with_indices,
    F.fractional_max_pool3d_with_indices,
]
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **{func: functools.partial(_inside, _body(func)) for func in _COMPOSITES},
    **{func: functools.partial(_refused, func) for func in _WITHOUT_SEED},
    **{func: functools.partial(_recurrent, func) for func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    torch.dropout: _dropout,
    torch.dropout_: functools.partial(_dropout, inplace=True),
    torch.feature_dropout: functools.partial(_dropout, channels=True),
    torch.feature_dropout_: functools.partial(_dropout, channels=True, inplace=True),
    torch.alpha_dropout: _alpha_dropout,
    torch.alpha_dropout_: functools.partial(_alpha_dropout, inplace=True),
    torch.feature_alpha_dropout: functools.partial(_alpha_dropout, channels=True),
    torch.feature_alpha_dropout_: functools.partial(_alpha_dropout, channels=True, inplace=True),
    F.scaled_dot_product_attention: _attention,
    torch.rrelu: _rrelu,
    torch.rrelu_: functools.partial(_rrelu, inplace=True),
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: functools.partial(_bernoulli, inplace=True),
    torch.Tensor.exponential_: _exponential_,
    torch.rand: functools.partial(_filled, random.uniform, torch.empty),
    torch.rand_like: functools.partial(_filled, random.uniform, torch.empty_like),
    torch.randn: functools.partial(_filled, random.normal, torch.empty),
    torch.randn_like: functools.partial(_filled, random.normal, torch.empty_like),
    torch.Tensor.unflatten: _unflatten,
}
