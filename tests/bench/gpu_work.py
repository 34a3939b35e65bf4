"""What `python -m tests.bench.gpu` measures: passes over many tensors, by the kernels of fmp and by those of torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import fmp
from fmp.kernels import multi_tensor

kernels: Any = torch  # does not declare these functions
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
RATE, BETAS, DECAY, MOMENTUM = 1e-3, (0.9, 0.999), 0.1, 0.9
NAMES = {F32: "f32", F16: "f16", BF16: "bf16"}


@dataclass(frozen=True)
class Work:
    """Something to measure.

    Attributes:
        what: What is done.
        by: Who does it.
        run: Does it once.
        numbers: How many numbers it is done to.
        nbytes_each: The bytes that each must move: those of each array that is read, then of each that is written.
        fraction: The share of a copy's bandwidth that it should reach; None for no target.
        output: The gigabytes of results a second that it should reach; None for no target.
    """

    what: str
    by: str
    run: Callable[[], Any]
    numbers: int
    nbytes_each: tuple[float, ...]
    fraction: float | None = None
    output: float | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that it must move, all together."""
        return round(self.numbers * sum(self.nbytes_each))

    @property
    def counted(self) -> str:
        """How the bytes are counted."""
        return "+".join(f"{nbytes:.3g}" for nbytes in self.nbytes_each)


def sizes(numbers: int) -> list[int]:
    """Splits numbers into the sizes of 150 parameters as a transformer has them: a matrix, another, and a bias."""
    layer = numbers // 50
    small = max(1, layer // 4000)
    return [size for _ in range(50) for size in (layer // 5, layer - layer // 5 - small, small)]


def drawn(numbers: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> list[torch.Tensor]:
    """Makes a list of tensors of normal random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        (torch.randn(size, generator=generator, device=device) * scale).to(dtype).contiguous()
        for size in sizes(numbers)
    ]


def unscaling(device: torch.device, numbers: int) -> Iterator[Work]:
    """Dividing gradients by the loss scale, their norm, and whether they are finite."""
    scale = torch.tensor(1024.0, device=device)
    one, found = torch.ones(1, device=device), torch.zeros(1, device=device)
    for dtype in (F16, BF16, F32):
        grads, size = drawn(numbers, dtype, device), dtype.itemsize
        what = f"unscale, norm, finite: {NAMES[dtype]} to f32"
        yield Work(what, "fmp", lambda grads=grads: multi_tensor.unscale(grads, scale), numbers, (size, 4), 0.85)
        what = f"norm, finite: {NAMES[dtype]}"
        yield Work(what, "fmp", lambda grads=grads: multi_tensor.measure(grads, scale), numbers, (size,), 0.85)
        what = f"unscale in place, finite: {NAMES[dtype]}"
        # Divided by more than 1, the numbers would vanish over the repeats.
        unscale = kernels._amp_foreach_non_finite_check_and_unscale_
        yield Work(what, "torch", lambda grads=grads: unscale(grads, found, one), numbers, (size, size))
        what = f"norm: {NAMES[dtype]}"
        yield Work(what, "torch", lambda grads=grads: kernels._foreach_norm(grads), numbers, (size,))


def adding(device: torch.device, numbers: int) -> Iterator[Work]:
    """Accumulating gradients."""
    sums = drawn(numbers, F32, device)
    for dtype in (F16, F32):
        grads, counted = drawn(numbers, dtype, device), (dtype.itemsize, 4, 4)
        what = f"a*x + b*y, norm, finite: {NAMES[dtype]}, f32 to f32"
        yield Work(what, "fmp", lambda grads=grads: multi_tensor.axpby(1.0, grads, 1.0, sums), numbers, counted, 0.85)
    yield Work("x + a*y: f32", "torch", lambda: kernels._foreach_add(sums, grads, alpha=0.5), numbers, (4, 4, 4))


def adam(device: torch.device, numbers: int) -> Iterator[Work]:
    """AdamW: gradient, master and two moments are read, all but the gradient written, and the cast for the model."""
    make = fmp.optim.adamw(RATE, *BETAS, weight_decay=DECAY)
    for dtype in (F16, BF16, F32):
        counted = (dtype.itemsize, 4, 4, 4, 4, 4, 4, *([dtype.itemsize] if dtype != F32 else []))
        run = fused(make, device, numbers, dtype)
        yield Work(f"AdamW: {NAMES[dtype]} gradients", "fmp fused", run, numbers, counted, 0.8)
    counted = (4, 4, 4, 4, 4, 4, 4)
    yield Work("AdamW: f32 gradients", "fmp update", plain(make, device, numbers), numbers, counted)
    for form in ("fused", "foreach"):
        run = by_torch(torch.optim.AdamW, form, device, numbers, lr=RATE, betas=BETAS, weight_decay=DECAY)
        yield Work("AdamW: f32 gradients", f"torch {form}", run, numbers, counted)


def sgd(device: torch.device, numbers: int) -> Iterator[Work]:
    """SGD with momentum."""
    make = fmp.optim.sgd(RATE, momentum=MOMENTUM)
    for dtype in (F16, F32):
        counted = (dtype.itemsize, 4, 4, 4, 4, *([dtype.itemsize] if dtype != F32 else []))
        run = fused(make, device, numbers, dtype)
        yield Work(f"SGD, momentum: {NAMES[dtype]} gradients", "fmp fused", run, numbers, counted, 0.8)
    counted = (4, 4, 4, 4, 4)
    yield Work("SGD, momentum: f32 gradients", "fmp update", plain(make, device, numbers), numbers, counted)
    for form in ("fused", "foreach"):
        run = by_torch(torch.optim.SGD, form, device, numbers, lr=RATE, momentum=MOMENTUM)
        yield Work("SGD, momentum: f32 gradients", f"torch {form}", run, numbers, counted)


def fused(tx: Any, device: torch.device, numbers: int, dtype: torch.dtype) -> Callable[[], None]:
    """A donating step on gradients that are still scaled, which casts out where the gradients are narrow."""
    params, grads = drawn(numbers, F32, device), drawn(numbers, dtype, device)
    low = None if dtype == F32 else [param.to(dtype) for param in params]
    state = tx.init(params)
    numbers_on_device = {"inv_scale": torch.tensor(1 / 1024, device=device), "clip": torch.tensor(0.5, device=device)}
    finite = torch.tensor(True, device=device)

    def run() -> None:
        nonlocal params, low, state
        params, low, state = tx.fused(grads, state, params, **numbers_on_device, finite=finite, low=low, donate=True)

    return run


def plain(tx: Any, device: torch.device, numbers: int) -> Callable[[], None]:
    """`update` and `apply_updates`."""
    params, grads = drawn(numbers, F32, device), drawn(numbers, F32, device)
    state = tx.init(params)

    def run() -> None:
        nonlocal params, state
        updates, state = tx.update(grads, state, params)
        params = fmp.optim.apply_updates(params, updates)

    return run


def by_torch(make: Any, form: str, device: torch.device, numbers: int, **options: Any) -> Callable[[], None]:
    """An optimizer of torch, on its kernel or on its operations for lists."""
    params = [param.requires_grad_() for param in drawn(numbers, F32, device)]
    for param, grad in zip(params, drawn(numbers, F32, device), strict=True):
        param.grad = grad
    optimizer = make(params, **{form: True}, **options)
    return lambda: optimizer.step() and None
