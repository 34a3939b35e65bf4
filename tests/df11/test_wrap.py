"""fmp.df11.wrap: modules that compute what they computed, on weights that stay compressed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import fmp
from fmp import tree
from fmp.df11 import CompressedTensor, FrozenWeight
from tests.bits import same_bits

WIDTH = 64
jit: Any = torch.jit


class Tied(nn.Module):
    """A language model in small, whose head has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


class Adapted(nn.Module):
    """A layer, and two small matrices that are trained in its place (LoRA, arXiv 2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer, like = layer, {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.down = nn.Parameter(torch.randn(rank, layer.in_features, **like) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.randn(layer.out_features, rank, **like) / 8)

    def forward(self, x):
        return self.layer(x) + x @ self.down.mT @ self.up.mT


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


MODULES: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)), lambda: floats(3, WIDTH)),
    "tied": (Tied, lambda: torch.randint(0, 128, (2, 5))),
    "conv": (lambda: nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3)), lambda: floats(2, 8, 7, 7)),
    "attention": (Attention, lambda: floats(2, 6, WIDTH)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True),
        lambda: floats(2, 6, WIDTH),
    ),
    "lstm": (Recurrent, lambda: floats(2, 5, WIDTH)),
}
every = pytest.mark.parametrize("name", MODULES)


def made(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    make, batch = MODULES[name]
    module = make().bfloat16()
    return module, fmp.df11.wrap(module), batch()


def weights_of(module: nn.Module) -> list[str]:
    return [name for name, param in module.named_parameters() if isinstance(param, FrozenWeight)]


@every
def test_outputs_and_gradients_are_those_of_the_module(name):
    module, small, x = made(name)
    assert weights_of(small)
    rest = [key for key, _ in module.named_parameters() if key not in weights_of(small)]

    def gradients(module):
        leaf = x.clone().requires_grad_() if x.is_floating_point() else x
        loss = module(leaf).float().square().sum()
        wanted = [module.get_parameter(key) for key in rest] + ([leaf] if leaf.requires_grad else [])
        return loss, torch.autograd.grad(loss, wanted) if wanted else ()

    assert same_bits(gradients(small), gradients(module))
    with torch.inference_mode():
        assert same_bits(small.eval()(x), module.eval()(x))


@every
def test_weights_are_visible(name):
    module, small, _ = made(name)
    for kind in ("named_parameters", "state_dict"):
        got, want = [dict(getattr(each, kind)()) for each in (small, module)]
        assert list(got) == list(want)
        assert [(t.shape, t.dtype, t.device) for t in got.values()] == [
            (t.shape, t.dtype, t.device) for t in want.values()
        ]
        assert same_bits(tree.map(lambda leaf: leaf.detach(), fmp.df11.decompress(got)), tree.map(torch.detach, want))
    assert [p for p in small.parameters() if isinstance(p, FrozenWeight) and p.requires_grad] == []
    assert repr(small) == repr(module)


@pytest.mark.parametrize(
    ("name", "compiled"), [*[(name, False) for name in MODULES], ("linear", True), ("tied", True), ("conv", True)]
)
def test_adapters_train_through_functions_of_parameters(name, compiled):
    module, small, x = made(name)

    def loss(scale, module, x):
        params = {key: param * scale for key, param in module.named_parameters() if param.numel() < 4096}
        return functional_call(module, params, (x,)).float().square().mean() * scale

    gradient = grad(loss)
    if compiled:
        gradient = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    scale = torch.tensor(1.5).bfloat16()
    assert same_bits(gradient(scale, small, x), grad(loss)(scale, module, x))
    if name in ("linear", "tied"):
        mapped = [vmap(grad(loss), (None, None, 0))(scale, each, torch.stack([x, x])) for each in (small, module)]
        assert same_bits(*mapped)


def test_tied_weights_are_compressed_once(decoded):
    _, small, x = made("tied")
    assert isinstance(small, Tied)
    assert small.head.weight is small.embed.weight
    small(x)
    assert decoded.calls == 2
    copied = copy.deepcopy(small)
    assert copied.head.weight is copied.embed.weight


def test_the_module_is_left_as_it_is():
    module, _, x = made("linear")
    before, out = dict(module.named_parameters()), module(x)
    small: Any = fmp.df11.wrap(module, ["0.weight"])
    assert dict(module.named_parameters()) == before
    assert same_bits(module(x), out)
    assert weights_of(small) == ["0.weight"]
    for name in ("2.weight", "0.bias"):
        copied = small.get_parameter(name)
        assert same_bits(copied, before[name])
        assert copied.data_ptr() != before[name].data_ptr()
    assert weights_of(fmp.df11.wrap(small)) == ["0.weight"]  # the other one may be about to be trained
    again: Any = fmp.df11.wrap(small, ["*.weight"])
    assert again[0].weight.node is small[0].weight.node
    assert weights_of(again) == ["0.weight", "2.weight"]


def test_state_dicts_go_either_way(tmp_path):
    module, small, x = made("linear")
    other, plain = fmp.df11.wrap(MODULES["linear"][0]().bfloat16()), MODULES["linear"][0]().bfloat16()
    other.load_state_dict(module.state_dict())
    assert weights_of(other) == ["0.weight", "2.weight"]
    assert same_bits(other(x), module(x))
    plain.load_state_dict(small.state_dict())
    assert weights_of(plain) == []
    assert same_bits(plain(x), module(x))
    torch.save(small.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    fmp.df11.save(small.state_dict(), tmp_path / "state.safetensors")
    compressed = fmp.df11.load(tmp_path / "state.safetensors")
    assert {name: isinstance(leaf, CompressedTensor) for name, leaf in compressed.items()} == {
        "0.weight": True,
        "0.bias": False,
        "2.weight": True,
        "2.bias": False,
    }
    with torch.device("meta"):
        empty = MODULES["linear"][0]().bfloat16()
    for restored in (other, fmp.df11.wrap(empty, weights=compressed)):
        assert weights_of(restored) == ["0.weight", "2.weight"]
        assert same_bits(restored(x), module(x))


def test_given_weights_under_all_names_of_a_tied_one():
    module, _, x = made("tied")
    weights = fmp.df11.compress(module.state_dict())
    assert set(weights) == {"embed.weight", "head.weight"}
    with torch.device("meta"):
        small: Any = fmp.df11.wrap(Tied().bfloat16(), weights=weights)
    assert small.head.weight is small.embed.weight
    assert small.head.weight.node is weights["head.weight"]
    assert same_bits(small(x), module(x))


def test_patterns_may_use_any_name_of_a_tied_weight():
    small: Any = fmp.df11.wrap(Tied().bfloat16(), ["head.weight"])
    assert small.head.weight is small.embed.weight
    assert isinstance(small.head.weight, FrozenWeight)
    same = fmp.df11.compress(small.state_dict())
    again: Any = fmp.df11.wrap(Tied().bfloat16(), weights=same | {"head.weight": same["embed.weight"].decompress()})
    assert same_bits(again.embed.weight.decompress(), small.embed.weight.decompress())


def adapted() -> Any:
    return nn.Sequential(Adapted(nn.Linear(128, 128), 64), nn.ReLU(), Adapted(nn.Linear(128, 128), 64)).bfloat16()


def test_adapters_stay_trainable(tmp_path):
    model = adapted()
    for name, param in model.named_parameters():
        param.requires_grad_("layer" not in name)
    small = fmp.df11.wrap(model)
    assert weights_of(small) == ["0.layer.weight", "2.layer.weight"]
    fmp.df11.save(small.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = adapted()
    again = fmp.df11.wrap(empty, weights=fmp.df11.load(tmp_path / "model.safetensors"))
    assert weights_of(again) == weights_of(small)
    assert [name for name, param in again.named_parameters() if param.requires_grad and "layer" not in name] == [
        "0.down",
        "0.up",
        "2.down",
        "2.up",
    ]
    x = floats(2, 128)
    assert same_bits(again(x), model(x))
    assert weights_of(fmp.df11.wrap(empty, weights=model.state_dict())) == [
        name for name, param in empty.named_parameters() if param.numel() >= 4096
    ]


def test_recurrent_layers_leave_their_weights_in_place():
    small: Any = made("lstm")[1]
    small.lstm.flatten_parameters()
    assert copy.deepcopy(small)(floats(1, 2, WIDTH)).shape == (1, 2, WIDTH)


def test_buffers_are_among_the_weights():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).bfloat16()
    module[1](floats(9, WIDTH))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).bfloat16()
    small = fmp.df11.wrap(empty, weights=module.state_dict()).eval()
    assert isinstance(dict(small.named_buffers())["1.running_mean"], torch.Tensor)
    x = floats(3, WIDTH)
    assert same_bits(small(x), module.eval()(x))


def test_moves_leave_it_compressed_and_other_dtypes_do_not():
    module, small, x = made("linear")
    out = small(x).detach()
    assert same_bits(small.to("cpu").bfloat16()(x), out)
    assert weights_of(small) == ["0.weight", "2.weight"]
    moved = copy.deepcopy(small).to("meta")
    assert all(param.is_meta for param in moved.parameters())
    assert moved(x.to("meta")).shape == out.shape
    for wide in (copy.deepcopy(small).float(), copy.deepcopy(small)):
        if weights_of(wide):
            wide.load_state_dict(fmp.df11.decompress(small.state_dict()), assign=True)
            wide.float()
        assert weights_of(wide) == []
        assert {param.dtype for param in wide.parameters()} == {torch.float32}
        assert same_bits(wide(x.float()), copy.deepcopy(module).float()(x.float()))


@pytest.mark.parametrize("compile", [False, True])
def test_a_train_step_of_adapters(compile):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).bfloat16()
    x, y = floats(8, WIDTH), floats(8, WIDTH)

    def train(base: Any) -> Any:
        torch.manual_seed(5)
        model = fmp.functionalize(nn.Sequential(Adapted(base[0]), base[1], Adapted(base[2])))
        frozen = {name: param for name, param in model.params.items() if "layer" in name}
        adapters = {name: param for name, param in model.params.items() if "layer" not in name}

        def loss(params, batch, *, frozen):
            out, _ = model.apply({**frozen, **params}, model.buffers, batch[0])
            return (out - batch[1]).float().square().mean()

        optimizer = fmp.optim.adam(1e-2)
        policy = fmp.opt_level("O2", half_dtype=torch.bfloat16)
        step = fmp.train_step(loss, optimizer, policy=policy, compile=compile)
        state = step.init(adapters)
        losses = []
        for _ in range(3):
            state, metrics = step(state, (x, y), frozen=frozen)
            losses.append(metrics.loss)
        return losses, state.params, [type(leaf) for leaf in frozen.values()]

    losses, params, types = train(module)
    small_losses, small_params, small_types = train(fmp.df11.wrap(module))
    assert small_types.count(FrozenWeight) == 2
    assert FrozenWeight not in types
    assert same_bits((small_losses, small_params), (losses, params))
    assert losses[-1] < losses[0]


def test_compressed_weights_are_no_parameters_of_a_step():
    model = fmp.functionalize(made("linear")[1])
    step = fmp.train_step(lambda params, batch: batch.sum(), fmp.optim.sgd(0.1))
    with pytest.raises(TypeError, match=r"'0\.weight' is a compressed weight.*frozen="):
        step.init(model.params)
    with pytest.raises(TypeError, match="params holds compressed tensors"):
        step.init({"layers": [fmp.df11.compress(fmp.df11.decompress(model.params))]})


@pytest.mark.parametrize("wrap", [fmp.remat, lambda fn: fmp.remat(fn, saveable=fmp.saveable.dots)])
@pytest.mark.parametrize("transform", [fmp.grad, grad])
def test_inside_of_remat(wrap, transform):
    module, small, x = made("encoder")

    def loss(block):
        return lambda x: block(x).float().square().sum()

    assert same_bits(transform(loss(wrap(small)))(x), transform(loss(module))(x))


def test_decoded_weights_live_one_at_a_time():
    """Beside the streams and what autograd keeps without weights: one decoded weight."""
    width, depth = 256, 12
    module = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]).bfloat16()
    module.requires_grad_(False)
    small, x = fmp.df11.wrap(module), floats(4, width)

    def peak(module):
        return fmp.memory.peak(fmp.grad(lambda x: module(x).float().square().sum()), x)

    assert peak(small) <= peak(module) + 1.01 * 2 * width * width


def test_what_is_kept_of_a_compressed_weight_is_listed_once():
    small, x = made("linear")[1:]
    kept = fmp.memory.saved_residuals(lambda x: small(x).sum(), x.requires_grad_())
    shapes = [residual.shape for residual in kept if residual.is_argument and residual.nbytes > 5000]
    assert sorted(shapes) == sorted(small.get_parameter(name).shape for name in weights_of(small))
    assert all(residual.nbytes < 0.75 * 2 * 96 * WIDTH for residual in kept)


def channels_last(module: Any) -> Any:
    return module.to(memory_format=torch.channels_last)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no module": (lambda: fmp.df11.wrap([torch.zeros(3)]), TypeError, "wrap takes a module"),  # pyright: ignore[reportArgumentType]
    "fp32": (lambda: fmp.df11.wrap(nn.Linear(128, 128)), ValueError, r"module\.bfloat16"),
    "small": (lambda: fmp.df11.wrap(nn.Linear(8, 8).bfloat16()), ValueError, "min_numel"),
    "chosen fp32": (lambda: fmp.df11.wrap(nn.Linear(128, 128), ["weight"]), TypeError, "weight is f32"),
    "no match": (lambda: fmp.df11.wrap(nn.Linear(128, 128).bfloat16(), ["x.weight"]), ValueError, "x.weight"),
    "meta": (lambda: fmp.df11.wrap(nn.Linear(128, 128, device="meta").bfloat16()), TypeError, "weight is .*meta"),
    "unknown": (
        lambda: fmp.df11.wrap(nn.Linear(128, 128).bfloat16(), weights={"w": torch.zeros(3)}),
        KeyError,
        "no such parameter",
    ),
    "shape": (
        lambda: fmp.df11.wrap(nn.Linear(128, 128).bfloat16(), weights={"weight": floats(128, 64)}),
        ValueError,
        r"bf16\[128,64\]",
    ),
    "no tensor": (
        lambda: fmp.df11.wrap(nn.Linear(128, 128).bfloat16(), weights={"weight": [1.0]}),
        TypeError,
        "weights",
    ),
    "script": (lambda: fmp.df11.wrap(jit.trace(nn.Linear(64, 64), torch.ones(1, 64))), TypeError, "in Python"),
    "strides": (
        lambda: fmp.df11.wrap(channels_last(nn.Conv2d(64, 64, 3).bfloat16())),
        ValueError,
        "weight has the strides",
    ),
    "missing, large": (
        lambda: fmp.df11.wrap(nn.Linear(128, 128, device="meta").bfloat16(), weights={"bias": floats(128)}),
        KeyError,
        "'weight', which is on the meta device",
    ),
    "missing": (
        lambda: fmp.df11.wrap(
            nn.Linear(128, 128, device="meta").bfloat16(), weights={"weight": fmp.df11.compress(floats(128, 128))}
        ),
        KeyError,
        "'bias', which is on the meta device",
    ),
    "two values of one": (
        lambda: fmp.df11.wrap(Tied().bfloat16(), weights={name: floats(128, 64) for name in Tied().state_dict()}),
        ValueError,
        "other values for 'head.weight'",
    ),
    "buffer": (
        lambda: fmp.df11.wrap(
            nn.BatchNorm1d(4096).bfloat16(), weights={"running_mean": fmp.df11.compress(floats(4096))}
        ),
        TypeError,
        "is a buffer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
