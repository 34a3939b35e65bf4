"""The table of docs/remat.md, what is given to remat by transform: `python -m tests.rematerialization.table`."""

from collections.abc import Iterator

from tests.rematerialization.cases import CASES, TRANSFORMS, refused, rounded


def table() -> str:
    """Writes the table in Markdown, with a note for each cell that is not equal bit for bit."""
    reasons = list(dict.fromkeys(reason for case in CASES for _, reason in _exceptions(case)))
    lines = ["| | " + " | ".join(TRANSFORMS) + " |", "|---|" + "---|" * len(TRANSFORMS)]
    for case in CASES:
        cells = {transform: f"({reasons.index(reason) + 1})" for transform, reason in _exceptions(case)}
        lines.append(f"| {case} | " + " | ".join(cells.get(transform, "=") for transform in TRANSFORMS) + " |")
    notes = [f"{number}. {reason}." for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", *notes])


def _exceptions(case: str) -> Iterator[tuple[str, str]]:
    for transform in TRANSFORMS:
        if reason := refused(case, transform):
            yield transform, f"Raises, with and without remat: {reason}"
        elif reason := rounded(case, transform):
            yield transform, f"Equal to rounding: {reason}"


if __name__ == "__main__":
    print(table())
