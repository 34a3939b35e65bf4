import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmp import df11
from fmp.df11 import manifest, stored, tensor_file
from fmp.errors import DF11Error
from tests.bits import same_bits
from tests.df11.test_container import normal, packed, small_tree


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Tensors as small as here are deflated, as a code needs 256 bytes for its lengths; not so the one for the code.
    pack = stored.pack
    monkeypatch.setattr(
        stored, "pack", lambda node, bits: packed("huffman", node, bits) if bits.size == 600 else pack(node, bits)
    )
    df11.save(small_tree(), tmp_path / "small")
    return tmp_path / "small"


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Changes the header and the manifest of a file, and gives it the right checksum, as an attacker would."""
    header, data = split(path)
    contents = json.loads(header)
    kept = json.loads(contents["__metadata__"]["manifest"])
    change(contents, kept)
    metadata = {"fmp_df11": "1 00000000", "manifest": json.dumps(kept)}
    contents = {"__metadata__": metadata, **{key: value for key, value in contents.items() if key != "__metadata__"}}
    sealed = manifest.seal(json.dumps(contents, separators=(",", ":")).encode())
    path.write_bytes(len(sealed).to_bytes(8, "little") + sealed + data)


def split(path: Path) -> tuple[bytes, bytes]:
    contents = path.read_bytes()
    size = int.from_bytes(contents[:8], "little")
    return contents[8 : 8 + size], contents[8 + size :]


def test_every_changed_byte_is_found(small: Path) -> None:
    contents = small.read_bytes()
    for place in range(len(contents)):
        changed = contents[place] ^ 1 << place % 8
        small.write_bytes(contents[:place] + bytes([changed]) + contents[place + 1 :])
        with pytest.raises(DF11Error, match="small: "):
            df11.load(small)


def test_every_truncation_and_extension_is_found(small: Path) -> None:
    contents = small.read_bytes()
    for size in range(len(contents)):
        small.write_bytes(contents[:size])
        with pytest.raises(DF11Error):
            df11.load(small)
    for more in (b"\0", b"\0" * 8, contents):
        small.write_bytes(contents + more)
        with pytest.raises(DF11Error):
            df11.load(small)


def test_garbage_is_refused(tmp_path: Path) -> None:
    random.seed(0)
    start = b'{"__metadata__":{"fmp_df11":"1 00000000","manifest":"'
    for length in [*range(64), 1000]:
        for prefix in (b"", length.to_bytes(8, "little"), (200).to_bytes(8, "little") + start):
            (tmp_path / "w").write_bytes(prefix + random.randbytes(length))
            with pytest.raises(DF11Error):
                df11.load(tmp_path / "w")


def test_a_damaged_tensor_is_named_and_the_others_can_be_read(small: Path) -> None:
    with df11.open(small) as file:
        start = 8 + len(file._file.header) + file._file.entries["huffman"].start
    contents = bytearray(small.read_bytes())
    contents[start] ^= 1
    small.write_bytes(contents)
    with df11.open(small) as file:
        with pytest.raises(DF11Error, match=r"small: huffman: damaged"):
            file["tied"]
        assert same_bits(file["ints"], torch.tensor([1, -2, 3]))


HUGE = [2**40, 2**40]
FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "a tensor less in the manifest": lambda header, kept: kept["tensors"].pop("ints"),
    "a tensor more in the manifest": lambda header, kept: kept["tensors"].update(more="00000000"),
    "a tensor less in the header": lambda header, kept: header.pop("ints"),
    "a huge shape": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, HUGE),
    "a huge shape, deflated": lambda header, kept: kept["tensors"]["deflate"].__setitem__(1, HUGE),
    "a huge shape, raw": lambda header, kept: kept["tensors"]["raw"].__setitem__(1, HUGE),
    "a huge plain shape": lambda header, kept: header["ints"].update(shape=HUGE),
    "an empty shape": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, [0]),
    "an empty deflated shape": lambda header, kept: kept["tensors"]["deflate"].__setitem__(1, [0, 2**62, 2**62]),
    "a smaller shape": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, [599]),
    "a smaller raw shape": lambda header, kept: kept["tensors"]["raw"].__setitem__(1, [15]),
    "a larger shape": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, [601]),
    "a smaller deflated shape": lambda header, kept: kept["tensors"]["deflate"].__setitem__(1, [319]),
    "a larger deflated shape": lambda header, kept: kept["tensors"]["deflate"].__setitem__(1, [321]),
    "a negative shape": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, [-1, -600]),
    "a float shape": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, [600.0]),
    "a bool shape": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, [600, True]),
    "a shape of nan": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, [float("nan")]),
    "a shape that is empty and too large": lambda header, kept: header["ints"].update(shape=[0, 2**62, 2**62]),
    "a shape of many sizes": lambda header, kept: kept["tensors"]["huffman"].__setitem__(1, [600] + [1] * 100),
    "another form": lambda header, kept: kept["tensors"]["huffman"].__setitem__(0, "deflate"),
    "another form, raw": lambda header, kept: kept["tensors"]["deflate"].__setitem__(0, "huffman"),
    "a form that does not exist": lambda header, kept: kept["tensors"]["huffman"].__setitem__(0, "pickle"),
    "a plain tensor that is compressed": lambda header, kept: kept["tensors"].update(
        ints=["raw", [12], *["00000000"] * 2]
    ),
    "another dtype": lambda header, kept: header["mask"].update(dtype="U16"),
    "a dtype that does not exist": lambda header, kept: header["ints"].update(dtype="F4"),
    "an overlap": lambda header, kept: header["ints"].update(data_offsets=header["raw"]["data_offsets"]),
    "a gap": lambda header, kept: header["mask"].update(data_offsets=[n + 1 for n in header["mask"]["data_offsets"]]),
    "reversed offsets": lambda header, kept: header["ints"].update(data_offsets=header["ints"]["data_offsets"][::-1]),
    "a further key": lambda header, kept: header["ints"].update(more=1),
    "a further part of the manifest": lambda header, kept: kept.update(more=1),
    "tied to itself": lambda header, kept: kept["tied"].update(tied="tied"),
    "tied to nothing": lambda header, kept: kept["tied"].update(tied="nothing"),
    "tied though it is there": lambda header, kept: kept["tied"].update(ints="raw"),
    "tied to a number": lambda header, kept: kept["tied"].update(tied=3),
    "no structure": lambda header, kept: kept.update(structure={"dict": {}}),
    "a tensor twice": lambda header, kept: kept.update(structure={"list": [kept["structure"], "ints"]}),
    "a structure of another kind": lambda header, kept: kept.update(structure={"set": []}),
    "a deep structure": lambda header, kept: kept.update(structure=nested(100)),
    "metadata that is none": lambda header, kept: kept.update(metadata={"a": 1}),
}


def nested(depth: int) -> Any:
    structure: Any = None
    for _ in range(depth):
        structure = {"list": [structure]}
    return structure


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES.keys())
def test_forged_headers_are_refused(forgery: Callable[[Any, Any], Any], small: Path) -> None:
    rewritten(small, lambda header, kept: None)
    assert same_bits(df11.load(small), small_tree())
    rewritten(small, lambda header, kept: forgery(header, kept))
    with pytest.raises(DF11Error, match=r"small: "):
        df11.load(small, decompress=True)


def test_json_that_is_deep_long_or_double_is_refused(tmp_path: Path) -> None:
    deep = b'{"tensors":{},"tied":{},"metadata":{},"structure":' + b'{"list":[' * 5000 + b"]}" * 5000 + b"}"
    for text in (
        deep,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 100_000,
        b'{"a":1,"a":1}',
        b"null",
        b"[]",
        b"\xff",
        b"",
    ):
        escaped = json.dumps(text.decode("latin-1")).encode()
        for header in (text, b'{"__metadata__":{"fmp_df11":"1 00000000","manifest":' + escaped + b"}}"):
            sealed = manifest.seal(header) if manifest.is_compressed(header) else header
            (tmp_path / "w").write_bytes(len(sealed).to_bytes(8, "little") + sealed)
            with pytest.raises(DF11Error):
                df11.load(tmp_path / "w")


def forged_parts() -> list[tuple[str, list[np.ndarray]]]:
    """Bytes that have the right checksum, but that `pack` never writes."""
    node = df11.CompressedTensor.compress(normal(600))
    stream, chunk_bits, lengths, rest = (
        part.numpy() for part in (node.stream, node.chunk_bits, node.code_lengths, node.sign_mantissa)
    )
    first = int(np.flatnonzero(lengths)[0])
    overfull, incomplete, long = lengths.copy(), lengths.copy(), lengths.copy()
    overfull[first], incomplete[first], long[first] = 1, 0, 255
    exponents = bytes(range(250)) + bytes(350)
    return [
        ("huffman", [stream, chunk_bits, overfull, rest]),
        ("huffman", [stream, chunk_bits, incomplete, rest]),
        ("huffman", [stream, chunk_bits, long, rest]),
        ("huffman", [stream, chunk_bits, np.zeros_like(lengths), rest]),
        ("huffman", [stream, chunk_bits + 1, lengths, rest]),
        ("huffman", [stream, np.zeros_like(chunk_bits), lengths, rest]),
        ("huffman", [stream, np.full_like(chunk_bits, -1), lengths, rest]),
        ("huffman", [stream[:-1], chunk_bits, lengths, rest]),
        ("huffman", [np.append(stream, 0), chunk_bits, lengths, rest]),
        ("huffman", [np.append(stream[:-1], 1), chunk_bits, lengths, rest]),
        ("huffman", [~stream[:-1], stream[-1:], chunk_bits, lengths, rest]),
        ("huffman", [stream, chunk_bits, lengths, rest, np.ones(4, np.uint8)]),
        ("huffman", [rest]),
        ("deflate", [rest, np.frombuffer(zlib.compress(exponents[:-1]), np.uint8)]),
        ("deflate", [rest, np.frombuffer(zlib.compress(exponents + b"\0"), np.uint8)]),
        ("deflate", [rest, np.frombuffer(zlib.compress(bytes(50_000_000)), np.uint8)]),
        ("deflate", [rest, np.frombuffer(zlib.compress(exponents)[:-1], np.uint8)]),
        ("deflate", [rest, np.frombuffer(zlib.compress(exponents) + b"\1", np.uint8)]),
        ("deflate", [rest, np.frombuffer(zlib.compress(exponents) + bytes(8), np.uint8)]),
        ("deflate", [rest, np.zeros(1, np.uint8)]),
        ("raw", [np.zeros(600, np.uint16), np.ones(1, np.uint8)]),
        ("raw", [np.zeros(600, np.uint16), np.zeros(8, np.uint8)]),
    ]


@pytest.mark.parametrize("index", range(len(forged_parts())))
def test_forged_tensors_are_refused(index: int, tmp_path: Path) -> None:
    form, parts = forged_parts()[index]
    data = b"".join(part.tobytes() for part in parts)
    record = manifest.Record(zlib.crc32(data), form, (600,), 0)
    entries = {"w": tensor_file.Entry(torch.uint8, (len(data),), 0, len(data))}
    header = manifest.seal(manifest.render(manifest.Manifest({"w": record}), entries))
    (tmp_path / "w").write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(DF11Error, match=r"w: "):
        df11.load(tmp_path / "w", decompress=True)


def test_weights_that_are_not_those_that_were_compressed_are_refused(small: Path) -> None:
    rewritten(small, lambda header, kept: kept["tensors"]["huffman"].__setitem__(2, "00000000"))
    with pytest.raises(DF11Error, match="huffman: damaged: it does not give the weights"):
        df11.load(small, decompress=True)


def test_another_version_is_refused_with_advice(small: Path) -> None:
    small.write_bytes(small.read_bytes().replace(b'"fmp_df11":"1 ', b'"fmp_df11":"2 '))
    with pytest.raises(DF11Error, match="version '2' of the format, and this fmp reads version 1; use"):
        df11.load(small)
