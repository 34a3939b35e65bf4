"""Dropout from a seed: a mode under which a module's random draws are a pure function of one integer.

torch's generators are global state, which `torch.compile` and `torch.func.vmap` will not let a function seed. Inside
`SeededRandomness` each draw takes its numbers from `fmp.random` instead, under a seed of its own: that of the mode
together with the number of draws made so far. What has no seeded form here raises, as does the dropout inside
`nn.LSTM`. What escapes even that is listed there.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fmp import _compat, random
from fmp._composite import body, custom_function, inside, run_as
from fmp.dtypes import full_precision

# Seeds are derived for this many draws at once: one derivation costs a few dozen tiny operations, whatever its size.
_BLOCK = 16
# Keeps the seeds of the draws apart from those that a user folds out of the same seed: digits of pi.
_DRAWS = 0x082EFA98EC4E6C89


class SeededRandomness(TorchFunctionMode):
    """Takes the random numbers of every torch function called inside from a seed.

    Covered: the dropout functions of `torch.nn.functional`, in place or not; `multi_head_attention_forward`; the
    dropout of `scaled_dot_product_attention`, for which the attention weights are written out, in float32 or wider;
    `rrelu`, `gumbel_softmax`, `bernoulli`, `bernoulli_`, `rand` and `randn`; the operators of these names in
    `torch.ops.aten`, so modules of `torch.export` too. Every other random function of torch raises, and so does every
    operator with the tag `nondeterministic_seeded`.

    Inside of `fmp.random.part_of_batch`, as in a step with a layout, each tensor gets the numbers of its part of the
    batch: its first dimension is taken for that of the batch.

    Some code no mode is shown, so it can be neither seeded nor refused. It goes on drawing from torch's generator:

    - Functions and modules of `torch.jit.script`, and custom operators without that tag.
    - The bodies of `torch.cond`, `map`, `scan`, `while_loop` and other higher-order operators; in compiled code also
      what `torch.utils.checkpoint` runs. The backward pass of a custom `torch.autograd.Function`.
    - In compiled code, calls of `torch.rand_like`, `randn_like`, `randint_like`, `normal`, `dropout_` and its kin, and
      of functions named with an underscore in front or found in `torch._C`, on which the distributions `Gamma`,
      `Beta` and `Dirichlet` and what is made of them rest. Run eagerly, all these raise.
    - In code compiled by torch below 2.13, also `torch.rand`, `randn`, `randint` and `randperm`.

    Args:
        seed: An integer, or i64[].
        calls: How many draws came before, to go on in the middle: `SeededRandomness(mode.seed, mode.calls)`
            draws what `mode` would draw next.

    Raises:
        TypeError: If `seed` is not an integer or an integer tensor.
        ValueError: If `seed` has dimensions or takes more than 64 bits.

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
        self._stream = random.fold_in(self.seed, _DRAWS)
        self._block: tuple[int, tuple[torch.Tensor, ...]] = (-1, ())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs one torch function."""
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:
            # Inside any mode, torch.compile cannot trace the method. The function is the same.
            return torch.unflatten(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is None and isinstance(func, _compat.OpOverload | _compat.OpOverloadPacket):
            return _operator(func, self, *args, **kwargs)
        return func(*args, **kwargs) if handler is None else handler(self, *args, **kwargs)

    def next_seed(self) -> torch.Tensor:
        """Derives the seed of the next draw."""
        number, place = divmod(self.calls, _BLOCK)
        if self._block[0] != number:
            calls = torch.arange(number * _BLOCK, (number + 1) * _BLOCK, device=self.seed.device)
            self._block = (number, random.fold_in(self._stream, calls).unbind(-1))
        self.calls += 1
        return self._block[1][place]


def _dropout(
    mode: SeededRandomness, input: torch.Tensor, p: float, train: bool, *, channels: bool = False
) -> torch.Tensor:
    if not train or p == 0.0:
        return input
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return torch.where(_keep(mode, input, p, channels), input * scale, 0.0)


def _alpha_dropout(
    mode: SeededRandomness, input: torch.Tensor, p: float, train: bool, *, channels: bool = False
) -> torch.Tensor:
    """Dropout that keeps mean and variance (Klambauer et al., Self-Normalizing Neural Networks, arXiv 1706.02515)."""
    if not train or p in (0.0, 1.0):
        return _dropout(mode, input, p, train, channels=channels)
    alpha = 1.7580993408473766
    scale = 1.0 / math.sqrt((alpha**2 * p + 1.0) * (1.0 - p))
    shift = alpha * scale * p
    return torch.where(_keep(mode, input, p, channels), input * scale + shift, shift - alpha * scale)


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

    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.to(full) @ key.to(full).transpose(-2, -1) * scale
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
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    _refuse_generator("rrelu", generator)
    if not training:
        return torch.rrelu(input, lower, upper, training)
    number = random.uniform(mode.next_seed(), input.shape, dtype=input.dtype, device=input.device)
    return torch.where(input >= 0.0, input, input * (lower + (upper - lower) * number))


def _gumbel_softmax(
    mode: SeededRandomness,
    logits: torch.Tensor,
    tau: float = 1.0,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
) -> torch.Tensor:
    noise = random.exponential(mode.next_seed(), logits.shape, device=logits.device).log().to(logits.dtype)
    soft = ((logits - noise) / tau).softmax(dim)
    if not hard:
        return soft
    one_hot = torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return one_hot - soft.detach() + soft  # straight through


def _bernoulli(
    mode: SeededRandomness,
    input: torch.Tensor,
    p: float | torch.Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    _refuse_generator("bernoulli", generator)
    number = random.uniform(mode.next_seed(), input.shape, device=input.device)
    drawn = (number < (input if p is None else p)).to(input.dtype)
    return drawn if out is None else out.resize_(drawn.shape).copy_(drawn)


def _bernoulli_(
    mode: SeededRandomness, input: torch.Tensor, p: float | torch.Tensor = 0.5, **options: Any
) -> torch.Tensor:
    return input.copy_(_bernoulli(mode, input, p, **options))


def _factory(
    name: str,
    draw: Callable[..., torch.Tensor],
    mode: SeededRandomness,
    /,
    *args: Any,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
    requires_grad: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    _refuse_generator(name, generator)
    if kwargs.get("names") or kwargs.get("pin_memory"):
        raise ValueError(f"{name} with names or pin_memory cannot draw from a seed; set them on the result")
    form = torch.empty(*args, out=out, **kwargs)
    if not form.dtype.is_floating_point:
        raise ValueError(f"{name} draws only floating-point numbers from a seed, got dtype={form.dtype}")
    drawn = draw(mode.next_seed(), form.shape, dtype=form.dtype, device=form.device)
    drawn = drawn if out is None else out.copy_(drawn)
    return drawn.requires_grad_() if requires_grad else drawn


def _recurrent(func: Callable[..., Any], mode: SeededRandomness, /, *args: Any) -> Any:
    # Padded input: (input, hx, params, has_biases, ...); packed: (data, batch_sizes, hx, params, has_biases, ...).
    num_layers, dropout, train = (args[4:] if isinstance(args[3], bool) else args[5:])[:3]
    if train and dropout > 0.0 and num_layers > 1:
        raise ValueError(
            f"torch.{func.__name__} draws its mask (dropout={dropout}) where no seed reaches; set dropout=0 and "
            "put nn.Dropout between single-layer modules, or call the model without seed"
        )
    return func(*args)


def _operator(func: Any, mode: SeededRandomness, /, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator that draws nothing, at least with these arguments."""
    draws, switches = _randomness(func)
    off = [(args[place] if len(args) > place else kwargs.get(name, default)) == 0 for place, name, default in switches]
    return _refused(func.__name__, mode) if draws and not any(off) else func(*args, **kwargs)


@_compat.constant_while_tracing
def _randomness(operator: Any) -> tuple[bool, list[tuple[int, str, Any]]]:
    """Whether an operator may draw, and the place, name and default of each argument that can turn that off."""
    form, names = _forms(operator)[-1], ("dropout_p", "dropout", "train", "training")
    if torch.Tag.nondeterministic_seeded not in form.tags:
        return False, []
    arguments = enumerate(form._schema.arguments)
    return True, [(i, item.name, item.default_value) for i, item in arguments if item.name in names]


def _forms(operator: Any) -> list[Any]:
    """An operator and its overloads, of which the first one comes last."""
    return [operator, *(getattr(operator, name) for name in reversed(getattr(operator, "overloads", list)()))]


def _drawing_functions() -> dict[Any, Callable[..., Any]]:
    """Finds the functions of torch that stand for an operator that may draw."""
    owners = (torch, torch.Tensor, _compat.NN_FUNCTIONS)
    values = [getattr(owner, name) for owner in owners for name in dir(owner) if not name.startswith("__")]
    functions = [item for item in values if isinstance(item, types.BuiltinFunctionType | types.MethodDescriptorType)]
    operators = {func: getattr(torch.ops.aten, func.__name__, None) for func in functions}
    drawing = {func: operator for func, operator in operators.items() if operator and _randomness(operator)[0]}
    return {func: functools.partial(_operator, operator) for func, operator in drawing.items()}


def _refused(name: str, mode: SeededRandomness, /, *args: Any, **kwargs: Any) -> Never:
    raise ValueError(
        f"{name} cannot draw from a seed; draw with torch.rand or torch.randn, for example "
        "torch.randn(x.shape, dtype=x.dtype, device=x.device), use the dropout functions of torch.nn.functional, "
        "or call the model without seed"
    )


def _refuse_generator(name: str, generator: torch.Generator | None) -> None:
    if generator is not None:
        raise ValueError(f"{name}: a generator and a seed exclude each other; leave one out")


def _as_one_op(func: Any, handler: Callable[..., Any], mode: SeededRandomness, /, *args: Any, **kwargs: Any) -> Any:
    """Runs the seeded form of a function; a mode that casts op by op takes it for that function."""
    return run_as(func, functools.partial(handler, mode), *args, **kwargs)


def _all(func: Any) -> list[Any]:
    """A function of torch, and the operator of its name with its overloads."""
    return [func, *_forms(getattr(torch.ops.aten, func.__name__))]


def _out_of_place(function: types.FunctionType, mode: SeededRandomness, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Likewise, but changes an input in place only at the end: the compiler hides in-place dropout from the mode."""
    place = function.__code__.co_varnames.index("inplace")
    inplace = args[place] if len(args) > place else kwargs.pop("inplace", False)
    output = inside(function, mode, *args[:place], **kwargs)
    return args[0].copy_(output) if inplace else output


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu)
_POOLS = (F.fractional_max_pool2d, F.fractional_max_pool3d)
_POOLS_WITH_INDICES = (F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices)
_INITIALIZERS = (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_)
# Each stands for the operator of its name as well.
_SEEDED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    torch.dropout: _dropout,
    torch.feature_dropout: functools.partial(_dropout, channels=True),
    torch.alpha_dropout: _alpha_dropout,
    torch.feature_alpha_dropout: functools.partial(_alpha_dropout, channels=True),
    torch.rrelu: _rrelu,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.rand: functools.partial(_factory, "rand", random.uniform),
    torch.randn: functools.partial(_factory, "randn", random.normal),
    **{func: functools.partial(_recurrent, func) for func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **_drawing_functions(),
    **{form: functools.partial(_as_one_op, func, handler) for func, handler in _SEEDED.items() for form in _all(func)},
    **{func: functools.partial(_out_of_place, body(func)) for func in _DROPOUTS},
    **{func: functools.partial(_refused, func.__name__) for func in (*_POOLS, *_POOLS_WITH_INDICES, *_INITIALIZERS)},
    F.multi_head_attention_forward: functools.partial(inside, body(F.multi_head_attention_forward)),
    F.gumbel_softmax: _gumbel_softmax,
    torch.Tensor.bernoulli: _bernoulli,
    torch.ops.higher_order.custom_function_call: custom_function,
}
