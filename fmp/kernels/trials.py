"""Small problems on which each kernel is compared with torch's operators, bit for bit.

All numbers have few digits. Then products are exact, and whether a compiler contracts a product and a sum changes
nothing: the same bits come out of every correct order of operations. Among them are subnormal numbers, odd sizes and
tensors that begin at odd addresses.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fmp.kernels import adam, loss_scale, multi_tensor, sgd
from fmp.master import FORMS

Tensor = torch.Tensor

_SIZES = (5, 0, 137, 1030)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SUBNORMAL = 2.0**-140
# By the form, the dtypes of gradients and of casts or parameters.
_F32, _F16, _BF16 = _DTYPES
_FORMATS: dict[str | None, Sequence[tuple[torch.dtype, torch.dtype]]] = {
    None: ((_F32, _F16), (_F16, _F16), (_BF16, _BF16)),
    "remainder": ((_F32, _BF16), (_BF16, _BF16)),
    "stochastic": ((_F32, _F16), (_F32, _BF16), (_F16, _F16), (_BF16, _BF16)),
}


def _numbers(size: int, device: torch.device, dtype: torch.dtype = torch.float32, *, step: int = 7) -> Tensor:
    """Makes numbers of five bits and both signs, in memory that begins one element after an even address."""
    whole = torch.arange(size + 1, device=device) * step % 31 - 15
    numbers = (whole.to(torch.float32) / 8.0).to(dtype)[1:]
    if dtype == torch.float32 and size:
        numbers[-1] = _SUBNORMAL
    return numbers


def _every_dtype(device: torch.device) -> list[Tensor]:
    return [_numbers(size, device, dtype) for dtype in _DTYPES for size in _SIZES]


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    squares = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).square()
    return squares.sum().sqrt().to(torch.float32)


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
        for one, other in zip(found, expected, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _scale(device: torch.device) -> bool:
    given = _every_dtype(device)
    for divisor in (4.0, 3.0):
        scale = torch.full((), divisor, device=device)
        expected = [tensor.to(torch.float32) / scale for tensor in given]
        found, norm, finite = multi_tensor.unscale(given, scale)
        measured = multi_tensor.measure(given, scale)
        if not _same([*found, *measured, finite], [*expected, norm, finite, torch.ones_like(finite)]):
            return False
        if divisor == 4.0 and not _same([norm], [_norm(expected)]):
            return False
    for bad in (float("inf"), float("nan")):
        given[2][-1] = bad
        if multi_tensor.measure(given).finite:
            return False
    return True


def _axpby(device: torch.device) -> bool:
    xs = _every_dtype(device)
    ys = [_numbers(x.numel(), device, step=11) for x in xs]
    ys[1] = ys[1].to(torch.bfloat16)
    found, norm, finite = multi_tensor.axpby(0.5, xs, -1.25, ys)
    expected = [0.5 * x.to(torch.float32) + -1.25 * y.to(torch.float32) for x, y in zip(xs, ys, strict=True)]
    return _same([*found, norm, finite], [*expected, _norm(expected), torch.ones_like(finite)])


def _optimizer(
    device: torch.device, form: str | None, run: Callable[..., None], update: Callable[..., list[Tensor]]
) -> bool:
    """Compares steps of an optimizer, one of which is skipped.

    Args:
        device: Where.
        form: The form of the parameters; None for float32 and casts.
        run: `run(gradients, params, first, second, low, scale=, clip=, finite=, form=, seeds=)` overwrites.
        update: `update(gradient, param, first, second)` returns the new parameter and moments.
    """
    scale, clip = torch.full((), 0.25, device=device), torch.full((), 0.5, device=device)
    seeds = torch.arange(len(_SIZES), device=device) * 3**38 - 2**60 if form == "stochastic" else None
    options = {"scale": scale, "clip": clip, "form": form, "seeds": seeds}
    for grad_dtype, dtype in _FORMATS[form]:
        gradients = [_numbers(size, device, grad_dtype) for size in _SIZES]
        params, low = _stored([_numbers(size, device, step=11) for size in _SIZES], form, dtype, seeds)
        full = params if form is None else list(map(FORMS[form].merge, params, low))
        first = [_numbers(size, device, step=13) for size in _SIZES]
        # Squares of the root that Adam takes, which then is exact.
        wide = [gradient.to(torch.float32) * scale * clip for gradient in gradients]
        second = [_shifted(2.0 * (2.0 * grad.abs().ceil()).square() - grad.square()) for grad in wide]
        expected = [list(column) for column in zip(*map(update, wide, full, first, second), strict=True)]
        after = [*_stored(expected[0], form, dtype, seeds), *expected[1:]]
        before = [
            [None if leaf is None else leaf.clone() for leaf in column] for column in (params, low, first, second)
        ]
        for finite, wanted in ((False, before), (True, after)):
            run(gradients, params, first, second, low, finite=torch.full((), finite, device=device), **options)
            if not all(map(_same, map(_there, (params, low, first, second)), map(_there, wanted))):
                return False
    return True


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


def _adam(device: torch.device, form: str | None = None) -> bool:
    first_weight, second_weight, step_size, eps, shrink = 0.25, 0.5, -0.3, 0.125, -0.0625
    row = [first_weight, second_weight, 1.0 - second_weight, step_size, eps, shrink, 0.0, 0.0]
    columns = [torch.full((len(_SIZES),), number, device=device) for number in row]
    coefficients = torch.stack(columns, dim=1)

    def run(gradients: list[Tensor], *columns: list[Tensor], **options: Any) -> None:
        params, first, second, low = columns
        flags = [adam.DECOUPLED_DECAY] * len(gradients)
        adam.step(gradients, params, first, second, low, flags=flags, coefficients=coefficients, **options)

    def update(gradient: Tensor, param: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
        first = first + first_weight * (gradient - first)
        second = second * (1.0 - second_weight) + second_weight * gradient * gradient
        moved = first / (second.sqrt() + eps) * step_size
        return [param + (moved + shrink * param), first, second]

    return _optimizer(device, form, run, update)


def _sgd(device: torch.device, form: str | None = None) -> bool:
    negated_rate, momentum, gain, decay = -0.3, 0.5, 0.75, 0.25
    columns = [torch.full((len(_SIZES),), number, device=device) for number in (negated_rate, momentum, gain, decay)]
    coefficients = torch.stack(columns, dim=1)

    def run(
        gradients: list[Tensor],
        params: list[Tensor],
        first: list[Tensor],
        _: object,
        low: list[Tensor],
        **options: Any,
    ) -> None:
        flags = [sgd.DECAY | sgd.NESTEROV] * len(gradients)
        sgd.step(gradients, params, first, low, flags=flags, coefficients=coefficients, **options)

    def update(gradient: Tensor, param: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
        gradient = gradient + decay * param
        first = momentum * first + gradient * gain
        return [param + (gradient + momentum * first) * negated_rate, first, second]

    return _optimizer(device, form, run, update)


def _loss_scale(device: torch.device) -> bool:
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "min_scale": 1.0, "max_scale": 48.0}
    cases = [(False, 16.0, 1, 8.0, 0), (False, 1.5, 2, 1.0, 0), (True, 16.0, 1, 16.0, 2), (True, 32.0, 2, 48.0, 0)]
    for finite, scale, count, new_scale, new_count in cases:
        given = torch.full((), finite, device=device), torch.full((), scale, device=device)
        found = loss_scale.adjust(*given, torch.full((), count, dtype=torch.int32, device=device), **rule)
        if [part.item() for part in found] != [new_scale, new_count]:
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
}
"""By source, and by the form of parameters: says whether the kernels agree with torch on a device."""
