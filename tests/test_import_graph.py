"""fmp's modules, and its packages, import one another one way only."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_FILES = {
    ".".join(file.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (_ROOT / "fmp").rglob("*.py")
}


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name not in _FILES and "." in name:
                name = name.rpartition(".")[0]
            if name in _FILES:
                yield name


def _check_one_way(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_no_module_imports_the_whole_library() -> None:
    found = {name for name, file in _FILES.items() if "fmp" in _imported(file)}
    assert found <= {"fmp.__main__"}


def test_modules_import_one_way() -> None:
    _check_one_way({name: set(_imported(file)) - {name} for name, file in _FILES.items()})


def test_packages_import_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for name, file in _FILES.items():
        if name in ("fmp", "fmp.__main__"):
            continue
        package = ".".join(name.split(".")[:2])
        found = {".".join(other.split(".")[:2]) for other in _imported(file)}
        graph.setdefault(package, set()).update(found - {package, "fmp"})
    _check_one_way(graph)
