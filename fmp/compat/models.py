"""The models of a session: checked, cast in place, and given hooks that cast what goes in and comes out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fmp._compat import _BatchNorm
from fmp.compat.inputs import CastInputs, CastOutputs, cast_to_weights, state_dict_in_float32
from fmp.compat.options import Options
from fmp.dtypes import is_castable
from fmp.tree import describe

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


class Place(NamedTuple):
    """Where a parameter or buffer lived when it was cast, and the dtype that it had before.

    Attributes:
        module: The module.
        name: The name in it.
        param: The parameter, which may have moved since; None for a buffer.
        dtype: The dtype before.
    """

    module: nn.Module
    name: str
    param: nn.Parameter | None
    dtype: torch.dtype


def as_list(models: Any) -> list[nn.Module]:
    """Reads the argument `models`.

    Raises:
        TypeError: If it is neither a module nor a list of them.
    """
    if isinstance(models, nn.Module):
        return [models]
    if not isinstance(models, list) or not all(isinstance(model, nn.Module) for model in models):
        raise TypeError(f"models must be one nn.Module or a list of them, got {_kind(models)}")
    return models


def check(models: Sequence[nn.Module], options: Options) -> None:
    """Refuses models that are wrapped, or cast already.

    Args:
        models: The models.
        options: With `cast_model_type=False`, models may mix dtypes.

    Raises:
        RuntimeError: If a model is wrapped for parallel training, compiled by `torch.jit`, or has a 16-bit tensor.
        ValueError: If a parameter is not initialized yet.
    """
    for model in models:
        if any(cls.__name__ in _WRAPPERS for cls in type(model).__mro__):
            raise RuntimeError(
                f"models: {type(model).__name__} is wrapped already; call amp.initialize on the plain model, then wrap "
                "what it returns"
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise RuntimeError(
                f"models: {type(model).__name__} is compiled by torch.jit, whose functions cannot be cast; give "
                "amp.initialize the module that it was made of"
            )
        for name, tensor in _named_tensors(model):
            if is_lazy(tensor):
                raise ValueError(f"models: {name} is not initialized yet; call the model once on a batch before")
            if tensor.dtype in (torch.float16, torch.bfloat16) and options.cast_model_type is not False:
                raise RuntimeError(
                    f"models: {name} is {describe(tensor)}; give amp.initialize a float32 model, without calling "
                    ".half() or .bfloat16() before, or cast_model_type=False to keep the dtypes of the model"
                )


def cast(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool) -> Iterator[Place]:
    """Casts the floating-point parameters and buffers of a model in place, gradients included.

    Args:
        model: The model.
        dtype: The dtype.
        keep_batchnorm: Leaves batch normalization with weights alone.

    Yields:
        What is cast next, for `put_back`.
    """
    for module in model.modules():
        if keep_batchnorm and isinstance(module, _BatchNorm) and module.affine:
            continue
        for name, tensor in _own_tensors(module):
            if is_castable(tensor) and tensor.dtype != dtype:
                yield Place(module, name, tensor if isinstance(tensor, nn.Parameter) else None, tensor.dtype)
                _set(module, name, tensor.detach().to(dtype))
        _flatten(module)


def put_back(places: Sequence[Place], cast_to: torch.dtype | None, masters: Mapping[Tensor, Tensor]) -> None:
    """Gives what `cast` has cast its old dtype again, and the values of the masters where there are some.

    Parameters are found wherever they are by now, as in an optimizer alone. What has come into their modules since, as
    by pruning or fusing, follows.

    Args:
        places: What `cast` yielded.
        cast_to: The dtype that it cast to.
        masters: The masters, by parameter.
    """
    for place in places:
        if place.param is not None:
            _set_data(place.param, _value(place.param, masters, place.dtype))
    for module, old in _by_module(places):
        usual = next(iter(old.values()))
        for name, tensor in _own_tensors(module):
            is_new = tensor.dtype == cast_to and tensor.dtype.itemsize == 2  # `check` lets in no tensor of 16 bits
            is_buffer = name in old and not isinstance(tensor, nn.Parameter)
            if is_castable(tensor) and (is_new or is_buffer):
                _set(module, name, _value(tensor, masters, old.get(name, usual)))
        _flatten(module)


def add_hooks(model: nn.Module, options: Options) -> Iterator[Any]:
    """Casts what goes in and comes out by hooks.

    Yields:
        Handles that remove the hooks.
    """
    if options.model_dtype is not None:
        follows = any(param.dtype == options.model_dtype for param in model.parameters())
        cast_inputs = CastInputs(options.model_dtype, follows=follows)
        yield model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        yield model.register_state_dict_post_hook(state_dict_in_float32)
    if options.output_dtype is not None:
        # First, so that other hooks see the outputs that the caller sees.
        yield model.register_forward_hook(CastOutputs(options.output_dtype), prepend=True)
    if options.patch_torch_functions:
        for layer in model.modules():
            if isinstance(layer, nn.RNNBase):
                yield layer.register_forward_pre_hook(cast_to_weights, with_kwargs=True)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _by_module(places: Sequence[Place]) -> Iterator[tuple[nn.Module, dict[str, torch.dtype]]]:
    modules = {id(place.module): place.module for place in places}
    dtypes: dict[int, dict[str, torch.dtype]] = {number: {} for number in modules}
    for place in places:
        dtypes[id(place.module)][place.name] = place.dtype
    return ((module, dtypes[number]) for number, module in modules.items())


def _value(tensor: Tensor, masters: Mapping[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    return masters.get(tensor, tensor).detach().to(dtype, copy=True)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    tensor = getattr(module, name)
    if isinstance(tensor, nn.Parameter):
        _set_data(tensor, value)
    else:
        setattr(module, name, value)


def _set_data(param: nn.Parameter, value: Tensor) -> None:
    # The parameter stays the same object, as with `module.to`: optimizers hold it.
    grad, param.grad = param.grad, None
    param.data = value
    param.grad = None if grad is None else grad.to(value.dtype)


def _flatten(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return type(value).__name__
