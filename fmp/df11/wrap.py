"""`fmp.df11.wrap`: modules whose weights stay compressed and visible."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fmp.df11.compressed import CompressedTensor
from fmp.df11.frozen_weight import FrozenWeight
from fmp.df11.trees import compress
from fmp.optim.masks import Mask
from fmp.tree import describe


def wrap(
    module: nn.Module,
    patterns: Mask | None = None,
    *,
    weights: Mapping[str, Any] | None = None,
    min_numel: int = 4096,
    progress: Callable[[list[int]], Iterable[int]] | None = None,
) -> nn.Module:
    """Copies a module, with compressed weights in place of its bf16 weights.

    The copy computes what the module computes, bit for bit: outputs, and gradients of everything that is not
    compressed. Its compressed weights are `FrozenWeight`s: parameters that require no grad, are still in `.weight`,
    `named_parameters()` and `state_dict()` with their shapes and dtype, and are decoded by each operator that reads
    them, in the backward pass again. It works where the module works: under `torch.func` transforms, `torch.compile`,
    `fmp.remat`, `fmp.functionalize`, and in libraries that put adapters around layers.

    Its `state_dict()` loads into the plain module, and the plain one's into it, which compresses them. `torch.save`
    writes plain tensors, `fmp.df11.save(module.state_dict(), path)` compressed ones.

    Args:
        module: Any module. It is left as it is; the copy shares its other parameters and its buffers.
        patterns: Which parameters to compress, as for `fmp.df11.compress`: patterns of names
            (`["blocks.*.weight"]`), or a function of a name. By default all bf16 parameters.
        weights: Values to take instead of the module's own, by name, such as what `fmp.df11.load` returns: compressed
            ones stay as they are, plain tensors replace the module's. So a module on the meta device gets its weights
            without ever holding them decoded.
        min_numel: Parameters with fewer elements stay as they are.
        progress: Wraps the list of what is to be done, for example `tqdm.tqdm`.

    Returns:
        The copy. Parameters that the module ties are tied in it, and compressed once.

    Raises:
        TypeError: If `module` is no module; if a chosen parameter is not bf16, or on the meta device and not among the
            `weights`; if one of these is no tensor.
        ValueError: If nothing is compressed, or one of the `weights` has another shape than the parameter.
        KeyError: If the module has no parameter or buffer of the name of one of the `weights`.

    Example:
        >>> module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
        >>> small = wrap(module, ["*.weight"])
        >>> small[0].weight, small[0].weight.shape
        (FrozenWeight(df11[64,64]), torch.Size([64, 64]))
        >>> x = torch.ones(1, 64, dtype=torch.bfloat16)
        >>> torch.equal(small(x), module(x))
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"wrap takes a module, got {describe(module)}; for trees of tensors there is fmp.df11.compress")
    given = _by_first_name(module, weights or {})
    own = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    params = {name: given.get(name, param) for name, param in module.named_parameters()}
    found = given | compress(params, select=patterns, min_numel=min_numel, progress=progress)
    if not any(isinstance(value, CompressedTensor) for value in found.values()):
        raise ValueError(
            f"no parameter of the module is bf16 and has {min_numel} elements or more; cast it first with "
            "module.bfloat16(), or pass min_numel"
        )
    # A copy of a tensor that is in the memo is what the memo says, wherever in the module it is.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in own.values()}
    memo |= {id(own[name]): _in_place_of(own[name], value) for name, value in found.items()}
    return copy.deepcopy(module, memo)


def _in_place_of(old: torch.Tensor, value: Any) -> torch.Tensor:
    if value is old:
        return old
    new = value if old.is_meta or value.device == old.device else value.to(old.device)
    if isinstance(new, CompressedTensor):
        return nn.Parameter(FrozenWeight(new), requires_grad=False)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _by_first_name(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Checks given values, and names them as the module does; one that it ties has several names."""
    items = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in items}
    own = dict(items)
    for name, value in weights.items():
        if name not in names:
            raise KeyError(f"weights has {name!r}, but the module has no such parameter or buffer")
        if not isinstance(value, CompressedTensor | torch.Tensor):
            raise TypeError(f"weights[{name!r}] is {describe(value)}; it must be a tensor or compressed tensor")
        if value.shape != own[name].shape:
            raise ValueError(f"weights[{name!r}] is {describe(value)}, but in the module {describe(own[name])}")
        if isinstance(value, CompressedTensor) and not isinstance(own[name], nn.Parameter):
            raise TypeError(f"weights[{name!r}] is {describe(value)}, but {name} is a buffer; decompress it first")
    return {names[name]: value for name, value in weights.items()}
