"""What the pages print is what their code prints, apart from where lines are broken."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["gotchas", "policy", "scaling", "step", "write_your_own"]
PRINTED = {
    name: re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for name in PAGES
    for page in [(DOCS / f"{name}.md").read_text()]
}


def printed(block: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, "<documentation>", "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.parametrize(
    ("block", "expected"),
    [pytest.param(*pair, id=f"{name}:{index}") for name in PAGES for index, pair in enumerate(PRINTED[name])],
)
def test_printed(block, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert printed(block).split() == expected.split()


@pytest.mark.parametrize("name", PAGES)
def test_every_text_belongs_to_a_block(name):
    assert len(PRINTED[name]) == (DOCS / f"{name}.md").read_text().count("```text\n") >= 1


def test_every_gotcha_shows_what_it_prints():
    assert len(PRINTED["gotchas"]) == (DOCS / "gotchas.md").read_text().count("```python") >= 20
