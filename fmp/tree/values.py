"""The numbers in a tree: casting them, choosing between two trees, checking and measuring them."""

import copy
import functools
from typing import Any

import torch

from fmp.dtypes import casts_itself, full_precision, is_castable
from fmp.tree.structure import describe, flatten, leaves, map, paths, unflatten
from fmp.tree.wholes import check_whole, is_dtensor

Tree = Any

_ROW = 2**12


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Casts the floating-point tensors of a tree.

    Args:
        tree: Any tree. Integer, boolean and complex tensors, None and Python numbers pass through untouched. Of a leaf
            of another class that has a method `to`, such as a batch, a shallow copy is cast by its `to(dtype)`.
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
    return map(lambda leaf: cast_leaf(leaf, dtype), tree)


def cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    """Casts one leaf, as `cast` does."""
    if is_castable(leaf):
        return leaf.to(dtype)
    # Some classes write what they cast into themselves, and return that.
    return copy.copy(leaf).to(dtype) if casts_itself(leaf) else leaf


def check_flag(name: str, value: Any) -> None:
    """Raises unless a value is a scalar boolean tensor.

    Args:
        name: What to call it in the message.
        value: The value, meant to be bool[].

    Raises:
        TypeError: If it is not a boolean tensor.
        ValueError: If it is one with dimensions.

    Example:
        >>> check_flag("good", torch.tensor(True))
        >>> check_flag("good", True)
        Traceback (most recent call last):
        TypeError: good must be a boolean tensor, as fmp.all_finite returns it, got True
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

    Raises:
        TypeError: If the tree holds a rank's part of a tensor, such as a `fmp.distributed.LocalShard`.

    Example:
        >>> all_finite({"w": torch.tensor([1.0, float("inf")])}), all_finite({})
        (tensor(False), tensor(True))
    """
    check_whole(tree, "the flag")
    numbers = [leaf.detach() for leaf in leaves(tree) if _has_numbers(leaf) and leaf.numel()]
    numbers = [leaf.float() if leaf.dtype.itemsize == 1 else leaf for leaf in numbers]
    counts = [torch.isfinite(leaf).logical_not().sum() for leaf in numbers if is_dtensor(leaf)]
    extremes = [extreme for leaf in numbers if not is_dtensor(leaf) for extreme in _extremes(leaf)]
    flags = [torch.stack(counts).sum() == 0] if counts else []
    flags += [torch.isfinite(torch.stack(extremes)).all()] if extremes else []
    return functools.reduce(torch.logical_and, flags) if flags else torch.tensor(True, device=_device(tree))


def global_norm(tree: Tree) -> torch.Tensor:
    """Computes the Euclidean norm over all tensors of a tree, as if they were one vector.

    Args:
        tree: Any tree; only floating-point and complex tensors count.

    Returns:
        f32[], or f64[] if any tensor is float64 or complex128; 0 for a tree without such tensors. Squares are summed
        in that dtype, so entries beyond 1.8e19 overflow float32 to inf, as in `torch.nn.utils.clip_grad_norm_`, and a
        norm below 1e-18 has fewer digits.

    Raises:
        TypeError: If the tree holds a rank's part of a tensor, such as a `fmp.distributed.LocalShard`.

    Example:
        >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float16)})
        tensor(5.)
    """
    check_whole(tree, "the norm")
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
    """Returns the smallest and largest entry: they carry inf and NaN alike, in one pass, without a mask.

    Those of a DTensor do not: gloo leaves out a NaN where it takes the larger one of two processes' numbers.
    """
    return torch.aminmax(torch.view_as_real(leaf.resolve_conj()) if leaf.dtype.is_complex else leaf)


def _norm(leaf: torch.Tensor) -> torch.Tensor:
    dtype = full_precision(leaf.dtype)
    if leaf.dtype.itemsize == 1:  # vector_norm upcasts as it reads, but not from the 8-bit formats
        leaf = leaf.to(dtype)
    # A DTensor cannot be cut into rows that are not those of its ranks.
    if leaf.device.type != "cpu" or leaf.numel() <= _ROW or is_dtensor(leaf):
        return torch.linalg.vector_norm(leaf, dtype=dtype)
    # On a CPU, vector_norm adds serially and drifts: by 2 % over 5e7 equal entries. Norms of rows do not.
    flat = leaf.reshape(-1)
    cut = flat.numel() - flat.numel() % _ROW
    rows = torch.linalg.vector_norm(flat[:cut].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[cut:], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([rows, rest.reshape(1)]))
