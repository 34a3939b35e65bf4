import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

# Prints how much more memory each command has needed than there was in use before it.
MEASURE = """
import re, sys
from pathlib import Path
from fmp.__main__ import main

def in_use(key):
    return 1024 * int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

for folder in sys.argv[1:]:
    plain, small, back = (f"{folder}/{name}" for name in ("plain", "small", "back"))
    commands = (["compress", plain, small], ["verify", plain, small], ["inspect", small], ["decompress", small, back])
    for words in commands:
        Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
        before = in_use("VmRSS")
        assert main(["df11", *words, "--threads", "1", "--json"]) == 0
        print("peak", in_use("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory cannot be measured")
def test_memory_is_enough_for_two_tensors_and_a_half(tmp_path: Path) -> None:
    # The first run pays for what is loaded and compiled on first use.
    (tmp_path / "first").mkdir()
    (tmp_path / "many").mkdir()
    safetensors.torch.save_file({"w": torch.ones(8192).bfloat16()}, tmp_path / "first" / "plain")
    tensor = torch.randn(2**23).bfloat16()
    safetensors.torch.save_file({str(index): tensor.clone() for index in range(5)}, tmp_path / "many" / "plain")
    words = [sys.executable, "-c", MEASURE, str(tmp_path / "first"), str(tmp_path / "many")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak")]
    assert len(peaks) == 8
    assert max(peaks[4:]) < 2.8 * tensor.nbytes


def test_the_command_line_runs_as_a_module(tmp_path: Path) -> None:
    plain = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"mlp.up.weight": torch.ones(64, 64).bfloat16()}, plain)
    words = [sys.executable, "-m", "fmp", "df11"]
    done = subprocess.run([*words, "verify", str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    reader, pipe = os.pipe()
    os.close(reader)
    done = subprocess.run([*words, "inspect", str(plain)], stdout=pipe, stderr=subprocess.PIPE, check=False)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, b"")
