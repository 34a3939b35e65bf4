"""Writes a folder in the published DFloat11 format."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import optree
import safetensors
import safetensors.torch
import torch
from torch import nn

from fmp import _compat, tree
from fmp.df11.compressed import CompressedTensor
from fmp.df11.published.patterns import PARTS, Patterns, config_text, joined
from fmp.df11_codec.published.groups import UnsupportedError, encode_group, in_parallel
from fmp.files import atomic_write
from fmp.folders import atomic_folder

Tree = Any
Named = dict[str, torch.Tensor | CompressedTensor]

_REST = "model.safetensors"
_CONFIG = "config.json"


def write_dfloat11(
    tree: Tree,
    dir: str | os.PathLike[str],
    pattern_dict: Mapping[str, Sequence[str]],
    *,
    single_file: bool = True,
    config: Mapping[str, Any] | None = None,
    unsupported: Literal["raise", "plain"] = "raise",
    overwrite: bool = False,
) -> None:
    r"""Writes weights to a folder in the published DFloat11 format.

    Equal weights give the bytes that the published encoder (version 0.5.0) writes, where that one works. It fails for
    groups with a single exponent and for many with few, and writes damaged files for values of 2**113 or more; the
    first are written here, the second are refused. Where the code of the last weight has a block of its own,
    `output_positions` gets the entry that the published encoder forgets.

    The folder appears all at once, or not at all.

    Args:
        tree: A module, a state dict, or any tree of tensors and `CompressedTensor` nodes; a leaf's path is its name,
            with dots for slashes. Weights that a module ties are written under each name.
        dir: The folder to create. Its own folder must exist.
        pattern_dict: Which weights to compress: from regular expressions, which must match a module's whole dotted
            name, to the paths of the submodules whose `weight` are compressed together, for example
            `{"lm_head": [], r"model\.layers\.\d+": ["self_attn.q_proj", "mlp.up_proj"]}`. An empty list stands for
            the module's own `weight`; the module must then be a Linear or an Embedding. All other tensors are stored
            as they are.
        single_file: Whether to write one file, or one for each group and one for the rest.
        config: Further entries of `config.json`, for example of a Hugging Face model.
        unsupported: What to do with a group that the format cannot hold. "plain" stores its weights as they are.
        overwrite: Whether to replace a folder that is not empty, if it holds nothing but such files.

    Raises:
        ValueError: If a group has a weight that is not bf16 or not two-dimensional, is empty or has 2**31 weights, has
            a value of 2**113 or more, an infinity or a NaN, or needs too many lookup tables, unless `unsupported` is
            "plain"; if a pattern is invalid or matches nothing, two groups share a weight, or two tensors or files
            would have the same name.
        KeyError: If a module that a pattern matches lacks one of the weights.
        TypeError: If an argument or a leaf has another type.
        FileExistsError: If the folder holds files.
        RuntimeError: Inside of a `torch.func` transform, where tensors may have no values.

    Example:
        >>> import tempfile
        >>> from fmp.df11.published.reader import read_dfloat11
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).bfloat16()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_dfloat11(model, f"{folder}/df11", {"0|2": []})
        ...     weights = read_dfloat11(f"{folder}/df11", model)
        >>> torch.equal(weights["0.weight"], model[0].weight)
        True
    """
    if unsupported not in ("raise", "plain"):
        raise ValueError(f"unsupported must be 'raise' or 'plain', got {unsupported!r}")
    if _compat.transform_active():
        raise RuntimeError("write_dfloat11 cannot run inside vmap, grad or another transform; write what it returns")
    patterns = Patterns(pattern_dict)
    text = config_text(patterns, config)
    named = _named(tree)
    groups = _groups(named, patterns)

    files: dict[str, dict[str, torch.Tensor]] = {_REST: {}}
    plain = dict(named)

    def encoded(module: str) -> dict[str, torch.Tensor] | None:
        try:
            return _encoded(module, {name: named[name] for name in groups[module]})
        except UnsupportedError:
            if unsupported == "raise":
                raise
            return None

    for module, parts in zip(groups, in_parallel(encoded, groups), strict=True):
        if parts is None:
            continue
        if clash := sorted(parts.keys() & named.keys()):
            raise ValueError(f"the tensor {clash[0]!r} has the name of a part of the group {module!r}; rename it")
        for name in groups[module]:
            del plain[name]
        file = _REST if single_file else f"{module.replace('.', '_')}.safetensors"
        if not single_file and file in files:
            raise ValueError(f"the file of the group {module!r} has the name of another one; use single_file=True")
        files.setdefault(file, {}).update(parts)
    files[_REST] |= {name: _plain(tensor) for name, tensor in plain.items()}
    if not single_file and not files[_REST]:
        del files[_REST]

    with atomic_folder(dir, overwrite=overwrite, replaceable=_is_ours) as folder:
        for file, tensors in files.items():
            _write(folder / file, tensors)
        with atomic_write(folder / _CONFIG) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _named(state: Tree) -> Named:
    if isinstance(state, nn.Module):
        state = state.state_dict()
    named: Named = {}
    spec = optree.tree_structure(state, is_leaf=_is_node, none_is_leaf=True)
    leaves = optree.tree_leaves(state, is_leaf=_is_node, none_is_leaf=True)
    for path, leaf in zip(spec.paths(), leaves, strict=True):
        name = tree.join(path).replace("/", ".")
        if not isinstance(leaf, torch.Tensor | CompressedTensor):
            raise TypeError(f"{name or 'the tree'} must be a tensor, got {type(leaf).__name__}; remove it")
        if leaf.device.type == "meta" or (isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided):
            raise TypeError(f"{name or 'the tree'} must have plain memory; it is on the meta device, or sparse")
        if not name:
            raise ValueError("the tree is a single tensor; put it into a dictionary, to give it a name")
        if name in named:
            raise ValueError(f"two tensors of the tree have the name {name!r}")
        named[name] = leaf
    return named


def _groups(named: Named, patterns: Patterns) -> dict[str, list[str]]:
    modules = {""} | {name[:end] for name in named for end, letter in enumerate(name) if letter == "."}
    groups: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    unused = set(patterns.as_dict)
    for module in sorted(modules):
        names = patterns.weights(module)
        unused -= set(patterns.matching(module))
        for name in names or ():
            if name not in named:
                raise KeyError(f"pattern_dict matches the module {module!r}, and there is no tensor {name!r}")
            if name in owners:
                raise ValueError(f"{name!r} belongs to two groups, {owners[name]!r} and {module!r}")
            owners[name] = module
        if names:
            groups[module] = names
    if unused:
        raise ValueError(f"pattern_dict has the pattern {min(unused)!r}, which matches no module")
    return groups


def _encoded(module: str, weights: Named) -> dict[str, torch.Tensor]:
    for name, weight in weights.items():
        if weight.dtype != torch.bfloat16 or len(weight.shape) != 2:
            raise UnsupportedError(
                f"{name} is {tree.describe(weight)}; readers of the format know two-dimensional bf16 weights only"
            )
    bits = [_bits(weight) for weight in weights.values()]
    try:
        group = encode_group(np.concatenate(bits) if len(bits) > 1 else bits[0])
    except UnsupportedError as error:
        raise UnsupportedError(f"the group {module!r} ({', '.join(weights)}) cannot be written: {error}") from error
    splits = torch.tensor([len(part) for part in bits], dtype=torch.int64, device="cpu").cumsum(0)[:-1]
    return {
        joined(module, part): torch.from_numpy(getattr(group, part)) if hasattr(group, part) else splits
        for part in PARTS
    }


def _bits(weight: torch.Tensor | CompressedTensor) -> npt.NDArray[np.uint16]:
    return _plain(weight).reshape(-1).view(torch.int16).numpy().view(np.uint16)


def _plain(weight: torch.Tensor | CompressedTensor) -> torch.Tensor:
    tensor = weight.decompress() if isinstance(weight, CompressedTensor) else weight
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    # The library refuses tensors that share memory, as tied weights do.
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.untyped_storage().data_ptr() in storages:
            tensors[name] = tensor.clone()
        storages.add(tensors[name].untyped_storage().data_ptr())
    with atomic_write(path) as temporary:
        try:
            safetensors.torch.save_file(tensors, temporary)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path.name} could not be written: {error}") from error


def _is_ours(name: str) -> bool:
    return "/" not in name and (name == _CONFIG or name.endswith(".safetensors"))


def _is_node(node: Any) -> bool:
    return isinstance(node, CompressedTensor)
