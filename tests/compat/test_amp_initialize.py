"""Apex 1.1 to 1.3: opt levels, the overrides they take and refuse, and what `initialize` does to models."""

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import fmp
from fmp.compat import amp
from fmp.compat.options import defaults, override
from tests.bits import same_bits

HALVES = [torch.float16, torch.bfloat16]
F16, F32 = torch.float16, torch.float32


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 2))


def sgd(*models: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, **kwargs)


def start(*args: Any, **kwargs: Any) -> Any:
    return amp.initialize(*args, **{"verbosity": 0} | kwargs)


# --- 1.1


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", (F32, False, None, False, 1.0)),
        ("O1", (None, True, None, None, "dynamic")),
        ("O2", (F16, False, True, True, "dynamic")),
        ("O3", (F16, False, False, False, 1.0)),
    ],
)
def test_defaults_are_apexs(level, expected):
    found = defaults(level)
    assert expected == (
        found.cast_model_type,
        found.patch_torch_functions,
        found.keep_batchnorm_fp32,
        found.master_weights,
        found.loss_scale,
    )


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_bfloat16_has_a_scale_of_one(level):
    found = defaults(level, torch.bfloat16)
    assert found.loss_scale == 1.0
    assert found.half == torch.bfloat16
    assert found.cast_model_type in (None, F32, torch.bfloat16)


@pytest.mark.parametrize("level", ["O4", "o1", "01", "", None, 1, ["O1"], {}])
def test_an_unknown_level_is_a_runtime_error_that_names_the_letter(level):
    with pytest.raises(RuntimeError, match="letter O"):
        start(net(), opt_level=level)


# --- 1.2


@pytest.mark.parametrize(
    ("level", "given", "error"),
    [
        ("O1", {"cast_model_type": F16}, RuntimeError),
        ("O1", {"cast_model_type": torch.float64}, RuntimeError),
        ("O0", {"patch_torch_functions": True}, RuntimeError),
        ("O2", {"patch_torch_functions": True}, RuntimeError),
        ("O3", {"patch_torch_functions": True}, RuntimeError),
        ("O1", {"keep_batchnorm_fp32": True}, RuntimeError),
        ("O1", {"keep_batchnorm_fp32": False}, RuntimeError),
        ("O1", {"keep_batchnorm_fp32": "False"}, RuntimeError),
        ("O2", {"keep_batchnorm_fp32": "no"}, AssertionError),
        ("O2", {"keep_batchnorm_fp32": 1}, AssertionError),
        ("O1", {"master_weights": True}, RuntimeError),
        ("O1", {"master_weights": False}, RuntimeError),
        ("O2", {"loss_scale": "dynamc"}, ValueError),
        ("O2", {"loss_scale": [1.0]}, TypeError),
        ("O2", {"loss_scale": "dyn"}, ValueError),
        ("O2", {"loss_scale": True}, TypeError),
        ("O2", {"loss_scale": False}, TypeError),
        ("O2", {"loss_scale": b"128"}, TypeError),
        ("O2", {"loss_scale": 0}, ValueError),
        ("O2", {"loss_scale": float("inf")}, ValueError),
        ("O2", {"loss_scale": "inf"}, ValueError),
        ("O2", {"loss_scale": "nan"}, ValueError),
        ("O2", {"loss_scale": "-1"}, ValueError),
        ("O2", {"loss_scale": 1e-40}, ValueError),
        ("O2", {"min_loss_scale": True}, TypeError),
        ("O2", {"min_loss_scale": False}, TypeError),
        ("O2", {"min_loss_scale": -1}, ValueError),
        ("O2", {"loss_scale": 0.0}, ValueError),
        ("O2", {"loss_scale": -1.0}, ValueError),
        ("O2", {"loss_scale": float("nan")}, ValueError),
        ("O2", {"min_loss_scale": 4.0, "max_loss_scale": 2.0}, ValueError),
        ("O2", {"max_loss_scale": None}, TypeError),
        ("O2", {"num_losses": "1"}, TypeError),
        ("O2", {"half_dtype": F32}, ValueError),
        ("O2", {"cast_model_outputs": torch.int32}, ValueError),
    ],
)
def test_an_override_is_refused_before_anything_changes(level, given, error):
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=next(iter(given))):
        start(model, sgd(model), opt_level=level, **given)
    assert same_bits(dict(before), dict(model.state_dict()))
    assert start(model, opt_level="O0") is model  # nothing has begun


@pytest.mark.parametrize(
    ("level", "given", "name", "value"),
    [
        ("O1", {"cast_model_type": F32}, "model_dtype", F32),
        ("O1", {"cast_model_type": F32}, "output_dtype", F32),
        ("O1", {"cast_model_type": False}, "model_dtype", None),
        ("O2", {"cast_model_type": False}, "model_dtype", None),
        ("O0", {"cast_model_type": F16}, "model_dtype", F16),
        ("O1", {"patch_torch_functions": False}, "patch_torch_functions", False),
        ("O3", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ("O2", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ("O0", {"master_weights": True}, "master_weights", True),
        ("O3", {"master_weights": True}, "master_weights", True),
        ("O3", {"loss_scale": "128.0"}, "loss_scale", 128.0),
        ("O3", {"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
        ("O1", {"cast_model_outputs": F16}, "output_dtype", F16),
        ("O2", {"cast_model_outputs": F16}, "output_dtype", F16),
        ("O2", {"cast_model_type": None, "loss_scale": None}, "model_dtype", F16),
    ],
)
def test_an_override_is_taken(level, given, name, value):
    assert getattr(override(defaults(level), **given), name) == value


# --- 1.3


def test_the_shapes_of_what_is_given_come_back():
    model, other = net(), net()
    one, two = sgd(model), sgd(other)
    for given, expected in [
        ((model,), model),
        (([model, other],), [model, other]),
        ((model, one), (model, one)),
        (([model, other], one), ([model, other], one)),
        (([model], [one, two]), ([model], [one, two])),
        ((model, []), (model, [])),
    ]:
        assert start(*given, opt_level="O0") == expected
        amp.shutdown()


@pytest.mark.parametrize(
    ("models", "optimizers", "error", "match"),
    [
        ((net(),), None, TypeError, "models must be one nn.Module or a list"),
        ([1], None, TypeError, "models"),
        ("net", None, TypeError, "models"),
        (net(), 3, TypeError, "optimizers"),
        (net(), (sgd(net()),), TypeError, "optimizers"),
        (net(), [sgd(net()), 3], TypeError, "optimizers"),
        (net(), [sgd(net())] * 2, RuntimeError, "twice"),
        (nn.DataParallel(net()), None, RuntimeError, "wrapped"),
        (net().half(), None, RuntimeError, "0.weight is f16"),
        (net().bfloat16(), None, RuntimeError, "half"),
        (nn.LazyLinear(2), None, ValueError, "initialized"),
        (torch.jit.script(nn.Linear(2, 2)), None, RuntimeError, r"compiled by torch\.jit"),
    ],
)
def test_models_and_optimizers_are_checked(models, optimizers, error, match):
    with pytest.raises(error, match=match):
        start(models, optimizers, opt_level="O2")


def test_a_second_initialize_is_refused_until_shutdown():
    model = start(net(), opt_level="O2")
    with pytest.raises(RuntimeError, match="shutdown"):
        start(net(), opt_level="O2")
    amp.shutdown()
    assert start(model, opt_level="O3") is model


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("level", "keep", "kept"), [("O2", None, True), ("O2", False, False), ("O3", None, False), ("O3", True, True)]
)
def test_all_is_cast_but_affine_batch_norm(half, level, keep, kept):
    model = start(net(), opt_level=level, keep_batchnorm_fp32=keep, half_dtype=half)
    assert {p.dtype for layer in (model[0], model[3]) for p in layer.parameters()} == {half}
    assert model[1].weight.dtype == model[1].running_mean.dtype == (F32 if kept else half)
    assert model[2].running_mean.dtype == half
    assert model[2].num_batches_tracked.dtype == torch.int64


def test_gradients_are_cast_with_their_parameters():
    model = net()
    model(torch.ones(3, 4)).sum().backward()
    start(model, opt_level="O3")
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F16}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_model_takes_and_returns_float32(half, level):
    model = start(net(), opt_level=level, half_dtype=half)
    assert model(torch.randn(3, 4)).dtype == F32
    assert model(torch.randn(3, 4, dtype=torch.float64)).dtype == F32
    amp.shutdown()
    start(model, opt_level=level, half_dtype=half, cast_model_outputs=half)
    assert model(torch.randn(3, 4)).dtype == half


def test_outputs_alone_are_cast_under_o1():
    model = start(nn.Linear(2, 2), opt_level="O1", half_dtype="bf16", cast_model_outputs=torch.float64)
    assert model(torch.ones(1, 2)).dtype == torch.float64


class Pair(NamedTuple):
    x: Any
    y: Any


class Batch:
    def __init__(self, x: torch.Tensor):
        self.x = x

    def to(self, dtype: torch.dtype) -> "Batch":
        self.x = self.x.to(dtype)
        return self


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return args


def test_inputs_are_cast_in_any_container():
    model = start(Echo(), opt_level="O3")
    batch = Batch(torch.ones(1))
    array = np.ones(1, dtype=np.float32)
    ids = torch.arange(2)
    output = model(
        Pair(torch.ones(1), [torch.ones(1)]), batch, array, "text", ids, None, flag=True, x={"y": torch.ones(1)}
    )
    (pair, seen, same, text, number, nothing), kwargs = model.seen
    assert type(pair) is Pair
    assert pair.x.dtype == pair.y[0].dtype == kwargs["x"]["y"].dtype == F16
    assert seen.x.dtype == F16
    assert batch.x.dtype == F32  # the caller's
    assert same is array
    assert (text, nothing, kwargs["flag"]) == ("text", None, True)
    assert number is ids
    assert type(output[0]) is Pair
    assert output[0].x.dtype == F32


def test_packed_sequences_are_cast():
    model = start(nn.LSTM(3, 4, batch_first=True), opt_level="O2", half_dtype="bf16")
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 3), torch.randn(2, 3)])
    output, (h, c) = model(packed)
    assert isinstance(output, nn.utils.rnn.PackedSequence)
    assert output.data.dtype == h.dtype == c.dtype == F32


def test_other_hooks_see_the_outputs_of_the_caller():
    model = net()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    start(model, opt_level="O3")(torch.ones(3, 4))
    assert seen == [F32]


def test_the_state_dict_is_float32_and_loads_back():
    model = start(net(), opt_level="O2")
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {F32, torch.int64}
    nested = nn.ModuleDict({"inner": model}).state_dict()
    assert {value.dtype for value in nested.values()} == {F32, torch.int64}
    other = net()
    nn.init.zeros_(other[0].weight)
    other.load_state_dict(state)
    assert torch.equal(other[0].weight, model[0].weight.float())


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_optimizer_state_is_recast_to_the_parameters(level):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    start(model, optimizer, opt_level=level)
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].dtype == model[0].weight.dtype
    assert state["step"].dtype == F32
    optimizer.step()


def test_masters_take_old_moments_over_unrounded():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    start(model, optimizer, opt_level="O2")
    after = [optimizer.state[p]["exp_avg"] for p in amp.master_params(optimizer)]
    assert same_bits(moments, after)


def test_models_that_mix_dtypes_are_taken_with_cast_model_type_false():
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    start(model, sgd(model), opt_level="O2", cast_model_type=False)
    assert [p.dtype for p in model.parameters()] == [F16, F16, F32, F32]


def test_shutdown_gives_the_model_back_with_the_values_of_the_masters():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = list(model.parameters())
    start(model, optimizer, opt_level="O2", loss_scale=64.0)
    with amp.scale_loss(model(torch.randn(3, 4)).square().sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    amp.shutdown()
    assert all(a is b for a, b in zip(own, optimizer.param_groups[0]["params"], strict=True))
    assert same_bits([p.detach() for p in own], masters)
    assert {buffer.dtype for buffer in model.buffers()} == {F32, torch.int64}
    assert optimizer.state[own[0]]["momentum_buffer"].dtype == F32
    assert model(torch.randn(3, 4)).dtype == F32
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def test_a_copied_model_casts_by_itself():
    model = net()
    start(model, sgd(model), opt_level="O2")
    average = copy.deepcopy(model)
    assert average(torch.randn(3, 4)).dtype == F32
    average.load_state_dict(model.state_dict())
    with torch.no_grad():
        model[3].weight.zero_()
    assert average[3].weight.abs().sum() > 0


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_copy_in_another_dtype_casts_to_that(level, dtype):
    model = start(net(), opt_level=level)
    average = copy.deepcopy(model).to(dtype)
    assert average(torch.randn(3, 4)).dtype == F32
    seen = []
    average[3].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    average(torch.randn(3, 4))
    assert seen == [dtype]
    assert model(torch.randn(3, 4)).dtype == F32  # goes on in half


@pytest.mark.parametrize("change", ["float", "half", "bfloat16"])
def test_a_model_that_is_cast_later_trains_on(change):
    model = net()
    optimizer = sgd(model, momentum=0.5)
    start(model, optimizer, opt_level="O2", loss_scale=64.0)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(3, 4)).square().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()

    step()
    getattr(model, change)()
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    step()
    step()
    masters = list(amp.master_params(optimizer))
    assert {p.dtype for p in masters} == {F32}
    assert not any(torch.equal(old, new) for old, new in zip(before, masters, strict=True))
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in zip(model.parameters(), masters, strict=True))


def test_a_compiled_part_of_a_model_is_cast_and_its_masters_follow_what_is_loaded():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 1))
    optimizer = sgd(model)
    start(model, optimizer, opt_level="O2", half_dtype="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    masters = list(amp.master_params(optimizer))
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not any(master.any() for master in masters)


def test_the_names_of_the_module_are_apexs():
    apexs = {
        "disable_casts",
        "float_function",
        "half_function",
        "initialize",
        "load_state_dict",
        "master_params",
        "promote_function",
        "register_float_function",
        "register_half_function",
        "register_promote_function",
        "scale_loss",
        "state_dict",
    }
    assert {name for name in dir(amp) if not name.startswith("__")} == apexs | {"shutdown"}
    assert all(callable(getattr(amp, name)) for name in dir(amp))


@pytest.mark.parametrize(("name", "match"), [("_amp_state", "state_dict"), ("init", "initialize"), ("lists", "lists")])
def test_names_that_are_not_there_say_what_to_use(name, match):
    with pytest.raises(AttributeError, match=match):
        getattr(amp, name)
    assert not hasattr(amp, name)


def test_disabled_returns_everything_untouched():
    model, optimizer = net(), sgd(net())
    before = copy.deepcopy(model.state_dict())
    assert start(model, enabled=False, opt_level="no level") is model
    assert start((model,), (optimizer,), enabled=False) == ((model,), (optimizer,))
    assert same_bits(dict(before), dict(model.state_dict()))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    loss = torch.ones((), dtype=F16)
    with amp.scale_loss(loss, optimizer, loss_id=7) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    assert list(amp.master_params(optimizer)) == optimizer.param_groups[0]["params"]
    with amp.disable_casts():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == F32


@pytest.mark.parametrize("verbosity", [0, 1, 2])
def test_verbosity(verbosity, capsys):
    amp.initialize(nn.Linear(2, 2), opt_level="O1", half_dtype="bf16", verbosity=verbosity, loss_scale="dynamic")(
        torch.ones(1, 2)
    )
    printed = capsys.readouterr().out
    assert ("Selected optimization level O1" in printed) == (verbosity > 0)
    assert ("loss_scale             : dynamic" in printed) == (verbosity > 0)
    assert ("f32->bf16 (linear)" in printed) == (verbosity > 1)


def test_the_names_that_fmp_decides_by_are_those_of_opt_level():
    for level in ("O0", "O1", "O2", "O3"):
        assert defaults(level).output_dtype in (None, fmp.opt_level(level).output_dtype)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("verbosity", "1", TypeError), ("num_losses", -1, ValueError), ("num_losses", 1.0, TypeError)],
)
def test_a_wrong_number_leaves_everything_untouched(name, value, error):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=name):
        amp.initialize(model, optimizer, opt_level="O2", **{name: value})
    assert model.weight.dtype == torch.float32
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_session_that_begins_where_no_gradients_are_made_trains(level, around):
    model = net()
    optimizer = sgd(model)
    with around():
        start(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=8.0)
        amp.load_state_dict(amp.state_dict())
        list(amp.master_params(optimizer))
    before = model[3].weight.detach().clone()
    with amp.scale_loss(model(torch.randn(3, 4)).float().square().sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert not torch.equal(before, model[3].weight)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_what_has_begun_is_taken_back_if_something_raises(level):
    class NoHooks(torch.optim.SGD):
        def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
            raise OSError("no hooks")

    model, other = net(), net()
    good, bad = sgd(model), NoHooks(other.parameters(), lr=0.1)
    with pytest.raises(OSError, match="no hooks"):
        start([model, other], [good, bad], opt_level=level)
    for part in (model, other):
        assert {p.dtype for p in part.parameters()} == {F32}
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    assert not good._optimizer_step_pre_hooks
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == F32
    start([model, other], good, opt_level=level)
