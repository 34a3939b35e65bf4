"""Private names of torch and optree are in fmp/_compat, but for a few that objects of torch bear."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

_ROOT = Path(__file__).parents[1]
_TREES = {file: ast.parse(file.read_text("utf-8")) for file in sorted((_ROOT / "fmp").rglob("*.py"))}

_MODULE = nn.Linear(1, 1)
_OBJECTS: dict[str, Any] = {
    **dict.fromkeys(("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_typed_storage"), torch.ones(1)),
    **dict.fromkeys(("_make_subclass", "_make_wrapper_subclass"), torch.Tensor),
    **dict.fromkeys(("_indices", "_values"), torch.ones(1).to_sparse()),
    "_is_param": None,  # nn.Parameter looks for it in a subclass of torch.Tensor
    "_cdata": torch.ones(1).untyped_storage(),
    **dict.fromkeys(("_schema", "_can_decompose"), torch.ops.aten.add.Tensor),
    **dict.fromkeys(("_parameters", "_buffers", "_forward_pre_hooks"), _MODULE),
    "_metadata": _MODULE.state_dict(),
    "_tensor_name": next(iter(prune.identity(nn.Linear(1, 1), "weight")._forward_pre_hooks.values())),
}
_OPERATORS = {"_to_copy", "_neg_view", "_conj"}
_OF_PYTHON = {"_replace", "_fields", "_getframe"}
# The module of torch's checkpoint files, of whose index it names the classes.
_STORAGE = {"torch.distributed._functional_collectives", "_StorageInfo", "_get_layout"}


def test_private_names_of_torch_are_in_compat() -> None:
    allowed = _OBJECTS.keys() | _OPERATORS | _OF_PYTHON
    own = _own_names()
    found = [
        f"{file.relative_to(_ROOT)}:{line}: {name}"
        for file, tree in _TREES.items()
        if not _is_compat(file)
        for line, name, is_of_torch in _private_names(tree)
        if name not in allowed | (set() if is_of_torch else own)
        if not (name in _STORAGE and file.match("distributed/storage.py"))
    ]
    assert found == []


def test_the_list_names_nothing_that_is_not_used() -> None:
    found = {name for tree in _TREES.values() for _, name, _ in _private_names(tree)}
    assert found >= _OBJECTS.keys() | _OPERATORS | _OF_PYTHON | _STORAGE


@pytest.mark.parametrize("name", [name for name, owner in _OBJECTS.items() if owner is not None])
def test_torch_still_has_what_is_listed(name: str) -> None:
    assert hasattr(_OBJECTS[name], name)


def test_a_tensor_passes_for_a_parameter_by_a_private_attribute() -> None:
    tensor: Any = torch.ones(1)
    assert not isinstance(tensor, nn.Parameter)
    tensor._is_param = True
    assert isinstance(tensor, nn.Parameter)


def _private_names(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yields the line of each private name, the name, and whether it is one of torch's for sure."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fmp"):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if not alias.name.startswith("fmp")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names = [str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        for name in names:
            if any(map(_is_private, name.split("."))):
                is_of_torch = ast.unparse(node).startswith(("torch.", "from torch", "import"))
                yield getattr(node, "lineno", 0), name, is_of_torch


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names() -> set[str]:
    """Returns the private names that fmp itself defines, but for those of fmp/_compat, which may be those of torch."""
    names = {file.stem for file in _TREES}
    for node in [node for file, tree in _TREES.items() if not _is_compat(file) for node in ast.walk(tree)]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def _is_compat(file: Path) -> bool:
    return file.parent.name == "_compat"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torch._C._nn.gelu(x)", "_C"),
        ("from torch._C import _autograd", "torch._C"),
        ("from torch.overrides import _pop_mode", "_pop_mode"),
        ("import torch._dynamo", "torch._dynamo"),
        ("layer._flat_weights", "_flat_weights"),
        ("getattr(layer, '_flat_weights')", "_flat_weights"),
    ],
)
def test_a_private_name_is_seen(source: str, name: str) -> None:
    assert name in {found for _, found, _ in _private_names(ast.parse(source))}
