"""What MkDocs does to the pages: it puts in sections of the README, and makes pages of the sources they link to."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_SECTION = re.compile(r"^<!-- README: (.+) -->$", re.MULTILINE)
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file of the repository, outside of docs, that a page links to."""
    linked = {
        path
        for file in files.documentation_pages()
        if "/" not in file.src_uri
        for path in _OUTSIDE.findall(_with_sections(file.content_string))
    }
    for path in sorted(linked):
        if not (ROOT / path).is_file():
            raise PluginError(f"a page links to {path}, which is no file of the repository")
        files.append(File.generated(config, _page_of(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts in the sections of the README, and points links at the pages of sources."""
    if "/" in page.file.src_uri:
        return markdown
    return _OUTSIDE.sub(lambda found: f"]({_page_of(found[1])})", _with_sections(markdown))


def _with_sections(markdown: str) -> str:
    return _SECTION.sub(lambda found: _section(found[1]), markdown)


def _section(heading: str) -> str:
    """Returns what stands under a heading of the README, its links as seen from docs."""
    readme = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise PluginError(f"README.md has no section {heading!r}")
    links = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
    return links.sub(lambda link: f"]({_from_docs(link[1])})", found[1].strip())


def _from_docs(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"


def _page_of(path: str) -> str:
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _shown(path: str) -> str:
    text = (ROOT / path).read_text()
    return text if path.endswith(".md") else f"# {path}\n\n``````{Path(path).suffix[1:]}\n{text}``````\n"
