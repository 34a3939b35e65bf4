"""Small calls of every op that the op lists of Apex and of torch's CUDA autocast name, in the spellings users write."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

# Some listed ops are not in torch's stubs.
_torch: Any = torch
_nn: Any = _torch._C._nn
_Tensor: Any = torch.Tensor


@dataclass(frozen=True)
class Sample:
    """One call, `fn(*args, **kwargs)`. Floating tensors are float32; no call changes its arguments."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def samples(name: str) -> list[Sample]:
    """Returns calls of the op; the same numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [Sample(name, fn, args, kwargs) for fn, args, kwargs in _CALLS[name]()]


def sampled() -> frozenset[str]:
    """Returns the names of the ops that have samples."""
    return frozenset(_CALLS)


# Why an op that is on a list has no sample.
WITHOUT_SAMPLE = {
    "_scaled_dot_product_flash_attention": "has a CUDA kernel only",
    "_thnn_fused_gru_cell": "has a CUDA kernel only, and no Python name",
    "_thnn_fused_lstm_cell": "has a CUDA kernel only, and no Python name",
    "cudnn_convolution": "is cuDNN's",
    "cudnn_convolution_transpose": "is cuDNN's",
}

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    return fn, args, kwargs


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _unit(*shape: int) -> torch.Tensor:
    """Numbers in [0.1, 0.9], where every listed function of one number is defined and smooth."""
    return torch.empty(shape).uniform_(0.1, 0.9)


def _log_probs(*shape: int) -> torch.Tensor:
    return torch.log_softmax(torch.randn(shape), 1)


def _classes(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 3


def _signs(*shape: int) -> torch.Tensor:
    return 2.0 * (torch.arange(torch.Size(shape).numel()).reshape(shape) % 2) - 1.0


def _unary(name: str) -> Callable[[], list[Call]]:
    return lambda: [_call(getattr(torch, name), _unit(2, 3)), _call(getattr(torch.Tensor, name), _unit(2, 3))]


def _binary(name: str) -> Callable[[], list[Call]]:
    return lambda: [_call(getattr(space, name), _x(2, 3), _x(2, 3)) for space in (torch, torch.Tensor)]


def _operator(op: Callable[..., Any]) -> Callable[[], list[Call]]:
    return lambda: [_call(op, _unit(2, 3), _unit(2, 3))]


def _in_place(op: Callable[..., Any]) -> Callable[[], list[Call]]:
    """The operator, on a copy, so that the arguments stay as they are."""
    return lambda: [_call(lambda x, y: op(x.clone(), y), _unit(2, 3), _unit(2, 3))]


def _reflected(op: Callable[..., Any]) -> Callable[[], list[Call]]:
    return lambda: [_call(lambda x: op(2.0, x), _unit(2, 3))]


def _convolution(dims: int, transposed: bool) -> Callable[[], list[Call]]:
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    weight = (2, 3) if transposed else (3, 2)
    kernel, image = [2] * dims, [4] * dims
    return lambda: [
        _call(getattr(F, name), _x(2, 2, *image), _x(*weight, *kernel), _x(3)),
        _call(getattr(torch, name), _x(2, 2, *image), _x(*weight, *kernel), stride=2),
    ]


def _cell(name: str, gates: int) -> Callable[[], list[Call]]:
    def calls() -> list[Call]:
        state = (_x(2, 4), _x(2, 4)) if gates == 4 else _x(2, 4)
        return [_call(getattr(torch, name), _x(2, 3), state, *_weights(gates))]

    return calls


def _rnn(name: str, gates: int) -> Callable[[], list[Call]]:
    """The whole-sequence function as the module calls it: one layer, biases, no dropout, evaluating."""

    def calls() -> list[Call]:
        state = (_x(1, 2, 4), _x(1, 2, 4)) if gates == 4 else _x(1, 2, 4)
        return [_call(getattr(torch, name), _x(3, 2, 3), state, _weights(gates), True, 1, 0.0, False, False, False)]

    return calls


def _weights(gates: int) -> list[torch.Tensor]:
    return [_x(4 * gates, 3), _x(4 * gates, 4), _x(4 * gates), _x(4 * gates)]


def _upsample(op: str, mode: str, dims: int, *align_corners: bool, **kwargs: Any) -> Callable[[], list[Call]]:
    return lambda: [
        _call(getattr(_nn, op), _x(1, 2, *[4] * dims), [6] * dims, *align_corners),
        _call(F.interpolate, _x(1, 2, *[4] * dims), size=[6] * dims, mode=mode, **kwargs),
    ]


def _loss(name: str, target: Callable[..., torch.Tensor] = _x, inputs: Callable[..., torch.Tensor] = _x):
    return lambda: [_call(getattr(F, name), inputs(4, 3), target(4, 3))]


def _class_loss(name: str, inputs: Callable[..., torch.Tensor] = _x) -> Callable[[], list[Call]]:
    return lambda: [
        _call(getattr(F, name), inputs(4, 3), _classes(4)),
        _call(getattr(F, name), inputs(4, 3), _classes(4), weight=_unit(3)),
    ]


_CALLS: dict[str, Callable[[], list[Call]]] = {
    # Convolutions and products.
    "conv1d": _convolution(1, False),
    "conv2d": _convolution(2, False),
    "conv3d": _convolution(3, False),
    "conv_transpose1d": _convolution(1, True),
    "conv_transpose2d": _convolution(2, True),
    "conv_transpose3d": _convolution(3, True),
    "conv_tbc": lambda: [_call(F.conv_tbc, _x(4, 2, 3), _x(2, 3, 2), _x(2))],
    "convolution": lambda: [_call(_torch.convolution, _x(2, 2, 4), _x(3, 2, 2), _x(3), [1], [0], [1], False, [0], 1)],
    "_convolution": lambda: [
        _call(
            _torch._convolution,
            *(_x(2, 2, 4), _x(3, 2, 2), _x(3), [1], [0], [1], False, [0], 1, False, False, True, True),
        )
    ],
    "linear": lambda: [_call(F.linear, _x(2, 3), _x(4, 3), _x(4)), _call(F.linear, _x(2, 3), _x(4, 3), bias=None)],
    "prelu": lambda: [_call(F.prelu, _x(2, 3), _unit(3)), _call(torch.prelu, _x(2, 3), _unit(1))],
    "addmm": lambda: [
        _call(torch.addmm, _x(2, 4), _x(2, 3), _x(3, 4)),
        _call(_Tensor.addmm, _x(4), _x(2, 3), _x(3, 4)),
    ],
    "addmv": lambda: [_call(torch.addmv, _x(2), _x(2, 3), _x(3)), _call(_Tensor.addmv, _x(2), _x(2, 3), _x(3))],
    "addr": lambda: [_call(torch.addr, _x(2, 3), _x(2), _x(3)), _call(_Tensor.addr, _x(2, 3), _x(2), _x(3))],
    "addbmm": lambda: [_call(torch.addbmm, _x(2, 4), _x(5, 2, 3), _x(5, 3, 4))],
    "baddbmm": lambda: [_call(torch.baddbmm, _x(5, 2, 4), _x(5, 2, 3), _x(5, 3, 4), beta=0.5)],
    "bmm": lambda: [_call(torch.bmm, _x(5, 2, 3), _x(5, 3, 4)), _call(_Tensor.bmm, _x(5, 2, 3), _x(5, 3, 4))],
    "matmul": lambda: [_call(torch.matmul, _x(5, 2, 3), _x(3, 4)), _call(_Tensor.matmul, _x(2, 3), _x(3, 4))],
    "mm": lambda: [_call(torch.mm, _x(2, 3), _x(3, 4)), _call(_Tensor.mm, _x(2, 3), _x(3, 4))],
    "mv": lambda: [_call(torch.mv, _x(2, 3), _x(3)), _call(_Tensor.mv, _x(2, 3), _x(3))],
    "__matmul__": lambda: [_call(operator.matmul, _x(2, 3), _x(3, 4)), _call(operator.matmul, _x(2, 3), _x(3))],
    "einsum": lambda: [
        _call(torch.einsum, "bij,bjk->bik", _x(5, 2, 3), _x(5, 3, 4)),
        _call(torch.einsum, "ij,j->i", [_x(2, 3), _x(3)]),
    ],
    "chain_matmul": lambda: [_call(torch.chain_matmul, _x(2, 3), _x(3, 4), _x(4, 2))],
    "linalg_multi_dot": lambda: [_call(torch.linalg.multi_dot, [_x(2, 3), _x(3, 4), _x(4, 2)])],
    "linalg_vecdot": lambda: [_call(torch.linalg.vecdot, _x(2, 3), _x(2, 3))],
    "scaled_dot_product_attention": lambda: [
        _call(F.scaled_dot_product_attention, _x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4)),
        _call(F.scaled_dot_product_attention, _x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4), is_causal=True),
    ],
    "lstm_cell": _cell("lstm_cell", 4),
    "gru_cell": _cell("gru_cell", 3),
    "rnn_tanh_cell": _cell("rnn_tanh_cell", 1),
    "rnn_relu_cell": _cell("rnn_relu_cell", 1),
    "lstm": _rnn("lstm", 4),
    "gru": _rnn("gru", 3),
    "rnn_tanh": _rnn("rnn_tanh", 1),
    "rnn_relu": _rnn("rnn_relu", 1),
    # Functions of one number.
    **{
        name: _unary(name)
        for name in (
            *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
            *("reciprocal", "rsqrt", "sinh", "tan"),
        )
    },
    "pow": lambda: [
        _call(torch.pow, _unit(2, 3), 3),
        _call(torch.pow, _unit(2, 3), _x(2, 3)),
        _call(torch.pow, 2.0, _x(2, 3)),
        _call(_Tensor.pow, _unit(2, 3), 0.5),
    ],
    "__pow__": lambda: [_call(operator.pow, _unit(2, 3), 3), _call(operator.pow, _unit(2, 3), _x(2, 3))],
    "__rpow__": _reflected(operator.pow),
    "__ipow__": _in_place(operator.ipow),
    "softplus": lambda: [_call(F.softplus, _x(2, 3))],
    "gelu": lambda: [_call(F.gelu, _x(2, 3)), _call(F.gelu, _x(2, 3), approximate="tanh")],
    "cpu": lambda: [_call(_Tensor.cpu, _x(2, 3))],
    # Norms, sums and softmaxes.
    "softmin": lambda: [_call(F.softmin, _x(2, 3), dim=1)],
    "softmax": lambda: [_call(F.softmax, _x(2, 3), dim=1), _call(_Tensor.softmax, _x(2, 3), -1)],
    "log_softmax": lambda: [_call(F.log_softmax, _x(2, 3), dim=1), _call(torch.log_softmax, _x(2, 3), 1)],
    "layer_norm": lambda: [_call(F.layer_norm, _x(2, 3), (3,), _x(3), _x(3)), _call(F.layer_norm, _x(2, 3), (3,))],
    "native_layer_norm": lambda: [_call(torch.native_layer_norm, _x(2, 3), (3,), _x(3), _x(3), 1e-5)],
    "rms_norm": lambda: [_call(F.rms_norm, _x(2, 3), (3,), _x(3)), _call(torch.rms_norm, _x(2, 3), (3,))],
    "group_norm": lambda: [_call(F.group_norm, _x(2, 4, 3), 2, _x(4), _x(4)), _call(F.group_norm, _x(2, 4, 3), 2)],
    "local_response_norm": lambda: [_call(F.local_response_norm, _x(1, 4, 3), 2)],
    "normalize": lambda: [_call(F.normalize, _x(2, 3))],
    "norm": lambda: [
        _call(torch.norm, _x(2, 3)),
        _call(_Tensor.norm, _x(2, 3), 2, 1),
        _call(torch.norm, _x(2, 3), p=3, dim=0, keepdim=True),
    ],
    "frobenius_norm": lambda: [_call(_torch.frobenius_norm, _x(2, 3), (0, 1))],
    "nuclear_norm": lambda: [_call(_torch.nuclear_norm, _x(2, 3)), _call(_torch.nuclear_norm, _x(4, 2, 3), (1, 2))],
    "linalg_vector_norm": lambda: [_call(torch.linalg.vector_norm, _x(2, 3), 3, 1)],
    "linalg_matrix_norm": lambda: [
        _call(torch.linalg.matrix_norm, _x(2, 3)),
        _call(torch.linalg.matrix_norm, _x(2, 3), ord=1),
    ],
    "dist": lambda: [_call(torch.dist, _x(2, 3), _x(2, 3)), _call(_Tensor.dist, _x(2, 3), _x(2, 3), 3)],
    "pdist": lambda: [_call(F.pdist, _x(4, 3))],
    "cdist": lambda: [_call(torch.cdist, _x(4, 3), _x(2, 3))],
    "renorm": lambda: [_call(torch.renorm, _x(2, 3), 2, 0, 1.0)],
    "cosine_similarity": lambda: [_call(F.cosine_similarity, _x(2, 3), _x(2, 3))],
    "cumprod": lambda: [_call(torch.cumprod, _x(2, 3), 1), _call(_Tensor.cumprod, _x(2, 3), 0)],
    "cumsum": lambda: [_call(torch.cumsum, _x(2, 3), 1), _call(_Tensor.cumsum, _x(2, 3), 0)],
    "prod": lambda: [_call(torch.prod, _x(2, 3)), _call(_Tensor.prod, _x(2, 3), 1)],
    "sum": lambda: [_call(torch.sum, _x(2, 3)), _call(_Tensor.sum, _x(2, 3), 1)],
    "std": lambda: [_call(torch.std, _x(2, 3)), _call(_Tensor.std, _x(2, 3), 1)],
    "var": lambda: [_call(torch.var, _x(2, 3)), _call(_Tensor.var, _x(2, 3), 1, unbiased=False)],
    "logsumexp": lambda: [_call(torch.logsumexp, _x(2, 3), 1), _call(_Tensor.logsumexp, _x(2, 3), 0)],
    # Losses.
    "binary_cross_entropy": _loss("binary_cross_entropy", _unit, _unit),
    "binary_cross_entropy_with_logits": _loss("binary_cross_entropy_with_logits", _unit),
    "poisson_nll_loss": _loss("poisson_nll_loss", _unit),
    "kl_div": lambda: [_call(F.kl_div, _log_probs(4, 3), _unit(4, 3), reduction="batchmean")],
    "l1_loss": _loss("l1_loss"),
    "mse_loss": _loss("mse_loss"),
    "smooth_l1_loss": _loss("smooth_l1_loss"),
    "huber_loss": _loss("huber_loss"),
    "soft_margin_loss": _loss("soft_margin_loss", _signs),
    "hinge_embedding_loss": _loss("hinge_embedding_loss", _signs),
    "cosine_embedding_loss": lambda: [_call(F.cosine_embedding_loss, _x(4, 3), _x(4, 3), _signs(4))],
    "margin_ranking_loss": lambda: [_call(F.margin_ranking_loss, _x(4), _x(4), _signs(4))],
    "triplet_margin_loss": lambda: [_call(F.triplet_margin_loss, _x(4, 3), _x(4, 3), _x(4, 3))],
    "multilabel_margin_loss": lambda: [
        _call(F.multilabel_margin_loss, _x(2, 3), torch.tensor([[2, 0, -1], [1, -1, 0]]))
    ],
    "multilabel_soft_margin_loss": _loss("multilabel_soft_margin_loss", lambda *shape: _unit(*shape).round()),
    "multi_margin_loss": _class_loss("multi_margin_loss"),
    "nll_loss": _class_loss("nll_loss", _log_probs),
    "cross_entropy": _class_loss("cross_entropy"),
    "nll_loss2d": lambda: [
        _call(_nn.nll_loss2d, _log_probs(1, 3, 2, 2), _classes(1, 2, 2)),
        _call(F.nll_loss, _log_probs(1, 3, 2, 2), _classes(1, 2, 2)),
    ],
    "ctc_loss": lambda: [
        _call(F.ctc_loss, torch.log_softmax(_x(4, 2, 3), 2), torch.tensor([[1, 2], [2, 1]]), (4, 4), (2, 1))
    ],
    # Sampling grids.
    "interpolate": lambda: [
        _call(F.interpolate, _x(1, 2, 4), scale_factor=2),
        _call(F.interpolate, _x(1, 2, 4, 4), size=(3, 3), mode="bilinear", align_corners=False),
    ],
    "upsample_nearest1d": _upsample("upsample_nearest1d", "nearest", 1),
    "upsample_nearest2d": _upsample("upsample_nearest2d", "nearest", 2),
    "upsample_nearest3d": _upsample("upsample_nearest3d", "nearest", 3),
    "_upsample_nearest_exact1d": _upsample("_upsample_nearest_exact1d", "nearest-exact", 1),
    "_upsample_nearest_exact2d": _upsample("_upsample_nearest_exact2d", "nearest-exact", 2),
    "_upsample_nearest_exact3d": _upsample("_upsample_nearest_exact3d", "nearest-exact", 3),
    "upsample_linear1d": _upsample("upsample_linear1d", "linear", 1, False),
    "upsample_bilinear2d": _upsample("upsample_bilinear2d", "bilinear", 2, False),
    "_upsample_bilinear2d_aa": _upsample("_upsample_bilinear2d_aa", "bilinear", 2, False, antialias=True),
    "upsample_trilinear3d": _upsample("upsample_trilinear3d", "trilinear", 3, False),
    "upsample_bicubic2d": _upsample("upsample_bicubic2d", "bicubic", 2, False),
    "_upsample_bicubic2d_aa": _upsample("_upsample_bicubic2d_aa", "bicubic", 2, False, antialias=True),
    "grid_sample": lambda: [_call(F.grid_sample, _x(1, 2, 4, 4), _unit(1, 3, 3, 2), align_corners=False)],
    "grid_sampler": lambda: [
        _call(_torch.grid_sampler, _x(1, 2, 4, 4), _unit(1, 3, 3, 2), 0, 0, False),
        _call(F.grid_sample, _x(1, 2, 4, 4), _unit(1, 3, 3, 2), align_corners=False),
    ],
    # Several tensors of one dtype.
    "addcdiv": lambda: [_call(torch.addcdiv, _x(2, 3), _x(2, 3), _unit(2, 3))],
    "addcmul": lambda: [
        _call(torch.addcmul, _x(2, 3), _x(2, 3), _x(2, 3)),
        _call(_Tensor.addcmul, _x(3), _x(3), _x(3)),
    ],
    "atan2": _binary("atan2"),
    "bilinear": lambda: [_call(F.bilinear, _x(2, 3), _x(2, 4), _x(5, 3, 4), _x(5))],
    "cross": lambda: [_call(torch.cross, _x(2, 3), _x(2, 3), dim=1)],
    "dot": lambda: [_call(torch.dot, _x(3), _x(3)), _call(_Tensor.dot, _x(3), _x(3))],
    "vdot": lambda: [_call(torch.vdot, _x(3), _x(3))],
    "tensordot": lambda: [_call(torch.tensordot, _x(2, 3), _x(3, 4), dims=1)],
    "index_put": lambda: [_call(torch.index_put, _x(4, 3), (torch.tensor([0, 2]),), _x(2, 3))],
    "scatter_add": lambda: [_call(torch.scatter_add, _x(4, 3), 0, torch.tensor([[0, 2, 1]]), _x(1, 3))],
    "cat": lambda: [_call(torch.cat, [_x(2, 3), _x(1, 3)]), _call(torch.cat, (_x(2, 3), _x(2, 1)), dim=1)],
    "stack": lambda: [_call(torch.stack, [_x(2, 3), _x(2, 3)]), _call(torch.stack, (_x(2), _x(2)), dim=1)],
    **{name: _binary(name) for name in ("add", "div", "mul", "eq", "ge", "gt", "le", "lt", "ne", "equal")},
    **{f"__{name}__": _operator(getattr(operator, name)) for name in ("add", "sub", "mul", "truediv")},
    **{f"__{name}__": _operator(getattr(operator, name)) for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    **{f"__i{name}__": _in_place(getattr(operator, f"i{name}")) for name in ("add", "sub", "mul", "truediv")},
    **{f"__r{name}__": _reflected(getattr(operator, name)) for name in ("add", "sub", "mul", "truediv")},
    # What Python 2 called them.
    "__div__": _operator(_Tensor.__div__),
    "__idiv__": _in_place(_Tensor.__idiv__),
    "__rdiv__": _reflected(lambda number, x: _Tensor.__rdiv__(x, number)),
}
