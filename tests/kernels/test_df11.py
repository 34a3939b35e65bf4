"""The DF11 decoder: what the CPU codec restores, in every schedule; and damage, which it survives and reports."""

import ctypes
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import fmp
from fmp import tree
from fmp.df11 import CompressedTensor
from fmp.df11_codec import codec
from fmp.kernels import df11, eligible, launch, nvrtc, trust
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
    return df11.Parts(node.code_lengths, node.stream, node.chunk_bits, node.group_starts, node.sign_mantissa)


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


def test_whole_groups(checked):
    tensor = weights(2 * 32 * 512)
    out = torch.zeros_like(tensor)
    assert decode(checked, [CompressedTensor.compress(tensor)], [out]) == [False]
    assert same_bits(out, tensor)


@pytest.mark.parametrize(("shift", "out_shift"), [(1, 1), (3, 3), (8, 8), (15, 0), (0, 7)])
def test_parts_that_begin_anywhere(checked, shift, out_shift):
    """Where sixteen bytes at once are not possible, as for what is mapped from a file."""
    tensor = weights(2000)
    node = CompressedTensor.compress(tensor)
    moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), node.sign_mantissa])[shift:]
    out = torch.zeros(2000 + out_shift, dtype=torch.bfloat16)
    assert decode(checked, [node_with(node, sign_mantissa=moved)], [out[out_shift:]]) == [False]
    assert same_bits(out[out_shift:], tensor)
    assert not out[:out_shift].any()


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
        assert len({out.untyped_storage().data_ptr() for out in outs}) == len(outs)
    bad = node_with(nodes[1], chunk_bits=nodes[1].chunk_bits + 1)
    _, damaged = df11.decode([of(node) for node in (nodes[2], bad, nodes[4])])
    assert damaged.bool().tolist() == [False, True, False]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes the CPU a GPU whose kernels run and are not tried yet; lists what is launched there, and on the host."""
    done: list[str] = []
    kernels, decode_on_host = Module(folder() / "df11.cu", "fast"), codec.decode
    monkeypatch.setattr(eligible, "has_kernels", lambda device: True)
    monkeypatch.setattr(launch, "module_on", lambda device, of: done.append(of) or kernels)
    monkeypatch.setattr(trust, "_verdicts", {})
    monkeypatch.setattr(
        codec, "decode", lambda *args, **options: done.append("host") or decode_on_host(*args, **options)
    )
    return done


class Wrong:
    """Kernels that say that everything is damaged, and restore nothing."""

    def get_function(self, name: str) -> Any:
        return lambda grid, block, args: setattr(ctypes.c_int32.from_address(args[-1]), "value", 1)


def refused(*error: Any) -> Any:
    raise error[0]


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda: refused(nvrtc.NvrtcError("df11.cu for sm_70")), r"cannot run \(NvrtcError: df11\.cu for sm_70"),
        (lambda: refused(PermissionError(13, "Permission denied")), r"cannot run \(PermissionError"),
        (Wrong, "returns wrong numbers"),
    ],
    ids=["not compiled", "not kept", "wrong"],
)
def test_the_host_decodes_where_the_kernel_cannot(gpu, monkeypatch, load, reason):
    monkeypatch.setattr(launch, "module_on", lambda device, of: load())
    tensor = weights(5000)
    node = CompressedTensor.compress(tensor)
    with pytest.warns(RuntimeWarning, match=f"the kernel 'df11' {reason}.* on cpu, so the host decodes"):
        assert same_bits(node.decompress(), tensor)
    assert same_bits(fmp.df11.decompress({"w": node})["w"], tensor)  # and no second warning
    assert gpu == ["host", "host"]


def test_a_kernel_is_tried_before_its_first_use(gpu):
    tensor = weights(5000)
    node = CompressedTensor.compress(tensor)
    for _ in range(2):
        assert same_bits(node.decompress(), tensor)
    assert gpu == ["df11"] * 3


def test_a_tree_is_decoded_in_one_launch(gpu):
    assert trust.agrees("df11", torch.device("cpu"))
    gpu.clear()
    params = {"a": weights(5000), "b": [weights(700), weights(3)], "c": torch.ones(2)}
    compressed = fmp.df11.compress(params, min_numel=1)
    found = fmp.df11.decompress(compressed)
    assert same_bits(found, params)
    assert gpu == ["df11"]
    memory = [leaf.untyped_storage().data_ptr() for leaf in tree.leaves(found)]
    assert len(set(memory)) == len(memory)
    bad = node_with(compressed["b"][0], chunk_bits=compressed["b"][0].chunk_bits + 1)
    with pytest.raises(ValueError, match="corrupt"):
        fmp.df11.decompress({**compressed, "b": [bad]})


def test_parts_with_gaps_are_decoded_too(gpu):
    tensor = weights(5000)
    node = CompressedTensor.compress(tensor)
    spread = node_with(node, sign_mantissa=node.sign_mantissa.repeat(2, 1).t()[:, 0])
    assert same_bits(spread.decompress(), tensor)
    assert same_bits(fmp.df11.decompress([spread]), [tensor])
    assert "host" not in gpu


def test_the_host_does_not_decode_into_a_graph(gpu, monkeypatch):
    node = CompressedTensor.compress(weights(5000))
    monkeypatch.setattr(eligible, "runs", lambda kernel, device: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(RuntimeError, match="decode once before"):
        node.decompress()
    assert gpu == []


def test_tensors_are_checked_when_they_are_first_met(monkeypatch):
    launched(monkeypatch, Module(folder() / "df11.cu", "fast"))
    tensors = [weights(5000), weights(700)]
    nodes = [CompressedTensor.compress(tensor) for tensor in tensors]
    bad = node_with(nodes[0], chunk_bits=nodes[0].chunk_bits + 1, sign_mantissa=nodes[0].sign_mantissa.clone())
    with pytest.raises(ValueError, match="corrupt"):
        df11.restore([of(nodes[1]), of(bad)])
    for _ in range(2):
        assert same_bits(df11.restore(list(map(of, nodes))), tensors)
        waits = pytest.MonkeyPatch()
        waits.setattr(torch.Tensor, "any", lambda *args: pytest.fail("asked again"))
        df11.restore(list(map(of, nodes)))
        waits.undo()
    with pytest.raises(ValueError, match="corrupt"):
        df11.restore([of(bad)])


@pytest.mark.parametrize("name", ["code_lengths", "chunk_bits", "group_starts", "stream"])
def test_what_is_changed_is_checked_again(monkeypatch, name):
    launched(monkeypatch, Module(folder() / "df11.cu", "fast"))
    node = CompressedTensor.compress(weights(5000))
    df11.restore([of(node)])
    with pytest.raises(ValueError, match="corrupt"):  # a part was replaced
        df11.restore([of(node_with(node, **{name: getattr(node, name).clone().fill_(1)}))])
    with pytest.raises(ValueError, match="corrupt"):
        df11.restore([of(node_with(node, stream=node.stream[:-1]))])
    assert df11.restore([of(node)])
    getattr(node, name).fill_(1)
    with pytest.raises(ValueError, match="corrupt"):  # overwritten
        df11.restore([of(node)])


def test_weights_may_share_memory(monkeypatch):
    launched(monkeypatch, Module(folder() / "df11.cu", "fast"))
    nodes = [CompressedTensor.compress(weights(numbers)) for numbers in (5000, 700)]
    together = torch.cat([node.sign_mantissa for node in nodes])
    first = node_with(nodes[0], sign_mantissa=together[:5000])
    second = node_with(nodes[1], sign_mantissa=together[5000:], chunk_bits=nodes[1].chunk_bits + 1)
    df11.restore([of(first)])
    with pytest.raises(ValueError, match="corrupt"):
        df11.restore([of(second)])


def test_what_was_checked_is_forgotten_with_its_memory(monkeypatch):
    launched(monkeypatch, Module(folder() / "df11.cu", "fast"))
    before = len(df11._sound)
    node = CompressedTensor.compress(weights(5000))
    df11.restore([of(node)])
    assert len(df11._sound) == before + 1
    del node
    gc.collect()
    assert len(df11._sound) == before


@pytest.mark.parametrize("start", [2**63 - 1, 2**63 - 2**13, -(2**63), -1, 2**40])
def test_a_start_outside_of_the_stream(checked, start):
    """No sum of such a start with lengths overflows: the executor is built to find that out."""
    node = CompressedTensor.compress(weights(32 * 512 + 40))
    for place in (0, 1):
        starts = node.group_starts.clone()
        starts[place] = start
        assert decode(checked, [node_with(node, group_starts=starts)], [torch.zeros(32 * 512 + 40).bfloat16()]) == [
            True
        ]


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
