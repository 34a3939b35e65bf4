"""Compresses files of weights, restores them, compares them and looks into them, one tensor at a time."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch

from fmp import tree
from fmp.df11 import stored, tensor_file, writing
from fmp.df11.container import WeightFile
from fmp.df11.writing import Progress, Source, Weight
from fmp.df11_codec import reference
from fmp.errors import DF11Error

Path = str | os.PathLike[str]

_RUN = 2**20


@dataclasses.dataclass(frozen=True)
class Converted:
    """What became of a file: its tensors, how many of them are compressed, and the bytes before and after."""

    tensors: int
    compressed: int
    bytes_in: int
    bytes_out: int


@dataclasses.dataclass(frozen=True)
class Inspected:
    """What there is to know about one tensor in a file.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
        form: How it is stored: "huffman", "deflate", "raw", or "plain".
        nbytes: The bytes that it takes in the file.
        bound: The least bits that a code for its exponents needs a number, with 8 for sign and mantissa; None for a
            dtype other than bf16, and for no numbers.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    form: str
    nbytes: int
    bound: float | None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bits(self) -> float | None:
        """The bits that an element takes; None for no elements."""
        return 8 * self.nbytes / self.numel if self.numel else None


def compressible(file: WeightFile, selected: Callable[[str], bool], min_numel: int) -> set[str]:
    """Returns the names of the bf16 tensors that are selected and have at least so many elements."""
    described = {name: file.describe(name) for name in file}
    large = {
        name
        for name, (dtype, shape, _) in described.items()
        if dtype == torch.bfloat16 and math.prod(shape) >= min_numel
    }
    return {name for name in large if selected(name)}


def compress_file(
    path: Path,
    target: Path,
    *,
    selected: Callable[[str], bool] = lambda name: True,
    min_numel: int = 4096,
    progress: Progress = iter,
) -> Converted:
    """Compresses the bf16 tensors of a safetensors file. Each is restored once, before it is written.

    Args:
        path: The file to compress.
        target: The file to create or replace.
        selected: Says which names to compress.
        min_numel: Tensors with fewer elements stay as they are.
        progress: Wraps the tensors while they are converted.

    Raises:
        DF11Error: If the file is damaged.
        ValueError: If it is compressed already.
        OSError: If a file cannot be read or written.
    """

    def source(name: str) -> Source:
        dtype, shape, nbytes = file.describe(name)
        compress = name in chosen
        most_bytes = stored.most_bytes(math.prod(shape)) if compress else nbytes
        return Source(name, dtype, shape, partial(file.read, name), compress, most_bytes)

    with WeightFile(path, plain=True) as file:
        if file.is_compressed:
            raise ValueError(f"{os.fspath(path)} is compressed already")
        chosen = compressible(file, selected, min_numel)
        sources = [source(name) for name in file]
        writing.write(sources, target, metadata=file.manifest.metadata, progress=progress)
    return Converted(len(sources), len(chosen), os.path.getsize(path), os.path.getsize(target))


def decompress_file(path: Path, target: Path, *, progress: Progress = iter) -> Converted:
    """Restores the safetensors file that was compressed: the same names, tensors and metadata.

    Args:
        path: The file of compressed weights. Tensors that are tied in it are written under each of their names.
        target: The file to create or replace.
        progress: Wraps the tensors while they are restored.

    Raises:
        DF11Error: If the file is damaged, or not compressed.
        OSError: If a file cannot be read or written.
    """

    def source(name: str) -> Source:
        dtype, shape, _ = file.describe(name)
        nbytes = math.prod(shape) * dtype.itemsize
        return Source(name, dtype, shape, partial(file.read, name, decompress=True), False, nbytes)

    with WeightFile(path) as file:
        sources = [source(name) for name in file]
        writing.write_plain(sources, target, metadata=file.manifest.metadata, progress=progress)
        compressed = sum(record.form is not None for record in file.records.values())
    return Converted(len(sources), compressed, os.path.getsize(path), os.path.getsize(target))


def differences(
    one: WeightFile, other: WeightFile | None = None, *, progress: Callable[[list[str]], Iterable[str]] = iter
) -> Iterator[str]:
    """Compares two files bit for bit, or checks one file by itself.

    Args:
        one: A file, compressed or not. All of its checksums are verified.
        other: The file to compare it with, or None.
        progress: Wraps the names.

    Yields:
        A line for each tensor that is missing, damaged or different.
    """
    others = one if other is None else other
    for name in others:
        if name not in one:
            yield f"{name}: missing in {os.fspath(one.path)}"
    for name in progress(list(one)):
        if name not in others:
            yield f"{name}: missing in {os.fspath(others.path)}"
            continue
        try:
            difference = _difference(one, others, name)
        except DF11Error as error:
            difference = str(error)
        if difference:
            yield difference


def inspect(file: WeightFile, name: str) -> Inspected:
    """Looks at one tensor of a file, compressed or not, and computes how far it can be compressed.

    Raises:
        DF11Error: If it is damaged.
    """
    dtype, shape, nbytes = file.describe(name)
    form = file.records[file.manifest.tied.get(name, name)].form or "plain"
    is_bound = dtype == torch.bfloat16 and math.prod(shape) > 0
    bound = 8 + _exponent_entropy(file.read(name, decompress=True)) if is_bound else None
    return Inspected(name, dtype, shape, form, nbytes, bound)


def _exponent_entropy(weight: Weight) -> float:
    """Computes the entropy of the exponents of bf16 numbers, in bits."""
    assert isinstance(weight, torch.Tensor)
    bits = tensor_file.raw_bytes(weight).view(np.uint16)
    counts = sum(reference.histogram(bits[start : start + _RUN]) for start in range(0, bits.size, _RUN))
    shares = np.asarray(counts, np.float64)[np.asarray(counts) > 0] / bits.size
    return float(-(shares * np.log2(shares)).sum())


def _difference(one: WeightFile, other: WeightFile, name: str) -> str | None:
    if other is one:
        one.read(name, decompress=True)
        return None
    # Reading a compressed one takes more memory than it has in the end, so that it comes first.
    files = sorted([one, other], key=lambda file: not file.is_compressed)
    read = {id(file): file.read(name, decompress=True) for file in files}
    mine, theirs = read[id(one)], read[id(other)]
    assert isinstance(mine, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return f"{name}: {tree.describe(mine)} in one file, {tree.describe(theirs)} in the other"
    bits, other_bits = tensor_file.raw_bytes(mine), tensor_file.raw_bytes(theirs)
    if torch.equal(torch.from_numpy(bits), torch.from_numpy(other_bits)):  # numpy would need a third array
        return None
    size = mine.dtype.itemsize
    runs = [slice(start, start + size * _RUN) for start in range(0, bits.size, size * _RUN)]
    count = sum(int((bits[run] != other_bits[run]).reshape(-1, size).any(axis=1).sum()) for run in runs)
    return f"{name}: {count} of {mine.numel()} elements differ"
