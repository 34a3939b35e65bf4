"""Small models as lists of layers, which run in any dtype: mixed under fmp, and in float64 as their own oracle."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import fmp

Tensor = torch.Tensor
Tree = Any

WIDTH, TIME, WORDS = 6, 3, 7
LAYERS = ("linear", "conv", "norm", "gelu", "tanh", "relu", "silu", "residual", "attention", "sdpa", "dropout")

_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)},
    "conv": {"weight": (WIDTH, WIDTH, 3), "bias": (WIDTH,)},
    "norm": {"weight": (WIDTH,), "bias": (WIDTH,)},
    "residual": {"weight": (2 * WIDTH, WIDTH), "bias": (2 * WIDTH,), "out": (WIDTH, 2 * WIDTH)},
    "attention": {"weight": (3 * WIDTH, WIDTH), "bias": (3 * WIDTH,)},
    "sdpa": {"weight": (3 * WIDTH, WIDTH), "bias": (3 * WIDTH,)},
    "embedding": {"weight": (WORDS, WIDTH)},
}

HAVE_WEIGHT_AND_BIAS = tuple(kind for kind in _SHAPES if kind != "embedding")


def make_params(layers: Sequence[str], *, is_tied: bool, seed: int) -> Tree:
    """Draws parameters in float32: `{"body": {"0_linear": {"weight": ..., "bias": ...}, ...}, "head": {...}}`."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if kind == "norm" and name == "weight":
            return 1.0 + 0.1 * noise
        return 0.1 * noise if name == "bias" else noise / math.sqrt(math.prod(shape[1:]))

    body = {
        f"{index}_{kind}": {name: drawn(kind, name, shape) for name, shape in _SHAPES[kind].items()}
        for index, kind in enumerate(layers)
        if kind in _SHAPES
    }
    size = WORDS if layers[0] == "embedding" else WIDTH
    head = {"bias": drawn("head", "bias", (size,))}
    if not is_tied:
        head["weight"] = drawn("head", "weight", (size, WIDTH))
    return {"body": body, "head": head}


def make_batch(*, rows: int, has_words: bool, seed: int) -> dict[str, Tensor]:
    """Draws inputs, targets and a weight for each row, in float32 (words in int64)."""
    generator = torch.Generator().manual_seed(seed)
    gain = 0.5 + torch.rand(rows, generator=generator)
    if has_words:
        words = torch.randint(WORDS, (2, rows, TIME), generator=generator)
        return {"x": words[0], "y": words[1], "gain": gain}
    x, y = torch.randn(2, rows, TIME, WIDTH, generator=generator)
    return {"x": x, "y": y, "gain": gain}


def apply(
    layers: Sequence[str], params: Tree, x: Tensor, seed: Tensor, remat: str = "none", is_tied: bool = False
) -> Tensor:
    """Runs the layers and the head: f[rows, time, width or words]."""
    functions: list[Callable[[Tensor], Tensor]] = [
        functools.partial(_layer, kind, params["body"].get(f"{index}_{kind}", {}), seed, index)
        for index, kind in enumerate(layers)
    ]
    weight = params["body"]["0_embedding"]["weight"] if is_tied else params["head"]["weight"]
    functions.append(lambda x: F.linear(x, weight, params["head"]["bias"]))
    if remat == "sequential":
        return fmp.remat_sequential(functions, 2)(x)
    if remat == "block":
        functions = [fmp.remat(function) for function in functions]
    run = functools.partial(_in_turn, functions)
    return fmp.remat(run)(x) if remat == "whole" else run(x)


def row_losses(out: Tensor, y: Tensor, kind: str, *, is_narrow: bool = False) -> Tensor:
    """The loss of each row, in float32 or wider; in the dtype of the output if it is to be narrow."""
    out = out if is_narrow else wide(out)
    if not y.is_floating_point():
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
    if kind == "absolute":
        return F.huber_loss(out, y.to(out.dtype), reduction="none").mean((1, 2))
    return (out - y.to(out.dtype)).square().mean((1, 2))


def wide(x: Tensor) -> Tensor:
    """The same numbers in float32, or in float64 if they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _in_turn(functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for function in functions:
        x = function(x)
    return x


def _layer(kind: str, p: dict[str, Tensor], seed: Tensor, index: int, x: Tensor) -> Tensor:
    match kind:
        case "embedding":
            return F.embedding(x, p["weight"])
        case "linear":
            return F.linear(x, p["weight"], p["bias"])
        case "conv":
            return F.conv1d(x.transpose(1, 2), p["weight"], p["bias"], padding=1).transpose(1, 2)
        case "norm":
            return F.layer_norm(x.to(p["weight"].dtype), (WIDTH,), p["weight"], p["bias"]).to(x.dtype)
        case "residual":
            hidden = torch.tanh(F.linear(x, p["weight"], p["bias"]))
            return x + F.linear(hidden, p["out"]).to(x.dtype)
        case "attention":
            q, k, v = F.linear(x, p["weight"], p["bias"]).chunk(3, -1)
            return torch.softmax(q @ k.transpose(1, 2) / math.sqrt(WIDTH), -1).to(v.dtype) @ v
        case "sdpa":
            q, k, v = F.linear(x, p["weight"], p["bias"]).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        case "dropout":
            return torch.where(fmp.random.keep_mask(fmp.random.fold_in(seed, index), x.shape, 0.25), x / 0.75, 0.0)
    return {"gelu": F.gelu, "tanh": torch.tanh, "relu": F.relu, "silu": F.silu}[kind](x)
