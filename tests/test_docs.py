"""Every example in a docstring and every Python block in the documentation runs as printed."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fmp

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    info.name for info in pkgutil.walk_packages(fmp.__path__, "fmp.") if not info.name.endswith("__main__")
)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCKS = [
    pytest.param(block, id=f"{page.name}:{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in finder.find(module, name, globs={**vars(module), "torch": torch, "fmp": fmp}):
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
@pytest.mark.parametrize("block", BLOCKS)
def test_documentation_block(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write a file
    # torch.compile looks up the globals of a function in its module.
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(block, "<documentation>", "exec"), vars(module))


def test_public_names_have_docstrings():
    missing = [name for name in fmp.__all__ if not getattr(fmp, name).__doc__]
    assert missing == []


def test_importing_loads_nothing_heavy():
    heavy = ("cupy", "matplotlib", "numba", "rich", "tensorboardX", "hypothesis", "pytest", "torch._dynamo")
    code = f"import torch, sys; import fmp; print([name for name in {heavy} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


def test_the_readme_shows_rows_of_one_kept_run():
    kept = (ROOT / "tests" / "bench" / "results" / "amd-epyc-1-thread.md").read_text()
    heading, table = kept.strip().split("\n\n")
    readme = (ROOT / "README.md").read_text()
    assert heading in readme.replace("\n", " ")
    rows = re.findall(r"^\| .* x \| (?:yes|no) \|$", readme, re.MULTILINE)
    assert len(rows) > 10
    assert set(rows) <= set(table.splitlines())


def test_the_page_on_masters_shows_the_kept_results():
    kept = (ROOT / "tests" / "bench" / "results" / "master-forms.md").read_text()
    assert kept.strip() in (ROOT / "docs" / "masters.md").read_text()
