"""Private copies of a module, with placeholders where a call puts the given tensors.

A placeholder holds no memory. Whoever computes with one reads a parameter where no call can put it, which would give
wrong numbers without a word; so it raises.
"""

import copy
import operator
from typing import Any, NamedTuple

import torch
from torch import nn

from fmp import _compat, tree
from fmp.module_checks import attributes, own_storages, storage

# What says something about a placeholder, or makes another one of it, does not read the numbers.
_HARMLESS = ("__get__", "__set__", "detach", "requires_grad_")


class Placeholder(torch.Tensor):
    """A tensor without memory that raises when it is computed with; made by `placeholder`."""

    _reason = "a placeholder of a module's parameter was used"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs a function that returns no new numbers, refuses every other one."""
        reason = next(leaf._reason for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, Placeholder))
        try:
            with torch.no_grad():  # torch.utils.checkpoint would stop at what is saved for a gradient, and see no error
                result = super().__torch_function__(func, types, args, kwargs or {})
        except RuntimeError as error:
            raise ValueError(reason) from error
        if func.__name__ in _HARMLESS:
            if isinstance(result, Placeholder):
                result._reason = reason
        elif any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(result)):
            raise ValueError(reason)
        return result

    def __deepcopy__(self, memo: Any) -> "Placeholder":
        return placeholder(self, self._reason)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_param = isinstance(self, nn.Parameter)
        return _rebuild, (tuple(self.shape), self.dtype, self.requires_grad, is_param, self._reason)


def placeholder(tensor: torch.Tensor, reason: str) -> Placeholder:
    """Makes a placeholder for a tensor.

    Args:
        tensor: A parameter, buffer or other tensor of a module.
        reason: What the error says when something computes with the placeholder.
    """
    is_param = isinstance(tensor, nn.Parameter)
    return _rebuild(tuple(tensor.shape), tensor.dtype, tensor.is_leaf and tensor.requires_grad, is_param, reason)


def _rebuild(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_param: bool, reason: str
) -> Placeholder:
    made: Any = torch.Tensor._make_subclass(Placeholder, torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
    made._reason = reason
    if is_param:
        made._is_param = True  # makes it an instance of nn.Parameter
    return made


class Skeleton(NamedTuple):
    """A private copy of a module's structure.

    Attributes:
        module: The copy.
        recurrent: The recurrent layers in it.
        tables: Each part with its dotted name and what its tables of parameters, buffers and submodules hold.
    """

    module: nn.Module
    recurrent: tuple[nn.RNNBase, ...]
    tables: tuple[tuple[str, nn.Module, tuple[dict[str, Any], ...]], ...]

    def restore(self) -> str | None:
        """Undoes what a call added to or removed from the tables of the copy.

        Returns:
            What the first change was; None without one.
        """
        found = None
        for path, part, tables in self.tables:
            for now, before in zip((part._parameters, part._buffers, part._modules), tables, strict=True):
                if now.keys() == before.keys() and all(map(operator.is_, now.values(), before.values())):
                    continue
                for name in {**before, **now}:
                    if now.get(name) is not before.get(name) or (name in now) != (name in before):
                        verb = "removed" if now.get(name) is None else "created"
                        found = found or f"{path}.{name}".removeprefix(".") + f" was {verb}"
                        vars(part).pop(name, None)
                now.clear()
                now.update(before)
        return found


def placeholders(module: nn.Module) -> dict[int, Any]:
    """Makes a memo for `deepcopy` that leaves out the memory of a module.

    Parameters and buffers become placeholders, as does what was computed from them or is a view of one. Other tensors
    in plain attributes are copied here, so that all copies of the module share them.
    """
    memo: dict[int, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        memo[id(tensor)] = placeholder(
            tensor,
            f"{name} was used where the tensor given to `apply` does not reach: through something other than the "
            "parameter or buffer itself, such as a list (read it as an attribute in forward), or after the call, as "
            "torch.utils.checkpoint inside the module does (put it around `apply`)",
        )
    own = own_storages(module)
    for name, value in attributes(module):
        if not isinstance(value, torch.Tensor) or id(value) in memo:
            continue
        # Of a transform that has ended, torch leaves tensors in recurrent layers; the next call replaces them.
        if _compat.wrapped_by_transform(value) or not value.is_leaf or storage(value) in own:
            memo[id(value)] = placeholder(
                value,
                f"{name} was computed from, or is a view of, tensors of the module when it was functionalized, and "
                "would not follow the ones given to `apply`; compute it in forward, or register it as a buffer",
            )
        else:
            memo[id(value)] = copy.deepcopy(value, memo)
    return memo


def private_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies a module.

    Args:
        module: Any module.
        memo: What `placeholders` made for it.

    Raises:
        TypeError: If a part of the module cannot be copied.
    """
    try:
        copied = copy.deepcopy(module, dict(memo))
    except Exception as error:
        name = _uncopied(module, memo)
        raise TypeError(
            f"{name} cannot be copied ({error}); keep it outside of the module, or give its class a __deepcopy__"
        ) from error
    originals = {id(part): path for path, part in module.named_modules()}
    for part in copied.modules():
        if id(part) in originals:
            raise TypeError(f"{originals[id(part)] or 'module'} is not copied by copy.deepcopy; fix its __deepcopy__")
    return copied


def skeleton_of(copied: nn.Module) -> Skeleton:
    """Describes a private copy as it is now.

    Args:
        copied: What `private_copy` made.
    """
    return Skeleton(
        copied,
        tuple(part for part in copied.modules() if isinstance(part, nn.RNNBase)),
        tuple(
            (path, part, (dict(part._parameters), dict(part._buffers), dict(part._modules)))
            for path, part in copied.named_modules()
        ),
    )


def _uncopied(module: nn.Module, memo: dict[int, Any]) -> str:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            try:
                if name != "_modules":
                    copy.deepcopy(value, dict(memo))
            except Exception:
                return f"{path}.{name}".removeprefix(".")
    return "module"
