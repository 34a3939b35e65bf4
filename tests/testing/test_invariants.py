import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fmp.testing import INVARIANTS
from fmp.testing.invariants import for_all

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"


def test_the_page_lists_the_invariants():
    sections = re.split(r"^### `(\w+)`$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    listed = {
        check: dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", text, re.MULTILINE))
        for check, text in zip(sections[::2], sections[1::2], strict=True)
    }
    assert listed == INVARIANTS


def test_every_invariant_has_one_line():
    meanings = [meaning for laws in INVARIANTS.values() for meaning in laws.values()]
    assert all(meaning.endswith(".") and len(meaning) < 120 for meaning in meanings)


def test_drawing_is_bounded_and_the_same_every_time():
    def drawn():
        values = []
        for_all(st.integers(), values.append, examples=7)
        return values

    assert drawn() == drawn()
    assert len(drawn()) == 7


def test_the_simplest_value_is_reported():
    def law(value):
        assert value < 100, f"{value} is too large"

    with pytest.raises(AssertionError, match=r"^100 is too large"):
        for_all(st.integers(), law, examples=200)


def test_a_failure_that_does_not_repeat_is_reported_as_it_was():
    seen = []

    def law(value):
        seen.append(value)
        assert len(seen) != 3, "only once"

    with pytest.raises(AssertionError, match=r"^only once"):
        for_all(st.integers(), law, examples=25)


def test_without_hypothesis_the_import_says_what_to_install():
    code = "import sys; sys.modules['hypothesis'] = None; import fmp; import fmp.testing"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "ImportError: fmp.testing needs hypothesis" in run.stderr
    assert "'.[testing]'" in run.stderr
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [requirement.split(">")[0] for requirement in extras["testing"]] == ["hypothesis"]
