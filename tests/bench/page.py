"""Writes the page on benchmarks from the results that are kept.

python -m tests.bench.page      # after a run with --save: tests/bench/results/*.json -> docs/benchmarks.md
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tests.bench.__main__ import RESULTS, Row, table

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"

_SECTIONS = {
    "Memory of a gradient, and of a step": r"gradient, |O2 bf16",
    "Casting: single ops that need no cast": r".*: fmp\.autocast / ",
    "Optimizers: one update": r"adamw|sgd|lion",
    "A step of a small network": r"MLP",
    "Rematerialization": r"remat",
    "Adapters on compressed weights": r"LoRA",
    "Recording, and measuring without allocating": r"recording|peak of a step",
    "Many processes": r"zero=",
    "A step of a language model": r"LM step",
}

_INTRODUCTION = """\
# Benchmarks

[A script](../tests/bench/page.py), `python -m tests.bench.page`, makes this page from the results that are kept in
`tests/bench/results`. `python -m tests.bench` measures again, and keeps its results with `--save NAME`.

fmp and its peer run in turns, each in a process of its own; a number is a median. "better by" is the peer's number
divided by fmp's: above 1, fmp takes less. A target was set before it was measured; the README says why some are
missed. Each table names its day, machine and versions.
"""


def page(results: Path = RESULTS) -> str:
    """Makes the page.

    Args:
        results: The folder with the results: for each run a table, and its rows as JSON. Comparisons with a peer are
            shown by section; other tables as they are.
    """
    return "\n".join([_INTRODUCTION, *[_run(path) for path in sorted(results.glob("*.json"))]])


def _run(path: Path) -> str:
    found = json.loads(path.read_text())
    heading, rows = found["heading"], found["rows"]
    title = f"## {path.stem}\n\n"
    if not all({"what", "fmp", "peer", "ratio"} <= row.keys() for row in rows):
        return title + path.with_suffix(".md").read_text()
    sections = _by_section([Row(**{key: value for key, value in row.items() if key != "met"}) for row in rows])
    tables = [f"### {name}\n\n{table(some)}\n" for name, some in sections.items() if some]
    return "\n".join([f"{title}{heading}\n", *tables])


def _by_section(rows: Sequence[Row]) -> dict[str, list[Row]]:
    sections: dict[str, list[Row]] = {name: [] for name in (*_SECTIONS, "Others")}
    for row in rows:
        fits = (name for name, pattern in _SECTIONS.items() if re.match(pattern, row.what))
        sections[next(fits, "Others")].append(row)
    return sections


if __name__ == "__main__":
    PAGE.write_text(page())
