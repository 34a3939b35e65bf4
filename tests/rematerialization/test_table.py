"""The page about remat shows the matrix that is tested."""

from pathlib import Path

from tests.rematerialization.table import table

PAGE = Path(__file__).parents[2] / "docs" / "remat.md"


def test_the_page_shows_the_table():
    assert table() in PAGE.read_text()
