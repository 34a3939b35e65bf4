import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fmp.policy import oplists
from fmp.policy.oplists import (
    ALIASES,
    APEX_ADDED,
    APEX_BANNED,
    APEX_FULL,
    APEX_LOW,
    APEX_PROMOTE,
    OPERATORS,
    TORCH_BANNED,
    TORCH_FULL,
    TORCH_INSIDE,
    TORCH_LOW,
    TORCH_PROMOTE,
)
from fmp.policy.spellings import spellings

# The names that Apex and torch themselves use, extracted from their sources and from torch's registered kernels.
LISTS = json.loads((Path(__file__).parents[1] / "data" / "op_lists.json").read_text())
APEX, TORCH = LISTS["apex"], LISTS["torch_cuda"]["base_names"]
ADDED = {kind: [name for names in groups.values() for name in names] for kind, groups in APEX_ADDED.items()}
INSIDE = {kind: [name for names in groups.values() for name in names] for kind, groups in TORCH_INSIDE.items()}

APEX_RULES = {
    "low": [*APEX_LOW, *ADDED["low"]],
    "full": [*APEX_FULL, *ADDED["full"]],
    "promote": [*APEX_PROMOTE, *ADDED["promote"]],
    "banned": [*APEX_BANNED],
}
TORCH_RULES = {
    "low": [*TORCH_LOW, *INSIDE["low"]],
    "full": [*TORCH_FULL, *INSIDE["full"]],
    "promote": [*TORCH_PROMOTE, *INSIDE["promote"]],
    "banned": [*TORCH_BANNED],
}
LISTED = sorted({name for rules in (APEX_RULES, TORCH_RULES) for names in rules.values() for name in names})

HALVES = [torch.bfloat16, torch.float16]


def canonical(name: str) -> str:
    """`__ipow__` is pow, `__rsub__` is sub: the names of Python's operators are those of the ops they call."""
    operator = name.strip("_")
    if not name.startswith("__"):
        return name
    symbols = {symbol: op for op, symbols in OPERATORS.items() for symbol in symbols}
    return symbols.get(operator) or symbols[operator[1:]] if operator != "cpu" else operator


# --- the lists are Apex's and torch's


@pytest.mark.parametrize(
    ("ours", "functional", "everywhere", "extra"),
    [
        (APEX_LOW, "FP16_FUNCS", ["FP16_FUNCS"], [*APEX["rnn_half"], *APEX["rnn_cells_half_cached"]]),
        (APEX_FULL, "FP32_FUNCS", ["FP32_FUNCS"], []),
        (APEX_PROMOTE, None, ["CASTS", "SEQUENCE_CASTS"], []),
        (APEX_BANNED, "BANNED_FUNCS", [], []),
    ],
)
def test_apex_lists_are_those_of_apex(ours, functional, everywhere, extra):
    theirs = {*extra, *(APEX["functional"][functional] if functional else [])}
    for key in everywhere:
        theirs.update(APEX["torch"][key], map(canonical, APEX["tensor_explicit"][key]))
    assert set(ours) == theirs


@pytest.mark.parametrize(
    ("ours", "keys"),
    [
        (TORCH_LOW, ["lower_precision_fp"]),
        (TORCH_FULL, ["fp32", "fp32_set_opt_dtype", "fp32_append_dtype"]),
        (TORCH_PROMOTE, ["promote"]),
        (TORCH_BANNED, ["banned"]),
    ],
)
def test_torch_lists_are_those_of_cuda_autocast(ours, keys):
    assert set(ours) == {name for key in keys for name in TORCH[key]}


def test_apex_leaves_out_nothing_that_torch_runs_in_full_or_low_precision():
    assert set(TORCH_LOW) <= set(APEX_RULES["low"])
    assert set(TORCH_FULL) <= set(APEX_RULES["full"])
    assert set(TORCH_PROMOTE) <= set(APEX_RULES["promote"])


# --- the lists are consistent


@pytest.mark.parametrize("rules", [APEX_RULES, TORCH_RULES], ids=["apex", "torch"])
def test_no_op_has_two_rules(rules):
    names = [name for kind in rules.values() for name in kind]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("name", LISTED)
def test_every_listed_op_exists(name):
    assert spellings(name).plain


def test_every_listed_name_is_canonical():
    aliases = {alias for names in ALIASES.values() for alias in names}
    assert aliases.isdisjoint([*LISTED, *ALIASES, *OPERATORS])


def test_no_alias_or_operator_belongs_to_two_ops():
    for table in (ALIASES, OPERATORS):
        names = [name for group in table.values() for name in group]
        assert sorted(set(names)) == sorted(names)


def test_every_alias_exists():
    missing = [alias for names in ALIASES.values() for alias in names if not spellings(alias).plain]
    assert not missing


def test_the_lists_import_nothing_but_typing():
    lines = inspect.getsource(oplists).splitlines()
    assert [line for line in lines if line.startswith(("import ", "from "))] == ["from typing import Final"]


# --- an alias computes what its op computes

MATRIX = torch.tensor([[0.6, 0.2, 0.1], [0.3, 0.7, 0.2], [0.1, 0.4, 0.8]])
VECTOR, INDEX = MATRIX[0], torch.tensor([0, 2, 1])
IMAGE = torch.arange(16.0).reshape(1, 1, 4, 4)
VOLUME = torch.arange(64.0).reshape(1, 1, 4, 4, 4)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cross_entropy": (MATRIX, INDEX),
    "nll_loss": (MATRIX, INDEX),
    "softmax": (MATRIX, 1),
    "log_softmax": (MATRIX, 1),
    "logsumexp": (MATRIX, 1),
    "linalg_matrix_power": (MATRIX, 3),
    "linalg_householder_product": (MATRIX, VECTOR),
    "polygamma": (2, MATRIX),
    "mvlgamma": (MATRIX + 2, 2),
    "acosh": (MATRIX + 1,),
    "clamp": (MATRIX, 0.2, 0.5),
    "outer": (VECTOR, VECTOR),
    "cat": ([MATRIX, MATRIX],),
    "vstack": ([MATRIX, MATRIX],),
    "movedim": (IMAGE, 1, 2),
    "transpose": (MATRIX, 0, 1),
    "_grouped_mm": (torch.ones(2, 16, 16, dtype=torch.bfloat16), torch.ones(2, 16, 16, dtype=torch.bfloat16)),
    "trapezoid": (MATRIX,),
    "max_pool1d": (IMAGE[0], 2),
    "max_pool2d": (IMAGE, 2),
    "max_pool3d": (VOLUME, 2),
    "adaptive_max_pool1d": (IMAGE[0], 2),
    "adaptive_max_pool2d": (IMAGE, 2),
    "adaptive_max_pool3d": (VOLUME, 2),
}
C_MEAN = 1
ALIAS_ARGUMENTS = {
    "cross_entropy_loss": (MATRIX, INDEX, None, C_MEAN),
    "nll_loss_nd": (MATRIX, INDEX, None, C_MEAN),
}
BINARY = ["sub", "mul", "div", "ne", "gt", "ge", "lt", "le", "atan2", "igamma", "igammac", "xlogy", "matmul"]
# Tested on their own below, for their arguments differ.
DIFFERENT = {"rsub", "upsample", "upsample_nearest", "upsample_bilinear"}


def function(name: str) -> Any:
    return spellings(name).plain[0]


def values(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        (name, alias)
        for name, aliases in ALIASES.items()
        for alias in aliases
        if alias not in DIFFERENT and not name.startswith("fractional")
    ],
)
def test_an_alias_computes_what_its_op_computes(name, alias):
    arguments = ARGUMENTS.get(name, (MATRIX, MATRIX.T) if name in BINARY else (MATRIX,))
    expected, found = function(name)(*arguments), function(alias)(*ALIAS_ARGUMENTS.get(alias, arguments))
    torch.testing.assert_close(values(found), values(expected), rtol=0, atol=0)


@pytest.mark.parametrize("alias", ["fractional_max_pool2d", "fractional_max_pool3d"])
def test_fractional_pooling_with_and_without_indices_is_one_op(alias):
    image = VOLUME if alias.endswith("3d") else IMAGE
    samples = torch.full((1, 1, image.ndim - 2), 0.3)
    pool, with_indices = getattr(F, alias), getattr(F, f"{alias}_with_indices")
    expected = pool(image, 2, output_size=2, _random_samples=samples)
    assert torch.equal(with_indices(image, 2, output_size=2, _random_samples=samples)[0], expected)


@pytest.mark.parametrize(
    ("alias", "mode"), [("upsample", "bicubic"), ("upsample_nearest", "nearest"), ("upsample_bilinear", "bilinear")]
)
def test_upsample_is_interpolate(alias, mode):
    options = {"mode": mode} if alias == "upsample" else {}
    with pytest.warns(UserWarning, match="deprecated"):
        found = getattr(F, alias)(IMAGE, scale_factor=2, **options)
    corners = {"align_corners": True} if alias == "upsample_bilinear" else {}
    assert torch.equal(found, F.interpolate(IMAGE, scale_factor=2, mode=mode, **corners))


def test_rsub_is_a_reflected_sub():
    assert torch.equal(torch.rsub(MATRIX, MATRIX.T), torch.sub(MATRIX.T, MATRIX))


# --- what the reasons say

NO_KERNEL = {
    "linalg_svd": lambda dtype: torch.linalg.svd(MATRIX.to(dtype)),
    "linalg_inv": lambda dtype: torch.linalg.inv(MATRIX.to(dtype)),
    "linalg_matrix_power": lambda dtype: torch.linalg.matrix_power(MATRIX.to(dtype), -1),
    "cholesky_inverse": lambda dtype: torch.cholesky_inverse(MATRIX.to(dtype)),
    "quantile": lambda dtype: torch.quantile(MATRIX.to(dtype), 0.5),
    "fft_rfft": lambda dtype: torch.fft.rfft(MATRIX.to(dtype)),
    "cdist": lambda dtype: torch.cdist(MATRIX.to(dtype), MATRIX.to(dtype)),
    "special_ndtri": lambda dtype: torch.special.ndtri(MATRIX.to(dtype)),
    "avg_pool3d": lambda dtype: F.avg_pool3d(VOLUME.to(dtype), 2),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NO_KERNEL)
def test_ops_without_16_bit_kernels_are_full(name, dtype):
    assert name in ADDED["full"]
    with pytest.raises(RuntimeError):
        NO_KERNEL[name](dtype)
    NO_KERNEL[name](torch.float32)


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "name",
    next(names for reason, names in APEX_ADDED["promote"].items() if "0-dim" in reason),
)
def test_elementwise_ops_that_promote_would_round_a_0_dim_operand(name, dtype):
    x, y = MATRIX.to(dtype), torch.tensor(0.5)
    op = getattr(torch.special, name.removeprefix("special_")) if name.startswith("special_") else getattr(torch, name)
    arguments = (x > 0.5, x, y) if name == "where" else (x, y)
    assert op(*arguments).dtype == dtype


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize(
    ("name", "call"),
    {
        "lerp": lambda x, y: torch.lerp(x, y, 0.5),
        "heaviside": lambda x, y: torch.heaviside(x, y),
        "isclose": lambda x, y: torch.isclose(x, y),
        "inner": lambda x, y: torch.inner(x, y),
        "tensordot": lambda x, y: torch.tensordot(x, y, 1),
        "vdot": lambda x, y: torch.vdot(x[0], y[0]),
        "linalg_cross": lambda x, y: torch.linalg.cross(x, y),
        "index_put": lambda x, y: x.index_put((INDEX,), y),
        "index_add": lambda x, y: x.index_add(0, INDEX, y),
        "index_copy": lambda x, y: x.index_copy(0, INDEX, y),
        "scatter": lambda x, y: x.scatter(0, INDEX[None], y),
        "scatter_add": lambda x, y: x.scatter_add(0, INDEX[None], y),
        "scatter_reduce": lambda x, y: x.scatter_reduce(0, INDEX[None], y, "sum"),
        "masked_scatter": lambda x, y: x.masked_scatter(x > 0.5, y),
        "put": lambda x, y: x.put(INDEX, y[0]),
        "meshgrid": lambda x, y: torch.meshgrid(x[0], y[0], indexing="ij"),
    }.items(),
)
def test_ops_that_promote_refuse_mixed_dtypes_without_it(name, call):
    assert name in ADDED["promote"]
    with pytest.raises(RuntimeError):
        call(MATRIX.bfloat16(), MATRIX)
    call(MATRIX, MATRIX)
