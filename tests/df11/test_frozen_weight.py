"""FrozenWeight: a tensor that shows its shape, decodes itself, and cannot be changed unnoticed."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fmp
from fmp.df11 import CompressedTensor, FrozenWeight
from tests.bits import same_bits

torch_: Any = torch  # does not declare all of these functions
VALUES = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def frozen(values: torch.Tensor = VALUES) -> FrozenWeight:
    return FrozenWeight(CompressedTensor.compress(values))


def test_it_shows_what_the_tensor_would_show():
    weight = frozen()
    shown: list[Callable[[torch.Tensor], Any]] = [
        lambda t: (t.shape, t.dtype, t.device, t.layout, t.requires_grad, t.ndim, t.nbytes, t.itemsize, len(t)),
        lambda t: (t.size(0), t.stride(), t.numel(), t.is_contiguous(), t.is_floating_point(), t.is_meta, t.is_leaf),
    ]
    assert [show(weight) for show in shown] == [show(VALUES) for show in shown]
    assert isinstance(torch.nn.Parameter(weight, requires_grad=False), torch.nn.Parameter)
    assert repr(weight) == "FrozenWeight(df11[48,64])"
    assert fmp.tree.describe({"w": weight}) == "{'w': df11[48,64]}"


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "t": lambda t: t.t(),
    "transpose": lambda t: t.transpose(0, 1),
    "mT of a part": lambda t: t[3:9].mT,
    "view": lambda t: t.view(8, 6, 64),
    "flatten": lambda t: t.flatten(),
    "select": lambda t: t[5],
    "step": lambda t: t[::3, 1:],
    "expand": lambda t: t[:1].expand(7, 64),
    "chunk": lambda t: t.chunk(3)[1],
    "split": lambda t: t.split([8, 40])[1],
    "unbind": lambda t: t.unbind(1)[7],
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "unsqueeze": lambda t: t.unsqueeze(0).permute(2, 0, 1),
    "as_strided": lambda t: t.as_strided((3, 3), (2, 1), 5),
    "dtype": lambda t: t.view(torch.int16),
    "unfold": lambda t: t.unfold(1, 4, 2),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu", torch.bfloat16, copy=True),
    "iter": lambda t: list(t)[2],
}


GRAD_MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
in_every_mode = pytest.mark.parametrize("mode", GRAD_MODES)


@in_every_mode
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_those_of_the_tensor_and_stay_compressed(name, mode):
    weight = frozen()
    with GRAD_MODES[mode]():
        got, want = VIEWS[name](weight), VIEWS[name](VALUES)
        assert same_bits(got + 0, want + 0)
    assert got.is_inference() <= want.is_inference()
    assert isinstance(got, FrozenWeight)
    assert (got.shape, got.dtype, got.stride(), got.storage_offset()) == (
        want.shape,
        want.dtype,
        want.stride(),
        want.storage_offset(),
    )
    assert same_bits(fmp.df11.decompress(got), want)


COMPUTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda t: t.float(),
    "reshape of the transpose": lambda t: t.t().reshape(-1),
    "contiguous transpose": lambda t: t.t().contiguous(),
    "clone of a part": lambda t: t[::2, ::2].clone(),
    "copy of a part": lambda t: t[2:].to("cpu", copy=True),
    "clone in a format": lambda t: t.view(3, 16, 8, 8).clone(memory_format=torch.channels_last),
    "half": lambda t: t.half(),
    "neg": lambda t: -t,
    "neg flag": lambda t: torch_._neg_view(t).resolve_neg(),
    "index": lambda t: t[torch.tensor([3, 1])],
    "mask": lambda t: t[t > 0],
    "cat": lambda t: torch.cat([t, t.t().contiguous().t()]),
    "stack": lambda t: torch.stack([t, t]),
    "matmul": lambda t: t @ t.mT,
    "linear": lambda t: F.linear(torch.ones(2, 64, dtype=torch.bfloat16), t, t[:, 0]),
    "embedding": lambda t: F.embedding(torch.tensor([[1, 2]]), t),
    "conv": lambda t: F.conv1d(torch.ones(1, 8, 9, dtype=torch.bfloat16), t.view(48, 8, 8)),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "equal": lambda t: t == VALUES,
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "split": lambda t: torch.split(t * 2, 16),
    "foreach": lambda t: torch_._foreach_add([t, t], 1.0),
    "zeros_like": lambda t: torch.zeros_like(t),
    "max": lambda t: t.max(dim=1),
    "vmap": lambda t: torch.func.vmap(lambda row: row.float().sum())(t),
    "vmap out": lambda t: torch.func.vmap(lambda x: x * t)(torch.ones(2, dtype=torch.bfloat16)),
}


@in_every_mode
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_is_plain(name, mode):
    weight = frozen()
    with GRAD_MODES[mode]():
        got, want = COMPUTED[name](weight), COMPUTED[name](VALUES)
    assert not any(isinstance(leaf, FrozenWeight) for leaf in fmp.tree.leaves(got))
    assert same_bits(got, want)
    for left, right in zip(fmp.tree.leaves(got), fmp.tree.leaves(want), strict=True):
        assert (left.stride(), left.storage_offset()) == (right.stride(), right.storage_offset())


def test_autograd_keeps_the_compressed_weight(decoded):
    weight, x = frozen(), torch.randn(5, 64).bfloat16().requires_grad_()
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = F.linear(x, weight)
    assert [type(tensor) for tensor in saved if tensor is not x] == [FrozenWeight]
    assert (decoded.calls, decoded.live) == (1, 0)
    (got,) = torch.autograd.grad(y.sum(), x)
    assert (decoded.calls, decoded.most, decoded.live) == (2, 1, 0)
    assert same_bits(got, torch.autograd.grad(F.linear(x, VALUES).sum(), x)[0])


def test_a_gradient_with_respect_to_it_is_right_too():
    def loss(weight):
        return (weight * weight.flip(0)).float().sum()

    want = torch.func.grad(loss)(VALUES)
    assert same_bits(torch.func.grad(loss)(frozen()), want)
    weight = frozen().requires_grad_()
    assert same_bits(torch.autograd.grad(loss(weight), weight)[0], want)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda t: t.mul_(2),
    "zero_": lambda t: t.zero_(),
    "normal_": lambda t: torch.nn.init.normal_(t),
    "setitem": lambda t: t.__setitem__(0, 1.0),
    "part": lambda t: t[0].fill_(1.0),
    "data": lambda t: t.data.add_(1),
    "detach": lambda t: t.detach().add_(1),
    "clone": lambda t: t.clone().add_(1),
    "view": lambda t: t.view(-1)[:5].zero_(),
    "copy into a part": lambda t: t[:2].copy_(torch.zeros(2, 64)),
    "out": lambda t: torch.add(VALUES, 1, out=t),
    "foreach": lambda t: torch_._foreach_mul_([t], 2.0),
    "index_put": lambda t: t.index_put_((torch.tensor([1]),), torch.tensor(0.0).bfloat16()),
    "shared memory": lambda t: t.share_memory_(),
    "address": lambda t: t.data_ptr(),
    "dlpack": lambda t: torch.from_dlpack(t),
    "apply_": lambda t: t.apply_(lambda x: 0.0),
    "numpy": lambda t: np.from_dlpack(t.view(torch.int16)),
}


@pytest.mark.parametrize("name", WRITES)
def test_changes_in_place_are_refused(name):
    weight = frozen()
    with torch.no_grad(), pytest.raises(TypeError, match="compressed weight"):
        WRITES[name](weight)
    assert same_bits(weight.decompress(), VALUES)


@pytest.mark.parametrize("values", [VALUES.float(), VALUES[:2], VALUES.t(), VALUES.t().contiguous().t()])
def test_data_of_another_form_makes_it_plain(values):
    """As for any parameter: module.float() and module.to(memory_format=...) set `data`."""
    weight: Any = torch.nn.Parameter(frozen(), requires_grad=False)
    weight.data = values
    assert type(weight) is torch.nn.Parameter
    assert weight.requires_grad is False
    assert weight.stride() == values.stride()
    assert same_bits(weight.detach(), values)


def test_all_views_have_one_storage_of_no_bytes():
    weight = frozen()
    assert weight.untyped_storage() is weight.t().untyped_storage()
    assert weight.untyped_storage().nbytes() == 0
    assert weight.untyped_storage() is not frozen().untyped_storage()


def test_single_numbers_are_written_as_those_of_a_tensor():
    weight = frozen()
    assert f"{weight[0, 0]:.3f}" == f"{VALUES[0, 0]:.3f}"
    assert weight[0].tolist() == VALUES[0].tolist()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_may_return_views_of_any_size(backend, dynamic):
    compiled = torch.compile(lambda t, n: (t[n : n + 8], t[:n] * 1), backend=backend, dynamic=dynamic)
    for n in (4, 9, 12, 20):
        assert same_bits([fmp.df11.decompress(part) for part in compiled(frozen(), n)], [VALUES[n : n + 8], VALUES[:n]])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_may_break_anywhere(backend):
    def read(weight, x):
        for _ in range(2):
            transposed = weight.T
            torch._dynamo.graph_break()
            x = x + (x @ transposed) @ weight
        return x, weight.T, copy.copy(weight)

    x = torch.randn(2, 64).bfloat16()
    got = torch.compile(read, backend=backend)(frozen(), x)
    assert same_bits([fmp.df11.decompress(part) for part in got], [*read(VALUES, x)])


def test_compiled_functions_take_another_dtype_of_it():
    compiled = torch.compile(lambda t: t ^ 1, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(frozen().view(torch.int16)), VALUES.view(torch.int16) ^ 1)


def test_compiled_functions_do_not_write_to_it():
    weight = frozen()
    with pytest.raises((TypeError, RuntimeError), match=r"inside of torch\.compile"):
        torch.compile(lambda t, u: t.copy_(u), backend="aot_eager", fullgraph=True)(weight, frozen(VALUES.flip(0)))
    assert same_bits(weight.decompress(), VALUES)


def test_collectives_do_not_write_to_it():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch_.distributed.HashStore())
    try:
        for call in (torch.distributed.all_reduce, lambda t: torch.distributed.broadcast(t, 0)):
            with pytest.raises(TypeError, match="compressed weight"):
                call(frozen())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "write",
    [
        lambda weight, values: weight.copy_(values),
        lambda weight, values: weight.copy_(values.float()),
        lambda weight, values: weight.data.copy_(values),
        lambda weight, values: weight.detach().copy_(frozen(values)),
        lambda weight, values: weight.copy_(frozen(values).t().contiguous().t()),
        lambda weight, values: setattr(weight, "data", values),
        lambda weight, values: setattr(weight, "data", frozen(values)),
    ],
)
def test_new_values_reach_every_view(write):
    weight, values = frozen(), VALUES.flip(0)
    part, kept = weight.t()[3], copy.deepcopy(weight)
    with torch.no_grad():
        write(weight, values)
    assert same_bits(weight.decompress(), values)
    assert same_bits(fmp.df11.decompress(part), values.t()[3])
    assert same_bits(kept.decompress(), VALUES)


def test_a_graph_whose_weight_was_overwritten_is_refused():
    weight, x = frozen(), torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True)
    y = F.linear(x, weight).sum()
    with torch.no_grad():
        weight.copy_(VALUES.flip(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("as_parameter", [False, True])
def test_copies_and_files(as_parameter):
    weight: Any = torch.nn.Parameter(frozen(), requires_grad=False) if as_parameter else frozen()
    copied = copy.deepcopy([weight, weight])
    assert copied[0] is copied[1]
    assert isinstance(copied[0], FrozenWeight)
    assert isinstance(copied[0], torch.nn.Parameter) == as_parameter
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    file.seek(0)
    for plain in (torch.load(file)["weight"], pickle.loads(pickle.dumps(weight))):
        assert type(plain) is (torch.nn.Parameter if as_parameter else torch.Tensor)
        assert plain.requires_grad is False
        assert same_bits(plain.detach(), VALUES)


@pytest.mark.parametrize("of_block", [lambda fn: fn, fmp.df11.frozen])
@pytest.mark.parametrize("gradient", [fmp.grad, torch.func.grad])
def test_decompressed_it_is_still_differentiated(of_block, gradient):
    def loss(read):
        return lambda weights: (read(weights)["w"].float() * VALUES.flip(0).float()).sum()

    read = of_block(lambda weights: fmp.df11.decompress(weights))
    got = gradient(loss(read))({"w": frozen()})
    assert same_bits(got, gradient(loss(lambda weights: weights))({"w": VALUES}))


def test_trees_take_it_as_what_it_holds(tmp_path):
    weight = frozen()
    tree = {"weight": weight, "bias": VALUES[0], "again": weight.detach()}
    compressed = fmp.df11.compress(tree)
    assert compressed["weight"] is weight.node
    assert compressed["again"] is weight.node
    restored = fmp.df11.decompress(tree)
    assert {name: type(leaf) for name, leaf in restored.items()} == dict.fromkeys(tree, torch.Tensor)
    assert restored["weight"] is restored["again"]
    assert same_bits(restored["weight"], VALUES)
    fmp.df11.save(tree, tmp_path / "weights.safetensors")
    loaded = fmp.df11.load(tmp_path / "weights.safetensors")
    assert isinstance(loaded["weight"], CompressedTensor)
    assert loaded["weight"] is loaded["again"]
    assert same_bits(loaded["weight"].decompress(), VALUES)


def test_a_view_is_a_leaf_of_its_own(tmp_path):
    part = frozen().t()
    assert same_bits(fmp.df11.decompress({"part": part})["part"], VALUES.t())
    fmp.df11.save({"part": part}, tmp_path / "weights.safetensors")
    assert same_bits(fmp.df11.load(tmp_path / "weights.safetensors")["part"].contiguous(), VALUES.t().contiguous())


@pytest.mark.parametrize("make", [lambda: VALUES, lambda: [1], lambda: None])
def test_only_compressed_values_are_taken(make):
    with pytest.raises(TypeError, match=r"fmp\.df11\.compress"):
        FrozenWeight(make())


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (7,), (2, 3, 5)])
def test_any_shape(shape):
    values = torch.randn(shape).bfloat16()
    weight = frozen(values)
    assert weight.shape == values.shape
    assert same_bits(weight * 1, values)


def test_bits_that_compression_keeps_as_they_are():
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weight = frozen(values)
    assert same_bits(weight.view(torch.int16) ^ 0, values.view(torch.int16))
    assert same_bits(fmp.df11.decompress(copy.deepcopy(weight).view(256, 256)[17]), values.view(256, 256)[17])
