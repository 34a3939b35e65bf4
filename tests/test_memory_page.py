"""What the page on memory prints is what its code prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "memory.md").read_text()
PRINTED = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def printed(block: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, "<documentation>", "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.parametrize(("block", "expected"), PRINTED, ids=map(str, range(len(PRINTED))))
def test_printed(block, expected):
    assert printed(block).splitlines() == expected.splitlines()


def test_every_block_says_what_it_prints():
    assert len(PRINTED) == PAGE.count("```python") >= 7
