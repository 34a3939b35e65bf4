"""What the fuzzer of DF11 runs: any bytes into a reader, which must raise what it documents or give the right tensors.

The first byte of an input chooses the reader, the others are what it reads.
"""

import atexit
import contextlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmp import df11
from fmp.df11 import manifest, stored, tensor_file
from fmp.df11.published.matcher import Matcher, PatternError
from fmp.df11.published.patterns import PARTS, read_config
from fmp.df11_codec import codec, layout
from fmp.df11_codec.layout import Encoded
from fmp.df11_codec.published.groups import Group, decode_group, encode_group
from fmp.errors import DF11Error
from tests.soak import df11_reference as reference

SAMPLE = Path(__file__).parent.parent / "data" / "df11_sample"
GROUP = tuple(part for part in PARTS if part != "split_positions")
_FOLDER = Path(tempfile.mkdtemp(prefix="fmp-soak-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_DTYPES = {code: dtype for dtype, code in tensor_file.CODES.items()}


def run(data: bytes) -> None:
    """Runs one input.

    Raises:
        AssertionError: If a tensor is wrong, or two decoders disagree.
        Exception: Whatever a reader raises that it does not document.
    """
    if data:
        list(TARGETS.values())[data[0] % len(TARGETS)](data[1:])


def container(data: bytes) -> None:
    """A file of compressed weights."""
    path = _FOLDER / "weights"
    path.write_bytes(data)
    try:
        restored = df11.load(path, decompress=True)
    except DF11Error:
        restored = None
    try:
        with df11.open(path) as file:
            nodes = {name: file.read(name) for name in file.records}
    except DF11Error:
        assert restored is None, "load reads what open does not"
        return
    if restored is None:
        return  # the bytes are right, and the values are not, or the structure
    expected = reference.container(data)
    assert nodes.keys() == expected.keys(), "other names than in the file"
    with df11.open(path) as file:
        found = {name: file.read(name, decompress=True) for name in nodes}
    for name, (code, shape, raw) in expected.items():
        value: Any = found[name]
        assert (value.dtype, tuple(value.shape)) == (_DTYPES[code], shape), f"{name} has another dtype or shape"
        assert tensor_file.raw_bytes(value).tobytes() == raw, f"{name} has other bits"
        if isinstance(nodes[name], df11.CompressedTensor):
            _node(nodes[name], raw)


def sealed(data: bytes) -> None:
    """The same with the right checksums, as whoever forges a file would give it."""
    container(forged(data))


def forged(data: bytes) -> bytes:
    """Gives a file the checksums that it should have, as far as it can be understood."""
    try:
        parsed, header, body = reference.parts_of(data)
        kept = json.loads(parsed["__metadata__"]["manifest"])
        for name, record in kept["tensors"].items():
            start, stop = parsed[name]["data_offsets"]
            crc = f"{zlib.crc32(body[start:stop]):08x}"
            if isinstance(record, str):
                kept["tensors"][name] = crc
                continue
            record[3] = crc
            try:
                numel = int(np.prod(record[1]))
                values = reference.unpacked(body[start:stop], record[0], numel)
                record[2] = f"{zlib.crc32(values.tobytes()):08x}"
            except Exception:  # then the reader must refuse it
                continue
        metadata = {"fmp_df11": "1 00000000", "manifest": json.dumps(kept)}
        rest = {key: value for key, value in parsed.items() if key != "__metadata__"}
        header = json.dumps({"__metadata__": metadata, **rest}, separators=(",", ":")).encode()
    except Exception:  # what is left is to seal the header as it is
        size = int.from_bytes(data[:8], "little")
        header, body = data[8 : 8 + size], data[8 + size :]
    with contextlib.suppress(DF11Error):
        header = manifest.seal(header)
    return len(header).to_bytes(8, "little") + header + body


def folder(data: bytes) -> None:
    """A published folder: two bytes for the size of config.json, config.json, a safetensors file."""
    size = int.from_bytes(data[:2], "little")
    config, weights = data[2 : 2 + size], data[2 + size :]
    directory = _FOLDER / "published"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes(config)
    (directory / "model.safetensors").write_bytes(weights)
    try:
        found = df11.read_dfloat11(directory, flat=True)
    except (ValueError, KeyError):  # a DF11Error is a ValueError
        return
    patterns = read_config(directory / "config.json")
    stored_tensors = dict(reference.tensors(weights))
    groups = {name[: -len("luts")].rstrip(".") for name in stored_tensors if name.split(".")[-1] == "luts"}
    expected: dict[str, bytes] = {}
    inside = set()
    for module in groups:
        names = patterns.weights(module)
        keys = {part: f"{module}.{part}" if module else part for part in PARTS}
        if names is None or not all(key in stored_tensors for key in keys.values()):
            continue
        arrays = [np.frombuffer(stored_tensors[keys[part]][2], np.uint8) for part in GROUP]
        bits = reference.group(arrays[0].reshape(-1, 256), *arrays[1:])
        splits = np.frombuffer(stored_tensors[keys["split_positions"]][2], "<i8")
        for name, part in zip(names, np.split(bits, splits), strict=True):
            expected[name] = part.tobytes()
        inside |= set(keys.values())
    expected |= {name: raw for name, (_, _, raw) in stored_tensors.items() if name not in inside}
    assert found.keys() == expected.keys(), "other names than in the folder"
    for name, raw in expected.items():
        assert tensor_file.raw_bytes(found[name]).tobytes() == raw, f"{name} has other bits"


def group(data: bytes) -> None:
    """The arrays of a published group: their five sizes, two bytes each, then their bytes."""
    sizes = np.frombuffer(data[:10].ljust(10, b"\0"), "<u2").astype(int)
    arrays = [part.copy() for part in np.split(np.frombuffer(data[10:], np.uint8), np.cumsum(sizes[:-1]))]
    arrays[-1] = arrays[-1][: sizes[-1]]
    made = Group(arrays[0][: arrays[0].size // 256 * 256].reshape(-1, 256), *arrays[1:])
    outcomes = []
    for compiled in (False, True):
        try:
            outcomes.append(decode_group(made, compiled=compiled))
        except ValueError:
            outcomes.append(None)
    _agree(outcomes, lambda: reference.group(*(getattr(made, part) for part in GROUP)))


def packed(data: bytes) -> None:
    """One tensor as it is stored in a file: its form, two bytes for the number of numbers, the bytes."""
    if len(data) < 3:
        return
    form = stored.FORMS[data[0] % len(stored.FORMS)]
    numel, array = int.from_bytes(data[1:3], "little"), np.frombuffer(data[3:], np.uint8).copy()
    entry = tensor_file.Entry(torch.uint8, array.shape, 0, array.size)
    if not stored.fits(entry, form, [numel]):
        return
    try:
        node = stored.unpack(array, form, [numel])
        bits = tensor_file.raw_bytes(node.decompress()).tobytes()
    except ValueError:
        return
    assert bits == reference.unpacked(data[3:], form, numel).tobytes(), "other bits"
    _node(node, bits)


def encoded(data: bytes) -> None:
    """The parts of a tensor in memory, as a program may make them up: sizes of four parts, the lengths, the others."""
    sizes = np.frombuffer(data[:8].ljust(8, b"\0"), "<u2").astype(int)
    array = np.frombuffer(data[8:], np.uint8)
    lengths, stream, chunk_bits, starts, rest = np.split(array, np.cumsum([256, *(sizes[:3] * [8, 2, 8])]))
    if lengths.size < 256 or stream.size % 8 or chunk_bits.size % 2 or starts.size % 8:
        return
    words, ends = stream.copy().view(np.uint64), chunk_bits.copy().view(np.uint16)
    parts = Encoded(lengths.copy(), words, ends, starts.copy().view(np.int64), rest[: sizes[3]].copy())
    outcomes = []
    for backend in ("numpy", "numba"):
        try:
            outcomes.append(codec.decode(parts, backend=backend))
        except ValueError:
            outcomes.append(None)
    _agree(outcomes, lambda: reference.huffman(parts.code_lengths, stream, ends, parts.sign_mantissa))


def pattern(data: bytes) -> None:
    """A regular expression of a config.json and a name, with a zero between them."""
    text, _, name = data.decode("utf-8", "replace").partition("\0")
    try:
        Matcher(text).matches(name)
    except PatternError:
        return


TARGETS: dict[str, Callable[[bytes], None]] = {
    "container": container,
    "sealed": sealed,
    "folder": folder,
    "group": group,
    "packed": packed,
    "encoded": encoded,
    "pattern": pattern,
}


def seeds() -> list[bytes]:
    """Inputs that every reader accepts: small files, those of tests/data among them."""
    return [bytes([list(TARGETS).index(name)]) + data for name, data in _seeds()]


def _seeds() -> list[tuple[str, bytes]]:
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(600, generator=generator) * 0.02).bfloat16()
    repeated = torch.linspace(-1, 1, 40).bfloat16().repeat(30)
    plain = {"ints": torch.tensor([1, -2, 3]), "mask": torch.tensor([True, False]), "none": None}
    trees: list[Any] = [{"w": weights}, {"a": [weights[:20], repeated], **plain}, {"w": weights, "tied": weights}]
    found: list[tuple[str, bytes]] = []
    for tree in trees:
        df11.save(df11.compress(tree, min_numel=0), _FOLDER / "seed")
        found += [(name, (_FOLDER / "seed").read_bytes()) for name in ("container", "sealed")]

    published = (SAMPLE / "edge_two_symbols.safetensors").read_bytes()
    config = json.loads((SAMPLE / "single" / "config.json").read_bytes())
    config["dfloat11_config"]["pattern_dict"] = {"g": ["a", "b"]}
    folders = [(json.dumps(config).encode(), published)]
    made = _FOLDER / "seed_folder"
    df11.write_dfloat11({"a.weight": weights.view(20, 30), "norm": weights[:4]}, made, {r"\w": []}, overwrite=True)
    folders.append(((made / "config.json").read_bytes(), (made / "model.safetensors").read_bytes()))
    found += [("folder", len(text).to_bytes(2, "little") + text + file) for text, file in folders]

    arrays = {name: np.frombuffer(raw, np.uint8) for name, (_, _, raw) in reference.tensors(published)}
    sample = df11.read_dfloat11(SAMPLE / "single", flat=True)["lm_head.weight"][:700].view(torch.int16).numpy()
    real = encode_group(sample.view(np.uint16))
    for parts in ([arrays[f"g.{part}"] for part in GROUP], [getattr(real, part).reshape(-1) for part in GROUP]):
        sizes = np.array([part.size for part in parts], "<u2")
        found.append(("group", sizes.tobytes() + b"".join(part.tobytes() for part in parts)))

    for values in (weights, repeated, repeated[:16]):
        bits = values.view(torch.int16).numpy().view(np.uint16)
        form, pieces = stored.pack(df11.CompressedTensor.compress(values), bits)
        head = bytes([stored.FORMS.index(form)]) + values.numel().to_bytes(2, "little")
        found.append(("packed", head + b"".join(piece.tobytes() for piece in pieces)))
        parts = codec.encode(bits, even_if_larger=True, backend="numpy")
        assert parts is not None
        sizes = [parts.stream.size, parts.chunk_bits.size, parts.group_starts.size, parts.sign_mantissa.size]
        pieces = [parts.code_lengths, parts.stream, parts.chunk_bits, parts.group_starts, parts.sign_mantissa]
        found.append(("encoded", np.array(sizes, "<u2").tobytes() + b"".join(piece.tobytes() for piece in pieces)))
    found += [("pattern", rf"{text}\0".encode()) for text in (r"model\.layers\.\d+", "(a|b)*c{1,3}[^x-z]?")]
    return found


def _node(node: Any, raw: bytes) -> None:
    """Decodes a node with numpy and with numba."""
    if node.is_raw:
        return
    parts = (part.numpy() for part in (node.code_lengths, node.stream, node.chunk_bits, node.group_starts))
    lengths, stream, chunk_bits, starts = parts
    rest = node.sign_mantissa.numpy()
    made = Encoded(lengths, stream.view(np.uint64), chunk_bits.view(np.uint16), starts, rest)
    layout.check(made)
    for backend in ("numpy", "numba"):
        assert codec.decode(made, backend=backend).tobytes() == raw, f"{backend} gives other bits"


def _agree(outcomes: list[Any], expected: Callable[[], np.ndarray]) -> None:
    one, other = outcomes
    assert (one is None) == (other is None), "numpy and numba do not agree on what is damaged"
    if one is not None:
        assert np.array_equal(one, other), "numpy and numba give other bits"
        assert np.array_equal(one, expected()), "other bits than the format says"
