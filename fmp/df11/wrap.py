"""`fmp.df11.wrap`: modules whose weights stay compressed and visible."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fmp import _compat
from fmp.df11.compressed import CompressedTensor
from fmp.df11.frozen_weight import FrozenWeight, stored_form
from fmp.df11.trees import compress, decompress
from fmp.distributed_modules import check_no_wrapper
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
        module: Any module. It is left as it is, and shares no tensor with the copy.
        patterns: Which parameters to compress, as for `fmp.df11.compress`: patterns of names
            (`["blocks.*.weight"]`), or a function of a name. By default all bf16 parameters; of a module in which some
            require grad and some do not, as with adapters, those that do not; and none that come plain among `weights`
            of which others are compressed.
        weights: Values to take instead of the module's own, by name, such as what `fmp.df11.load` returns: compressed
            ones stay as they are, plain tensors replace the module's. So a module on the meta device gets its weights
            without ever holding them decoded; it must get all of them.
        min_numel: Parameters with fewer elements stay as they are.
        progress: Wraps the list of what is to be done, for example `tqdm.tqdm`.

    Returns:
        The copy. Parameters that the module ties are tied in it, and compressed once.

    Raises:
        TypeError: If `module` is no module, or one from TorchScript, DDP or FSDP; if a chosen parameter is not bf16, or
            on the meta device; if one of the `weights` is no tensor.
        ValueError: If nothing is compressed; if a chosen parameter is not contiguous, as decoded ones are; if one of
            the `weights` has another shape than the parameter, or two for one parameter differ.
        KeyError: If the module has no parameter or buffer of the name of one of the `weights`, or there is none for a
            tensor that is on the meta device.

    Example:
        >>> module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
        >>> small = wrap(module, ["*.weight"])
        >>> small[0].weight, small[0].weight.shape
        (FrozenWeight(df11[64,64]), torch.Size([64, 64]))
        >>> x = torch.ones(1, 64, dtype=torch.bfloat16)
        >>> torch.equal(small(x), module(x))
        True
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"wrap takes a module written in Python, got a {type(module).__name__}; for trees of tensors there is "
            "fmp.df11.compress"
        )
    check_no_wrapper(module, "wrap")
    given = _by_first_name(module, weights or {})
    named = _named(module)
    for name, tensor in named.tensors.items():
        if weights is not None and tensor.is_meta and named.first[name] not in given:
            raise KeyError(f"weights has no {name!r}, which is on the meta device")
    params = {name: given.get(named.first[name], named.tensors[name]) for name in named.params}
    chosen = _frozen_names(named, given) if patterns is None else params.keys()
    values = {name: params[name] for name in params if name in chosen}
    compressed = compress(
        values,
        select={name: value.dtype == torch.bfloat16 for name, value in values.items()}
        if patterns is None
        else patterns,
        min_numel=min_numel,
        progress=progress,
    )
    found = given | {named.first[name]: node for name, node in compressed.items() if isinstance(node, CompressedTensor)}
    _check(named, found, min_numel)
    # A copy of a tensor that is in the memo is what the memo says, wherever in the module it is.
    copied = copy.deepcopy(
        module, {id(named.tensors[name]): _in_place_of(named.tensors[name], value) for name, value in found.items()}
    )
    for layer in copied.modules():
        if isinstance(layer, nn.RNNBase) and any(isinstance(param, FrozenWeight) for param in layer.parameters()):
            layer.flatten_parameters = _compat.leave_in_place
    return copied


class _Named(NamedTuple):
    """The parameters and buffers of a module, under all of their names."""

    tensors: dict[str, torch.Tensor]
    params: list[str]
    first: dict[str, str]


def _named(module: nn.Module) -> _Named:
    params = dict(module.named_parameters(remove_duplicate=False))
    tensors = params | dict(module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return _Named(tensors, list(params), {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()})


def _frozen_names(named: _Named, given: Mapping[str, Any]) -> set[str]:
    """Names the parameters that nobody seems to want trained."""
    frozen = {name for name in named.params if not named.tensors[name].requires_grad} or set(named.params)
    if any(isinstance(value, CompressedTensor) for value in given.values()):
        frozen -= {name for name in frozen if isinstance(given.get(named.first[name]), torch.Tensor)}
    return frozen


def _check(named: _Named, found: Mapping[str, Any], min_numel: int) -> None:
    if not any(isinstance(value, CompressedTensor) for value in found.values()):
        raise ValueError(
            f"no parameter of the module is bf16 and has {min_numel} elements or more; cast it first with "
            "module.bfloat16(), or pass min_numel"
        )
    for name, tensor in named.tensors.items():
        if isinstance(found.get(name), CompressedTensor) and not tensor.is_contiguous():
            raise ValueError(
                f"{name} has the strides {tensor.stride()}, which decoded weights would not have; make it contiguous, "
                "or leave it out by the patterns"
            )


def _in_place_of(old: torch.Tensor, value: Any) -> torch.Tensor:
    new = value if old.is_meta or value.device == old.device else value.to(old.device)
    if isinstance(new, CompressedTensor):
        return nn.Parameter(FrozenWeight(new), requires_grad=False)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _by_first_name(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Checks given values, and names them as the module does; one that it ties has several names."""
    named, found = _named(module), {}
    for name, given in weights.items():
        value = stored_form(given)
        if name not in named.tensors:
            raise KeyError(
                f"weights has {name!r}, but the module has no such parameter or buffer; if they were saved from a "
                "module with adapters around its layers, save its state_dict() before adding these, and add them to "
                "what wrap returns"
            )
        if not isinstance(value, CompressedTensor | torch.Tensor):
            raise TypeError(f"weights[{name!r}] is {describe(value)}; it must be a tensor or compressed tensor")
        if value.shape != named.tensors[name].shape:
            raise ValueError(
                f"weights[{name!r}] is {describe(value)}, but in the module {describe(named.tensors[name])}"
            )
        if isinstance(value, CompressedTensor) and name not in named.params:
            raise TypeError(f"weights[{name!r}] is {describe(value)}, but {name} is a buffer; decompress it first")
        first = named.first[name]
        if not _are_equal(value, found.setdefault(first, value)):
            raise ValueError(f"weights has other values for {name!r} than for {first!r}, which are one in the module")
    return found


def _are_equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    plain, other = decompress((left, right))
    return plain.dtype == other.dtype and torch.equal(*[t.contiguous().view(torch.uint8) for t in (plain, other)])
