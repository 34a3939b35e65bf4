"""Reads a folder in the published DFloat11 format."""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import nn

from fmp.df11.published.patterns import PARTS, Patterns, joined, read_config
from fmp.df11_codec.published.groups import Group, decode_group, in_parallel
from fmp.errors import DF11Error
from fmp.kernels import df11_published, eligible

Skeleton = nn.Module | Mapping[str, Any]


def read_dfloat11(
    dir: str | os.PathLike[str],
    skeleton: Skeleton | None = None,
    *,
    flat: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Reads the weights of a folder in the published DFloat11 format, bit for bit.

    The format does not hold shapes, which is why the skeleton is needed. Everything is checked against it, and
    everything that the format says twice against the other place. Three kinds of damage cannot be seen, as the format
    has no checksums: in `sign_mantissa` and in tensors that are not compressed, any change; in the codes, one that
    turns a code into another of the same length; in `pattern_dict`, an order of tensors that exchanges two of the same
    size.

    Args:
        dir: The folder, with a `config.json` and one or more `*.safetensors`, all of which belong to the model.
        skeleton: The model, for example built under `torch.device("meta")`; only names, shapes and kinds of its state
            dict are looked at. Or a mapping from all names to shapes or tensors.
        flat: Whether to do without a skeleton. Compressed tensors then come out with one dimension, and only what the
            folder itself shows to be missing is noticed.
        device: Where to put the tensors. On a GPU whose kernels run here, compressed ones are also decoded there.

    Returns:
        The tensors by name, on the device, in the order of the skeleton: compressed ones as bf16, the others as stored.
        Where the skeleton ties weights and the folder has only one of them, both names have the same tensor.

    Raises:
        KeyError: If a tensor is missing, or there is one that the skeleton does not have.
        DF11Error: If a tensor is there twice, has another dtype or size than the format or the skeleton says, one that
            torch cannot read, or is damaged; if a file is damaged. It is a ValueError.
        ValueError: If `config.json` is damaged, or neither or both of `skeleton` and `flat` are given.
        TypeError: If the skeleton is something else.
        FileNotFoundError: If the folder, its `config.json` or its weights do not exist.

    Example:
        >>> import tempfile
        >>> from fmp.df11.published.writer import write_dfloat11
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_dfloat11(nn.Linear(5, 3).bfloat16(), f"{folder}/df11", {"": []})
        ...     fmp.tree.describe(read_dfloat11(f"{folder}/df11", {"weight": (3, 5), "bias": (3,)}))
        "{'weight': bf16[3,5], 'bias': bf16[3]}"
    """
    if (skeleton is None) != flat:
        raise ValueError(
            "the format holds no shapes: give the model (it may be on the meta device) or a mapping from names to "
            "shapes as `skeleton`, or flat=True for tensors of one dimension"
        )
    expected = None if skeleton is None else _expected(skeleton)
    folder, device = Path(dir), torch.device(device)
    patterns = read_config(folder / "config.json")
    try:
        with contextlib.ExitStack() as stack:
            files = _open(folder, stack)
            groups = _groups(files, patterns, expected or {})
            parts = {joined(module, part) for module in groups for part in PARTS}
            plain = [key for key in files if key not in parts]
            stored = [name for names in groups.values() for name in names] + plain
            sources = _sources(stored, expected)
            for module, names in groups.items():
                _check_group(files, module, names, expected)
            for name in plain:
                _check_plain(files[name], name, expected)

            tensors = {name: _read(files[name], name).to(device) for name in plain}
            # Other threads would launch on other streams than the caller's.
            each = map if eligible.runs("df11_published", device) else in_parallel
            for weights in each(lambda group: _decoded(files, *group, device), groups.items()):
                tensors |= weights
    except (safetensors.SafetensorError, ValueError) as error:
        raise DF11Error(f"{folder}: {error}") from error
    if expected is None:
        return {name: tensors[name] for name in sorted(tensors)}
    shaped = {name: tensor.reshape(expected[name].shape) for name, tensor in tensors.items()}
    return {name: shaped[source] for name, source in sources.items()}


@dataclasses.dataclass(frozen=True)
class _Expected:
    """What the skeleton says of a tensor; `identity` is the same for tied ones, `is_float` None where it is unknown."""

    shape: tuple[int, ...]
    identity: Any
    is_float: bool | None = None


def _expected(skeleton: Skeleton) -> dict[str, _Expected]:
    if isinstance(skeleton, nn.Module):
        skeleton = skeleton.state_dict(keep_vars=True)
    if not isinstance(skeleton, Mapping):
        raise TypeError(f"skeleton must be a module or a mapping from names to shapes, got {type(skeleton).__name__}")
    expected = {}
    for name, value in skeleton.items():
        shape = getattr(value, "shape", value)
        if not isinstance(shape, Sequence) or not all(_is_size(size) for size in shape):
            raise TypeError(f"skeleton[{name!r}] must be a tensor or a shape, got {value!r}")
        tensor = value if isinstance(value, torch.Tensor) else None
        is_float = None if tensor is None else tensor.is_floating_point()
        expected[name] = _Expected(tuple(shape), name if tensor is None else id(tensor), is_float)
    return expected


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _open(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Opens all files, and returns the one that holds each key."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no *.safetensors file")
    files, names = {}, {}
    for path in paths:
        try:
            file = stack.enter_context(safetensors.safe_open(path, "pt"))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path.name} is damaged or incomplete: {error}") from error
        for key in file.keys():  # noqa: SIM118 -- the file is no mapping
            if key in files:
                raise ValueError(f"{key!r} is in {names[key]} and in {path.name}; remove the wrong file")
            files[key], names[key] = file, path.name
    return files


def _groups(files: Mapping[str, Any], patterns: Patterns, expected: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the modules that are compressed, and the names of the tensors in each."""
    groups: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    for key in sorted(files):
        module, _, part = key.rpartition(".")
        if part not in PARTS or key in expected or module in groups:
            continue
        names = patterns.weights(module)
        if names is None:
            raise ValueError(f"{key!r} is a part of a compressed module, which no pattern in config.json matches")
        for part in PARTS:
            if joined(module, part) not in files:
                raise KeyError(f"{joined(module, part)!r} is missing, a part of a compressed module; get all files")
        for name in names:
            if name in owners or name in files:
                raise ValueError(f"{name!r} is in the group {module!r}, and stored in another place too")
            owners[name] = module
        groups[module] = names
    return groups


def _sources(stored: Sequence[str], expected: Mapping[str, _Expected] | None) -> dict[str, str]:
    """Returns, for each name of the skeleton, the name of the stored tensor: its own, or that of a tied one."""
    if expected is None:
        return {}
    if extra := sorted(set(stored) - expected.keys()):
        raise KeyError(f"the skeleton has no tensor {extra[0]!r} ({len(extra)} such); give that of the same model")
    by_identity = {expected[name].identity: name for name in reversed(stored)}
    own = dict.fromkeys(stored)
    sources = {name: name if name in own else by_identity.get(value.identity) for name, value in expected.items()}
    missing = [name for name, source in sources.items() if source is None]
    if missing:
        raise KeyError(f"the folder has no tensor {missing[0]!r} ({len(missing)} such); get all files of the model")
    return {name: source for name, source in sources.items() if source is not None}


def _read(file: Any, name: str) -> torch.Tensor:
    stored = file.get_slice(name)
    try:
        tensor = file.get_tensor(name).clone()
    except MemoryError:
        raise
    except Exception as error:  # What is raised for a dtype that torch lacks, or has in part, is not defined.
        raise DF11Error(f"{name!r} has the dtype {stored.get_dtype()}, which cannot be read: {error}") from error
    if tensor.shape != tuple(stored.get_shape()):  # Of some dtypes, torch has two numbers in one element.
        raise DF11Error(f"{name!r} has the dtype {stored.get_dtype()}, which cannot be read in its shape")
    return tensor


def _check_plain(file: Any, name: str, expected: Mapping[str, _Expected] | None) -> None:
    if expected is None:
        return
    stored, wanted = file.get_slice(name), expected[name]
    if tuple(stored.get_shape()) != wanted.shape:
        raise ValueError(f"{name!r} has the shape {stored.get_shape()}, and in the skeleton {list(wanted.shape)}")
    is_float = stored.get_dtype().startswith(("F", "BF"))
    if wanted.is_float not in (None, is_float):
        kind = "is" if wanted.is_float else "is not"
        raise ValueError(f"{name!r} is stored as {stored.get_dtype()}, and {kind} floating point in the skeleton")


def _check_group(
    files: Mapping[str, Any], module: str, names: Sequence[str], expected: Mapping[str, _Expected] | None
) -> None:
    """Compares dtypes and sizes before anything is read."""
    sizes = {}
    for part in PARTS:
        key = joined(module, part)
        stored = files[key].get_slice(key)
        dtype, dims = ("I64", 1) if part == "split_positions" else ("U8", 2 if part == "luts" else 1)
        shape = stored.get_shape()
        if stored.get_dtype() != dtype or len(shape) != dims or (part == "luts" and shape[1] != 256):
            raise ValueError(f"{key!r} is {stored.get_dtype()}{shape}, which the format does not allow")
        sizes[part] = shape[0]
    if sizes["split_positions"] != len(names) - 1:
        raise ValueError(
            f"{joined(module, 'split_positions')!r} is for {sizes['split_positions'] + 1} tensors, and pattern_dict in "
            f"config.json lists {len(names)}"
        )
    key = joined(module, "split_positions")
    splits = [0, *files[key].get_tensor(key).tolist(), sizes["sign_mantissa"]]
    if any(start > stop for start, stop in itertools.pairwise(splits)):
        raise ValueError(f"{key!r} is damaged: it must rise from 0 to {splits[-1]}, the number of weights")
    for name, (start, stop) in zip(names, itertools.pairwise(splits), strict=True):
        if expected is not None and math.prod(expected[name].shape) != stop - start:
            raise ValueError(
                f"{name!r} has {stop - start} weights, and in the skeleton the shape {list(expected[name].shape)}; the "
                "skeleton is of another model, or the order in pattern_dict is wrong"
            )
        if expected is not None and expected[name].is_float is False:
            raise ValueError(f"{name!r} is compressed bf16, and is not floating point in the skeleton")


def _decoded(
    files: Mapping[str, Any], module: str, names: Sequence[str], device: torch.device
) -> dict[str, torch.Tensor]:
    parts = {part: files[joined(module, part)].get_tensor(joined(module, part)) for part in PARTS}
    splits = parts.pop("split_positions")
    group = Group(**{part: tensor.contiguous().numpy() for part, tensor in parts.items()})
    try:
        if eligible.runs("df11_published", device):
            numbers = df11_published.restore(group, device)
        else:
            numbers = torch.from_numpy(decode_group(group).view(np.int16)).view(torch.bfloat16).to(device)
    except ValueError as error:
        raise ValueError(f"the group {module!r} is damaged: {error}") from error
    weights = numbers.tensor_split(splits)
    # Tensors that share memory would keep all of it alive, and cannot be saved by safetensors.
    return dict(zip(names, weights if len(names) == 1 else [weight.clone() for weight in weights], strict=True))
