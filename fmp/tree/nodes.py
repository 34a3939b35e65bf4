"""State as frozen dataclasses that optree, torch.func, torch.compile, pickle and deepcopy all understand."""

import dataclasses
import inspect
from typing import Any, TypeVar, cast, dataclass_transform

from fmp import _compat

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """Marks a field of a `fmp.tree.dataclass` as metadata: part of the tree's structure, not a leaf.

    Args:
        **kwargs: Passed to `dataclasses.field`, for example `default=2.0`.

    Returns:
        The dataclass field. Its values must be hashable and comparable.

    Example:
        >>> @fmp.tree.dataclass
        ... class Scaled:
        ...     value: torch.Tensor
        ...     factor: float = fmp.tree.static(default=2.0)
        >>> fmp.tree.leaves(Scaled(torch.tensor(1.0)))
        [tensor(1.)]
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def dataclass(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass and a pytree node, for optree and for torch's own pytree alike.

    One object then passes through `optree`, `torch.func.vmap`/`grad`/`vjp`, `torch.compile`, pickle and deepcopy
    unchanged. Rebuilding an object from its leaves never calls `__init__` or `__post_init__`, because transforms fill
    trees with whatever they like; validation therefore belongs into `__init__` or `__post_init__`. A class that
    defines its own `__init__` keeps it, and so does a subclass that adds no fields. A subclass must be decorated too,
    or trees take it for a leaf. Two objects compare by identity, since their fields are tensors.

    Args:
        cls: The class to decorate. Fields marked with `fmp.tree.static()` are metadata, the others are children.

    Returns:
        The registered class.

    Example:
        >>> @fmp.tree.dataclass
        ... class Average:
        ...     total: torch.Tensor
        ...     unit: str = fmp.tree.static(default="nats")
        >>> doubled = fmp.tree.map(lambda leaf: leaf * 2, Average(torch.tensor(1.5)))
        >>> doubled
        Average(total=tensor(3.), unit='nats')
    """
    # A constructor of one's own is kept, and inherited where no field is added.
    init = "__init__" not in vars(cls) and bool(inspect.get_annotations(cls))
    cls = dataclasses.dataclass(frozen=True, eq=False, init=init)(cls)
    fields = dataclasses.fields(cast(Any, cls))
    children = tuple(field.name for field in fields if not field.metadata.get("static"))
    metadata = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(node, name) for name in children), tuple(getattr(node, name) for name in metadata)

    def unflatten(static_values: tuple[Any, ...], values: Any) -> Any:
        node = object.__new__(cls)
        for name, value in zip(children + metadata, (*values, *static_values), strict=True):
            object.__setattr__(node, name, value)
        return node

    _compat.register_pytree(cls, fields=children, flatten=flatten, unflatten=unflatten)
    return cls


def replace(node: T, **changes: Any) -> T:
    """Returns a copy of a dataclass node with some fields changed, without running its constructor.

    Args:
        node: An instance of a class made by `fmp.tree.dataclass`.
        **changes: New values by field name.

    Returns:
        A new node of the same class.

    Raises:
        TypeError: If a name is not a field of the class.

    Example:
        >>> @fmp.tree.dataclass
        ... class Count:
        ...     value: torch.Tensor
        >>> replace(Count(torch.tensor(1)), value=torch.tensor(2))
        Count(value=tensor(2))
    """
    names = [field.name for field in dataclasses.fields(cast(Any, node))]
    if unknown := changes.keys() - set(names):
        raise TypeError(f"{type(node).__name__} has no field {sorted(unknown)}; its fields are {names}")
    copy = object.__new__(type(node))
    for name in names:
        object.__setattr__(copy, name, changes[name] if name in changes else getattr(node, name))
    return copy
