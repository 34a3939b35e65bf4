"""The site can be built: every page is in its contents, and every link leads to something."""

import re
from pathlib import Path

import pytest

from tests.bench.page import PAGE, page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONTENTS = (ROOT / "mkdocs.yml").read_text()


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^(```+).*?^\1$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[ -]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_page_is_in_the_contents_once(path):
    assert len(re.findall(rf": {re.escape(str(path.relative_to(DOCS)))}$", CONTENTS, re.MULTILINE)) == 1


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
        file = (path.parent / target).resolve() if target else path
        assert file.is_file(), target
        if anchor and file.suffix == ".md" and "README" not in file.read_text():
            assert anchor in anchors(file), f"{target}#{anchor}"


def test_every_section_of_the_readme_that_a_page_takes_exists():
    headings = re.findall(r"^## (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    taken = [name for path in PAGES for name in re.findall(r"^<!-- README: (.+) -->$", path.read_text(), re.MULTILINE)]
    assert len(taken) >= 3
    assert set(taken) <= set(headings)


def test_the_page_on_benchmarks_is_made_from_the_kept_results():
    assert PAGE.read_text() == page(), "run: python -m tests.bench.page"


def test_the_versions_of_the_site_are_pinned():
    extra = re.search(r"^docs = (\[.*?\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None
    pinned = (ROOT / "constraints.txt").read_text()
    for name in re.findall(r'"([\w-]+)', extra[1]):
        assert f"\n{name}==" in pinned
