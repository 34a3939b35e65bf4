"""The pages on migrating: before and after train to the same losses."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
FENCE = r"```python\n(.*?)^```\n"
PAIR = re.compile(rf"^Before:\n\n{FENCE}\nAfter:\n\n{FENCE}", re.MULTILINE | re.DOTALL)


def pairs(name: str) -> list[Any]:
    page = (DOCS / name).read_text()
    found = PAIR.findall(page)
    assert len(found) == page.count("Before:\n") == page.count("After:\n")
    return [pytest.param(*pair, id=f"{name}:{index}") for index, pair in enumerate(found)]


def results(code: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(code, "<documentation>", "exec"), vars(module))
    return vars(module)


@pytest.mark.parametrize(("before", "after"), [*pairs("migrating_from_torch_amp.md"), *pairs("migrating_from_apex.md")])
def test_before_and_after_have_the_same_losses(before, after, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new = results(before, monkeypatch), results(after, monkeypatch)
    assert len(old["losses"]) >= 10
    assert old["losses"][0] != old["losses"][-1]
    expected, found = torch.tensor(old["losses"]), torch.tensor(new["losses"])
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=0.0)
    if "running_mean" in old:  # of a BatchNorm: the buffers have come back
        assert new["running_mean"].dtype == torch.float32
        torch.testing.assert_close(new["running_mean"], old["running_mean"], rtol=2.0**-6, atol=2.0**-8)
        assert old["running_mean"].abs().max() > 0.01
    if "log" in old:  # scales and skips
        assert old["log"] == new["log"]
        assert len(set(old["log"])) > 1
