"""The reference has every public name, and what it has, has a docstring with an example."""

import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

import pytest

import fmp

DOCS = Path(__file__).parent.parent / "docs"
ENTRIES = {
    heading or target: target
    for page in sorted((DOCS / "reference").glob("*.md"))
    for target, heading in re.findall(
        r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", page.read_text(), re.MULTILINE
    )
}
PACKAGES = {
    **{name: name for name in ("fmp", "fmp.checkpoint", "fmp.compat.amp", "fmp.df11", "fmp.distributed", "fmp.errors")},
    **{name: name for name in ("fmp.kernels", "fmp.master", "fmp.memory", "fmp.memory.estimators", "fmp.numerics")},
    **{name: name for name in ("fmp.optim", "fmp.optim.schedules", "fmp.random", "fmp.testing", "fmp.tree")},
    "fmp.saveable": "fmp.rematerialization.saveable",
    "fmp.testing.strategies": "fmp.testing.strategies",
}
# What a type checker or the modules beside them use.
INTERNAL = {
    "fmp.optim.schedules": {"T"},
}


def public(name: str) -> dict[str, Any]:
    """Returns the public names of a package: its `__all__`, or what it defines or brings in by `import x as x`."""
    module = importlib.import_module(PACKAGES[name])
    names = getattr(module, "__all__", None)
    if names is None and hasattr(module, "__path__"):
        names = re.findall(r"\b(\w+) as \1\b", inspect.getsource(module))
    elif names is None:
        names = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    hidden = INTERNAL.get(name, set())
    found = {key: getattr(module, key) for key in names if not key.startswith("_") and key not in hidden}
    return {key: value for key, value in found.items() if not isinstance(value, types.ModuleType)}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_in_the_reference(name):
    found = public(name)
    assert len(found) >= 1
    assert [key for key in found if f"{name}.{key}" not in ENTRIES] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_has_a_docstring_and_each_function_an_example(name):
    without_docstring, without_example = [], []
    for key, value in public(name).items():
        is_code = inspect.isfunction(value) or inspect.isclass(value)
        if is_code and not value.__doc__:
            without_docstring.append(key)
        if inspect.isfunction(value) and ">>>" not in (value.__doc__ or ""):
            without_example.append(key)
    assert without_docstring == []
    assert without_example == []


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_every_entry_is_a_public_name_and_the_same_object(name):
    shown, written = resolved(name), resolved(ENTRIES[name])
    assert shown is written
    assert not isinstance(shown, types.ModuleType)


def resolved(name: str) -> Any:
    package, _, key = name.rpartition(".")
    return getattr(importlib.import_module(PACKAGES.get(package, package)), key)


def test_every_public_package_is_looked_at():
    packages = {
        f"fmp.{info.name}"
        for info in pkgutil.iter_modules(fmp.__path__)
        if info.ispkg and not info.name.startswith("_")
    }
    # Those whose names fmp itself brings, the bridge, which has one module, and what fmp.df11 is made of.
    internal = {"fmp.compat", "fmp.df11_codec", "fmp.policy", "fmp.rematerialization", "fmp.step"}
    assert packages - PACKAGES.keys() == internal
