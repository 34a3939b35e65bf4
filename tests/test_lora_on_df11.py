"""The example that trains adapters on compressed weights: every variant ends in the same bits, with less memory."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fmp
from tests.bits import same_bits

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "lora_on_df11.py"
TINY = ["--width=64", "--heads=2", "--layers=2", "--context=16", "--batch=2", "--pretrain-batch=2", "--rank=2"]
VARIANTS = ["bf16", "df11", "bf16, remat", "df11, remat"]
pytestmark = pytest.mark.mixed_dtypes  # the attention adds a mask in bf16 to float32
COUNT = "must be at least 1 and below 2**31"


@pytest.fixture
def script(monkeypatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def table(output: str) -> dict[str, list[str]]:
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("variant")) + 1
    return {line[:12].strip(): line[12:].split() for line in lines[start : start + len(VARIANTS)]}


def test_all_variants_end_in_the_same_bits_and_compressed_weights_take_less(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    sizes = ["--width=128", "--heads=4", "--layers=3", "--context=32", "--pretrain-steps=15", "--steps=15"]
    command = [sys.executable, str(SCRIPT), *sizes, "--out=pictures"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    rows = table(finished.stdout)
    assert list(rows) == VARIANTS
    assert {words[-1] for words in rows.values()} == {"yes"}
    assert len({words[4] for words in rows.values()}) == 1
    weights, step, together = ({name: float(words[place]) for name, words in rows.items()} for place in range(3))
    assert weights["df11"] == weights["df11, remat"] < 0.75 * weights["bf16"] == 0.75 * weights["bf16, remat"]
    assert step["bf16, remat"] < 0.7 * step["bf16"]
    assert together["df11, remat"] < min(together[name] for name in VARIANTS[:3])
    assert finished.stdout.splitlines()[-1].endswith("other bits than the first: 0")
    learned = re.search(r"loss ([\d.]+) before, ([\d.]+) after", finished.stdout)
    assert learned is not None
    assert float(learned[2]) < float(learned[1]) - 0.05
    assert (tmp_path / "pictures" / "losses.png").stat().st_size > 10_000


def test_only_adapters_are_trained_and_the_weights_stay_compressed(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["x", *TINY, "--steps=4", f"--out={tmp_path}"])
    args = script["parse_arguments"]()
    bases = script["make_bases"](script["GPT"](args.context, args.width, args.heads, args.layers).bfloat16())
    code = script["read_code"]()
    runs = {
        name: script["Run"](script["with_adapters"](base, args), script["sample_batch"](code, 0, args), args)
        for name, base in bases.items()
    }
    before = {name: fmp.df11.decompress(run.frozen) for name, run in runs.items()}
    assert same_bits(before["bf16"], before["df11"])
    script["train_adapters"](runs, code, args)

    run = runs["df11"]
    kinds = {name for name, weight in run.frozen.items() if isinstance(weight, fmp.df11.FrozenWeight)}
    assert {name for name, weight in run.frozen.items() if weight.numel() >= 4096} == kinds
    assert same_bits(fmp.df11.decompress(run.frozen), before["bf16"])
    # Four linear layers a block, and the head; two matrices each.
    assert {name.rpartition(".")[2] for name in run.state.params} == {"down", "up"}
    assert len(run.state.params) == 2 * (4 * args.layers + 1)
    assert all(weight.any() for weight in run.state.params.values())
    assert all(weight.dtype == torch.float32 for weight in fmp.tree.leaves(run.state.master))
    assert run.has_bits_of(runs["bf16"])
    assert len(run.losses) == args.steps


def test_an_adapter_starts_as_its_layer_and_is_a_product_beside_it(script):
    adapter = script["LoRA"](nn.Linear(5, 3), 2)
    x = torch.randn(4, 5)
    assert torch.equal(adapter(x), adapter.layer(x))
    adapter.up.data.normal_()
    merged = adapter.layer.weight + adapter.up @ adapter.down
    torch.testing.assert_close(adapter(x), nn.functional.linear(x, merged, adapter.layer.bias))


def test_other_bits_are_noticed(script, tmp_path, monkeypatch, capsys):
    honest = script["make_bases"]

    def off_by_a_little(gpt):
        bases = honest(gpt)
        bases["df11"].norm.bias = nn.Parameter(bases["df11"].norm.bias + 2.0**-6)
        return bases

    monkeypatch.setitem(script["main"].__globals__, "make_bases", off_by_a_little)
    monkeypatch.setattr(sys, "argv", ["x", *TINY, "--steps=2", "--pretrain-steps=2", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match=r"other bits than the first: df11; df11, remat$"):
        script["main"]()
    rows = table(capsys.readouterr().out)
    assert [name for name, words in rows.items() if words[-1] == "no"] == ["df11", "df11, remat"]


@pytest.mark.parametrize("option", ["--learning-rate=1e6", "--adapter-rate=1e6"])
def test_a_training_that_diverges_says_so(script, option, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", *TINY, "--steps=9", "--pretrain-steps=9", f"--out={tmp_path}", option])
    with pytest.raises(SystemExit, match="the training diverged; take a smaller --learning-rate or --adapter-rate"):
        script["main"]()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            ([f"--{option}={value}"], f"--{option} {COUNT}")
            for option in ("pretrain-steps", "steps", "batch", "rank", "layers")
            for value in (0, 2**31)
        ],
        (["--heads=5"], "--width 384 must be a multiple of --heads 5"),
        (["--width=32", "--heads=2"], "--width must be at least 64"),
        (["--learning-rate=nan"], "--learning-rate must be above 0 and at most 1e6"),
        (["--adapter-rate=0"], "--adapter-rate must be above 0 and at most 1e6"),
        (["--seed=-1"], "--seed must be at least 0 and below 2**32"),
        ([f"--out={ROOT / 'README.md'}"], "--out: "),
    ],
)
def test_bad_options_are_refused_by_name(script, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    with pytest.raises(SystemExit) as stop:
        script["parse_arguments"]()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
