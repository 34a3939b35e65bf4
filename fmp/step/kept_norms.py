"""Warns of normalization layers that an opt level would keep in float32, if their names told that they are some."""

import functools
import inspect
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fmp import tree
from fmp.dtypes import is_castable, short_name
from fmp.module import Model
from fmp.patterns import matcher
from fmp.policy import NORM_PATTERNS, Policy

Tree = Any

# How far a model is looked for: in a loss, in a function that it calls, and in one that this calls.
_DEPTH = 3


def warn_of_cast_norms(fns: Sequence[Any], policy: Policy | None, *trees: Tree, stacklevel: int) -> None:
    """Warns if a policy guesses norms by their names, and misses some of a model that a loss function calls.

    Args:
        fns: The loss functions. A `fmp.Model` is found among what they, and the functions that they call, refer to.
        policy: The policy; only one that has `NORM_PATTERNS` guesses.
        *trees: Parameters, buffers and what is frozen, as they are given, with the names of the model; or dictionaries
            of several such.
        stacklevel: How many calls above this one the user's line is.

    Warns:
        UserWarning: It has the paths, and what to pass as `keep_full`.
    """
    if torch.compiler.is_compiling() or policy is None or not set(NORM_PATTERNS) <= set(policy.keep_full):
        return
    dtype, is_kept = policy.param_dtype, matcher(policy.keep_full)
    if dtype is None or dtype.itemsize > 2:
        return
    leaves = {path.replace("/", "."): leaf for each in trees for path, leaf in tree.items(each)}
    groups = [f"{key}." for each in trees if isinstance(each, Mapping) for key in each]
    models = {id(model): model for fn in fns for model in _models(fn, _DEPTH)}
    for model in models.values():
        for prefix in dict.fromkeys(("", *groups)):
            # A loss may close over the buffers.
            names = [name for name in model.norm_params if name in model.params or prefix + name in leaves]
            own = {**model.buffers, **model.params}
            if not all(_is_like(leaves.get(prefix + name), own[name]) for name in names):
                continue
            paths = [prefix + name for name in names]
            cast = [path for path in paths if _is_wide(leaves[path]) and not is_kept(path)]
            if cast:
                layers = list(dict.fromkeys(path.rpartition(".")[0] or path for path in cast))
                warnings.warn(
                    f"the policy keeps normalization layers in float32 by their names, and misses {_few(cast)}, which "
                    f"become {short_name(dtype)}: give opt_level keep_full=model, the fmp.Model or its module, or "
                    f"these names, keep_full=[{_few(layers)}]; or keep_norm_fp32=False if that is meant",
                    stacklevel=stacklevel + 1,
                )


def _is_like(leaf: Any, own: torch.Tensor) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.shape == own.shape


def _is_wide(leaf: torch.Tensor) -> bool:
    return is_castable(leaf) and leaf.dtype.itemsize > 2


def _few(names: list[str]) -> str:
    return ", ".join([*[repr(name) for name in names[:6]], *["..."] * (len(names) > 6)])


def _models(value: Any, depth: int) -> Iterator[Model]:
    """Yields the models that a function refers to: as a variable around it, bound to it, or by a function it calls."""
    if isinstance(value, Model):
        yield value
    elif depth and callable(value):
        for each in _referred(value):
            yield from _models(each, depth - 1)


def _referred(fn: Any) -> list[Any]:
    if isinstance(fn, functools.partial):
        return [fn.func, *fn.args, *fn.keywords.values()]
    if isinstance(fn, types.MethodType):
        return [fn.__func__, fn.__self__, *vars(fn.__self__).values()] if hasattr(fn.__self__, "__dict__") else []
    fn = inspect.unwrap(fn)
    if not isinstance(fn, types.FunctionType):
        call: Any = fn.__call__  # an object that is called like a function
        return [call] if isinstance(call, types.MethodType) else []
    if (fn.__module__ or "").partition(".")[0] == "torch":
        return []
    # A variable of the function around may not have been assigned yet.
    cells = [_contents(cell) for cell in fn.__closure__ or ()]
    return [*cells, *[fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__]]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names that a function looks up, those of the functions inside of it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
