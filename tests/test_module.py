import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import fmp.tree
from fmp import functionalize, value_and_grad
from fmp.module import Model, norm_names

Tensors = dict[str, torch.Tensor]


class Tied(nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x[:, 0].abs().long() % 5))


class Counter(nn.Module):
    """Writes its buffers in three ways, and has one that it does not save."""

    assigned: torch.Tensor
    written: torch.Tensor
    registered: torch.Tensor
    unsaved: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("assigned", torch.zeros(8))
        self.register_buffer("written", torch.zeros(8))
        self.register_buffer("registered", torch.zeros(8))
        self.register_buffer("unsaved", torch.ones(8), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.assigned = self.assigned + x.detach().mean(0)
        self.written.add_(1)
        self.register_buffer("registered", self.registered + self.unsaved)
        return x * self.scale + self.assigned


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden_states.dtype)


class Block(nn.Module):
    """Attention, norms of two kinds, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.out = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(0)
        x = x + self.attention(*[self.norm(hidden_states=x)] * 3, need_weights=False)[0]
        return (x + self.out(x)).squeeze(0)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )


ZOO: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
    "conv_net": conv_net,
    "batch_norm": lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "cumulative_batch_norm": lambda: nn.BatchNorm1d(8, momentum=None),
    "tied": Tied,
    "counter": Counter,
    "block": Block,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 3, num_layers=2, batch_first=True),
    "shared_layer": lambda: nn.Sequential(*[nn.Linear(8, 8)] * 3),
    "no_state": lambda: nn.ReLU(),
    "group_norm": lambda: nn.GroupNorm(2, 8),
}


def batch(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 8)


def scalar(out: Any) -> torch.Tensor:
    return (out[0] if isinstance(out, tuple) else out).square().sum()


def snapshot(module: nn.Module) -> dict[str, Any]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {name: (id(tensor), tensor._version, tensor.requires_grad) for name, tensor in named},
        "values": {name: tensor.detach().clone() for name, tensor in named},
        "modes": {name: part.training for name, part in module.named_modules()},
        "hooks": {
            name: (len(part._forward_hooks), len(part._forward_pre_hooks)) for name, part in module.named_modules()
        },
        "attributes": {name: sorted(vars(part)) for name, part in module.named_modules()},
    }


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ZOO)
def test_params_and_buffers_are_copies_under_the_modules_names(name: str) -> None:
    module = ZOO[name]()
    model = functionalize(module)
    assert_same(model.params, {name: param.detach() for name, param in module.named_parameters()})
    assert_same(model.buffers, dict(module.named_buffers()))
    own = [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
    copies = [tensor.data_ptr() for tensor in (*model.params.values(), *model.buffers.values()) if tensor.numel()]
    assert len(set(own) | set(copies)) == 2 * len(own)
    assert not any(tensor.requires_grad for tensor in (*model.params.values(), *model.buffers.values()))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_apply_is_the_module(name: str, train: bool) -> None:
    module, x = ZOO[name](), batch()
    model = functionalize(module)
    reference = copy.deepcopy(module).train(train)

    for _ in range(2):
        buffers = {name: buffer.clone() for name, buffer in reference.named_buffers()}
        out, new_buffers = model.apply(model.params, buffers, x, train=train)
        assert_same(out, reference(x))
        assert_same(new_buffers, dict(reference.named_buffers()))


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_those_of_backward(name: str) -> None:
    module, x = ZOO[name](), batch()
    model = functionalize(module)

    def loss(params: Tensors) -> torch.Tensor:
        return scalar(model.apply(params, model.buffers, x, train=True)[0])

    value, grads = value_and_grad(loss)(model.params)
    reference = copy.deepcopy(module).train()
    expected = scalar(reference(x))
    assert_same(value, expected.detach())
    if model.params:
        expected.backward()
    assert_same(grads, {name: param.grad for name, param in reference.named_parameters()})
    torch.testing.assert_close(torch.func.grad(loss)(model.params), grads)


@pytest.mark.parametrize("name", ZOO)
def test_nothing_given_or_wrapped_is_touched(name: str) -> None:
    module, x = ZOO[name](), batch()
    next(iter(module.parameters()), torch.nn.Parameter()).requires_grad_(False)
    module.register_forward_hook(lambda module, args, out: out)
    before = snapshot(module)
    model = functionalize(module)
    inputs = (model.params, model.buffers, x)
    copies = copy.deepcopy(inputs)

    outputs = []
    for train in (True, False, None):
        first, second = (model.apply(*inputs, train=train) for _ in range(2))
        assert_same(first, second)
        outputs.append(first[1])
    value_and_grad(lambda params: scalar(model.apply(params, model.buffers, x, train=True)[0]))(model.params)
    assert_same(inputs, copies)
    after = snapshot(module)
    assert_same(after.pop("values"), before.pop("values"))
    assert after == before
    # New buffers share memory neither with the old ones nor with those of another call.
    storages = [tensor.data_ptr() for buffers in (*outputs, model.buffers) for tensor in buffers.values()]
    assert len(set(storages)) == len(storages)


def test_steps_can_be_repeated_from_the_same_state() -> None:
    """A step is pure: BatchNorm's statistics move in what comes back, not in what was given."""
    model, x = functionalize(ZOO["batch_norm"]()), batch()

    def step(params: Tensors, buffers: Tensors) -> tuple[Tensors, Tensors]:
        def loss(params: Tensors) -> tuple[torch.Tensor, Tensors]:
            out, new = model.apply(params, buffers, x, train=True)
            return scalar(out), new

        (_, buffers_out), grads = value_and_grad(loss, has_aux=True)(params)
        return {name: param - 0.1 * grads[name] for name, param in params.items()}, buffers_out

    first, again = step(model.params, model.buffers), step(model.params, model.buffers)
    assert_same(first, again)
    assert first[1]["0.num_batches_tracked"] == 1
    assert model.buffers["0.num_batches_tracked"] == 0
    assert not torch.equal(step(*first)[1]["0.running_mean"], first[1]["0.running_mean"])


@pytest.mark.parametrize("name", ["batch_norm", "counter", "tied", "shared_layer", "spectral_norm", "encoder"])
def test_compiled_it_is_the_same(name: str) -> None:
    model, x = functionalize(ZOO[name]()), batch()

    def loss(params: Tensors, buffers: Tensors, x: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        out, new = model.apply(params, buffers, x, train=True, seed=0)
        return scalar(out), new

    expected = value_and_grad(loss, has_aux=True)(model.params, model.buffers, x)
    compiled = torch.compile(value_and_grad(loss, has_aux=True), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(model.params, model.buffers, x), expected)


def test_a_step_with_batch_norm_and_dropout_compiles_once() -> None:
    model = functionalize(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Block(0.3)))

    def loss(params: Tensors, buffers: Tensors, x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        out, new = model.apply(params, buffers, x, train=True, seed=seed)
        return scalar(out), new

    step = value_and_grad(loss, has_aux=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    params, buffers = model.params, model.buffers
    for number in range(5):
        x, seed = batch(), torch.tensor(number)
        expected = step(params, buffers, x, seed)
        found = compiled(params, buffers, x, seed)
        torch.testing.assert_close(found, expected)
        buffers = found[0][1]
        params = {name: param - 0.01 * found[1][name] for name, param in params.items()}
    assert counter.frame_count == 1


def stacked(models: list[Model]) -> tuple[Tensors, Tensors]:
    def stack(trees: list[Tensors]) -> Tensors:
        return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}

    return stack([model.params for model in models]), stack([model.buffers for model in models])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["conv_net", "batch_norm", "block", "tied", "counter", "shared_layer", "weight_norm"])
def test_an_ensemble_is_a_loop(name: str) -> None:
    models = [functionalize(ZOO[name]()) for _ in range(3)]
    params, buffers = stacked(models)
    x = batch()

    def loss(params: Tensors, buffers: Tensors) -> tuple[torch.Tensor, Tensors]:
        out, new = models[0].apply(params, buffers, x, train=True)
        return scalar(out), new

    step = value_and_grad(loss, has_aux=True)
    mapped = torch.func.vmap(step)(params, buffers)
    for index, model in enumerate(models):
        member = fmp.tree.map(lambda leaf: leaf[index], mapped)
        torch.testing.assert_close(member, step(model.params, model.buffers), rtol=1e-4, atol=1e-5)


def test_seeded_dropout_is_one_function_under_every_transform() -> None:
    model = functionalize(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 64), Dropped()))
    x, seeds = batch(), torch.arange(3)
    state = torch.get_rng_state()

    def out(params: Tensors, seed: torch.Tensor | int) -> torch.Tensor:
        return model.apply(params, {}, x, seed=seed, train=True)[0]

    def loss(params: Tensors, seed: torch.Tensor | int) -> torch.Tensor:
        return out(params, seed).square().sum()

    masks = [out(model.params, seed) == 0 for seed in range(3)]
    assert torch.equal(out(model.params, torch.tensor(1)) == 0, masks[1])
    assert 0.4 < float(masks[0].float().mean()) < 0.6
    assert not torch.equal(masks[0], masks[1])
    compiled = torch.compile(out, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(model.params, torch.tensor(1)) == 0, masks[1])
    assert torch.equal(torch.func.vmap(out, (None, 0))(model.params, seeds) == 0, torch.stack(masks))

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(model.params, seeds)
    for index in range(3):
        member = {name: grad[index] for name, grad in grads.items()}
        torch.testing.assert_close(member, value_and_grad(loss)(model.params, index)[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.get_rng_state(), state)


class Dropped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)


def test_without_a_seed_dropout_draws_from_the_global_generator() -> None:
    model, x = functionalize(nn.Dropout(0.5)), torch.ones(100)
    torch.manual_seed(3)
    out = model.apply({}, {}, x, train=True)[0]
    torch.manual_seed(3)
    assert_same(out, F.dropout(x, 0.5))
    assert_same(model.apply({}, {}, x, train=False)[0], x)
    assert_same(model.apply({}, {}, x, seed=0, train=False)[0], x)


def test_dropout_that_no_seed_reaches_is_refused() -> None:
    model = functionalize(nn.LSTM(8, 3, num_layers=2, dropout=0.5))
    with pytest.raises(ValueError, match=r"torch.lstm draws its mask"):
        model.apply(model.params, {}, batch(), seed=0, train=True)
    model.apply(model.params, {}, batch(), seed=0, train=False)
    model.apply(model.params, {}, batch(), train=True)


def test_train_none_keeps_the_mode_of_each_part() -> None:
    module = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    module[0].eval()
    model, x = functionalize(module), batch()
    module.eval()
    buffers = model.apply(model.params, model.buffers, x, seed=0)[1]
    assert [int(buffers[f"{index}.num_batches_tracked"]) for index in (0, 1)] == [0, 1]
    buffers = model.apply(model.params, model.buffers, x, seed=0, train=True)[1]
    assert [int(buffers[f"{index}.num_batches_tracked"]) for index in (0, 1)] == [1, 1]


def test_a_module_that_freezes_its_norms_in_train_is_asked() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self[0].eval()
            return self

    model = functionalize(Frozen(nn.BatchNorm1d(8)))
    assert model.apply(model.params, model.buffers, batch(), train=True)[1]["0.num_batches_tracked"] == 0


def test_tied_weights_are_one_leaf() -> None:
    model, x = functionalize(Tied()), batch()
    assert list(model.params) == ["embedding.weight"]
    grad = torch.func.grad(lambda params: scalar(model.apply(params, {}, x)[0]))(model.params)["embedding.weight"]
    rows = x[:, 0].abs().long() % 5
    untouched = torch.tensor([row not in rows for row in range(5)])
    # The embedding alone would leave those rows without a gradient.
    assert (grad[untouched].abs().sum(1) > 0).all()
    shared = functionalize(ZOO["shared_layer"]())
    assert list(shared.params) == ["0.weight", "0.bias"]


def test_tied_buffers_are_one_leaf() -> None:
    module = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    module[1].running_mean = module[0].running_mean
    module[1].register_buffer("copy_of_weight", module.get_parameter("0.weight"))
    model = functionalize(module)
    assert "1.running_mean" not in model.buffers
    assert "1.copy_of_weight" not in model.buffers
    x = batch()
    assert_same(model.apply(model.params, model.buffers, x)[1]["0.running_mean"], copied_mean(module, x))


def copied_mean(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module = copy.deepcopy(module)
    module(x)
    return dict(module.named_buffers())["0.running_mean"]


def test_frozen_parameters_are_params_too() -> None:
    module = nn.Linear(8, 3).requires_grad_(False)
    model = functionalize(module)
    assert model.params.keys() == {"weight", "bias"}
    grads = value_and_grad(lambda params: scalar(model.apply(params, {}, batch())[0]))(model.params)[1]
    assert all(grad.abs().sum() > 0 for grad in grads.values())


@given(st.sets(st.sampled_from(["0.weight", "0.bias", "2.weight"])), st.sets(st.sampled_from(["x", "0.wait"])))
def test_names_must_be_the_models(missing: set[str], unknown: set[str]) -> None:
    model = functionalize(ZOO["mlp"]())
    params = {name: param for name, param in model.params.items() if name not in missing}
    params |= dict.fromkeys(unknown, torch.ones(1))
    if not missing | unknown:
        model.apply(params, {}, batch())
        return
    with pytest.raises(KeyError) as raised:
        model.apply(params, {}, batch())
    for name in missing:
        assert f"missing {name}" in str(raised.value)
    for name in unknown:
        assert f"unknown {name}" in str(raised.value)


def test_buffers_must_be_the_models() -> None:
    model = functionalize(nn.BatchNorm1d(8))
    with pytest.raises(KeyError, match="buffers: missing num_batches_tracked; missing running_mean"):
        model.apply(model.params, {}, batch())
    with pytest.raises(TypeError, match="buffers must be a dictionary of tensors by name, got NoneType"):
        model.apply(model.params, None, batch())  # pyright: ignore[reportArgumentType]


def test_shapes_must_be_the_models() -> None:
    model = functionalize(nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"params\['bias'\] is bf16\[1\], but the module has the shape \[3\]$"):
        model.apply(model.params | {"bias": torch.ones(1, dtype=torch.bfloat16)}, {}, batch())
    stack = {name: param.expand(2, *param.shape) for name, param in model.params.items()}
    with pytest.raises(ValueError, match=r"params\['weight'\] is f32\[2,3,8\].*\[3, 8\]; map over .*vmap"):
        model.apply(stack, {}, batch())
    with pytest.raises(TypeError, match=r"params\['bias'\] must be a tensor, got NoneType"):
        model.apply(model.params | {"bias": None}, {}, batch())  # pyright: ignore[reportArgumentType]


def test_a_failed_call_leaves_the_model_as_it_was() -> None:
    model, x = functionalize(ZOO["batch_norm"]()), batch()
    expected = model.apply(model.params, model.buffers, x)
    with pytest.raises((RuntimeError, ValueError)):
        model.apply(model.params, model.buffers, torch.randn(4, 9))
    assert_same(model.apply(model.params, model.buffers, x), expected)


def test_modules_without_values_yet_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1.weight is not initialized yet; call the module once"):
        functionalize(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"module must be an nn.Module, got function"):
        functionalize(lambda x: x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="module is a ScriptModule: its tensors cannot be replaced"):
        functionalize(torch.jit.script(nn.Linear(2, 2)))


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        rank=0,
        world_size=1,
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_modules_with_collectives_of_their_own_are_refused(process_group: None) -> None:
    def linear() -> nn.Module:
        return nn.Linear(2, 2)

    with pytest.raises(TypeError, match=r"module is a DistributedDataParallel.*inner module, `.module`"):
        functionalize(nn.parallel.DistributedDataParallel(linear()))
    with pytest.raises(TypeError, match=r"0 is a DataParallel.*inner module, `.module`"):
        functionalize(nn.Sequential(nn.DataParallel(linear())))
    sharded: Any = fully_shard(linear(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r"1 is a FSDPModule.*before `fully_shard`"):
        functionalize(nn.Sequential(linear(), sharded))
    with pytest.raises(TypeError, match=r"module is a FullyShardedDataParallel.*before it is wrapped"):
        functionalize(FullyShardedDataParallel(linear(), device_id=torch.device("cpu")))


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_reparametrized_weights_are_trained_by_their_originals(name: str) -> None:
    model, x = functionalize(ZOO[name]()), batch()
    assert sum("original" in key for key in model.params) == (2 if name == "weight_norm" else 1)
    assert "weight" not in model.params
    double = {key: param.double() for key, param in model.params.items()}
    buffers = {key: buffer.double() for key, buffer in model.buffers.items()}
    names = sorted(double)

    def fn(*values: torch.Tensor) -> torch.Tensor:
        return model.apply(dict(zip(names, values, strict=True)), buffers, x.double(), train=False)[0]

    assert torch.autograd.gradcheck(fn, [double[key].requires_grad_() for key in names])


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm:FutureWarning")
def test_weights_that_a_hook_computes_are_trained_by_their_originals() -> None:
    module, x = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh()), batch()
    model = functionalize(module)
    grads = value_and_grad(lambda params: scalar(model.apply(params, {}, x)[0]))(model.params)[1]
    scalar(module(x)).backward()
    assert_same(grads, {name: param.grad for name, param in module.named_parameters()})
    assert grads.keys() == {"0.bias", "0.weight_g", "0.weight_v"}


def test_norm_names_are_those_of_normalization_layers() -> None:
    class NormedLinear(nn.Linear):
        pass

    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))
            self.norm = nn.LayerNorm([2, 8])
            self.fn = nn.Linear(8, 8)

    class FrozenBatchNorm2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(8))

    class BatchNormAct(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(8)
            self.act = nn.PReLU()

    shared = nn.RMSNorm(8)
    module = nn.ModuleDict(
        {
            "batch": nn.BatchNorm1d(8),
            "group": nn.GroupNorm(2, 8),
            "instance": nn.InstanceNorm1d(8, affine=True),
            "local": nn.LocalResponseNorm(2),
            "llama": LlamaRMSNorm(8),
            "linear": NormedLinear(8, 8),
            "pre": PreNorm(),
            "frozen": FrozenBatchNorm2d(),
            "act": BatchNormAct(),
            "spectral": parametrizations.spectral_norm(nn.Linear(8, 8)),
            "weight_normed": parametrizations.weight_norm(nn.LayerNorm([2, 8])),
            "rms": nn.ModuleList([shared, shared]),
            "plain": nn.LayerNorm(8, elementwise_affine=False),
        }
    )
    assert norm_names(module) == functionalize(module).norm_params
    assert norm_names(module) == (
        *[f"batch.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")],
        *["group.weight", "group.bias", "instance.weight", "instance.bias", "llama.weight"],
        *["pre.norm.weight", "pre.norm.bias", "frozen.weight"],
        *[f"act.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")],
        *[f"weight_normed.{name}" for name in ("bias", "parametrizations.weight.original0")],
        "weight_normed.parametrizations.weight.original1",
        "rms.0.weight",
    )
    assert norm_names(nn.LayerNorm(8)) == ("weight", "bias")


def with_norms_in_full(model: Model, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    def cast(tensors: Tensors) -> Tensors:
        return {
            name: tensor if name in model.norm_params or not tensor.is_floating_point() else tensor.to(dtype)
            for name, tensor in tensors.items()
        }

    return cast(model.params), cast(model.buffers)


NORMED: dict[str, Callable[[], nn.Module]] = {
    "block": Block,
    "batch_norm": ZOO["batch_norm"],
    "conv_net": conv_net,
    "encoder": ZOO["encoder"],
    "layer": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
    "group": lambda: nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8)),
    "instance": lambda: nn.Sequential(nn.Linear(8, 8), nn.InstanceNorm1d(4, affine=True), nn.Linear(8, 8)),
    "rms": lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8)),
}


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NORMED)
def test_norms_kept_in_full_precision_return_what_they_were_given(name: str, dtype: torch.dtype, train: bool) -> None:
    model, x = functionalize(NORMED[name]()), batch()
    params, buffers = with_norms_in_full(model, dtype)

    def loss(params: Tensors) -> tuple[torch.Tensor, tuple[torch.Tensor, Tensors]]:
        out, new = model.apply(params, buffers, x.to(dtype), train=train, seed=0)
        return out.float().square().sum(), (out, new)

    (_, (out, new_buffers)), grads = value_and_grad(loss, has_aux=True)(params)
    assert out.dtype == dtype
    assert {name: grad.dtype for name, grad in grads.items()} == {name: param.dtype for name, param in params.items()}
    assert {name: item.dtype for name, item in new_buffers.items()} == {n: item.dtype for n, item in buffers.items()}
    tolerance = 20 * torch.finfo(dtype).eps
    full = model.apply(model.params, model.buffers, x, train=train)[0]
    torch.testing.assert_close(out.float(), full, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        detached = model.apply(params, buffers, x.to(dtype), train=train)[0]
    torch.testing.assert_close(detached, out, rtol=tolerance, atol=tolerance)


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("name", ["block", "batch_norm", "encoder"])
def test_norms_kept_in_full_precision_compile(name: str) -> None:
    model, x = functionalize(NORMED[name]()), batch().bfloat16()
    params, buffers = with_norms_in_full(model, torch.bfloat16)

    def loss(params: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.apply(params, buffers, x, train=True, seed=0)[0]
        return out.float().square().sum(), out

    expected = value_and_grad(loss, has_aux=True)(params)
    compiled = torch.compile(value_and_grad(loss, has_aux=True), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(params), expected, rtol=0.05, atol=0.05)


@pytest.mark.mixed_dtypes
def test_batch_norm_takes_its_input_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 it would keep twice the memory for the backward pass."""
    model, seen = functionalize(ZOO["batch_norm"]()), []
    params, buffers = with_norms_in_full(model, torch.bfloat16)
    original = F.batch_norm
    monkeypatch.setattr(F, "batch_norm", lambda x, *args: seen.append(x.dtype) or original(x, *args))
    model.apply(params, buffers, batch().bfloat16(), train=True)
    assert seen == [torch.bfloat16] * 2


@pytest.mark.mixed_dtypes
def test_the_fused_encoder_layer_does_not_pass_the_norms_by(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = functionalize(ZOO["encoder"]()), torch.randn(2, 4, 8)
    calls: list[Any] = []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda x, *args: calls.append(args) or x)
    with torch.no_grad():
        model.apply(model.params, {}, x, train=False)
        assert len(calls) == 1
        out = model.apply(with_norms_in_full(model, torch.bfloat16)[0], {}, x.bfloat16(), train=False)[0]
    assert len(calls) == 1
    assert out.dtype == torch.bfloat16


@pytest.mark.mixed_dtypes
def test_a_norm_kept_in_full_precision_computes_in_it() -> None:
    model = functionalize(nn.Sequential(nn.Linear(8, 8, bias=False), LlamaRMSNorm(8)))
    params, _ = with_norms_in_full(model, torch.bfloat16)
    x = batch().bfloat16()
    out = model.apply(params, {}, x)[0]
    layer = LlamaRMSNorm(8)
    assert_same(out, layer(F.linear(x, params["0.weight"]).float()).bfloat16())


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("norm", [nn.LayerNorm(8), LlamaRMSNorm(8)])
def test_where_all_parameters_are_alike_norms_are_left_alone(norm: nn.Module) -> None:
    model, x = functionalize(norm), batch().bfloat16()
    assert_same(model.apply(model.params, {}, x)[0], norm(x).detach())


def test_models_can_be_pickled_and_copied() -> None:
    model, x = functionalize(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.LSTM(8, 3))), batch()
    expected = model.apply(model.params, model.buffers, x)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_same(other.apply(other.params, other.buffers, x), expected)
        assert other.norm_params == model.norm_params
        params, buffers = with_norms_in_full(model, torch.bfloat16)
        assert other.apply(params, buffers, x.bfloat16())[0][0].dtype == torch.bfloat16
    apply = pickle.loads(pickle.dumps(model.apply))
    assert_same(apply(model.params, model.buffers, x), expected)


def tensors_in_memory() -> list[torch.Tensor]:
    gc.collect()
    return [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.device.type == "cpu"]


def places(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_model_holds_no_memory_but_its_params_and_buffers() -> None:
    shared, x = nn.Linear(8, 8), batch()
    module = nn.Sequential(shared, nn.LayerNorm(8), nn.BatchNorm1d(8), shared, nn.LSTM(8, 3))
    before = tensors_in_memory()  # and kept, so that their places are not given away again
    known = set(map(id, before))
    model = functionalize(module)
    model.apply(model.params, model.buffers, x)
    own = [*model.params.values(), *model.buffers.values()]
    assert places(tensor for tensor in tensors_in_memory() if id(tensor) not in known) == places(own)


def test_recurrent_layers_forget_the_tensors_of_a_call() -> None:
    model = functionalize(nn.LSTM(8, 3))
    params = {name: param.clone() for name, param in model.params.items()}
    weight = weakref.ref(params["weight_ih_l0"])
    model.apply(params, {}, batch())
    del params
    gc.collect()
    assert weight() is None


def test_recurrent_layers_leave_the_tensors_of_a_call_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = functionalize(nn.LSTM(8, 3))
    # With cuDNN it would put all of the given tensors into one piece of memory.
    moved = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", moved.append)
    model.apply(model.params, {}, batch())
    assert moved == []


def test_arguments_reach_the_module() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, scale: float, *, shift: float = 0.0) -> dict[str, Any]:
            return {"out": x * scale + shift, "scale": scale}

    model = functionalize(Scaled())
    out, buffers = model.apply({}, {}, torch.ones(2), 3.0, shift=1.0)
    assert_same(out, {"out": torch.full((2,), 4.0), "scale": 3.0})
    assert buffers == {}


def test_models_say_what_they_are_in_one_line() -> None:
    assert repr(functionalize(nn.BatchNorm1d(700))) == "Model(BatchNorm1d, 2 params of 1,400 numbers, 3 buffers)"
    with pytest.raises(AttributeError):
        functionalize(nn.ReLU()).params = {}  # pyright: ignore[reportAttributeAccessIssue]


class Holding(nn.Module):
    """Multiplies by a weight that it finds through something else than its attribute."""

    def __init__(self, hold: Callable[["Holding"], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2, bias=False)
        self.held = hold(self)
        self.read = read

    def forward(self, x: torch.Tensor) -> Any:
        held = self.read(self.held)
        return held(x) if callable(held) else x @ held


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def itself(value: Any) -> Any:
    return value


FIVES = {"lin.weight": torch.full((2, 2), 5.0)}


@pytest.mark.parametrize(
    ("hold", "read"),
    [
        (lambda m: [m.lin], lambda held: held[0]),
        (lambda m: m.lin.forward, itself),
        (lambda m: functools.partial(m.lin.forward), itself),
        (lambda m: functools.partial(F.linear, bias=None), lambda held: lambda x: 10 * torch.ones_like(x)),
    ],
    ids=["list", "method", "partial", "unrelated"],
)
def test_parts_reached_through_other_things_are_those_of_the_call(hold: Any, read: Any) -> None:
    assert_same(functionalize(Holding(hold, read)).apply(FIVES, {}, torch.ones(1, 2))[0], torch.full((1, 2), 10.0))


@pytest.mark.parametrize(
    ("hold", "read"),
    [
        (lambda m: [m.lin.weight], lambda held: held[0]),
        (lambda m: {"w": m.lin.weight}, lambda held: held["w"]),
        (lambda m: [m.lin.weight], lambda held: held[0].T),
        (lambda m: [m.lin.weight], lambda held: held[0].detach()),
        (lambda m: Holder(m.lin.weight), lambda held: held.value),
        (lambda m: functools.partial(F.linear, weight=m.lin.weight), itself),
        (lambda m: m.lin.weight.detach(), itself),
        (lambda m: m.lin.weight.data, itself),
        (lambda m: m.lin.weight.t(), itself),
        (lambda m: m.lin.weight * 2, itself),
        (lambda m: [m.lin.weight.t()], lambda held: held[0]),
        (lambda m: Holder((m.lin.weight.detach(),)), lambda held: held.value[0]),
    ],
)
def test_parameters_reached_through_other_things_are_refused(hold: Any, read: Any) -> None:
    model = functionalize(Holding(hold, read))
    for other in (model, pickle.loads(pickle.dumps(functionalize(Holding(hold, itself)))) if read is itself else model):
        with pytest.raises(ValueError, match=r"lin.weight was used where|held was computed from, or is a view of"):
            other.apply(FIVES, {}, torch.ones(1, 2))


def gained(use: Callable[[nn.Module], Any]) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    use(module)
    return module


def doubled(module: Any) -> None:
    old = module[0].forward
    module[0].forward = lambda x: old(x) * 2


def hooked(module: Any) -> None:
    module[0].register_forward_hook(lambda part, args, out: out * module[1].bias)


def pre_hooked(module: Any) -> None:
    weight = module[0].weight.detach()
    module[1].register_forward_pre_hook(lambda part, args, weight=[weight]: args[0] @ weight[0])


def nested(module: Any) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return module[1](x)

    module[0].helper = [functools.partial(lambda x: inner(x))]


def decorated(module: Any) -> None:
    module[0].forward = torch.no_grad()(module[0].forward)


_GLOBAL = nn.Linear(2, 2)


def by_global(module: Any) -> None:
    module.append(_GLOBAL)
    module[0].register_forward_hook(lambda part, args, out: _GLOBAL(out))


@pytest.mark.parametrize("use", [doubled, hooked, pre_hooked, nested, decorated, by_global])
def test_functions_that_would_use_the_users_module_are_refused(use: Any) -> None:
    with pytest.raises(ValueError, match=r"(forward|_forward_hooks|_forward_pre_hooks|helper): the function .* refers"):
        functionalize(gained(use))


def test_methods_that_would_use_the_users_module_are_refused() -> None:
    lin = nn.Linear(2, 2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = lin

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return lin(x)

    with pytest.raises(ValueError, match=r"Outer.forward: the function .* refers to lin"):
        functionalize(Outer())


def test_functions_that_do_not_use_the_module_are_left_alone() -> None:
    log, scale, other = [], torch.full((2,), 2.0), nn.Linear(2, 2)

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def log(self, out: torch.Tensor) -> None:
            log.append(out.shape)

    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainer = Trainer(module)
    module[0].register_forward_hook(lambda part, args, out: log.append(part.weight[0, 0].item()))
    module[0].register_forward_hook(lambda part, args, out: out * scale)
    module[0].register_forward_hook(lambda part, args, out: trainer.log(out))
    module[1].register_forward_pre_hook(lambda part, args: other(args[0]))
    module[1].forward = functools.update_wrapper(functools.partial(module[1].forward), module[1].forward)
    model, x = functionalize(module), torch.ones(1, 2)
    assert_same(model.apply(model.params, {}, x)[0], module(x))
    assert len(log) == 4
    zeros = {name: torch.zeros_like(param) for name, param in model.params.items()}
    assert not model.apply(zeros, {}, x)[0].any()
    assert log[-2] == 0


def test_torchs_own_wrappers_are_not_taken_for_the_users() -> None:
    inner, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), batch()
    expected = functionalize(inner).apply(*(functionalize(inner).params, functionalize(inner).buffers), x)[0]
    for module in (torch.compile(inner, backend="eager"), torch.fx.symbolic_trace(inner)):
        model = functionalize(module)  # pyright: ignore[reportArgumentType]
        assert_same(model.apply(model.params, model.buffers, x)[0], expected)
    pruned = nn.Linear(8, 8)
    prune.l1_unstructured(pruned, "weight", 0.5)
    model = functionalize(pruned)
    assert_same(model.apply(model.params, model.buffers, x)[0], pruned(x))


@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
def test_recurrent_layers_follow_weights_that_are_computed() -> None:
    module, x = parametrizations.weight_norm(nn.LSTM(8, 3), "weight_hh_l0"), batch()
    model = functionalize(module)
    reference = copy.deepcopy(module)
    for factor in (1.0, 1.0, 2.0):
        params = {name: param * factor for name, param in model.params.items()}
        reference.load_state_dict(params)
        assert_same(model.apply(params, {}, x)[0][0], reference(x)[0].detach())


class Writer(nn.Module):
    def __init__(self, write: Callable[["Writer"], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", None)
        self.register_parameter("gain", None)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self)
        return self.lin(x)


def delete(module: nn.Module, name: str) -> None:
    delattr(module, name)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda m: m.lin.weight.mul_(0.9), r"wrote into its parameter lin.weight"),
        (lambda m: m.lin.bias.copy_(torch.ones(2)), r"wrote into its parameter lin.bias"),
        (lambda m: setattr(m.lin, "bias", nn.Parameter(torch.ones(2))), r"replaced its parameter lin.bias"),
        (lambda m: setattr(m, "cache", torch.ones(2)), r"^cache was created"),
        (lambda m: setattr(m, "gain", nn.Parameter(torch.ones(2))), r"^gain was created"),
        (lambda m: setattr(m, "new", nn.Parameter(torch.ones(2))), r"^new was created"),
        (lambda m: m.lin.register_buffer("new", torch.ones(2)), r"^lin.new was created"),
        (lambda m: setattr(m, "extra", nn.Linear(2, 2)), r"^extra was created"),
        (lambda m: delete(m, "mean"), r"^mean was removed"),
        (lambda m: delete(m.lin, "bias"), r"^lin.bias was removed"),
        (lambda m: setattr(m, "mean", None), r"buffer mean was removed"),
        (lambda m: setattr(m, "mean", torch.ones(3)), r"buffer mean became f32\[3\].*keeps its shape, \[2\]"),
    ],
)
def test_calls_that_leave_something_behind_are_refused(write: Any, message: str) -> None:
    calls = []

    def write_twice(module: Any) -> None:
        calls.append((list(module.state_dict()), module.cache, sorted(vars(module)), [*module._modules]))
        if len(calls) < 3:
            write(module)

    model = functionalize(Writer(write_twice))
    for _ in range(2):
        with pytest.raises((ValueError, AttributeError), match=message if "lin.bias was" not in message else None):
            model.apply(model.params, model.buffers, torch.ones(1, 2))
    model.apply(model.params, model.buffers, torch.ones(1, 2))
    assert calls == [calls[0]] * 3
    assert calls[0][:2] == (["mean", "lin.weight", "lin.bias"], None)


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    def fill_and_fail(module: Any) -> None:
        assert module.cache is None
        module.cache = torch.ones(2)
        raise OSError("no data")

    model = functionalize(Writer(fill_and_fail))
    for _ in range(2):
        with pytest.raises(OSError, match="no data"):
            model.apply(model.params, model.buffers, torch.ones(1, 2))


def test_writes_are_seen_in_a_differentiated_call() -> None:
    model = functionalize(Writer(lambda m: m.lin.weight.mul_(0.9)))
    for transform in (value_and_grad, torch.func.grad):
        with pytest.raises(ValueError, match=r"wrote into its parameter lin.weight"):
            transform(lambda params: model.apply(params, model.buffers, torch.ones(1, 2))[0].sum())(model.params)


def test_parameters_made_in_inference_mode_can_be_used() -> None:
    model = functionalize(nn.Linear(8, 3))
    with torch.inference_mode():
        params = {name: param.clone() for name, param in model.params.items()}
        out = model.apply(params, {}, torch.ones(1, 8))[0]
    assert_same(out.clone(), model.apply(model.params, {}, torch.ones(1, 8))[0])


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_renormalize_their_weight_are_refused(layer: Any) -> None:
    with pytest.raises(ValueError, match=r"^0 has max_norm=0.1.*set max_norm=None"):
        functionalize(nn.Sequential(layer(4, 3, max_norm=0.1)))


def test_gradient_hooks_are_refused() -> None:
    module = nn.Linear(2, 2)
    handle = module.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(ValueError, match="weight has gradient hooks"):
        functionalize(module)
    handle.remove()
    functionalize(module)
    module.bias.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(ValueError, match="bias has gradient hooks"):
        functionalize(module)


def test_what_cannot_be_copied_is_named() -> None:
    module: Any = nn.Sequential(nn.ReLU(), nn.ReLU())
    module[1].lock = [threading.Lock()]
    with pytest.raises(TypeError, match=r"^1.lock cannot be copied \(cannot pickle"):
        functionalize(module)

    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo: Any) -> "Uncopied":
            return self

    with pytest.raises(TypeError, match=r"^0 is not copied by copy.deepcopy"):
        functionalize(nn.Sequential(Uncopied(2, 2)))


class Checkpointed(nn.Module):
    def __init__(self, *, of_tensors: bool = False) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.of_tensors = of_tensors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of_tensors:
            return checkpoint(F.linear, x, self.lin.weight, self.lin.bias, use_reentrant=False).square()
        return checkpoint(self.lin, x, use_reentrant=False).square()


def test_a_checkpoint_inside_the_module_raises_where_it_would_recompute_something_else() -> None:
    x = batch()
    model = functionalize(Checkpointed())
    with pytest.raises(ValueError, match=r"lin.weight was used where .*checkpoint"):
        value_and_grad(lambda params: model.apply(params, {}, x)[0].sum())(model.params)
    model = functionalize(Checkpointed(of_tensors=True))
    with pytest.raises(RuntimeError, match="with a seed, saved-tensor hooks"):
        value_and_grad(lambda params: model.apply(params, {}, x, seed=0)[0].sum())(model.params)
    plain = functionalize(nn.Linear(8, 8))
    grads = value_and_grad(lambda params: model.apply(params, {}, x)[0].sum())(model.params)[1]
    expected = value_and_grad(lambda params: plain.apply(params, {}, x)[0].square().sum())(
        {name.removeprefix("lin."): param for name, param in model.params.items()}
    )[1]
    assert_same(grads, {f"lin.{name}": grad for name, grad in expected.items()})


def test_a_checkpoint_around_the_call_is_the_call() -> None:
    model, x = functionalize(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())), batch()

    def out(params: Tensors) -> torch.Tensor:
        return model.apply(params, {}, x, seed=0, train=True)[0].square()

    expected = value_and_grad(lambda params: out(params).sum())(model.params)
    found = value_and_grad(lambda params: checkpoint(out, params, use_reentrant=False).sum())(model.params)
    assert_same(found, expected)


def test_tensors_in_plain_attributes_are_copied_once() -> None:
    class WithTables(nn.Linear):
        table = torch.zeros(())
        tables: Tensors

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read.append((self.table.data_ptr(), self.tables["a"].data_ptr()))
            assert_same(self.table, torch.arange(4.0))
            return super().forward(x)

    read: list[tuple[int, int]] = []
    layer = WithTables(8, 8)
    layer.table = torch.arange(4.0)
    layer.tables = {"a": torch.arange(3.0)}
    model = functionalize(nn.Sequential(layer, nn.LayerNorm(8)))
    layer.table.zero_()
    for train in (None, True, False):
        for dtype in (torch.float32, torch.bfloat16):
            model.apply(*with_norms_in_full(model, dtype), batch().to(dtype), train=train)
    assert len(read) == 6
    assert len(set(read)) == 1


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_a_residual_that_a_norm_returns_keeps_its_precision(residual: torch.dtype) -> None:
    class AddRMSNorm(nn.RMSNorm):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
            total = x + residual
            return super().forward(total), total

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lin = AddRMSNorm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
            out, residual = self.norm(x, residual)
            return self.lin(out), residual

    model = functionalize(Outer())
    params, _ = with_norms_in_full(model, torch.bfloat16)
    x, given = batch().bfloat16(), (batch() + 100).to(residual)
    out, total = model.apply(params, {}, x, given)[0]
    assert out.dtype == torch.bfloat16
    assert_same(total, (x.float() + given.float()).to(residual))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)], ids=str)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_an_ensemble_with_batch_norms_kept_in_float32_is_a_loop(layer, half):
    model = functionalize(nn.Sequential(nn.Linear(3, 4), layer, nn.ReLU(), nn.Linear(4, 2)))

    def loss_fn(params, batch, *, buffers):
        out, buffers = model.apply(params, buffers, batch, train=True)
        return out.float().square().mean(), buffers

    policy = fmp.opt_level("O2", half, keep_full=model)
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy, loss_scale=8.0)
    batch = torch.randn(2, 8, 3)
    members = [step.init({k: v + i for k, v in model.params.items()}, buffers=model.buffers) for i in (0, 1)]
    stacked = fmp.tree.map(lambda *leaves: None if leaves[0] is None else torch.stack(leaves), *members)
    found, _ = torch.func.vmap(step)(stacked, batch)
    for index, member in enumerate(members):
        expected, metrics = step(member, batch[index])
        assert not metrics.skipped
        for one, other in zip(fmp.tree.leaves(found), fmp.tree.leaves(expected), strict=True):
            if one is not None:
                torch.testing.assert_close(one[index], other, rtol=2e-2, atol=2e-2)


def test_a_recurrent_layer_that_a_transform_has_left_its_tensors_in():
    module = nn.Sequential(nn.LSTM(4, 4))
    params = {name: param.detach() for name, param in module.named_parameters()}
    x = torch.ones(2, 3, 4)
    torch.func.grad(lambda params: torch.func.functional_call(module, params, (x,))[0].sum())(params)
    model = fmp.functionalize(module)
    (out, _), _ = model.apply(model.params, model.buffers, x)
    assert torch.equal(out, module(x)[0])
