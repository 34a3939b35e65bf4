"""fmp.df11's nodes: every tensor comes back bit for bit, and everything that carries trees carries them."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fmp
import fmp.df11
from fmp import tree
from fmp.df11 import CompressedTensor, compress, decompress
from fmp.df11_codec.codec import encode
from tests.bits import same_bits, storages

EVERY_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).mul(0.02).bfloat16()


def round_trip(tensor: torch.Tensor) -> CompressedTensor:
    node = CompressedTensor.compress(tensor)
    restored = node.decompress()
    assert same_bits(restored, tensor.detach())
    assert restored.is_contiguous()
    assert not set(storages(restored)) & set(storages((tensor, node)))
    assert (node.shape, node.dtype, node.ndim, node.numel()) == (
        tensor.shape,
        tensor.dtype,
        tensor.ndim,
        tensor.numel(),
    )
    assert node.device == tensor.device
    return node


TENSORS = {
    "empty": lambda: torch.empty(0, 5, dtype=torch.bfloat16),
    "scalar": lambda: torch.tensor(1.5, dtype=torch.bfloat16),
    "one element": lambda: torch.tensor([[float("nan")]], dtype=torch.bfloat16),
    "zeros": lambda: torch.zeros(80, 80, dtype=torch.bfloat16),
    "negative zeros": lambda: -torch.zeros(80, 80, dtype=torch.bfloat16),
    "two exponents": lambda: torch.tensor([0.5, 2.0], dtype=torch.bfloat16).repeat(3000),
    "all patterns": lambda: EVERY_PATTERN,
    "all patterns among weights": lambda: torch.cat([EVERY_PATTERN, weights(2**19)]),
    "infinities": lambda: torch.cat([torch.full((9,), float("inf"), dtype=torch.bfloat16), weights(5000)]),
    "odd size": lambda: weights(7, 11, 13),
    "transposed": lambda: weights(96, 64).t(),
    "strided": lambda: weights(200, 64)[::3, 1::2],
    "expanded": lambda: weights(1, 640).expand(10, 640),
    "channels last": lambda: weights(4, 8, 16, 16).contiguous(memory_format=torch.channels_last),
    "offset": lambda: weights(5001)[1:],
    "parameter": lambda: torch.nn.Parameter(weights(64, 96)),
    "inference": lambda: torch.inference_mode()(weights)(64, 96),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(name: str) -> None:
    tensor = TENSORS[name]()
    node = round_trip(tensor)
    assert node.nbytes <= 2 * tensor.numel()
    assert node.is_raw == (name in ("empty", "scalar", "one element", "all patterns"))


@hypothesis.given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_small_tensors_of_any_shape_come_back(shape: list[int], low: int, high: int) -> None:
    bits = np.random.default_rng(low).integers(min(low, high), max(low, high) + 1, shape, np.uint16)
    round_trip(torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16))


def test_a_node_says_what_it_holds() -> None:
    node = round_trip(weights(64, 128))
    assert repr(node) == str(node) == "df11[64,128]"
    assert tree.describe(node) == "df11[64,128]"
    assert (
        tree.describe({"w": node, "b": torch.ones(2), "none": None}) == "{'w': df11[64,128], 'b': f32[2], 'none': None}"
    )
    assert tree.describe([round_trip(torch.tensor(1.0).bfloat16())]) == "[df11[]]"
    parts = [leaf for leaf in tree.leaves(node) if isinstance(leaf, torch.Tensor)]
    assert node.nbytes == sum(part.nbytes for part in parts)
    assert node.bits_per_weight == 8 * node.nbytes / 8192
    assert round_trip(torch.empty(0).bfloat16()).bits_per_weight == 16


def test_the_same_tensor_gives_the_same_bytes() -> None:
    tensor = weights(64, 128)
    assert same_bits(CompressedTensor.compress(tensor), CompressedTensor.compress(tensor.t().contiguous().t()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(3), r"f32\[3\]"),
        (lambda: torch.ones(3, dtype=torch.float16), r"f16\[3\]"),
        (lambda: torch.ones(3, dtype=torch.int16), r"i16\[3\]"),
        (lambda: [1.0], r"\[1.0\]"),
        (lambda: torch.ones(3, device="meta").bfloat16(), "on meta"),
        (lambda: torch.eye(3).bfloat16().to_sparse(), "sparse"),
    ],
)
def test_what_cannot_be_compressed_is_refused(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CompressedTensor.compress(make())


def test_compressing_inside_of_a_transform_is_refused() -> None:
    def compressed(x: torch.Tensor) -> torch.Tensor:
        return CompressedTensor.compress(x).decompress().sum()

    x = weights(2, 5000)
    constant = lambda y: compressed(x) * y.sum()
    for transformed in (torch.func.vmap(compressed), torch.func.grad(compressed), torch.func.grad(constant)):
        with pytest.raises(RuntimeError, match=r"compress cannot run inside .* do it outside"):
            transformed(x)
    for fullgraph in (True, False):
        compiled = torch.compile(lambda x: compress({"x": x}), backend="eager", fullgraph=fullgraph)
        with pytest.raises(RuntimeError, match=r"inside of torch\.compile; do it outside"):
            compiled(x)
    with FakeTensorMode(), pytest.raises(TypeError, match="FakeTensor"):
        CompressedTensor.compress(torch.ones(5000).bfloat16())


def test_moving_a_node() -> None:
    tensor = weights(64, 128)
    node = CompressedTensor.compress(tensor)
    assert node.to("meta").device.type == "meta"
    assert same_bits(node.to("cpu").decompress(), tensor)
    with pytest.raises(TypeError, match="cast what decompress"):
        node.to(torch.float32)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("carry", [copy.deepcopy, copy.copy, lambda node: pickle.loads(pickle.dumps(node))])
@pytest.mark.parametrize("tensor", [weights(64, 128), torch.ones(3, 1).bfloat16()], ids=["coded", "raw"])
def test_copies_and_pickles(carry: Any, tensor: torch.Tensor) -> None:
    node = carry(CompressedTensor.compress(tensor))
    assert same_bits(node.decompress(), tensor)
    assert (node.shape, type(node.shape), node.dtype) == (tensor.shape, torch.Size, torch.bfloat16)


def test_checkpoints(tmp_path: Path) -> None:
    params = {"w": weights(64, 128), "small": weights(3), "raw": EVERY_PATTERN, "b": torch.ones(2)}
    state = {"frozen": compress(params, min_numel=1), "step": torch.tensor(3)}
    fmp.checkpoint.save(state, tmp_path / "state")
    restored = fmp.checkpoint.load(state, tmp_path / "state")
    assert same_bits(restored, state)
    assert same_bits(decompress(restored)["frozen"], params)
    wider = {**state, "frozen": compress({**params, "w": weights(64, 256)}, min_numel=1)}
    with pytest.raises(fmp.errors.CheckpointError, match="frozen/w/stream"):
        fmp.checkpoint.load(wider, tmp_path / "state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_casts_leave_nodes_alone(dtype: torch.dtype) -> None:
    params = {"w": weights(64, 128), "raw": EVERY_PATTERN, "b": weights(2)}
    compressed = compress(params, min_numel=100)
    policy = fmp.Policy(dtype, dtype, dtype)
    for convert in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output, lambda t: tree.cast(t, dtype)):
        found = convert(compressed)
        assert found["b"].dtype == dtype
        assert same_bits((found["w"], found["raw"]), (compressed["w"], compressed["raw"]))


# A table would take more bytes than the small one has.
NODES = {"coded": lambda: weights(64, 96), "raw": lambda: weights(64, 2)}


def loss(x: torch.Tensor, node: CompressedTensor) -> torch.Tensor:
    return (x @ node.decompress()).float().square().sum()


@pytest.mark.parametrize("kind", NODES)
def test_as_an_argument_of_torch_func(kind: str) -> None:
    weight = NODES[kind]()
    node = CompressedTensor.compress(weight)
    assert node.is_raw is (kind == "raw")

    def plain(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).float().square().sum()

    x = torch.randn(4, 64).bfloat16()
    in_dims: Any = (0, None)
    assert same_bits(torch.func.grad(loss)(x, node), torch.func.grad(plain)(x))
    assert same_bits(torch.func.vmap(loss, in_dims)(x, node), torch.func.vmap(plain)(x))
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims)(x, node)
    assert same_bits(per_sample, torch.func.vmap(torch.func.grad(plain))(x))
    outer = torch.func.grad(lambda x: torch.func.vmap(loss, in_dims)(x, node).sum())(x)
    assert same_bits(outer, torch.func.grad(lambda x: torch.func.vmap(plain)(x).sum())(x))
    tangents = torch.func.jvp(lambda x: loss(x, node), (x,), (x,))
    assert same_bits(tangents, torch.func.jvp(plain, (x,), (x,)))
    assert same_bits(fmp.grad(loss)(x, node), fmp.grad(lambda x, node: plain(x))(x, node))


def test_inside_of_a_tree_that_is_differentiated() -> None:
    weight = weights(64, 96)
    params = {"frozen": CompressedTensor.compress(weight), "scale": torch.ones(96).bfloat16()}

    def scaled(params: Any) -> torch.Tensor:
        return (params["frozen"].decompress() * params["scale"]).float().sum()

    grads = fmp.grad(scaled)(params)
    assert all(leaf is None for leaf in tree.leaves(grads["frozen"]))
    expected = torch.func.grad(lambda scale: scaled({**params, "scale": scale}))(params["scale"])
    assert same_bits(grads["scale"], expected)


def test_mapping_over_a_node_is_refused() -> None:
    node = CompressedTensor.compress(weights(64, 96))
    stacked = tree.map(lambda part: torch.stack([part, part]), node)
    with pytest.raises(ValueError, match="in_dims=None"):
        torch.func.vmap(lambda node: node.decompress())(stacked)


@pytest.mark.parametrize("kind", NODES)
def test_compiled_in_one_graph(kind: str) -> None:
    params = {"w": CompressedTensor.compress(NODES[kind]()), "b": torch.ones(1).bfloat16(), "none": None}
    x = torch.randn(4, 64).bfloat16()

    def apply(x: torch.Tensor, params: Any) -> torch.Tensor:
        return x @ params["w"].decompress() + params["b"]

    def apply_tree(x: torch.Tensor, params: Any) -> torch.Tensor:
        plain = decompress(params)
        return x @ plain["w"] + plain["b"]

    def gradient(x: torch.Tensor, params: Any) -> torch.Tensor:
        return torch.func.grad(loss)(x, params["w"])

    for function in (apply, apply_tree, gradient):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert same_bits(compiled(x, params), function(x, params))


def test_fake_tensors_have_the_right_shape() -> None:
    node = CompressedTensor.compress(weights(64, 96))
    with FakeTensorMode() as mode:
        found = tree.map(mode.from_tensor, node).decompress()
    assert (found.shape, found.dtype) == (torch.Size([64, 96]), torch.bfloat16)
    meta = node.to("meta").decompress()
    assert (meta.shape, meta.dtype, meta.device.type) == (torch.Size([64, 96]), torch.bfloat16, "meta")


def test_parts_that_do_not_fit_are_refused() -> None:
    node = CompressedTensor.compress(weights(64, 96))
    with pytest.raises(ValueError, match=r"6144 compressed numbers do not have the shape \[64, 97\]"):
        tree.replace(node, shape=torch.Size([64, 97])).decompress()
    raw = CompressedTensor.compress(weights(3))
    for wrong in (raw.raw[:2], raw.raw.float()):
        with pytest.raises(ValueError, match=r"numbers as torch\..* do not make df11\[3\]"):
            tree.replace(raw, raw=wrong).decompress()
    with pytest.raises(ValueError, match="corrupt"):
        tree.replace(node, stream=node.stream[:-1]).decompress()
    with pytest.raises(ValueError, match="corrupt"):
        tree.replace(node, stream=node.stream.int()).decompress()


def test_parts_may_lie_anywhere_in_memory() -> None:
    tensor = weights(64, 96)
    node = CompressedTensor.compress(tensor)
    file = torch.zeros(node.stream.nbytes + 1, dtype=torch.uint8).numpy()
    stream = file[1:].view(np.int64)
    stream[:] = node.stream.numpy()
    moved = tree.replace(node, stream=torch.from_numpy(stream), sign_mantissa=node.sign_mantissa.repeat(2, 1).t()[:, 0])
    assert same_bits(moved.decompress(), tensor)


def test_nodes_are_made_of_what_the_codec_returns() -> None:
    tensor = weights(64, 96)
    bits = tensor.reshape(-1).view(torch.int16).numpy().view(np.uint16)
    encoded = encode(bits)
    assert encoded is not None
    node = CompressedTensor.from_encoded(encoded, torch.empty(0, dtype=torch.int16), tensor.shape)
    assert same_bits(node, CompressedTensor.compress(tensor))
    assert node.stream.data_ptr() == encoded.stream.ctypes.data


def test_neither_numba_nor_the_compiler_is_loaded_by_the_import() -> None:
    program = "import sys, fmp.df11; print([name for name in ('numba', 'torch._dynamo') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_view_that_negates_is_compressed_as_it_is_seen():
    x = torch.randn(100, 100).bfloat16()
    weights = {"x": x, "n": cast(Any, torch)._neg_view(x)}
    found = fmp.df11.decompress(fmp.df11.compress(weights))
    assert torch.equal(found["x"], x)
    assert torch.equal(found["n"], -x)


def test_decoding_does_not_load_the_compiler():
    code = """
import sys, torch, fmp
fmp.df11.compress(torch.ones(64, 64).bfloat16()).decompress()
assert "torch._dynamo" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
