"""Pytrees: frozen dataclasses that every transform understands, and the few tree functions that a train step needs.

None is a leaf everywhere in fmp, so a tree with holes (a leaf without a master, a parameter without a gradient) keeps
its structure. Dictionaries are flattened in sorted key order, as optree does it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, dataclass_transform

import optree
import torch

from fmp import _compat, _traced
from fmp.dtypes import full_precision, is_castable, short_name

T = TypeVar("T")
Tree = Any
Spec = optree.PyTreeSpec | _traced.Spec

_ROW = 2**12


def static(**kwargs: Any) -> Any:
    """Marks a field of a `fmp.tree.dataclass` as metadata: part of the tree's structure, not a leaf.

    Args:
        **kwargs: Passed to `dataclasses.field`, for example `default=2.0`.

    Returns:
        The dataclass field. Its values must be hashable and comparable.
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
        >>> @dataclass
        ... class Average:
        ...     total: torch.Tensor
        ...     unit: str = static(default="nats")
        >>> doubled = map(lambda leaf: leaf * 2, Average(torch.tensor(1.5)))
        >>> doubled
        Average(total=tensor(3.), unit='nats')
    """
    # A constructor of one's own is kept, and inherited where no field is added.
    init = "__init__" not in vars(cls) and bool(inspect.get_annotations(cls))
    cls = dataclasses.dataclass(frozen=True, eq=False, init=init)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
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
    """
    names = [field.name for field in dataclasses.fields(node)]  # type: ignore[arg-type]
    if unknown := changes.keys() - set(names):
        raise TypeError(f"{type(node).__name__} has no field {sorted(unknown)}; its fields are {names}")
    copy = object.__new__(type(node))
    for name in names:
        object.__setattr__(copy, name, changes[name] if name in changes else getattr(node, name))
    return copy


def flatten(tree: Tree) -> tuple[list[Any], Spec]:
    """Takes a tree apart into its leaves and its structure; None is a leaf."""
    if torch.compiler.is_compiling():
        return _traced.flatten(tree)
    return optree.tree_flatten(tree, none_is_leaf=True)


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Tree:
    """Puts leaves back into a structure that `flatten` returned."""
    return spec.unflatten(leaves)


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves of a tree, None included.

    Example:
        >>> leaves({"b": None, "a": (1, 2)})
        [1, 2, None]
    """
    return flatten(tree)[0]


def structure(tree: Tree) -> Spec:
    """Returns the structure of a tree; two trees that can be mapped together have equal ones."""
    return flatten(tree)[1]


def map(fn: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """Applies a function to the leaves of one or more trees of the same structure.

    Args:
        fn: Called with one leaf of each tree. A None leaf is passed like any other.
        tree: The tree that sets the structure.
        *rests: Further trees, each with `tree`'s structure, or with whole subtrees in place of its leaves.

    Returns:
        A tree of the results.

    Example:
        >>> map(lambda a, b: a if b is None else a + b, {"w": 1, "b": 2}, {"w": 10, "b": None})
        {'w': 11, 'b': 2}
    """
    if not torch.compiler.is_compiling():
        return optree.tree_map(fn, tree, *rests, none_is_leaf=True)
    leaves, spec = flatten(tree)
    columns = [spec.flatten_up_to(rest) for rest in rests]
    return spec.unflatten([fn(*row) for row in zip(leaves, *columns, strict=True)])


def map_with_path(fn: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """Like `map`, with the leaf's path (`blocks/3/attn/qkv`) as the function's first argument."""
    spec = structure(tree)
    return map(fn, spec.unflatten(paths(tree)), tree, *rests)


def unzip(tree: Tree, count: int, spec: Spec) -> tuple[Tree, ...]:
    """Turns a tree of `count`-tuples into `count` trees of structure `spec`."""
    columns = zip(*spec.flatten_up_to(tree), strict=True) if spec.num_leaves else [()] * count
    return tuple(spec.unflatten(column) for column in columns)


def join(path: tuple[Any, ...]) -> str:
    """Writes a path of keys, indices and field names as one string."""
    return "/".join(str(part) for part in path)


def paths(tree: Tree) -> list[str]:
    """Returns the path of every leaf, in the order of `leaves`.

    Args:
        tree: Any tree. A tree that is a single leaf has the path `""`.

    Returns:
        One string a leaf: dictionary keys, sequence indices and field names, joined with `/`.

    Example:
        >>> paths({"blocks": [{"w": 0}, {"w": 1}], "norm": 2})
        ['blocks/0/w', 'blocks/1/w', 'norm']
    """
    return [join(path) for path in structure(tree).paths()]


def items(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Iterates over the pairs of path and leaf."""
    return zip(paths(tree), leaves(tree), strict=True)


class _Description(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe(tree: Tree) -> str:
    """Writes a tree with dtype and shape in place of each tensor.

    Args:
        tree: Any tree, or a single tensor.

    Returns:
        For example `{'w': f32[3,4], 'count': i32[], 'name': 'adam'}`.

    Example:
        >>> describe({"w": torch.ones(3, 4), "count": torch.tensor(1)})
        "{'w': f32[3,4], 'count': i64[]}"
    """

    def short(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return _Description(f"{short_name(leaf.dtype)}[{','.join(str(size) for size in leaf.shape)}]")

    return repr(map(short, tree))


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Casts the floating-point tensors of a tree.

    Args:
        tree: Any tree. Integer, boolean and complex tensors, None and Python numbers pass through untouched.
        dtype: The floating-point dtype to cast to.

    Returns:
        A tree of the same structure. A leaf that already has the dtype is the same tensor, not a copy.

    Raises:
        TypeError: If `dtype` is not a floating-point dtype.

    Example:
        >>> describe(cast({"w": torch.ones(2), "ids": torch.arange(2)}, torch.bfloat16))
        "{'w': bf16[2], 'ids': i64[2]}"
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"cast needs a floating-point torch dtype, got {dtype!r}")
    return map(lambda leaf: leaf.to(dtype) if is_castable(leaf) else leaf, tree)


def check_flag(name: str, value: Any) -> None:
    """Raises unless a value is a scalar boolean tensor.

    Args:
        name: What to call it in the message.
        value: The value, meant to be bool[].

    Raises:
        TypeError: If it is not a boolean tensor.
        ValueError: If it is one with dimensions.
    """
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
        raise TypeError(f"{name} must be a boolean tensor, as fmp.all_finite returns it, got {describe(value)}")
    if value.ndim:
        raise ValueError(f"{name} must be a scalar, got {describe(value)}; reduce it, for example with .all()")


def select(pred: torch.Tensor, on_true: Tree, on_false: Tree) -> Tree:
    """Chooses between two trees, leaf by leaf, without looking at the predicate on the host.

    Args:
        pred: bool[], the choice.
        on_true: The result where `pred` is true.
        on_false: A tree of the same structure, shapes and dtypes.

    Returns:
        One of the two trees, bit for bit: NaN and inf in the other one leave no trace.

    Raises:
        TypeError: If `pred` is not a boolean tensor, or two leaves differ in dtype or are unequal non-tensors.
        ValueError: If `pred` is not a scalar, or the trees or two leaves differ in structure or shape.

    Example:
        >>> select(torch.tensor(False), {"w": torch.tensor(float("nan"))}, {"w": torch.tensor(1.0)})
        {'w': tensor(1.)}
    """
    check_flag("pred", pred)
    true_leaves, spec = flatten(on_true)
    false_leaves, false_spec = flatten(on_false)
    if spec != false_spec:
        raise ValueError(f"on_true and on_false differ in structure: {spec} against {false_spec}")

    def choose(index: int, new: Any, old: Any) -> Any:
        if new is old:
            return new
        tensors = isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)
        if tensors and new.shape == old.shape and new.dtype == old.dtype:
            return torch.where(pred, new, old)
        if not tensors and type(new) is type(old) and new == old:
            return new
        error = ValueError if tensors and new.dtype == old.dtype else TypeError
        path = paths(on_true)[index]
        raise error(f"{path}: on_true is {describe(new)}, on_false is {describe(old)}; both must be alike")

    return unflatten(spec, [choose(i, *pair) for i, pair in enumerate(zip(true_leaves, false_leaves, strict=True))])


def all_finite(tree: Tree) -> torch.Tensor:
    """Says whether every number in a tree is finite.

    Args:
        tree: Any tree; only floating-point and complex tensors are looked at.

    Returns:
        bool[], true for a tree without such tensors. It stays on the device.

    Example:
        >>> all_finite({"w": torch.tensor([1.0, float("inf")])}), all_finite({})
        (tensor(False), tensor(True))
    """
    extremes = [extreme for leaf in leaves(tree) if _has_numbers(leaf) for extreme in _extremes(leaf)]
    if not extremes:
        return torch.tensor(True, device=_device(tree))
    return torch.isfinite(torch.stack(extremes)).all()


def global_norm(tree: Tree) -> torch.Tensor:
    """Computes the Euclidean norm over all tensors of a tree, as if they were one vector.

    Args:
        tree: Any tree; only floating-point and complex tensors count.

    Returns:
        f32[], or f64[] if any tensor is float64 or complex128; 0 for a tree without such tensors. Squares are summed
        in that dtype, so entries beyond 1.8e19 overflow float32 to inf, as in `torch.nn.utils.clip_grad_norm_`.

    Example:
        >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float16)})
        tensor(5.)
    """
    norms = [_norm(leaf) for leaf in leaves(tree) if _has_numbers(leaf)]
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32, device=_device(tree))
    if len(norms) == 1:
        return norms[0]
    widest = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.linalg.vector_norm(torch.stack([norm.to(widest) for norm in norms]))


def _has_numbers(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)


def _device(tree: Tree) -> torch.device | None:
    return next((leaf.device for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)), None)


def _extremes(leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the smallest and largest entry: they carry inf and NaN alike, in one pass, without a mask."""
    if leaf.numel() == 0:
        return ()
    leaf = leaf.detach()
    if leaf.dtype.is_complex:
        leaf = torch.view_as_real(leaf.resolve_conj())
    return torch.aminmax(leaf.float() if leaf.dtype.itemsize == 1 else leaf)


def _norm(leaf: torch.Tensor) -> torch.Tensor:
    dtype = full_precision(leaf.dtype)
    if leaf.dtype.itemsize == 1:  # vector_norm upcasts as it reads, but not from the 8-bit formats
        leaf = leaf.to(dtype)
    if leaf.device.type != "cpu" or leaf.numel() <= _ROW:
        return torch.linalg.vector_norm(leaf, dtype=dtype)
    # On a CPU, vector_norm adds serially and drifts: by 2 % over 5e7 equal entries. Norms of rows do not.
    flat = leaf.reshape(-1)
    cut = flat.numel() - flat.numel() % _ROW
    rows = torch.linalg.vector_norm(flat[:cut].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[cut:], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([rows, rest.reshape(1)]))
