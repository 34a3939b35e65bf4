"""Modules that run collectives of their own, and that pure functions therefore cannot be made of.

They are known by the names of their classes. To import these would take longer than to import fmp; and where they were
never imported, there are no such modules.
"""

import functools
from typing import Any, NamedTuple

from torch import nn

_WAYS = (
    "Two ways lead to many processes: a plain module with fmp.distributed.Layout, as in fmp.train_step(..., "
    "layout=layout); or FSDP2's own engine, with fmp.distributed.fsdp2_value_and_grad(module, loss_fn)"
)


class Wrapper(NamedTuple):
    """A kind of such modules.

    Attributes:
        name: What it is called.
        why: What would go wrong.
        instead: What to pass.
        is_rematerialized: Whether it can be run twice under plain autograd, as `fmp.remat` does.
    """

    name: str
    why: str
    instead: str
    is_rematerialized: bool = False


_HOOKS = "its hooks put other parameters in place, which neither torch.func nor a recomputation allows"
_WRAPPERS = {
    "DistributedDataParallel": Wrapper(
        "DistributedDataParallel", "gradients would silently stay local", "the inner module, `.module`", True
    ),
    "FullyShardedDataParallel": Wrapper("FullyShardedDataParallel", _HOOKS, "the module before it is wrapped"),
    "ReplicateModule": Wrapper("ReplicateModule", _HOOKS, "the module before `replicate`"),
    "FSDPModule": Wrapper("FSDPModule", _HOOKS, "the module before `fully_shard`"),
    "DDP": Wrapper("module changed by `replicate`", _HOOKS, "the module before `replicate`"),
}


def check_no_wrapper(module: nn.Module, what: str, *, twice: bool = False, prefix: str = "") -> None:
    """Refuses a module that is, or has a part, that runs its own collectives.

    Args:
        module: Any module.
        what: The function that it was given to, and that its parts would go wrong in.
        twice: Whether it is enough if it can be run twice under plain autograd.
        prefix: The path of the module in a larger one.

    Raises:
        TypeError: If there is such a part, naming it and what to do instead.
    """
    for path, part in module.named_modules():
        check_no_wrapper_class(type(part), f"{prefix}.{path}".strip("."), what, twice=twice)


def check_no_wrapper_class(cls: type, path: str, what: str, *, twice: bool = False) -> None:
    """Refuses one part, as `check_no_wrapper` does, by its class."""
    wrapper = wrapper_of(cls)
    if wrapper is not None and not (twice and wrapper.is_rematerialized):
        raise TypeError(
            f"{what}: {path or 'module'} is a {wrapper.name}: {wrapper.why}; pass {wrapper.instead}. {_WAYS}"
        )


@functools.lru_cache(maxsize=4096)
def wrapper_of(cls: type) -> Wrapper | None:
    """Says which kind of wrapper a class of modules is; None for all others.

    Example:
        >>> wrapper_of(nn.parallel.DistributedDataParallel).instead, wrapper_of(nn.Linear)
        ('the inner module, `.module`', None)
    """
    bases: list[Any] = [base for base in cls.__mro__ if base.__module__.startswith("torch.")]
    return next((_WRAPPERS[base.__name__] for base in bases if base.__name__ in _WRAPPERS), None)
