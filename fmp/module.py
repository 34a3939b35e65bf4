"""From `nn.Module` to a pure function: parameters and buffers go in as dictionaries, buffers come back as one.

A model runs private copies of the module's structure, one for each mode, whose tensors hold no memory. A call puts
the given tensors in their place, so the user's module is never touched and nothing about the copies ever changes.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fmp import tree
from fmp.dropout import SeededRandomness
from fmp.dtypes import is_castable
from fmp.random import Seed, as_seed

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
# torch computes these in float32 by itself when the input is narrower than weights and statistics.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_REFUSED = {
    "DistributedDataParallel": "gradients would silently stay local; functionalize the inner module, `.module`",
    "DataParallel": "it copies the module inside each call; functionalize the inner module, `.module`",
    "FullyShardedDataParallel": "its hooks do not work under torch.func; functionalize the module before it is wrapped",
    "FSDPModule": "its hooks do not work under torch.func; functionalize the module before `fully_shard`",
    "ReplicateModule": "its hooks do not work under torch.func; functionalize the module before `replicate`",
    "ScriptModule": "its tensors cannot be replaced; functionalize the module before it is scripted",
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A module as a pure function and its initial state; made by `fmp.functionalize`.

    What the module stores in plain attributes during a call stays on the model's private copy. Threads that call at
    the same time need a model each.

    Attributes:
        params: The parameters by dotted name, copies in the module's dtypes. Weights that the module ties are one leaf.
            Parameters that do not require grad are among them; leave those out of training with the optimizer.
        buffers: The buffers likewise, those included that the module does not save.
        norm_params: The names of parameters and buffers that belong to normalisation layers, see `norm_names`.
    """

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    norm_params: tuple[str, ...]
    _name: str
    _ties: dict[str, str]
    _param_shapes: dict[str, torch.Size]
    _buffer_shapes: dict[str, torch.Size]
    _skeletons: "dict[tuple[bool | None, bool], _Skeleton]"

    def apply(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        /,
        *args: Any,
        seed: Seed | None = None,
        train: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Calls the module with the given parameters and buffers.

        It works under every torch.func transform and `torch.compile(fullgraph=True)`, and changes none of its
        arguments. Where parameters are of mixed precision, because a policy keeps normalisation layers in float32,
        these layers compute in that precision and return the dtype that they were given.

        Args:
            params: The parameters, with the keys of `Model.params`, in any dtypes.
            buffers: The buffers, with the keys of `Model.buffers`.
            *args: Passed to the module.
            seed: An integer or i64[]. All random draws of the module, such as dropout masks, are then functions of it
                (see `fmp.dropout.SeededRandomness`). Without a seed they come from torch's global generator, and a
                module in training mode that has dropout is not a pure function.
            train: Whether the module runs in training mode. None leaves each part in the mode that it had when it was
                functionalized.
            **kwargs: Passed to the module.

        Returns:
            What the module returns, and the new buffers: fresh tensors, equal to the old ones where nothing changed.

        Raises:
            KeyError: If a parameter or buffer is missing, or there is one that the module does not have.
            ValueError: If one has another shape than in the module, or a seed is given and the module draws random
                numbers where no seed reaches.
            TypeError: If one is not a tensor.

        Example:
            >>> model = functionalize(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
            >>> out, buffers = model.apply(model.params, model.buffers, torch.randn(4, 2), seed=0, train=True)
            >>> buffers["1.num_batches_tracked"], model.buffers["1.num_batches_tracked"]
            (tensor(1), tensor(0))
        """
        _check_tensors("params", params, self._param_shapes)
        _check_tensors("buffers", buffers, self._buffer_shapes)
        mixed = len({param.dtype for param in params.values() if param.dtype.is_floating_point}) > 1
        skeleton = self._skeletons[train, mixed]

        tensors = {**params, **{name: buffer.clone() for name, buffer in buffers.items()}}
        tensors |= {alias: tensors[name] for alias, name in self._ties.items()}
        device = next((param.device for param in params.values()), None)
        with contextlib.nullcontext() if seed is None else SeededRandomness(as_seed(seed, device)):
            # Buffers are written in place, or replaced in the dictionary; both are read back from it.
            output = torch.func.functional_call(skeleton.module, tensors, args, kwargs, tie_weights=False)
        for layer in skeleton.recurrent:
            layer._update_flat_weights()  # forget the given tensors
        return output, {name: tensors[name] for name in buffers}

    def __repr__(self) -> str:
        numbers = sum(param.numel() for param in self.params.values())
        return f"Model({self._name}, {len(self.params)} params of {numbers:,} numbers, {len(self.buffers)} buffers)"


def functionalize(module: nn.Module) -> Model:
    """Turns a module into a pure function of its parameters and buffers.

    Args:
        module: Any module. It is left as it is, and later changes to it do not reach the model.

    Returns:
        The model.

    Raises:
        TypeError: If `module` is not an `nn.Module`, or is or holds one that runs its own collectives (DDP, FSDP) or
            cannot run with other tensors than its own.
        ValueError: If a parameter or buffer is not initialised yet.

    Example:
        >>> model = functionalize(nn.Linear(2, 3))
        >>> model
        Model(Linear, 2 params of 9 numbers, 0 buffers)
        >>> out, _ = model.apply(model.params, model.buffers, torch.ones(1, 2))
        >>> out.shape
        torch.Size([1, 3])
    """
    _check_module(module)
    ties = _ties(module)
    params = {name: param.detach().clone() for name, param in module.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers() if name not in ties}
    return Model(
        params=params,
        buffers=buffers,
        norm_params=norm_names(module),
        _name=type(module).__name__,
        _ties=ties,
        _param_shapes={name: param.shape for name, param in params.items()},
        _buffer_shapes={name: buffer.shape for name, buffer in buffers.items()},
        _skeletons={
            (train, mixed): _skeleton(module, train, mixed) for train in (True, False, None) for mixed in (False, True)
        },
    )


def norm_names(module: nn.Module) -> tuple[str, ...]:
    """Names the parameters and buffers of a module's normalisation layers, which low precision harms most.

    These are torch's BatchNorm, SyncBatchNorm, InstanceNorm, LayerNorm, GroupNorm and RMSNorm, and every other module
    without submodules whose class name contains `norm` and whose own tensors are all vectors, such as a `LlamaRMSNorm`.

    Args:
        module: Any module.

    Returns:
        Dotted names, as in `Model.params` and `Model.buffers`.

    Example:
        >>> norm_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
        ('1.weight', '1.bias')
    """
    ties = _ties(module)
    names = [
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        if _is_norm(path, layer)
        for name, _ in _own_tensors(layer)
    ]
    return tuple(dict.fromkeys(ties.get(name, name) for name in names))


def _is_norm(path: str, layer: nn.Module) -> bool:
    if isinstance(layer, _NORMS):
        return True
    if "norm" not in type(layer).__name__.lower():
        return False
    # Torch's spectral_norm and weight_norm have such a name, but are part of the layer whose weight they compute.
    if "parametrizations" in path.split("."):
        return False
    only = all(name == "parametrizations" for name, _ in layer.named_children())
    return only and all(tensor.numel() == max(tensor.shape, default=1) for _, tensor in _own_tensors(layer))


def _own_tensors(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (layer.named_parameters(), layer.named_buffers()):
        yield from [item for item in named if "." not in item[0] or item[0].startswith("parametrizations.")]


def _ties(module: nn.Module) -> dict[str, str]:
    """Maps every further name of a parameter or buffer to its first one.

    The names of a module that occurs twice are one place, not two, and would be put back in the wrong order.
    """
    first: dict[int, str] = {}
    parts = list(module.named_modules())
    places = [item for path, part in parts for item in part.named_parameters(path, False, False)]
    places += [item for path, part in parts for item in part.named_buffers(path, False, False)]
    return {name: first[id(tensor)] for name, tensor in places if first.setdefault(id(tensor), name) != name}


class _Skeleton(NamedTuple):
    """A private copy of a module's structure, and the recurrent layers in it."""

    module: nn.Module
    recurrent: tuple[nn.RNNBase, ...]


def _skeleton(module: nn.Module, train: bool | None, mixed: bool) -> _Skeleton:
    copied = copy.deepcopy(module, _placeholders(module))
    if train is not None:
        copied.train(train)
    recurrent = tuple(part for part in copied.modules() if isinstance(part, nn.RNNBase))
    for layer in recurrent:
        layer.flatten_parameters = _leave_in_place
    if mixed:
        for path, layer in copied.named_modules():
            if _is_norm(path, layer) and not isinstance(layer, _BATCH_NORMS):
                layer.forward = functools.partial(_in_own_precision, layer, layer.forward)
                layer.register_forward_pre_hook(_no_fast_path)
    return _Skeleton(copied, recurrent)


def _placeholders(module: nn.Module) -> dict[int, Any]:
    """Makes a memo for `deepcopy` that puts tensors without memory in the place of parameters and buffers."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        # A plain attribute that was computed, such as the weight of the old weight_norm, cannot be deep-copied.
        memo |= {id(value): value.detach().clone() for value in vars(part).values() if _is_computed(value)}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(_placeholder(param), requires_grad=param.requires_grad)
    return memo | {id(buffer): _placeholder(buffer) for buffer in module.buffers()}


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def _leave_in_place() -> None:
    """Stands for `RNNBase.flatten_parameters`, which would move the caller's tensors in memory."""


def _in_own_precision(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = next((arg.dtype for arg in (*args, *kwargs.values()) if is_castable(arg)), None)
    own = next((tensor.dtype for _, tensor in _own_tensors(layer) if is_castable(tensor)), None)
    if given is None or own is None or torch.promote_types(given, own) == given:
        return forward(*args, **kwargs)
    wide = torch.promote_types(given, own)
    return tree.cast(forward(*tree.cast(args, wide), **tree.cast(kwargs, wide)), given)


def _no_fast_path(layer: nn.Module, args: Any) -> None:
    """Does nothing, but keeps `nn.TransformerEncoderLayer` from its fused form, which would not call the norms."""


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    for path, part in module.named_modules():
        for cls in type(part).__mro__:
            if cls.__name__ in _REFUSED and cls.__module__.startswith("torch."):
                raise TypeError(f"{path or 'module'} is a {cls.__name__}: {_REFUSED[cls.__name__]}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} is not initialised yet; call the module once on a batch, then functionalize it")


def _check_tensors(kind: str, given: Mapping[str, Any], shapes: dict[str, torch.Size]) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{kind} must be a dictionary of tensors by name, got {type(given).__name__}")
    if given.keys() != shapes.keys():
        missing, unknown = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
        raise KeyError(
            f"{kind}: " + "; ".join([f"missing {name}" for name in missing] + [f"unknown {name}" for name in unknown])
        )
    for name, shape in shapes.items():
        tensor = given[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{kind}[{name!r}] must be a tensor, got {type(tensor).__name__}")
        if tensor.shape != shape:
            hint = "; map over stacked ones with torch.func.vmap" if tensor.shape[1:] == shape else ""
            raise ValueError(
                f"{kind}[{name!r}] is {tree.describe(tensor)}, but the module has the shape {list(shape)}{hint}"
            )
