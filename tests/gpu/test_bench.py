"""The benchmark's script: everything that it measures runs, and without a GPU it says so."""

import json

import pytest
import torch

from fmp.kernels import launch
from tests import cuda_executor
from tests.bench import gpu


@pytest.mark.skipif(cuda_executor.missing() is not None, reason=cuda_executor.missing() or "")
@pytest.mark.mixed_dtypes  # torch's own optimizers and scaler do
def test_all_that_it_measures_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert gpu.main(["--on-executor", "--save", "tiny"]) == 0
    assert (tmp_path / "tiny.md").read_text() in capsys.readouterr().out
    rows = json.loads((tmp_path / "tiny.json").read_text())["rows"]
    found = {(row["what"], row["by"]): row["counted"] for row in rows}
    assert found["unscale, norm, finite: f16 to f32", "fmp"] == "2+4"
    assert found["AdamW: f16 gradients", "fmp fused"] == "2+4+4+4+4+4+4+2"
    assert found["AdamW: f32 gradients", "torch fused"] == "4+4+4+4+4+4+4"
    assert found["SGD, momentum: f16 gradients", "fmp fused"] == "2+4+4+4+4+2"
    assert {"DF11, native", "DF11, published", "LM step, f16", "LM step, f16, CUDA graph"} <= {
        what for what, _ in found
    }
    assert all(row["milliseconds"] is None for row in rows)


def test_without_a_gpu_it_says_what_is_missing(capsys):
    if launch.missing("cuda") is None:
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 2
    assert str(launch.missing("cuda")) in capsys.readouterr().err


def test_a_row_says_what_was_reached(monkeypatch):
    """A card on which every copy takes 1 ms, and all else 2."""
    monkeypatch.setattr(gpu, "milliseconds", lambda run, device: 2.0)
    monkeypatch.setattr(gpu, "copy_milliseconds", lambda nbytes, device: 1.0)
    device, numbers = torch.device("cuda"), 10**9
    row = gpu.measured(gpu.Work("x", "y", lambda: None, numbers, (2, 4), fraction=0.4), device)
    assert (row.gigabytes, row.fraction, row.goal, row.met) == (3000.0, 0.5, "40% of a copy", True)
    assert not gpu.measured(gpu.Work("x", "y", lambda: None, numbers, (2, 4), fraction=0.6), device).met
    row = gpu.measured(gpu.Work("x", "y", lambda: None, numbers, (1.3, 2), output=900.0), device)
    assert (row.output, row.counted, row.met) == (1000.0, "1.3+2", True)
    assert "| x | y | 1.3+2 | 2.000 | 1,650 | 50% | 1,000 | 900 GB/s of output | yes |" in gpu.table([row])
