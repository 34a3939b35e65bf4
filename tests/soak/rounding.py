"""How far apart two right results may lie, found by Monte Carlo arithmetic.

A program in a narrow dtype rounds after each op. Run in float64, with a random relative error of that size after each
op of the forward and the backward pass, the same program gives samples of what rounding alone can do to it, with
cancellation, conditioning and subnormal numbers. The spread of the samples is the tolerance, times a margin.

    out = out * (1 + 2u * r) + s * r'        r, r' uniform in [-1, 1]
    u = 2^-24, 2^-11 or 2^-8                 half a unit in the last place of f32, f16, bf16, and twice that for ops
                                             such as softmax, which round more than once
    s = 2^-24 in f16, else 0                 the distance of its subnormal numbers

References:
    Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 0.0}
SUBNORMAL = {torch.float32: 0.0, torch.float16: 2.0**-24, torch.bfloat16: 0.0, torch.float64: 0.0}
_NUMBERS = 2**14


class Rounding(TorchDispatchMode):
    """Disturbs each op's floating-point results as a rounding to `dtype` would."""

    def __init__(self, dtype: torch.dtype, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        noise = torch.empty(_NUMBERS, dtype=torch.float64).uniform_(-1.0, 1.0, generator=generator)
        self.factors = 1.0 + 2.0 * UNIT[dtype] * noise
        self.terms = SUBNORMAL[dtype] * noise.flip(0) if SUBNORMAL[dtype] else None
        self.places = random.Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one op and disturbs what it computes; views, and what is not float64, stay."""
        found = func(*args, **(kwargs or {}))
        several = isinstance(found, tuple | list)
        outs = list(found) if several else [found]
        returns = func._schema.returns
        for place, out in enumerate(outs):
            if not isinstance(out, torch.Tensor) or out.dtype != torch.float64:
                continue
            alias = returns[min(place, len(returns) - 1)].alias_info
            if alias is None:
                outs[place] = self._disturbed(out)
            elif alias.is_write:
                out.copy_(self._disturbed(out))
        return type(found)(outs) if several else outs[0]

    def _disturbed(self, out: Tensor) -> Tensor:
        # A piece of the noise: to draw it anew for each op would take most of the time.
        start = self.places.randrange(_NUMBERS - out.numel())
        piece = slice(start, start + out.numel())
        disturbed = out * self.factors[piece].view(out.shape)
        return disturbed if self.terms is None else disturbed + self.terms[piece].view(out.shape)


class Largest(TorchDispatchMode):
    """Notes the largest magnitude that any op computes."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one op and looks at what it computes."""
        found = func(*args, **(kwargs or {}))
        for out in found if isinstance(found, tuple | list) else [found]:
            if isinstance(out, torch.Tensor) and out.is_floating_point() and out.numel():
                self.value = max(self.value, float(out.abs().max()))
        return found


def excess(
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    sample: Callable[[int], dict[str, Tensor]],
    *,
    floor: Callable[[str], Any],
    margin: float = 6.0,
) -> str | None:
    """Says which of some tensors lies further from the exact one than the samples explain, None if none does.

    Args:
        found: What is tested.
        exact: The same, without any rounding.
        sample: Makes the n-th sample. Four are made, and 60 more where these do not explain what was found: a spread
            is a random number itself, and few samples miss a relu that switches.
        floor: What is allowed for a tensor in any case.
        margin: How many times the largest deviation of a sample is allowed; also of a quarter of the tensor's root
            mean square of it, for an entry whose few samples happen to lie close.
    """
    spread = {name: torch.zeros_like(value) for name, value in exact.items()}
    bad: dict[str, str] = {}
    done = 0
    for count in (4, 16, 64):
        for index in range(done, count):
            drawn = sample(index)
            for name, value in drawn.items():
                # Where a sample overflows, anything may.
                spread[name] = torch.maximum(spread[name], (value - exact[name]).abs().nan_to_num(torch.inf))
        done = count
        bad = {}
        for name, value in exact.items():
            typical = spread[name].square().mean().sqrt() / 4.0 if value.numel() else torch.tensor(0.0)
            allowed = margin * torch.maximum(spread[name], typical) + floor(name)
            error = (found[name].double() - value).abs()
            wrong = ~((error <= allowed) | (found[name].double() == value))
            if wrong.any():
                place = int((error / allowed).nan_to_num(torch.inf).flatten().argmax())
                bad[name] = (
                    f"{name}[{place}]: found {found[name].flatten()[place]:.9g}, exact {value.flatten()[place]:.9g}, "
                    f"error {error.flatten()[place]:.3g}, allowed {allowed.flatten()[place]:.3g} by {done} samples"
                )
        if not bad:
            return None
    return "; ".join(bad.values())
