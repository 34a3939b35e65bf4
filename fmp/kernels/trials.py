"""Small problems on which each kernel is compared with torch's operators, bit for bit.

All numbers have few digits. Then products are exact, and whether a compiler contracts a product and a sum changes
nothing: the same bits come out of every correct order of operations. Among them are subnormal numbers, odd sizes, more
than one chunk, tensors that begin at odd addresses, and casts half way between two numbers and of NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fmp.kernels import adam, df11_trials, loss_scale, multi_tensor, sgd
from fmp.master import FORMS

Tensor = torch.Tensor

_SIZES = (5, 0, 137, 1030, multi_tensor.CHUNK + 137)
_F32, _F16, _BF16 = _DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SUBNORMAL = 2.0**-140
# By the form, the dtypes of gradients and of casts or parameters.
_FORMATS: dict[str | None, Sequence[tuple[torch.dtype, torch.dtype]]] = {
    None: ((_F32, _F16), (_F32, _BF16), (_F16, _F16), (_BF16, _BF16)),
    "remainder": ((_F32, _BF16), (_BF16, _BF16)),
    "stochastic": ((_F32, _F16), (_F32, _BF16), (_F16, _F16), (_BF16, _BF16)),
}
# Half way between two numbers of 16 bits, or between the largest one and infinity; and infinity.
_TIES = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-8, 2**-25, 3 * 2**-25]
_TIES += [65520.0, 511 * 2.0**119, float("inf")]
_FULL_NAN = 0x7FFFFFFF  # the bits of the NaN that a GPU makes; what is added to them runs over


def _numbers(size: int, device: torch.device, dtype: torch.dtype = torch.float32, *, step: int = 7) -> Tensor:
    """Makes numbers of five bits and both signs, in memory that begins one element after an even address."""
    whole = torch.arange(size + 1, device=device) * step % 31 - 15
    numbers = (whole.to(torch.float32) / 8.0).to(dtype)[1:]
    if dtype == torch.float32 and size:
        numbers[-1] = _SUBNORMAL
    return numbers


def _every_dtype(device: torch.device) -> list[Tensor]:
    """Makes tensors of every size and dtype. The largest begin where new memory does, so that packs can be written."""
    numbers = [_numbers(size, device, dtype) for dtype in _DTYPES for size in _SIZES]
    return [each.clone() if each.numel() == _SIZES[-1] else each for each in numbers]


def _number(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    squares = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).square()
    return squares.sum().sqrt().to(torch.float32)


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
        for one, other in zip(found, expected, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor, the same ones for every NaN."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), float("nan"))
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _scale(device: torch.device) -> bool:
    given = _every_dtype(device)
    for divisor in (4.0, 3.0):
        scale = _number(divisor, device)
        expected = [tensor.to(torch.float32) / scale for tensor in given]
        found, norm, finite = multi_tensor.unscale(given, scale)
        measured = multi_tensor.measure(given, scale)
        if not _same([*found, *measured, finite], [*expected, norm, finite, torch.ones_like(finite)]):
            return False
        if divisor == 4.0 and not _same([norm], [_norm(expected)]):
            return False
    many = list(_numbers(1100, device).unbind())  # more than `finish` has threads
    if not _same([multi_tensor.measure(many).norm], [_norm(many)]):
        return False
    places = range(len(_SIZES) - 1, len(given), len(_SIZES))
    for place, bad in zip(places, (float("inf"), float("-inf"), float("nan")), strict=True):
        spoilt = given[place].clone()
        spoilt[0] = bad  # its thread goes on to finite ones
        if multi_tensor.measure([*given[:place], spoilt, *given[place + 1 :]]).finite:
            return False
    return True


def _axpby(device: torch.device) -> bool:
    xs = _every_dtype(device)
    ys = [_numbers(x.numel(), device, step=11).clone() for x in xs]
    for wide in (2, 3):
        ys[wide] = ys[wide].to(torch.bfloat16)
    found, norm, finite = multi_tensor.axpby(0.5, xs, -1.25, ys)
    expected = [0.5 * x.to(torch.float32) + -1.25 * y.to(torch.float32) for x, y in zip(xs, ys, strict=True)]
    xs[-1][0] = float("nan")
    nan = multi_tensor.axpby(0.5, xs, -1.25, ys)[2]
    return _same([*found, norm, finite, ~nan], [*expected, _norm(expected), *[torch.ones_like(finite)] * 2])


def _optimizer(
    device: torch.device,
    form: str | None,
    decays: Sequence[float],
    run: Callable[..., None],
    update: Callable[..., list[Tensor]],
) -> bool:
    """Compares steps of an optimizer, one of which is skipped.

    Args:
        device: Where.
        form: The form of the parameters; None for float32 and casts.
        decays: For each row the factor of the parameter in its gradient.
        run: `run(gradients, params, first, second, low, scale=, clip=, finite=, form=, seeds=)` overwrites.
        update: `update(row, gradient, param, first, second)` returns the new parameter and moments. Its gradient has
            the decay in it.
    """
    ties = torch.tensor(_TIES, dtype=torch.float32, device=device)
    ties = _shifted(torch.cat([ties, torch.full_like(ties[:1], _FULL_NAN, dtype=torch.int32).view(torch.float32)]))
    still = torch.zeros_like(ties)
    seeds = torch.arange(len(_ROWS), device=device) * 3**38 - 2**60 if form == "stochastic" else None
    for index, (grad_dtype, dtype) in enumerate(_FORMATS[form]):
        # A factor that is absent is one.
        scale, clip = (_number(0.25, device), _number(0.5, device)) if index % 2 == 0 else (None, None)
        gradients = [*[_numbers(size, device, grad_dtype) for size in _SIZES], still.to(grad_dtype)]
        params, low = _stored([*[_numbers(size, device, step=11) for size in _SIZES], ties], form, dtype, seeds)
        full = params if form is None else list(map(FORMS[form].merge, params, low))
        first = [*[_numbers(size, device, step=13) for size in _SIZES], still.clone()]
        wide = [
            gradient.to(torch.float32) * (0.125 if scale is not None else 1.0) + (decay * param if decay else 0.0)
            for gradient, param, decay in zip(gradients, full, decays, strict=True)
        ]
        # Squares of the root that Adam takes, which then is exact.
        second = [_shifted(2.0 * (2.0 * grad.abs().ceil()).square() - grad.square()) for grad in wide]
        expected = [list(column) for column in zip(*map(update, _ROWS, wide, full, first, second), strict=True)]
        after = [*_stored(expected[0], form, dtype, seeds), *expected[1:]]
        before = [
            [None if leaf is None else leaf.clone() for leaf in column] for column in (params, low, first, second)
        ]
        on = True if index % 2 == 0 else None
        for finite, wanted in ((False, before), (on, after)):
            flag = None if finite is None else _number(finite, device, torch.bool)
            options = {"scale": scale, "clip": clip, "finite": flag, "form": form, "seeds": seeds}
            run(gradients, params, first, second, low, **options)
            if not all(map(_same, map(_there, (params, low, first, second)), map(_there, wanted))):
                return False
    return True


_ROWS = range(len(_SIZES) + 1)  # the last one has the ties


def _stored(full: list[Tensor], form: str | None, dtype: torch.dtype, seeds: Tensor | None) -> list[list[Any]]:
    """Makes what stands for float32 numbers, and what is beside it, in memory that begins where `_numbers` begin."""
    if form is None:
        pairs = [(param, param.to(dtype) if index else None) for index, param in enumerate(full)]
    else:
        own = [None] * len(full) if seeds is None else list(seeds)
        pairs = [FORMS[form].split(param, dtype, seed) for param, seed in zip(full, own, strict=True)]
    return [[None if leaf is None else _shifted(leaf) for leaf in column] for column in zip(*pairs, strict=True)]


def _shifted(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.new_zeros(1), tensor])[1:]


def _there(column: list[Any]) -> list[Tensor]:
    return [leaf for leaf in column if leaf is not None]


def _coefficients(columns: Sequence[float | Sequence[float]], device: torch.device) -> Tensor:
    """Makes f32[rows, columns] of numbers, or of a number for each row."""
    table = [column if isinstance(column, Sequence) else [column] * len(_ROWS) for column in columns]
    return torch.tensor(table, dtype=torch.float32, device=device).t().contiguous()


def _adam(device: torch.device, form: str | None = None) -> bool:
    second_weight, step_size, eps, shrink, decay = 0.5, -0.3, 0.125, -0.0625, 0.25
    first_weights = (0.25, 0.5, 0.75, 0.25, 0.75, 0.25)  # from 0.5 on, the mean is taken from its other end
    flags = [adam.COUPLED_DECAY, 0, 0, adam.DECOUPLED_DECAY, adam.COUPLED_DECAY, 0]
    row = (first_weights, second_weight, 1.0 - second_weight, step_size, eps, shrink, decay, 0.0)
    coefficients = _coefficients(row, device)

    def run(gradients: list[Tensor], *columns: list[Tensor], **options: Any) -> None:
        params, first, second, low = columns
        adam.step(gradients, params, first, second, low, flags=flags, coefficients=coefficients, **options)

    def update(row: int, gradient: Tensor, param: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
        first = first + first_weights[row] * (gradient - first)
        second = second * (1.0 - second_weight) + second_weight * gradient * gradient
        moved = first / (second.sqrt() + eps) * step_size
        if flags[row] & adam.DECOUPLED_DECAY:
            moved = moved + shrink * param
        return [param + moved, first, second]

    return _optimizer(device, form, [decay if flag & adam.COUPLED_DECAY else 0.0 for flag in flags], run, update)


def _sgd(device: torch.device, form: str | None = None) -> bool:
    negated_rate, momentum, gain, decay = -0.3, 0.5, 0.75, 0.25
    flags = [sgd.NESTEROV, 0, sgd.DECAY, sgd.DECAY | sgd.NESTEROV, 0, 0]
    coefficients = _coefficients((negated_rate, momentum, gain, decay), device)

    def run(
        has_momentum: bool,
        gradients: list[Tensor],
        params: list[Tensor],
        first: list[Tensor],
        _: object,
        low: list[Tensor],
        **options: Any,
    ) -> None:
        moments = first if has_momentum else None
        sgd.step(gradients, params, moments, low, flags=flags, coefficients=coefficients, **options)

    def update(
        has_momentum: bool, row: int, gradient: Tensor, param: Tensor, first: Tensor, second: Tensor
    ) -> list[Tensor]:
        direction = gradient
        if has_momentum:
            first = momentum * first + gradient * gain
            direction = gradient + momentum * first if flags[row] & sgd.NESTEROV else first
        return [param + direction * negated_rate, first, second]

    decays = [decay if flag & sgd.DECAY else 0.0 for flag in flags]
    return all(
        _optimizer(device, form, decays, partial(run, has_momentum), partial(update, has_momentum))
        for has_momentum in (True, False)
    )


def _loss_scale(device: torch.device) -> bool:
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "min_scale": 1.0, "max_scale": 48.0}
    cases = [
        (False, 16.0, 1, 8.0, 0),
        (False, 1.5, 2, 1.0, 0),
        (True, 16.0, 1, 16.0, 2),
        (True, 16.0, 2, 32.0, 0),
        (True, 16.0, 7, 32.0, 0),  # the interval was longer when this was counted
        (True, 32.0, 2, 48.0, 0),
    ]
    for finite, scale, count, new_scale, new_count in cases:
        given = _number(finite, device, torch.bool), _number(scale, device), _number(count, device, torch.int32)
        if [part.item() for part in loss_scale.adjust(*given, **rule)] != [new_scale, new_count]:
            return False
    return True


TRIALS: Mapping[str, Callable[[torch.device], bool]] = {
    "scale": _scale,
    "axpby": _axpby,
    "adam": _adam,
    "adam_remainder": partial(_adam, form="remainder"),
    "adam_stochastic": partial(_adam, form="stochastic"),
    "sgd": _sgd,
    "sgd_remainder": partial(_sgd, form="remainder"),
    "sgd_stochastic": partial(_sgd, form="stochastic"),
    "loss_scale": _loss_scale,
    "df11": df11_trials.native,
    "df11_published": df11_trials.published,
}
"""By source, and by the form of parameters: says whether the kernels agree with torch, or the codec, on a device."""
