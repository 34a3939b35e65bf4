"""Fake tensors in place of real ones, so that a call is run for its shapes alone."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fmp import _compat, tree
from fmp._compat import wraps_tensors
from fmp.errors import RematError
from fmp.memory.holders import holders
from fmp.rematerialization.capture import Capture


@contextmanager
def stand_ins(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Lends fake tensors in place of those that a call reaches; inside, torch computes shapes only.

    Args:
        fn: The function or module.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Yields:
        The three, with fake tensors that share storages where the tensors do.

    Raises:
        ValueError: If a tensor is fake already or has no strides, or if the call reads a tensor that was not found, or
            looks at values.
    """
    owners = holders(fn, args, kwargs)
    capture = Capture((fn, args, kwargs, [dict(vars(owner)) for owner in owners]))
    bases: dict[int, Tensor] = {}
    ended = False
    with _compat.FakeTensorMode(), _on_host():
        fakes = [_stand_in(tensor, bases) for tensor in capture.tensors]
        try:
            with capture.swapped(fakes):
                *call, attributes = capture.rebuilt(fakes)
                with _attributes(owners, attributes):
                    yield call[0], call[1], call[2]
                    ended = True
        except RematError:
            if not ended:
                raise
            # A module has set one of its tensors anew. The module gets the old one back, as it should.
        except RuntimeError as error:
            if not (op := looks_at_values(error)):
                raise
            raise ValueError(
                f"fake=True: the function looks at the values of tensors ({op}; `.item()` and `bool` do so), and fake "
                "ones have none; leave out fake=True"
            ) from error
        except AssertionError as error:
            if "convert all Tensors to FakeTensors" not in str(error):
                raise
            raise ValueError(
                "on fake tensors, the function reads a real one that was not found, such as one in a slot of another "
                "object or in a list that it makes; pass it as an argument"
            ) from error


def looks_at_values(error: BaseException) -> str:
    """Returns which op asked for the values of fake tensors, if that is what an error is about, else an empty string.

    Example:
        >>> looks_at_values(ValueError("a negative number"))
        ''
    """
    if type(error).__name__ in _VALUE_ERRORS:
        return str(getattr(error, "func", "")) or str(error)
    return ""


# The names, since torch keeps the classes to itself.
_VALUE_ERRORS = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


def _on_host() -> Any:
    """Makes new tensors on the CPU where they would have no device, as tensors on the meta device count as there."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


@contextmanager
def _attributes(owners: list[Any], attributes: list[dict[str, Any]]) -> Iterator[None]:
    """Lends attributes to objects, and gives back what they had before."""
    before = [dict(vars(owner)) for owner in owners]
    try:
        for owner, values in zip(owners, attributes, strict=True):
            _change(vars(owner), values)
        yield
    finally:
        for owner, values in zip(owners, before, strict=True):
            _change(vars(owner), values)


def _change(table: dict[str, Any], values: dict[str, Any]) -> None:
    """Makes a table hold some values, and touches no others: other threads may use the object."""
    for key in [key for key in table if key not in values]:
        del table[key]
    for key, value in values.items():
        if key not in table or table[key] is not value:
            table[key] = value


def _stand_in(tensor: Tensor, bases: dict[int, Tensor]) -> Tensor:
    is_plain = tensor.layout == torch.strided and not tensor.is_nested
    if isinstance(tensor, _compat.FakeTensor) or not is_plain or wraps_tensors(type(tensor)):
        raise ValueError(
            f"fake=True makes fake tensors of plain ones, got {tree.describe(tensor)}, a {type(tensor).__name__} with "
            f"layout {tensor.layout}; leave out fake=True"
        )
    storage, size = tensor.untyped_storage(), tensor.element_size()
    if storage._cdata not in bases:
        device = "cpu" if tensor.is_meta else tensor.device
        bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    whole = bases[storage._cdata][: storage.nbytes() // size * size].view(tensor.dtype)
    fake = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
    fake.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        fake = nn.Parameter(fake, tensor.requires_grad)
    if tensor.is_leaf and tensor.grad is not None:
        fake.grad = _stand_in(tensor.grad, bases)
    return fake
