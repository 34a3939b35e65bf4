"""The live bytes of a train step on fake tensors, against the allocator events that the profiler sees in a real one."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmp
from fmp import tree
from fmp._compat import running_node
from fmp.memory.measured import Timeline, measure_step
from tests.memory import peak_bytes

ROOT = Path(__file__).parents[1]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((scores @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Stack(nn.Module):
    """Layers that are recomputed in the backward pass, or not."""

    def __init__(self, first: nn.Module, layers: list[nn.Module], last: nn.Module, remat: bool):
        super().__init__()
        self.first, self.layers, self.last, self.remat = first, nn.ModuleList(layers), last, remat

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = fmp.remat(layer)(x) if self.remat else layer(x)
        return self.last(x)


def mlp(remat: bool) -> tuple[nn.Module, Any]:
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 48), nn.GELU()) for _ in range(4)
    ]
    model = Stack(nn.Linear(16, 48), layers, nn.Linear(48, 10), remat)
    return model, (torch.randn(512, 16), torch.randint(10, (512,)))


def transformer(remat: bool) -> tuple[nn.Module, Any]:
    layers: list[nn.Module] = [Layer(32, 4) for _ in range(3)]
    model = Stack(nn.Embedding(64, 32), layers, nn.Linear(32, 64), remat)
    tokens = torch.randint(64, (8, 33))
    return model, (tokens[:, :-1].clone(), tokens[:, 1:].clone())


def classify(model: fmp.Model) -> Any:
    def loss_fn(params, batch, *, buffers):
        logits, buffers = model.apply(params, buffers, batch[0])
        return F.cross_entropy(logits.float().flatten(0, -2), batch[1].flatten()), buffers

    return loss_fn


MODELS = {"mlp": mlp, "transformer": transformer}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True},
    "accumulated": {"accumulate": 4, "clip_norm": 1.0, "ema": 0.9},
}


def nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor))


def kept(state: fmp.TrainState) -> dict[str, int]:
    return {"params": nbytes(state.params), "masters": nbytes(state.master), "moments": nbytes(state.opt_state)}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_a_real_step(name, remat, options):
    module, batch = MODELS[name](remat)
    model = fmp.functionalize(module)
    policy = fmp.opt_level("O2", torch.float16, keep_full=module)
    step = fmp.train_step(classify(model), fmp.optim.adam(1e-3), policy=policy, **OPTIONS[options])
    timeline = measure_step(step, model.params, batch, buffers=model.buffers)

    state = step.init(model.params, buffers=model.buffers)
    before = nbytes((state, batch))
    assert timeline.totals[0] == before
    states = [state]
    del state
    real = before + peak_bytes(lambda: step(states.pop(), batch))
    assert timeline.peak == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_remat_is_seen(name):
    most = []
    for remat in (False, True):
        module, batch = MODELS[name](remat)
        model = fmp.functionalize(module)
        step = fmp.train_step(classify(model), fmp.optim.adam(1e-3), policy=fmp.opt_level("O2", keep_full=module))
        most.append(max(measure_step(step, model.params, batch, buffers=model.buffers).live["activations"]))
    assert most[1] < 0.7 * most[0]


def linear_step(policy: fmp.Policy | None = None, optimizer: Any = None, **options: Any) -> fmp.TrainStep:
    def loss_fn(params, x):
        return (x @ params["w"].to(x.dtype)).float().square().mean()

    return fmp.train_step(loss_fn, optimizer or fmp.optim.adamw(1e-3), policy=policy, **options)


W, X = torch.randn(256, 128), torch.randn(32, 256)
SIZE = W.numel()


def test_kinds_counted_by_hand():
    timeline = measure_step(linear_step(fmp.opt_level("O2")), {"w": W}, X)
    assert timeline.ops[0] == timeline.phases[0] == "start"
    assert len(timeline.ops) == len(timeline.phases) == len(timeline.totals)
    first = {kind: values[0] for kind, values in timeline.live.items()}
    assert (first["params"], first["masters"]) == (2 * SIZE, 4 * SIZE)
    assert 8 * SIZE <= first["moments"] <= 8 * SIZE + 8  # two counts
    assert first["batch"] == X.nbytes
    assert first["compute"] == first["gradients"] == first["activations"] == 0
    # The half-precision gradient, and what unscaling makes of it: the quotient, and at most a float32 copy on the way.
    assert 6 * SIZE <= max(timeline.live["gradients"]) < 10.1 * SIZE
    # The product and its float32 copy, the square, and gradients of these.
    assert 0 < max(timeline.live["activations"]) <= 5 * 4 * 32 * 128 + 8
    assert max(timeline.live["batch"]) == 1.5 * X.nbytes
    assert [max(timeline.live[kind]) for kind in ("params", "masters")] == [4 * SIZE, 8 * SIZE]


def test_compute_copies_live_through_the_backward_pass():
    policy = fmp.Policy("f32", "bf16", "f32")
    timeline = measure_step(linear_step(policy), {"w": W}, X)
    copies = timeline.live["compute"]
    assert max(copies) == 2 * SIZE
    assert {phase for phase, size in zip(timeline.phases, copies, strict=True) if size} >= {"forward", "backward"}
    # Those that ops cast for themselves are found, too.
    by_op = measure_step(linear_step(fmp.opt_level("O1", "bf16")), {"w": W}, X)
    assert max(by_op.live["compute"]) == 2 * SIZE


@pytest.mark.parametrize("form", fmp.master.FORMS)
def test_masters_of_every_form(form):
    policy = fmp.opt_level("O2", "bf16", master_weights=form)
    step = linear_step(policy)
    timeline = measure_step(step, {"w": W}, X)
    state = step.init({"w": W})
    first = {kind: values[0] for kind, values in timeline.live.items()}
    assert {kind: first[kind] for kind in kept(state)} == kept(state)


def test_the_phases_come_in_order():
    timeline = measure_step(linear_step(fmp.opt_level("O2")), {"w": W}, X)
    assert list(dict.fromkeys(timeline.phases)) == ["start", "prepare", "forward", "backward", "update"]
    assert timeline.phases[timeline.peak_index] == "update"
    assert sum(timeline.at_peak.values()) == timeline.peak == max(timeline.totals)


def test_gradients_die_before_the_new_state_is_chosen():
    # In a process of its own: once Dynamo has been at work, Python keeps the arguments of a call until it returns.
    code = """
import fmp
from tests.test_memory_measure import W, X, linear_step, measure_step
gradients = measure_step(linear_step(fmp.opt_level("O2")), {"w": W}, X)
print(gradients.at_peak["gradients"], gradients.live["gradients"][-1])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    at_peak, at_end = map(int, done.stdout.split())
    assert at_peak < SIZE
    assert at_end < 100


def test_state_that_is_donated_dies_on_the_way():
    fused = fmp.optim.sgd(0.1, momentum=0.9, fused=True)
    kept, donated = (measure_step(linear_step(optimizer=fused, donate=donate), {"w": W}, X) for donate in (False, True))
    for kind in ("params", "moments"):
        assert kept.live[kind][-1] >= 2 * W.nbytes
        assert W.nbytes <= donated.live[kind][-1] < 1.1 * W.nbytes


def test_several_losses_and_optimizers():
    def first(params, x):
        return (x @ params["a"]).square().mean()

    def second(params, x):
        return (x @ params["a"] @ params["b"]).square().mean()

    optimizers = {"a": fmp.optim.adam(1e-3), "b": fmp.optim.sgd(0.1)}
    step = fmp.train_step({"first": first, "second": second}, optimizers, uses={"first": ["a"]})
    params = {"a": W, "b": torch.randn(128, 16)}
    timeline = measure_step(step, params, X)
    state = step.init(params)
    real = nbytes((state, X)) + peak_bytes(lambda: step(state, X))
    assert timeline.peak == pytest.approx(real, rel=0.02)


def test_what_the_loss_closes_over_is_there_from_the_start():
    scale = torch.ones(1000, 256)

    def loss_fn(w, x):
        return (x * scale[:32] @ w).square().mean()

    timeline = measure_step(fmp.train_step(loss_fn, fmp.optim.sgd(0.1)), W, X)
    assert timeline.live["other"][0] >= scale.nbytes
    assert scale.sum() == 256_000


def test_frozen_tensors_are_parameters():
    frozen = torch.ones(256, 256)

    def loss_fn(w, x, *, frozen):
        return (x @ frozen @ w).square().mean()

    timeline = measure_step(fmp.train_step(loss_fn, fmp.optim.sgd(0.1)), W, X, frozen=frozen)
    assert timeline.live["params"][0] == W.nbytes + frozen.nbytes


def test_a_model_too_large_for_the_machine_and_nothing_is_changed():
    with torch.device("meta"):
        w, x = torch.empty(2**20, 2**16), torch.empty(4, 2**20)
    timeline = measure_step(linear_step(fmp.opt_level("O2")), {"w": w}, x)
    assert timeline.peak > 14 * w.numel() > 2**39
    module, batch = mlp(False)
    model = fmp.functionalize(module)
    before = tree.map(torch.clone, model.params)
    step = fmp.train_step(classify(model), fmp.optim.adam(1e-3))
    measure_step(step, model.params, batch, buffers=model.buffers)
    assert all(torch.equal(before[name], value) for name, value in model.params.items())
    assert all(type(value) is torch.Tensor for value in model.params.values())


def test_storages_that_change_their_size():
    def loss_fn(w, x):
        big = torch.empty(0)
        big.resize_(10_000)
        big.size()
        return (x @ w).square().mean() + big.new_zeros(())

    timeline = measure_step(fmp.train_step(loss_fn, fmp.optim.sgd(0.1)), W, X)
    assert max(timeline.live["activations"]) >= 40_000
    assert timeline.live["activations"][-1] < 100


def test_a_compiled_step_runs_as_it_was_written():
    plain, compiled = (linear_step(fmp.opt_level("O2"), compile=compile) for compile in (False, True))
    assert measure_step(compiled, {"w": W}, X).peak == measure_step(plain, {"w": W}, X).peak


def test_the_table():
    timeline = Timeline(
        ("start", "mm", "add"), ("start", "forward", "update"), {"params": (4, 4, 8), "activations": (0, 9, 1)}
    )
    assert timeline.peak == 13
    assert str(timeline.table("B")).splitlines() == [
        "kind         start, B  at the peak  most",
        "params              4            4     8",
        "activations         0            9     9",
        "total               4           13    13",
        "the peak is after op 1 of 2, mm, in the forward",
    ]


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"fmp\.train_step"):
        measure_step(lambda state, batch: state, {"w": W}, X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"the optimizer looks at the values .*aten\.equal.*fmp\.optim\.adamw"):
        measure_step(linear_step(optimizer=fmp.optim.from_torch(torch.optim.AdamW, lr=1e-3)), {"w": W}, X)

    def looking(w, x):
        return (x @ w).mean() * x.sum().item()

    with pytest.raises(ValueError, match=r"the step looks at the values .*`\.item\(\)`.*torch\.where"):
        measure_step(fmp.train_step(looking, fmp.optim.sgd(0.1)), W, X)


def test_it_says_what_init_would_be_given():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model, batch = fmp.functionalize(net), torch.empty(5, 3)

    def loss_fn(params, batch, *, buffers):
        out, buffers = model.apply(params, buffers, batch, train=True)
        return out.square().mean(), buffers

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"step\.init\(params, buffers=\.\.\.\) would be given; pass them here"):
        measure_step(step, model.params, batch)
    with pytest.raises(TypeError, match=r"params is a TrainState.*pass what init\(params, buffers=\.\.\.\) was given"):
        measure_step(step, step.init(model.params, buffers=model.buffers), batch)
    for params, advice in ((net, r"fmp\.functionalize\(module\)\.params"), (model, r"model\.params")):
        with pytest.raises(TypeError, match=f"not its parameters; pass {advice}"):
            measure_step(step, params, batch)
    with pytest.raises(ValueError, match="buffers: the loss does not take"):
        measure_step(linear_step(), {"w": W}, X, buffers=model.buffers)
    with pytest.raises(TypeError, match=r"got a Recorded; pass the step in it, its \.step"):
        measure_step(fmp.numerics.record(step), model.params, batch)  # pyright: ignore[reportArgumentType]
    assert measure_step(step, model.params, batch, buffers=model.buffers).live["buffers"][0] > 0


def test_torch_says_when_a_backward_pass_runs():
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(running_node())
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append(running_node())
            return grad * 2

    seen: list[Any] = []
    Seen.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen[0] is None
    assert seen[1] is not None
    assert running_node() is None


def test_fields_of_a_timeline_are_frozen():
    timeline = measure_step(linear_step(), {"w": W}, X)
    with pytest.raises(dataclasses.FrozenInstanceError):
        timeline.ops = ()  # pyright: ignore[reportAttributeAccessIssue]
