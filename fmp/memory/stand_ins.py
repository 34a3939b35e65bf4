"""Fake tensors in place of real ones, so that a call is run for its shapes alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as wraps_tensors

from fmp import _compat, tree
from fmp.errors import RematError
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
        ValueError: If a tensor is fake already or has no strides, or if the call reads a tensor that was not found.
    """
    capture = Capture((fn, args, kwargs))
    bases: dict[int, Tensor] = {}
    ended = False
    with _compat.FakeTensorMode():
        fakes = [_stand_in(tensor, bases) for tensor in capture.tensors]
        try:
            with capture.swapped(fakes):
                yield capture.rebuilt(fakes)
                ended = True
        except RematError:
            if not ended:
                raise
            # A module has set one of its tensors anew. The module gets the old one back, as it should.
        except AssertionError as error:
            if "convert all Tensors to FakeTensors" not in str(error):
                raise
            raise ValueError(
                "fake=True: the function reads a tensor that is an attribute of another object; pass it as an argument"
            ) from error


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
