"""The documented table of what Apex did is the one that is tested, line by line."""

import ast
import functools
from pathlib import Path

import pytest

from tests.apex.parity import SECTIONS, document

ROOT = Path(__file__).parents[2]
ROWS = [row for rows in SECTIONS.values() for row in rows]


@functools.cache
def names_of_tests(path: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_page_shows_the_tables():
    page = (ROOT / "docs" / "migrating_from_apex.md").read_text()
    assert document() in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert len(lines) == len(ROWS) + 2 * len(SECTIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.apex)
def test_each_line_names_a_test(row):
    path, _, name = row.test.partition("::")
    assert name in names_of_tests(path)


def test_each_test_of_apex_has_a_line_or_says_what_is_behind_one():
    """A new file of tests here belongs into the table."""
    named = {row.test.partition("::")[0] for row in ROWS}
    others = {"tests/apex/test_parity.py", "tests/apex/test_torch_amp.py", "tests/apex/test_pages.py"}
    found = {str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("test_*.py")}
    assert {path for path in found if "compat" not in path} <= named | others
