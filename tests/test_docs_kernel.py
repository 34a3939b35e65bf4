"""The kernel of the page on parts of one's own: launched as fmp launches its own, on the CPU executor."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fmp.kernels import launch
from tests.cuda_executor import Module
from tests.kernels.harness import needs_executor

PAGE = (Path(__file__).parent.parent / "docs" / "write_your_own.md").read_text()
pytestmark = needs_executor


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def signum(tmp_path, monkeypatch) -> Any:
    (source,) = blocks("cuda")
    (tmp_path / "signum.cu").write_text(source)
    kernels = Module(tmp_path / "signum.cu")
    monkeypatch.setattr(launch, "module_on", lambda device, of: {"signum": kernels}[of])
    (block,) = [block for block in blocks("python") if "import launch" in block]
    names: dict[str, Any] = {}
    exec(compile(block, "<documentation>", "exec"), names)
    return names["signum"]


@pytest.mark.parametrize("size", [0, 1, 256, 1000])
def test_the_launch_gives_the_update_and_the_momentum(signum, size):
    gradient, old = torch.randn(size), torch.randn(size)
    before = gradient.clone(), old.clone()
    update, moved = signum(gradient, old, rate=0.5, momentum=0.75)
    torch.testing.assert_close(moved, 0.75 * old + 0.25 * gradient)
    assert torch.equal(update, -0.5 * moved.sign())
    assert torch.equal(gradient, before[0])
    assert torch.equal(old, before[1])


def test_every_part_is_under_forty_lines():
    assert all(len(block.splitlines()) < 55 for block in blocks("python") + blocks("cuda"))
    classes = re.findall(r"^(?:@fmp.tree.dataclass\n)?(?:class|def) .*?(?=\n\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    assert len(classes) >= 5
    assert max(len(part.splitlines()) for part in classes) < 40
