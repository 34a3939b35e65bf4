"""float32 masters: full-precision copies of exactly the parameters that are stored in less.

A 16-bit weight near 1 cannot take an update below 0.4 % (bf16) or 0.05 % (fp16) of itself; its master can. The
optimizer sees and changes masters, the model computes with the parameters; `params == cast(master)` after every step.
"""

from typing import Any

from fmp import tree
from fmp.dtypes import full_precision, is_castable

Tree = Any


def init(params: Tree, source: Tree | None = None) -> Tree:
    """Makes the masters of a parameter tree.

    Args:
        params: The parameters as the model computes with them.
        source: The values before they were rounded to the parameters' dtypes, if they are still known.

    Returns:
        A tree of the same structure: a float32 copy of each floating-point leaf narrower than that, None elsewhere.

    Example:
        >>> tree.describe(init({"w": torch.ones(2, dtype=torch.float16), "norm": torch.ones(2)}))
        "{'w': f32[2], 'norm': None}"
    """

    def master(param: Any, value: Any) -> Any:
        narrow = is_castable(param) and param.dtype != full_precision(param.dtype)
        return value.to(full_precision(param.dtype), copy=True) if narrow else None

    return tree.map(master, params, params if source is None else source)


def merge(params: Tree, master: Tree) -> Tree:
    """Returns the tree that the optimizer works on: the master where there is one, the parameter itself elsewhere."""
    return tree.map(lambda param, wide: param if wide is None else wide, params, master)


def split(full: Tree, params: Tree, master: Tree) -> tuple[Tree, Tree]:
    """Takes an updated tree apart again into parameters and masters.

    Args:
        full: What `merge` returned, after the update.
        params: The old parameters; they give each new parameter its dtype.
        master: The old masters; they say which leaves have one.

    Returns:
        The new parameters, rounded to nearest, and the new masters.

    Example:
        >>> params = {"w": torch.ones(1, dtype=torch.float16), "norm": torch.ones(1)}
        >>> split({"w": torch.tensor([1.0001]), "norm": torch.tensor([2.0])}, params, init(params))
        ({'w': tensor([1.], dtype=torch.float16), 'norm': tensor([2.])}, {'w': tensor([1.0001]), 'norm': None})
    """
    new_params = tree.map(lambda wide, param: wide.to(param.dtype) if is_castable(param) else wide, full, params)
    new_master = tree.map(lambda wide, old: None if old is None else wide, full, master)
    return new_params, new_master
