"""Whole trees for the CUDA kernels of an optimizer: all leaves in one launch, or one for each pair of dtypes."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from fmp import random, tree
from fmp.kernels import trust
from fmp.kernels.eligible import are_alike, are_memory, are_plain
from fmp.kernels.tables import upload
from fmp.master.seeds import name_of, word_of
from fmp.optim import checks
from fmp.optim.aliasing import PLAIN, shares_memory
from fmp.optim.base import Scalar
from fmp.optim.columns import chosen, copies, laid_out_as, put
from fmp.optim.fused import Request

Tree = Any
Tensor = torch.Tensor


class Leaves(NamedTuple):
    """What a launch works on.

    Attributes:
        indices: The places of the leaves in the tree.
        gradients: Their gradients, still scaled.
        params: The parameters, f32 or in a form, to be overwritten.
        moments: For each tree of moments the tensors, f32, to be overwritten.
        low: The casts, or what the form keeps beside the parameters, to be overwritten; None for none.
        options: The keywords of a kernel of `fmp.kernels` scale, clip, finite, form and seeds.
    """

    indices: list[int]
    gradients: list[Tensor]
    params: list[Tensor]
    moments: tuple[list[Tensor], ...]
    low: list[Tensor | None]
    options: dict[str, Any]


class _Part(NamedTuple):
    """Leaves that go into one launch, as they are given.

    Attributes:
        form: The form of the parameters; None for float32.
        indices: The places of the leaves in the tree.
        gradients: Their gradients.
        own: Columns of parameters and of moments.
        low: What is beside the parameters.
        pairs: Of what is beside them that which there is, and the parameters that it belongs to.
    """

    form: str | None
    indices: list[int]
    gradients: list[Any]
    own: list[list[Any]]
    low: list[Any]
    pairs: tuple[list[Any], list[Any]]


def in_one_launch(
    kernel: str,
    launch: Callable[[Leaves], None],
    grads: Tree,
    params: Tree,
    *moments: Tree,
    counts: Sequence[Tensor],
    numbers: Sequence[Any],
    request: Request,
) -> tuple[Tree, ...] | None:
    """Runs a kernel over whole trees.

    Args:
        kernel: Its source, `cuda/<kernel>.cu`.
        launch: `launch(leaves)` runs it.
        grads: The gradients. Where one is None, the leaf is left out.
        params: The parameters.
        *moments: Trees of moments.
        counts: Tensors that are read on the device of the parameters.
        numbers: The hyper-parameters; those that are tensors may be anywhere.
        request: What is asked for besides.

    Returns:
        The new parameters, the new casts, and the new trees of moments; or None, with nothing done, if the kernel
        cannot work on these tensors.
    """
    checks.params_match(grads, params)
    grad_leaves, spec = tree.flatten(grads)
    due = [index for index, grad in enumerate(grad_leaves) if grad is not None]
    columns = [list(spec.flatten_up_to(other)) for other in (params, *moments)]
    has_low = request.low is not None or request.form is not None
    low: list[Any] = list(spec.flatten_up_to(cast(Any, request.low))) if has_low else [None] * len(grad_leaves)
    parts = [
        _part(form, indices, grad_leaves, columns, low)
        for form, indices in _by_form(request.form, due, columns[0], low)
    ]
    if not parts or not all(_fits(part, request) for part in parts):
        return None
    device = parts[0].own[0][0].device
    scale, clip = _on_device(request.inv_scale, device), _on_device(request.clip, device)
    factors = {"scale": scale, "clip": clip, "finite": request.finite}
    read = [*chosen(grad_leaves, due), *counts, *[factor for factor in factors.values() if factor is not None]]
    elsewhere = _tensors([*numbers, request.seed])
    written = chain.from_iterable([[*chain.from_iterable(part.own), *part.pairs[0]] for part in parts])
    if not are_plain([*written, *read]) or not are_memory(elsewhere):
        return None
    if not all(are_alike(part.own) and are_alike(part.pairs) for part in parts):
        return None
    if not all(trust.agrees(kernel if part.form is None else f"{kernel}_{part.form}", device) for part in parts):
        return None
    if not request.donate or shares_memory(chain(*columns, low), chain(read, elsewhere)):
        parts = [part._replace(own=list(map(copies, part.own)), low=copies(part.low)) for part in parts]
    for part in parts:
        options: dict[str, Any] = factors if part.form is None else {**factors, "form": part.form}
        if part.form == "stochastic":
            options["seeds"] = _seeds(request.seed, chosen(spec.paths(), part.indices), device)
        are_contiguous = all(map(Tensor.is_contiguous, chain(part.own[0], part.gradients)))
        gradients = laid_out_as(part.own[0], part.gradients, are_contiguous=are_contiguous)
        launch(Leaves(part.indices, gradients, part.own[0], tuple(part.own[1:]), part.low, options))
        for column, leaves in zip((*columns, low), (*part.own, part.low), strict=True):
            put(leaves, column, part.indices)
    new_params, *new_moments = [tree.unflatten(spec, column) for column in columns]
    return new_params, tree.unflatten(spec, low) if has_low else None, *new_moments


def as_rows(row: Sequence[Scalar], like: torch.Tensor) -> torch.Tensor:
    """Makes a table whose columns are numbers, 0-dim tensors, which may be elsewhere, or vectors.

    Args:
        row: The columns.
        like: f32[n], which says how many rows there are and where.

    Returns:
        f32[n, columns].

    Example:
        >>> as_rows([0.5, torch.tensor(2.0)], like=torch.zeros(2))
        tensor([[0.5000, 2.0000],
                [0.5000, 2.0000]])
    """
    return torch.stack([_column(value, like) for value in row], dim=1)


_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_GRADIENTS = frozenset([_F32, _F16, _BF16])
# By the form, the dtypes of parameters and of what is beside them.
_STORED = {
    None: (frozenset([_F32]), frozenset([_F16, _BF16])),
    "remainder": (frozenset([_BF16]), frozenset([torch.int16])),
    "stochastic": (frozenset([_F16, _BF16]), frozenset()),
}
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_known_word = lru_cache(maxsize=2**14)(word_of)


def _by_form(form: str | None, due: list[int], params: list[Any], low: list[Any]) -> list[tuple[str | None, list[int]]]:
    """Says which leaves go into which launch: those in the form, and those that stand for themselves."""
    if form is None:
        return [(None, due)] if due else []
    plain = [index for index in due if low[index] is None and getattr(params[index], "dtype", None) == _F32]
    found = [(form, sorted({*due} - {*plain})), (None, plain)]
    return [(name, indices) for name, indices in found if indices]


def _part(form: str | None, indices: list[int], grads: list[Any], columns: list[list[Any]], low: list[Any]) -> _Part:
    own, own_low = [chosen(column, indices) for column in columns], chosen(low, indices)
    places = [place for place, beside in enumerate(own_low) if beside is not None]
    pairs = chosen(own_low, places), chosen(own[0], places)
    return _Part(form, indices, chosen(grads, indices), own, own_low, pairs)


def _fits(part: _Part, request: Request) -> bool:
    """Says whether these are tensors of the dtypes that kernels take, and those of each row of one shape."""
    if part.form not in _STORED:
        return False
    (params, *moments), (beside, their_params) = part.own, part.pairs
    if not PLAIN.issuperset(map(type, chain(part.gradients, *part.own, beside))):
        return False
    of_params, of_beside = _STORED[part.form]
    if not _GRADIENTS.issuperset(map(_DTYPE, part.gradients)) or not of_params.issuperset(map(_DTYPE, params)):
        return False
    if not of_beside.issuperset(map(_DTYPE, beside)) or not {_F32}.issuperset(map(_DTYPE, chain(*moments))):
        return False
    if part.form == "remainder" and len(beside) < len(params):
        return False
    # A number draws by its place in the tensor, and the kernel sees its place in memory.
    if part.form == "stochastic" and (request.seed is None or not all(map(Tensor.is_contiguous, params))):
        return False
    shapes = list(map(_SHAPE, params))
    if any(list(map(_SHAPE, column)) != shapes for column in (part.gradients, *moments)):
        return False
    return list(map(_SHAPE, beside)) == list(map(_SHAPE, their_params))


def _seeds(seed: Any, paths: list[tuple[Any, ...]], device: torch.device) -> Tensor:
    """Derives the seeds of many leaves, i64[n]: those that `fmp.master.split` derives one by one."""
    words = np.array([_known_word(name_of(path)) for path in paths], np.int64)
    table = upload(words, (), 1, device)
    return random.fold_in(random.as_seed(seed, device), table.rows.view(torch.int64))


def _tensors(items: Sequence[Any]) -> list[Tensor]:
    return [item for item in items if isinstance(item, Tensor)]


def _on_device(number: Tensor | float | None, device: torch.device) -> Tensor | None:
    if number is None or isinstance(number, Tensor):
        return number if number is None else number.to(torch.float32)
    return torch.full((), number, dtype=torch.float32, device=device)


def _column(value: Scalar, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full_like(like, value)
    return value if value.ndim else torch.ones_like(like) * value.to(like.dtype)
