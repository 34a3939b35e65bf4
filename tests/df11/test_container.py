import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st

import fmp
from fmp import df11
from fmp.df11 import stored, tensor_file
from fmp.errors import DF11Error
from tests.bits import same_bits

DTYPES = sorted(tensor_file.CODES, key=str)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def small_tree() -> dict[str, Any]:
    """Weights in all forms that a file can have, in few bytes."""
    weights = {
        "huffman": normal(600),
        "deflate": torch.linspace(-1, 1, 40).bfloat16().repeat(8),
        "raw": torch.arange(16, dtype=torch.int16).mul(2048).view(torch.bfloat16),
    }
    plain = {"ints": torch.tensor([1, -2, 3]), "mask": torch.tensor([True, False]), "scalar": torch.tensor(2.5)}
    compressed = df11.compress(weights, min_numel=0)
    return {**compressed, "tied": compressed["huffman"], **plain, "none": None, "list": [(torch.ones(1),)]}


def test_flat_names_come_back_as_flat_names(tmp_path: Path) -> None:
    weights = {
        "blocks.0.weight": normal(64, 64),
        "blocks.0.bias": normal(64),
        "steps": torch.tensor(3),
        "a/b": normal(2),
    }
    compressed = df11.compress(weights)
    df11.save(compressed, tmp_path / "w")
    restored = df11.load(tmp_path / "w")
    assert isinstance(restored["blocks.0.weight"], df11.CompressedTensor)
    assert same_bits(restored, compressed)
    assert same_bits(df11.load(tmp_path / "w", decompress=True), weights)


def test_nested_trees_come_back_nested(tmp_path: Path) -> None:
    df11.save(small_tree(), tmp_path / "w")
    restored = df11.load(tmp_path / "w")
    assert same_bits(restored, small_tree())
    assert restored["tied"] is restored["huffman"]
    assert same_bits(df11.load(tmp_path / "w", decompress=True), df11.decompress(small_tree()))


@pytest.mark.parametrize("weights", [{}, [], (), None, {"a": {}}, [None, ()], torch.ones(2), {"": {"": torch.ones(1)}}])
def test_odd_trees_come_back(weights: Any, tmp_path: Path) -> None:
    df11.save(weights, tmp_path / "w")
    assert same_bits(df11.load(tmp_path / "w"), weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3)], ids=str)
def test_every_dtype_passes_through(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.ones(shape).to(dtype)
    df11.save({"w": tensor, "odd": torch.ones(3, dtype=torch.uint8)}, tmp_path / "w")
    assert same_bits(df11.load(tmp_path / "w")["w"], tensor)
    # Other programs read it too.
    assert same_bits(safetensors.torch.load_file(tmp_path / "w")["w"], tensor)


@pytest.mark.parametrize("numel", [*range(10), 511, 512, 513, 32 * 512 - 1, 32 * 512 + 1])
def test_every_size_comes_back(numel: int, tmp_path: Path) -> None:
    weights = {"normal": normal(numel), "zeros": torch.zeros(numel).bfloat16()}
    compressed = df11.compress(weights, min_numel=0)
    df11.save(compressed, tmp_path / "w")
    assert same_bits(df11.load(tmp_path / "w"), compressed)
    assert same_bits(df11.load(tmp_path / "w", decompress=True), weights)


def test_every_pattern_of_bits_comes_back(tmp_path: Path) -> None:
    weights = {"all": torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).reshape(256, 256)}
    df11.save(df11.compress(weights), tmp_path / "w")
    assert same_bits(df11.load(tmp_path / "w", decompress=True), weights)


@settings(max_examples=25, deadline=None)
@given(
    scales=st.lists(st.integers(-120, 120), min_size=1, max_size=5), numel=st.integers(1, 3000), seed=st.integers(0, 9)
)
def test_weights_of_any_scale_come_back(tmp_path_factory: Any, scales: list[int], numel: int, seed: int) -> None:
    path = tmp_path_factory.mktemp("w") / "w"
    weights = [(normal(numel, seed=seed + index).float() * 2.0**scale).bfloat16() for index, scale in enumerate(scales)]
    compressed = df11.compress(weights, min_numel=0)
    df11.save(compressed, path)
    assert same_bits(df11.load(path), compressed)
    assert same_bits(df11.load(path, decompress=True), weights)


def test_strided_weights_come_back(tmp_path: Path) -> None:
    weights = {
        "t": normal(8, 4).T,
        "half": normal(8, 4)[:, ::2],
        "expanded": normal(1).expand(5),
        "ints": torch.arange(9)[::2],
    }
    df11.save(weights, tmp_path / "w")
    assert same_bits(df11.load(tmp_path / "w"), weights)


def test_a_large_normal_tensor_takes_at_most_10_65_bits_a_weight(tmp_path: Path) -> None:
    weights = {"w": normal(2048, 2048)}
    df11.save(df11.compress(weights), tmp_path / "w")
    assert 8 * os.path.getsize(tmp_path / "w") / 2048**2 <= 10.65


def test_repetitions_take_less_than_their_exponents_would(tmp_path: Path) -> None:
    df11.save(df11.compress({"w": normal(16, 512).repeat(64, 1)}), tmp_path / "w")
    assert 8 * os.path.getsize(tmp_path / "w") / (16 * 512 * 64) < 8.2


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    shared, plain = normal(128, 64), torch.ones(5)
    weights = {
        "embed": shared,
        "head": shared,
        "view": shared.view(64, 128),
        "p": plain,
        "q": {"r": plain},
        "s": plain[:4],
    }
    df11.save(df11.compress(weights), tmp_path / "w")
    restored = df11.load(tmp_path / "w")
    assert restored["embed"] is restored["head"]
    assert restored["p"] is restored["q"]["r"]
    assert same_bits(df11.decompress(restored), weights)
    with df11.open(tmp_path / "w") as file:
        assert len(file) == 6
        assert len(file.records) == 4
        assert same_bits(file["q/r"], plain)


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    one = {"a": normal(100, 100), "b": normal(3), "c": torch.ones(2)}
    other = {key: one[key].clone() for key in reversed(one)}
    df11.save(df11.compress(one), tmp_path / "one")
    df11.save(df11.compress(other), tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_one_tensor_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": normal(100, 100), "b": normal(50, 100), "c": torch.arange(3)}
    df11.save(df11.compress(weights), tmp_path / "w")
    read: list[str] = []
    original = tensor_file.TensorFile.read
    monkeypatch.setattr(tensor_file.TensorFile, "read", lambda self, name: read.append(name) or original(self, name))
    with df11.open(tmp_path / "w") as file:
        assert list(file) == ["a", "b", "c"]
        assert file.describe("b")[:2] == (torch.bfloat16, (50, 100))
        assert read == []
        assert same_bits(file.read("b", decompress=True), weights["b"])
        assert same_bits(file["c"], weights["c"])
    assert read == ["b", "c"]
    with pytest.raises(ValueError, match="closed"):
        file["a"]


def test_the_forms_and_where_they_begin(tmp_path: Path) -> None:
    weights = {
        "huffman": normal(100, 100),
        "deflate": torch.linspace(-1, 1, 40).bfloat16().repeat(8),
        "raw": torch.arange(16, dtype=torch.int16).mul(2048).view(torch.bfloat16),
    }
    odd = {"half": normal(3), "bytes": torch.ones(5, dtype=torch.uint8), "double": torch.ones(2, dtype=torch.float64)}
    df11.save({**df11.compress(weights, min_numel=0), **odd}, tmp_path / "w")
    file = tensor_file.TensorFile(tmp_path / "w")
    file.close()
    assert (8 + len(file.header)) % 8 == 0
    assert all(file.entries[name].start % 8 == 0 for name in weights)
    assert all(file.entries[name].start % weight.dtype.itemsize == 0 for name, weight in odd.items())
    with df11.open(tmp_path / "w") as weight_file:
        assert {name: weight_file.records[name].form for name in weights} == {name: name for name in weights}


def test_other_files_are_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "w")
    with pytest.raises(DF11Error, match="not a file of compressed weights; `python -m fmp df11 compress`"):
        df11.load(tmp_path / "w")
    with pytest.raises(FileNotFoundError):
        df11.load(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        df11.load(tmp_path / "folder")


def test_a_folder_with_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        df11.save({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(DF11Error, match=r"b.safetensors: another file of the folder has w too"):
        df11.load(tmp_path)


@pytest.mark.parametrize("root", [list, tuple, lambda parts: {"blocks": list(parts), "none": None}])
def test_a_folder_gives_flat_names_whatever_its_files_hold(root: Any, tmp_path: Path) -> None:
    one, other = normal(64, 64), normal(3)
    df11.save(df11.compress(root([one, {"bias": other, "same": one}])), tmp_path / "a.safetensors")
    df11.save({"last": other}, tmp_path / "b.safetensors")
    start = "blocks/" if isinstance(root([]), dict) else ""
    found = df11.load(tmp_path)
    assert isinstance(found[f"{start}0"], df11.CompressedTensor)
    assert found[f"{start}0"] is found[f"{start}1/same"]
    wanted = {f"{start}0": one, f"{start}1/bias": other, f"{start}1/same": one, "last": other}
    assert same_bits(df11.load(tmp_path, decompress=True), wanted)


def test_names_that_nearly_clash(tmp_path: Path) -> None:
    weights = {"": torch.ones(1), "tensor": torch.ones(2), "/": torch.ones(3), "a": {"": torch.ones(4)}}
    df11.save(weights, tmp_path / "w")
    assert same_bits(df11.load(tmp_path / "w"), weights)
    with df11.open(tmp_path / "w") as file:
        assert sorted(file) == ["", "/", "a/", "tensor"]
        assert repr(file) == f"WeightFile({str(tmp_path / 'w')!r}, 4 tensors)"


def packed(form: str, node: df11.CompressedTensor, bits: Any, level: int = 6) -> tuple[str, list[Any]]:
    """Packs a tensor in a form of the test's choice, as the format is described in `fmp.df11.stored`."""
    pieces = [part.numpy() for part in (node.stream, node.chunk_bits, node.code_lengths, node.sign_mantissa)]
    if form == "deflate":
        exponents = zlib.compress((bits >> 7).astype(np.uint8).tobytes(), level)
        pieces = [node.sign_mantissa.numpy(), np.frombuffer(exponents, np.uint8)]
    return form, [*pieces, np.zeros(-sum(piece.nbytes for piece in pieces) % 8, np.uint8)]


@pytest.mark.parametrize("level", [0, 1, 9])
def test_whatever_level_deflated_a_tensor_it_is_read(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"w": torch.linspace(-1, 1, 40).bfloat16().repeat(80)}
    df11.save(df11.compress(weights, min_numel=0), tmp_path / "w")
    monkeypatch.setattr(stored, "pack", lambda node, bits: packed("deflate", node, bits, level))
    df11.save(df11.compress(weights, min_numel=0), tmp_path / "other")
    assert (tmp_path / "w").read_bytes() != (tmp_path / "other").read_bytes()
    assert same_bits(df11.load(tmp_path / "other", decompress=True), weights)


def test_deflating_can_be_interrupted_and_is_not_tried_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Deflater:
        def __init__(self, level: int):
            self._own = compressobj(level)

        def compress(self, data: Any) -> bytes:
            given.append(len(data))
            return self._own.compress(data)

        def flush(self) -> bytes:
            return self._own.flush()

    compress, compressobj = zlib.compress, zlib.compressobj
    monkeypatch.setattr(zlib, "compress", lambda data: given.append(len(data)) or compress(data))
    monkeypatch.setattr(zlib, "compressobj", Deflater)
    df11.save(df11.compress({"w": normal(1024, 1024)}), tmp_path / "normal")
    assert sum(given) < 2**16
    given.clear()
    repeated = {"w": normal(16, 512).repeat(300, 1)}
    df11.save(df11.compress(repeated), tmp_path / "repeated")
    assert sum(given) > repeated["w"].numel() > 2 * max(given)
    with df11.open(tmp_path / "normal") as one, df11.open(tmp_path / "repeated") as other:
        assert (one.records["w"].form, other.records["w"].form) == ("huffman", "deflate")
    assert same_bits(df11.load(tmp_path / "repeated", decompress=True), repeated)


def test_a_file_cannot_be_read_inside_of_a_transform(tmp_path: Path) -> None:
    df11.save({"w": torch.ones(3)}, tmp_path / "w")
    with pytest.raises(RuntimeError, match=r"reading a file of weights cannot run inside .* do it outside"):
        torch.func.grad(lambda x: (x * df11.load(tmp_path / "w")["w"]).sum())(torch.ones(3))


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    df11.save({"w": torch.ones(2)}, tmp_path / "w")

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(stored, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        df11.save(df11.compress({"w": normal(100, 100)}), tmp_path / "w")
    assert os.listdir(tmp_path) == ["w"]
    assert same_bits(df11.load(tmp_path / "w"), {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"a": {"b": 1.5}}, TypeError, "a/b is a float; a file of weights holds tensors"),
        ({1: torch.ones(1)}, TypeError, "has the key 1; a file of weights has strings"),
        ({"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)}, ValueError, "two leaves have the name 'a/b'"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, TypeError, "a has the dtype torch.complex128"),
        ({"a": torch.ones(1, device="meta")}, ValueError, "a is on the meta device"),
        ({"a": df11.compress(normal(64, 64)).to("meta")}, ValueError, "a is on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, TypeError, "a is a Tensor"),
        ({"__metadata__": torch.ones(1)}, ValueError, "cannot be called '__metadata__'"),
        ({"\udc80": torch.ones(1)}, ValueError, "not valid Unicode"),
    ],
)
def test_what_cannot_be_saved_is_named(weights: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        df11.save(weights, tmp_path / "w")
    assert os.listdir(tmp_path) == []


def test_save_refuses_transforms(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside vmap"):
        torch.func.vmap(lambda x: df11.save({"x": x}, tmp_path / "w"))(torch.ones(2))


def test_views_that_conjugate_or_negate_are_not_tied(tmp_path):
    z = torch.randn(4, 4, dtype=torch.complex64)
    weights = {"i": z.imag, "ic": z.conj().imag, "z": z, "zc": z.conj()}
    fmp.df11.save(weights, tmp_path / "z.safetensors")
    found = fmp.df11.load(tmp_path / "z.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
