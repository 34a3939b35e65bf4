"""The forms of master weights, applied to trees of parameters."""

from collections.abc import Mapping
from typing import Any

from fmp import random, tree
from fmp.dtypes import full_precision, is_castable, short_name
from fmp.master import f32, kahan, remainder, stochastic
from fmp.master.form import Form
from fmp.master.seeds import seed_of

Tree = Any

FORMS: Mapping[str, Form] = {
    "f32": f32.FORM,
    "remainder": remainder.FORM,
    "kahan": kahan.FORM,
    "stochastic": stochastic.FORM,
}


def init(params: Tree, source: Tree | None = None, *, form: str | None = "f32") -> Tree:
    """Makes the masters of a parameter tree.

    Args:
        params: The parameters as the model computes with them.
        source: The values before they were rounded to the parameters' dtypes, if they are still known.
        form: A key of `fmp.master.FORMS`, see `fmp.master`; None, which a policy without masters has, is `"f32"`.

    Returns:
        A tree of the same structure: what the form keeps beside each floating-point leaf narrower than float32, None
        elsewhere.

    Raises:
        ValueError: If the form is unknown.
        TypeError: If a narrow parameter has a dtype that the form is not made for.

    Example:
        >>> tree.describe(init({"w": torch.ones(2, dtype=torch.bfloat16), "norm": torch.ones(2)}))
        "{'w': f32[2], 'norm': None}"
        >>> tree.describe(init({"w": torch.ones(2, dtype=torch.bfloat16), "norm": torch.ones(2)}, form="remainder"))
        "{'w': i16[2], 'norm': None}"
    """
    chosen = _form(form)
    for path, param in tree.items(params):
        if is_narrow(param) and param.dtype not in chosen.dtypes:
            raise TypeError(
                f"{path or 'params'}: masters of the form {form!r} are for {_names(chosen)}, and this parameter is "
                f"{tree.describe(param)}; use the form 'f32', or keep the parameter in float32"
            )

    def rest(param: Any, value: Any) -> Any:
        return chosen.init(param, value) if is_narrow(param) else None

    return tree.map(rest, params, params if source is None else source)


def merge(params: Tree, master: Tree, *, form: str | None = "f32") -> Tree:
    """Returns the tree that the optimizer works on: in float32 where there is a master, the parameter itself elsewhere.

    Args:
        params: The parameters.
        master: Their masters, of the same structure.
        form: The form of the masters.

    Raises:
        TypeError: If the form is `"f32"` and a master is what another form keeps.

    Example:
        >>> params, masters = {"w": torch.ones(1).bfloat16()}, {"w": torch.tensor([1.001])}
        >>> merge(params, masters)
        {'w': tensor([1.0010])}
    """
    chosen = _form(form)

    def full(param: Any, rest: Any) -> Any:
        return chosen.merge(param, rest) if _has_master(chosen, param, rest) else param

    return tree.map(full, params, master)


def split(
    full: Tree,
    params: Tree,
    master: Tree,
    *,
    form: str | None = "f32",
    seed: random.Seed | None = None,
    offsets: Tree | None = None,
) -> tuple[Tree, Tree]:
    """Takes an updated tree apart again into parameters and masters.

    Args:
        full: What `merge` returned, after the update.
        params: The old parameters; they give each new parameter its dtype.
        master: The old masters; they say which leaves have one.
        form: The form of the masters.
        seed: An integer, or i64[], another one in each step; only `stochastic` draws by it. Each leaf draws by a seed
            derived from this one and from its path. None rounds to nearest.
        offsets: For shards, a tree of the same structure: the flat index in the whole leaf at which each one starts,
            so that it is rounded as within the whole.

    Returns:
        The new parameters and the new masters.

    Example:
        >>> params = {"w": torch.ones(1, dtype=torch.float16), "norm": torch.ones(1)}
        >>> split({"w": torch.tensor([1.0001]), "norm": torch.tensor([2.0])}, params, init(params))
        ({'w': tensor([1.], dtype=torch.float16), 'norm': tensor([2.])}, {'w': tensor([1.0001]), 'norm': None})
    """
    chosen = _form(form)
    leaves, spec = tree.flatten(full)
    # Only what draws needs its path.
    paths = spec.paths() if chosen.takes_seed and seed is not None else [None] * len(leaves)
    # Pairs in a list: in the tree they would become part of it.
    pairs: list[tuple[Any, Any]] = []

    starts = None if offsets is None else spec.flatten_up_to(offsets)

    def take(wide: Any, param: Any, rest: Any) -> None:
        path = paths[len(pairs)]
        if _has_master(chosen, param, rest):
            own = None if path is None or seed is None else seed_of(path, seed)
            if own is None or starts is None or starts[len(pairs)] == 0:
                pairs.append(chosen.split(wide, param.dtype, own))
            else:
                pairs.append(chosen.split(wide, param.dtype, own, start=starts[len(pairs)]))
        else:
            pairs.append((wide.to(param.dtype) if is_castable(param) else wide, None))

    tree.map(take, full, params, master)
    return tree.unflatten(spec, [param for param, _ in pairs]), tree.unflatten(spec, [rest for _, rest in pairs])


def is_narrow(param: Any) -> bool:
    """Says whether a parameter is a floating-point tensor narrower than float32, which takes a master."""
    return is_castable(param) and param.dtype != full_precision(param.dtype)


def _form(form: str | None) -> Form:
    form = "f32" if form is None else form
    if form not in FORMS:
        raise ValueError(f"masters have no form {form!r}; use one of {', '.join(map(repr, FORMS))}")
    return FORMS[form]


def _has_master(form: Form, param: Any, rest: Any) -> bool:
    return is_narrow(param) and (rest is not None or not form.has_rest)


def _names(form: Form) -> str:
    return " and ".join(sorted(short_name(dtype) for dtype in form.dtypes))
