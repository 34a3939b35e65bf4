"""DF11 on a GPU: the native layout, the published one, and the published decoder where its package is installed."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmp.df11 import CompressedTensor
from fmp.df11_codec.published.groups import Group, encode_group
from fmp.kernels import df11, df11_published
from fmp.kernels.launch import Stream
from tests.bench.gpu_work import Work

_THREADS, _BYTES_A_THREAD, _SMALL = 512, 8, 48 * 1024


def decoding(device: torch.device, numbers: int) -> Iterator[Work]:
    """Restores weights of N(0, 0.02); the bytes are those of the compressed form and the two of each weight.

    Raises:
        AssertionError: If one of the decoders returns other weights.
    """
    weights = (torch.randn(numbers, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    node = CompressedTensor.compress(weights)
    bits = weights.to(device).view(torch.int16)
    parts = [
        part.to(device)
        for part in (node.code_lengths, node.stream, node.chunk_bits, node.group_starts, node.sign_mantissa)
    ]
    native = df11.Parts(*parts)
    assert torch.equal(df11.decode([native])[0][0].view(torch.int16), bits)
    counted = (node.nbytes / numbers, 2)
    yield Work("DF11, native", "fmp", lambda: df11.decode([native]), numbers, counted, output=600.0)

    group = encode_group(weights.view(torch.int16).numpy().view(np.uint16))
    published = df11_published.Parts(
        *(torch.from_numpy(getattr(group, name)).to(device) for name in df11_published.Parts._fields)
    )
    assert torch.equal(df11_published.decode(published)[0].view(torch.int16), bits)
    counted = (sum(part.nbytes for part in published) / numbers, 2)
    yield Work("DF11, published", "fmp", lambda: df11_published.decode(published), numbers, counted, output=600.0)

    if device.type == "cuda" and (decode := published_decoder(group, published)):
        assert torch.equal(decode().view(torch.int16), bits)
        yield Work("DF11, published", "dfloat11", decode, numbers, counted)


def published_decoder(group: Group, parts: df11_published.Parts) -> Callable[[], torch.Tensor] | None:
    """The kernel of the package `dfloat11`, as its loader launches it; None where that is not installed.

    The package itself is not imported: all that is wanted of it is one file.
    """
    spec = importlib.util.find_spec("dfloat11")
    ptx = Path(spec.origin).parent / "decode.ptx" if spec and spec.origin else None
    if ptx is None or not ptx.is_file():
        return None
    function: Any = importlib.import_module("cupy").RawModule(path=str(ptx)).get_function("decode")
    size, out = parts.encoded_exponent.numel(), torch.empty(parts.sign_mantissa.numel(), dtype=torch.bfloat16)
    out = out.to(parts.luts.device)
    blocks = -(-size // (_THREADS * _BYTES_A_THREAD))
    most = int(np.diff(group.output_positions.view("<u4").astype(np.int64)).max())
    shared = 4 * _THREADS + 4 + 2 * most
    if shared > _SMALL:
        function.max_dynamic_shared_size_bytes = shared
    pointers = [part.data_ptr() for part in (parts.luts, parts.encoded_exponent, parts.sign_mantissa)]
    pointers += [part.data_ptr() for part in (parts.output_positions, parts.gaps, out)]
    arguments = (*pointers, *(np.int32(count) for count in (len(parts.luts), size, out.numel())))

    def decode() -> torch.Tensor:
        stream = Stream(torch.cuda.current_stream(out.device).cuda_stream)
        function((blocks,), (_THREADS,), arguments, shared_mem=shared, stream=stream)
        return out

    return decode
