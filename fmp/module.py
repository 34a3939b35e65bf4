"""From `nn.Module` to a pure function: parameters and buffers go in as dictionaries, buffers come back as one.

A model runs private copies of the module's structure, one for each mode, whose tensors hold no memory. A call puts
the given tensors in their place, so the user's module is never touched and nothing about the copies ever changes.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fmp import _compat, tree
from fmp._skeleton import Skeleton, placeholders, private_copy, skeleton_of
from fmp.dropout import SeededRandomness
from fmp.dtypes import is_castable
from fmp.module_checks import check_module, check_new_buffers, check_tensors, check_unwritten, versions
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
# torch computes these in float32 by itself when the input is narrower than weights and statistics; not under vmap.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_CHECKPOINT = (
    "with a seed, saved-tensor hooks such as those of torch.utils.checkpoint cannot be used inside the module: what it "
    "draws when it is recomputed would be different; put them around `apply`"
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A module as a pure function and its initial state; made by `fmp.functionalize`.

    What the module stores in plain attributes during a call stays on the model's private copy. Threads that call at
    the same time need a model each.

    Attributes:
        params: The parameters by dotted name, copies in the module's dtypes. Weights that the module ties are one leaf.
            Parameters that do not require grad are among them; leave those out of training with the optimizer.
        buffers: The buffers likewise, those included that the module does not save.
        norm_params: The names of parameters and buffers that belong to normalization layers, see `norm_names`.
    """

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    norm_params: tuple[str, ...]
    _name: str
    _ties: dict[str, str]
    _param_shapes: dict[str, torch.Size]
    _buffer_shapes: dict[str, torch.Size]
    _skeletons: dict[tuple[bool | None, bool], Skeleton]

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
        arguments. Where parameters are of mixed precision, because a policy keeps normalization layers in float32,
        these layers compute in that precision and return the dtype that they were given.

        To save memory, put `torch.utils.checkpoint` around this call, not inside the module: recomputed after the
        call, a part finds no parameters and raises. Its reentrant form (use_reentrant=True) inside the module is not
        noticed, and gives the parameters of the part no gradient.

        `seed` and `train` are for the model. A module whose forward takes arguments of these names does not receive
        them; pass those by position, or wrap the module in one that names them otherwise.

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
            ValueError: If one has another shape than in the module, before or after the call; if the module writes
                into a parameter (seen where it runs eagerly, outside of vmap, and not through `.data`), creates or
                removes tensors or parts, or uses a parameter where the given one does not reach; or if a seed is given
                and the module draws random numbers where no seed reaches.
            RuntimeError: If a seed is given and the module uses torch.utils.checkpoint or other saved-tensor hooks.
            TypeError: If one is not a tensor.

        Example:
            >>> model = functionalize(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
            >>> out, buffers = model.apply(model.params, model.buffers, torch.randn(4, 2), seed=0, train=True)
            >>> buffers["1.num_batches_tracked"], model.buffers["1.num_batches_tracked"]
            (tensor(1), tensor(0))
        """
        check_tensors("params", params, self._param_shapes)
        check_tensors("buffers", buffers, self._buffer_shapes)
        mixed = len({param.dtype for param in params.values() if param.dtype.is_floating_point}) > 1
        skeleton = self._skeletons[train, mixed]

        tensors = {**params, **{name: buffer.clone() for name, buffer in buffers.items()}}
        tensors |= {alias: tensors[name] for alias, name in self._ties.items()}
        device = next((param.device for param in params.values()), None)
        compiling = torch.compiler.is_compiling()
        before = [] if compiling else versions(params)
        try:
            with contextlib.nullcontext() if seed is None else _seeded(as_seed(seed, device)):
                # Buffers are written in place, or replaced in the dictionary; both are read back from it.
                output = torch.func.functional_call(skeleton.module, tensors, args, kwargs, tie_weights=False)
        finally:
            changed = skeleton.restore()
            for layer in skeleton.recurrent:
                _compat.forget_weights(layer)
        if changed is not None:
            raise ValueError(
                f"{changed} during the call, which would be hidden state; parameters, buffers and submodules must be "
                "there with their shapes when the module is functionalized"
            )
        check_new_buffers(tensors, self._buffer_shapes)
        if not compiling:
            check_unwritten(before, params, tensors)
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
        ValueError: If a parameter or buffer is not initialized yet or has gradient hooks, if an embedding has a
            max_norm, or if a function in the module, such as a lambda as a hook, refers to the module itself.

    Example:
        >>> model = functionalize(nn.Linear(2, 3))
        >>> model
        Model(Linear, 2 params of 9 numbers, 0 buffers)
        >>> out, _ = model.apply(model.params, model.buffers, torch.ones(1, 2))
        >>> out.shape
        torch.Size([1, 3])
    """
    check_module(module)
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
        _skeletons=_skeletons(module),
    )


def norm_names(module: nn.Module) -> tuple[str, ...]:
    """Names the parameters and buffers of a module's normalization layers, which low precision harms most.

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


def _skeletons(module: nn.Module) -> dict[tuple[bool | None, bool], Skeleton]:
    memo = placeholders(module)
    modes = [(train, mixed) for train in (True, False, None) for mixed in (False, True)]
    return {(train, mixed): _skeleton(module, memo, train, mixed) for train, mixed in modes}


def _skeleton(module: nn.Module, memo: dict[int, Any], train: bool | None, mixed: bool) -> Skeleton:
    copied = private_copy(module, memo)
    if train is not None:
        copied.train(train)
    skeleton = skeleton_of(copied)
    for layer in skeleton.recurrent:
        layer.flatten_parameters = _compat.leave_in_place
        layer.check_input = functools.partial(_check_input, layer)
    if mixed:
        for path, layer in copied.named_modules():
            if _is_norm(path, layer):
                layer.forward = functools.partial(_in_own_precision, layer, layer.forward)
                layer.register_forward_pre_hook(_no_fast_path)
    return skeleton


@contextlib.contextmanager
def _seeded(seed: torch.Tensor) -> Iterator[None]:
    # With hooks in place, they are around `apply`, and so is the recomputation.
    free = torch.compiler.is_compiling() or _compat.saved_tensors_are_hooked()
    without = contextlib.nullcontext() if free else torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINT)
    with without, SeededRandomness(seed):
        yield


def _check_input(layer: nn.RNNBase, input: torch.Tensor, batch_sizes: torch.Tensor | None) -> None:
    """Checks shapes only: where `fmp.autocast` casts op by op, an input may be narrower than the weights until then."""
    form = torch.empty(input.shape, dtype=_compat.first_weight(layer).dtype, device="meta")
    type(layer).check_input(layer, form, batch_sizes)


def _in_own_precision(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if isinstance(layer, _BATCH_NORMS) and not (torch.compiler.is_compiling() or _compat.transform_active()):
        return forward(*args, **kwargs)
    given = next((arg.dtype for arg in (*args, *kwargs.values()) if is_castable(arg)), None)
    own = next((tensor.dtype for _, tensor in _own_tensors(layer) if is_castable(tensor)), None)
    if given is None or own is None or torch.promote_types(given, own) == given:
        return forward(*args, **kwargs)
    wide = torch.promote_types(given, own)
    output = forward(*tree.cast(args, wide), **tree.cast(kwargs, wide))
    if type(output) is tuple and any(is_castable(arg) and arg.dtype == wide for arg in (*args, *kwargs.values())):
        # A residual that came in wide goes out wide; only the normalized tensor, the first one, is narrowed.
        return (tree.cast(output[0], given), *output[1:])
    return tree.cast(output, given)


def _no_fast_path(layer: nn.Module, args: Any) -> None:
    """Does nothing, but keeps `nn.TransformerEncoderLayer` from its fused form, which would not call the norms."""
