"""The DF11 decoder: what the CPU codec restores, in every schedule; and damage, which it survives and reports."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fmp import tree
from fmp.df11 import CompressedTensor
from fmp.df11.compressed import _kernel_is_right
from fmp.kernels import df11, launch
from tests.bits import same_bits
from tests.cuda_executor import SCHEDULES, LaunchError, Module
from tests.kernels.harness import folder, needs_executor

pytestmark = needs_executor
BLOCK = 8 * 32 * 512
PARTS = ("code_lengths", "stream", "chunk_bits", "group_starts", "sign_mantissa")
ROW = np.dtype([*[(name, np.uint64) for name in PARTS], *[(name, np.int64) for name in ("offset", "numbers", "words")]])


def decode(module: Module, nodes: Sequence[CompressedTensor], outs: Sequence[torch.Tensor]) -> list[bool]:
    """Launches the kernel on many tensors, and returns which are damaged."""
    rows, blocks = np.zeros(max(len(nodes), 1), ROW), []
    for index, (node, out) in enumerate(zip(nodes, outs, strict=True)):
        for name in PARTS:
            rows[name][index] = getattr(node, name).data_ptr()
        rows["offset"][index] = (out.data_ptr() - outs[0].data_ptr()) // 2
        rows["numbers"][index], rows["words"][index] = out.numel(), 2 * node.stream.numel()
        blocks += [index << 32 | block for block in range(-(-out.numel() // BLOCK))]
    entries, damaged = np.array(blocks, np.uint64), np.zeros(max(len(nodes), 1), np.uint32)
    read = {f"{index} {name}": part for index, node in enumerate(nodes) for name, part in parts(node).items()}
    written = {f"{index} out": out for index, out in enumerate(outs)}
    with module.memory(read={"rows": rows, "blocks": entries, **read}, written={"damaged": damaged, **written}):
        if blocks:
            arguments = (rows.ctypes.data, entries.ctypes.data, outs[0].data_ptr(), damaged.ctypes.data)
            module.get_function("df11_decode")((len(blocks),), (256,), arguments)
    return damaged.astype(bool).tolist()[: len(nodes)]


def parts(node: CompressedTensor) -> dict[str, Any]:
    return {name: getattr(node, name) for name in PARTS}


def of(node: CompressedTensor) -> df11.Parts:
    return node.code_lengths, node.stream, node.chunk_bits, node.group_starts, node.sign_mantissa


@pytest.fixture(scope="module", params=["fast", "checked"])
def module(request: pytest.FixtureRequest) -> Module:
    return Module(folder() / "df11.cu", request.param)


def launched(monkeypatch: pytest.MonkeyPatch, module: Module) -> None:
    """Lets the product launch its kernels on the CPU."""
    monkeypatch.setattr(launch, "module_on", lambda device, of: module)


@pytest.fixture(scope="module")
def checked() -> Module:
    return Module(folder() / "df11.cu", "checked")


def weights(numbers: int, kind: str = "normal") -> torch.Tensor:
    generator = torch.Generator().manual_seed(numbers)
    values = torch.randn(numbers, generator=generator) * 0.02
    if kind == "two exponents":
        values = torch.where(values > 0, 1.0, 0.25)
    if kind == "constant":
        values = torch.full((numbers,), 3.0)
    if kind == "wide":  # all lengths up to 12 bits
        values = torch.exp2(torch.randint(-100, 100, (numbers,), generator=generator) * values.abs() * 20)
    if kind == "special":  # zeros of both signs, subnormal numbers, inf and NaN
        special = torch.tensor([0.0, -0.0, 1e-39, float("inf"), float("nan")])
        chosen = special[torch.randint(0, len(special), (numbers,), generator=generator)]
        values = torch.where(torch.rand(numbers, generator=generator) < 0.1, chosen, values)
    return values.bfloat16()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["normal", "two exponents", "constant", "wide", "special"])
def test_same_bits_as_the_codec(module, kind, schedule):
    module.schedule = schedule
    tensors = [weights(numbers, kind) for numbers in (1, 15, 511, 512, 513, 3000, 32 * 512 + 17)]
    nodes = [CompressedTensor.compress(tensor) for tensor in tensors]
    pairs = [(node, tensor) for node, tensor in zip(nodes, tensors, strict=True) if not node.is_raw]
    assert pairs
    outs = [torch.zeros_like(tensor) for _, tensor in pairs]
    assert decode(module, [node for node, _ in pairs], outs) == [False] * len(pairs)
    for out, (_, tensor) in zip(outs, pairs, strict=True):
        assert same_bits(out, tensor)


def test_several_blocks_of_one_tensor(module):
    module.schedule = "forward"
    tensor = weights(BLOCK + 32 * 512 + 5)
    out = torch.zeros_like(tensor)
    assert decode(module, [CompressedTensor.compress(tensor)], [out]) == [False]
    assert same_bits(out, tensor)


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_parts_that_begin_anywhere(checked, shift):
    """Where sixteen bytes at once are not possible, as for what is mapped from a file."""
    tensor = weights(2000)
    node = CompressedTensor.compress(tensor)
    moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), node.sign_mantissa])[shift:]
    out = torch.zeros(2000 + shift, dtype=torch.bfloat16)
    assert decode(checked, [node_with(node, sign_mantissa=moved)], [out[shift:]]) == [False]
    assert same_bits(out[shift:], tensor)
    assert not out[:shift].any()


def node_with(node: CompressedTensor, **changed: torch.Tensor) -> CompressedTensor:
    return tree.replace(node, **changed)


@pytest.mark.parametrize("numbers", [600, 32 * 512 + 40])
def test_every_bit_of_the_lengths_and_positions(checked, numbers):
    """Each flipped bit is survived: the checker sees every access. What changes the numbers is reported."""
    tensor = weights(numbers)
    node = CompressedTensor.compress(tensor)
    checked.schedule = "forward"
    for name in ("code_lengths", "chunk_bits", "group_starts", "stream"):
        raw = getattr(node, name).view(torch.uint8)
        for bit in range(0, 8 * raw.numel(), 1 if raw.numel() < 20 else 8 * raw.numel() // 40 + 1):
            flipped = raw.clone()
            flipped[bit // 8] ^= 1 << bit % 8
            out = torch.zeros_like(tensor)
            changed = {name: flipped.view(getattr(node, name).dtype)}
            damaged = decode(checked, [node_with(node, **changed)], [out])
            if name != "stream":  # another code of the same length is what checksums are for
                assert damaged == [True] or same_bits(out, tensor), (name, bit)
    short = node_with(node, stream=node.stream[:-1].clone())
    assert decode(checked, [short], [torch.zeros_like(tensor)]) == [True]


def zeros_of(lengths: dict[int, int], bits: int, words: int | None = None, numbers: int = 100) -> CompressedTensor:
    """Makes a tensor of one chunk whose stream is all zeros, with a code of its own."""
    code_lengths = torch.zeros(256, dtype=torch.uint8)
    for symbol, length in lengths.items():
        code_lengths[symbol] = length
    return CompressedTensor(
        code_lengths,
        torch.zeros((bits + 63) // 64 + 1 if words is None else words, dtype=torch.int64),
        torch.tensor([bits], dtype=torch.int16),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(numbers, dtype=torch.uint8),
        torch.empty(0, dtype=torch.int16),
        torch.Size([numbers]),
    )


@pytest.mark.parametrize(
    ("lengths", "bits", "is_whole"),
    [
        ({0: 1, 255: 1}, 100, True),
        ({7: 1}, 100, True),  # the only symbol has a code of one bit
        ({7: 2}, 200, False),
        ({7: 2, 8: 2}, 200, False),
        ({7: 1, 8: 2}, 100, False),
        ({7: 1, 8: 1, 9: 1}, 100, False),
        ({7: 1, 8: 1, 9: 13}, 100, False),
        ({7: 1, 8: 13}, 100, False),
        ({}, 0, False),
    ],
)
def test_a_code_is_complete(checked, lengths, bits, is_whole):
    out = torch.full((100,), 3.0, dtype=torch.bfloat16)
    assert decode(checked, [zeros_of(lengths, bits)], [out]) == [not is_whole]
    if is_whole:
        assert out.view(torch.int16).tolist() == [min(lengths) << 7] * 100


@pytest.mark.parametrize("bits", [63, 64, 65, 95, 96, 97, 127, 128])
def test_nothing_but_unset_bits_follows_the_last_code(checked, bits):
    node, out = zeros_of({0: 1, 255: 1}, bits, numbers=bits), torch.zeros(bits, dtype=torch.bfloat16)
    assert decode(checked, [node], [out]) == [False]
    for bit in range(bits, 64 * node.stream.numel()):
        stream = node.stream.clone()
        stream.view(torch.uint8)[bit // 8] |= 1 << bit % 8
        assert decode(checked, [node_with(node, stream=stream)], [out]) == [True], bit
    for words in (node.stream.numel() - 1, node.stream.numel() + 1):
        assert decode(checked, [zeros_of({0: 1, 255: 1}, bits, words, numbers=bits)], [out]) == [True]


@given(st.binary(min_size=256, max_size=256), st.integers(0, 2**32 - 1), st.sampled_from(SCHEDULES))
@settings(max_examples=20)
def test_noise_neither_hangs_nor_leaves_its_memory(checked, lengths, seed, schedule):
    generator = torch.Generator().manual_seed(seed)
    numbers = 700

    def noise(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)

    code = torch.frombuffer(bytearray(lengths), dtype=torch.uint8)
    node = CompressedTensor(
        code % 14 if seed % 2 else code,
        noise(5, torch.int64),
        noise(2, torch.int16),
        noise(1, torch.int64),
        noise(numbers, torch.uint8),
        torch.empty(0, dtype=torch.int16),
        torch.Size([numbers]),
    )
    checked.schedule = schedule
    decode(checked, [node], [torch.zeros(numbers, dtype=torch.bfloat16)])


def test_the_checker_watches_these_launches(checked):
    node = CompressedTensor.compress(weights(600))
    short = node_with(node, sign_mantissa=node.sign_mantissa[:500].clone())
    with pytest.raises(LaunchError, match="out of bounds"):
        decode(checked, [short], [torch.zeros(600, dtype=torch.bfloat16)])


def test_the_way_to_the_gpu(monkeypatch):
    launched(monkeypatch, Module(folder() / "df11.cu", "fast"))
    tensors = [weights(numbers) for numbers in (3, 700, BLOCK + 1, 64, 5000)]
    nodes = [CompressedTensor.compress(tensor) for tensor in tensors]
    pairs = [(node, tensor) for node, tensor in zip(nodes, tensors, strict=True) if not node.is_raw]
    for _ in range(2):
        outs, damaged = df11.decode([of(node) for node, _ in pairs])
        assert not damaged.any()
        assert same_bits(outs, [tensor for _, tensor in pairs])
        assert {out.untyped_storage().data_ptr() for out in outs} == {outs[0].untyped_storage().data_ptr()}
    bad = node_with(nodes[1], chunk_bits=nodes[1].chunk_bits + 1)
    _, damaged = df11.decode([of(node) for node in (nodes[2], bad, nodes[4])])
    assert damaged.bool().tolist() == [False, True, False]


def test_a_card_is_believed_if_it_agrees_with_the_codec(monkeypatch):
    launched(monkeypatch, Module(folder() / "df11.cu", "fast"))
    assert _kernel_is_right.__wrapped__(torch.device("cpu"))
    restore = df11.restore
    monkeypatch.setattr(df11, "restore", lambda parts: restore(parts).roll(1))
    with pytest.warns(RuntimeWarning, match="wrong numbers"):
        assert not _kernel_is_right.__wrapped__(torch.device("cpu"))


def test_one_tensor_is_checked_when_it_is_first_met(monkeypatch):
    launched(monkeypatch, Module(folder() / "df11.cu", "fast"))
    tensor = weights(5000)
    node = CompressedTensor.compress(tensor)
    bad = node_with(node, chunk_bits=node.chunk_bits + 1, sign_mantissa=node.sign_mantissa.clone())
    with pytest.raises(ValueError, match="corrupt"):
        df11.restore(of(bad))
    for _ in range(2):
        assert same_bits(df11.restore(of(node)), tensor)
    with pytest.raises(ValueError, match="corrupt"):
        df11.restore(of(bad))


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("code_lengths", lambda part: part[:255], ValueError),
        ("chunk_bits", lambda part: part[:-1], ValueError),
        ("group_starts", lambda part: part.repeat(2), ValueError),
        ("sign_mantissa", lambda part: torch.cat([part, part]), ValueError),
        ("stream", lambda part: part.int(), TypeError),
        ("sign_mantissa", lambda part: part.repeat(2)[::2], TypeError),
        ("chunk_bits", lambda part: part.to("meta"), TypeError),
    ],
)
def test_parts_that_do_not_fit_are_not_launched(monkeypatch, name, change, error):
    monkeypatch.setattr(launch, "module_on", lambda device, of: pytest.fail("launched"))
    own = parts(CompressedTensor.compress(weights(700)))
    changed: Any = tuple((own | {name: change(own[name])}).values())
    with pytest.raises(error, match=name if error is TypeError else "numbers need"):
        df11.decode([changed])
