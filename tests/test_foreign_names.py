"""A name that fmp does not have is answered with the one that was meant, and what is advised exists."""

import re
from pathlib import Path

import pytest
import torch

import fmp
from fmp import foreign_names, optim
from fmp.foreign_names import unknown_name

GOTCHAS = Path(__file__).parents[1] / "docs" / "gotchas.md"
ROWS = re.findall(r"^\| (.*) \| (.*) \|$", GOTCHAS.read_text("utf-8").split("## Called otherwise elsewhere")[1], re.M)[
    2:
]


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [
        (fmp, "GradScaler", "fmp.DynamicLossScale"),
        (fmp, "LossScaler", "fmp.DynamicLossScale"),
        (fmp, "get_policy", "fmp.Policy.parse"),
        (fmp, "tree_map", "fmp.tree.map"),
        (fmp, "jit", "compile=True"),
        (fmp, "train_stpe", "did you mean 'train_step'?"),
        (fmp, "opt_levle", "did you mean 'opt_level'?"),
        (optim, "multi_transform", "fmp.optim.partition"),
        (optim, "clip_grad_norm", "fmp.optim.clip_by_global_norm"),
        (optim, "AdamW", "fmp.optim.adamw"),
        (optim, "adafacter", "did you mean 'adafactor'?"),
        (optim.schedules, "cosine", "fmp.optim.schedules.cosine_decay"),
        (optim.schedules, "warmup_cosine", "fmp.optim.schedules.warmup_cosine_decay"),
        (optim.schedules, "liner", "did you mean 'linear'?"),
    ],
)
def test_the_error_names_what_was_meant(module, name, meant):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; .*{re.escape(meant)}"):
        getattr(module, name)


def test_a_name_like_no_other_gets_no_advice():
    for name in ("zzzzzz", "__wrapped__", "_adam"):
        assert str(unknown_name("fmp", name, ["adam"])) == f"module 'fmp' has no attribute {name!r}"
    assert not hasattr(fmp, "zzzzzz")


def test_what_is_advised_exists():
    for meant in foreign_names._MEANT.values():
        names = re.findall(r"(?:fmp|torch)(?:\.\w+)+", meant)
        assert names
        for name in names:
            eval(name, {"fmp": fmp, "torch": torch})


@pytest.mark.parametrize("row", ROWS, ids=[left for left, _ in ROWS])
def test_each_row_of_the_table_runs(row):
    params = {"w": torch.ones(2)}
    names = {
        "loss_fn": lambda params, batch: params["w"].sum(),
        "optimizer": optim.sgd(0.1),
        "params": params,
        "finite": torch.tensor(True),
        "new": params,
        "old": params,
        "f": torch.sin,
        "fmp": fmp,
        "torch": torch,
    }
    found = re.findall(r"`([^`]+)`", row[1])
    assert found
    for code in found:
        value = eval(code, names)
        if isinstance(value, optim.GradientTransformation):
            tree = {"body.bias": torch.ones(2), "head.weight": torch.ones(2, 2)}
            value.update(tree, value.init(tree), tree)
