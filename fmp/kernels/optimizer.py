"""Launches of an optimizer over lists of tensors, which overwrite parameters, moments and casts in place.

Nobody waits for anything. The callers make sure that `fmp.kernels.eligible.usable` says yes.
"""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from fmp.kernels.launch import launch
from fmp.kernels.multi_tensor import CHUNK, THREADS, packed
from fmp.kernels.tables import upload

Tensor = torch.Tensor

_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
# By the form; then by the dtypes of gradient and cast, None without, or in a form those of gradient and parameter. A
# cast is no matter of the kernel where there is none.
_KERNELS: dict[str | None, dict[tuple[torch.dtype, torch.dtype | None], str]] = {
    None: {
        (_F32, _F16): "f32_f16",
        (_F32, _BF16): "f32_bf16",
        (_F32, None): "f32_bf16",
        (_F16, _F16): "f16_f16",
        (_F16, None): "f16_f16",
        (_BF16, _BF16): "bf16_bf16",
        (_BF16, None): "bf16_bf16",
    },
    "remainder": {(_F32, _BF16): "f32_remainder", (_BF16, _BF16): "bf16_remainder"},
    "stochastic": {
        (_F32, _F16): "f32_stochastic_f16",
        (_F32, _BF16): "f32_stochastic_bf16",
        (_F16, _F16): "f16_stochastic_f16",
        (_BF16, _BF16): "bf16_stochastic_bf16",
    },
}
_DTYPE = attrgetter("dtype")


def overwrite(
    of: str,
    gradients: Sequence[Tensor],
    params: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor] | None],
    low: Sequence[Tensor | None],
    flags: Sequence[int],
    coefficients: Tensor,
    *,
    scale: Tensor | None,
    divide: bool,
    clip: Tensor | None,
    finite: Tensor | None,
    form: str | None = None,
    seeds: Tensor | None = None,
) -> None:
    """Makes one step of an optimizer, with a launch for each pair of dtypes of gradient and cast, or parameter.

    Args:
        of: The source, `cuda/<of>.cu`, whose kernels are called `<of>_<gradient>_<cast>`, `<of>_<gradient>_remainder`
            or `<of>_<gradient>_stochastic_<parameter>`.
        gradients: f32, f16 or bf16, still scaled.
        params: f32, overwritten; bf16 in the form `"remainder"`, f16 or bf16 in the form `"stochastic"`.
        moments: Columns of f32, overwritten; None for one that is absent.
        low: For each parameter its cast, f16 or bf16, overwritten; None for none, and in the form `"stochastic"`. In
            the form `"remainder"` what the parameter lacks, i16.
        flags: For each parameter, what the kernel calls its flags.
        coefficients: f32[n, k], contiguous, a row for each parameter.
        scale: f32[], what gradients are multiplied by or divided by first; None for 1.
        divide: Whether they are divided by it, rounded as `fmp.kernels.multi_tensor.unscale` rounds. The steps of fmp,
            which get the inverse of a loss scale, multiply.
        clip: f32[], what they are multiplied by then; None for 1.
        finite: bool[], false where every byte must stay as it is; None for always true.
        form: The form of the parameters, see `fmp.master`: `"remainder"` or `"stochastic"`. None for f32 with casts.
        seeds: i64[n], contiguous, for each parameter what it draws by in the form `"stochastic"`.
    """
    names = _KERNELS[form]
    others = [None if cast is None else cast.dtype for cast in low] if form is None else list(map(_DTYPE, params))
    if not names.keys() >= set(zip(map(_DTYPE, gradients), others, strict=True)):
        pairs = zip(gradients, others, strict=True)
        gradients = [g if (g.dtype, other) in names else g.to(torch.float32) for g, other in pairs]
    kernels = list(map(names.__getitem__, zip(map(_DTYPE, gradients), others, strict=True)))
    device, sizes = params[0].device, list(map(Tensor.numel, params))
    rows = packed(
        [
            list(map(Tensor.data_ptr, gradients)),
            list(map(Tensor.data_ptr, params)),
            *[None if column is None else list(map(Tensor.data_ptr, column)) for column in moments],
            [0 if cast is None else cast.data_ptr() for cast in low],
            sizes,
            list(flags),
        ]
    )
    factors = [0 if scale is None else scale.data_ptr(), np.int32(divide), 0 if clip is None else clip.data_ptr()]
    factors.append(0 if finite is None else finite.data_ptr())
    if seeds is not None:
        factors.append(seeds.data_ptr())
    for kernel in dict.fromkeys(kernels):
        # All launches see all rows, which are in the order of the coefficients; of others' rows they have no chunks.
        own = [size if name == kernel else 0 for size, name in zip(sizes, kernels, strict=True)]
        table = upload(rows, own, CHUNK, device)
        given = [table.rows.data_ptr(), table.chunks.data_ptr(), np.int32(CHUNK), coefficients.data_ptr(), *factors]
        launch(device, f"{of}_{kernel}", of=of, blocks=len(table.chunks), threads=THREADS, arguments=given)
    # Autograd finds out by these if a graph elsewhere has saved what was overwritten.
    written = [*params, *[moment for column in moments if column is not None for moment in column]]
    torch.autograd.graph.increment_version([*written, *[cast for cast in low if cast is not None]])
