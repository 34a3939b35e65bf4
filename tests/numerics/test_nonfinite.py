import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmp
from fmp.numerics import nonfinite
from tests.numerics.planted import planted

find_nonfinite: Any = nonfinite.find_nonfinite  # its result may be None, which no test here expects by mistake

ONES = torch.ones(3)


class Poisoned(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan  # planted


def log_of_zero(x):
    y = x - x
    return torch.log(y).sum()  # planted


def quotient(x):
    y = x - x
    return (x / y).sum()  # planted


def half_product(x):
    y = (x * 1000).half()
    return (y[:, None] @ y[None, :]).float().sum()  # planted


def root_of_zero(x):
    y = torch.sqrt(x - 1)  # planted
    return y.sum() + x.sum()


def power(x):
    y = (x - 1) ** 0.5  # planted
    return y.sum()


def poisoned(x):
    y = Poisoned.apply(x.sin())  # planted
    return y.cos().sum()


class PoisonedAgain(Poisoned):
    @staticmethod
    def forward(x):
        return Poisoned.forward(x)


def poisoned_again(x):
    y = PoisonedAgain.apply(x.sin())  # planted
    return y.cos().sum()


def half_gradient(x):
    y = x.half()
    return (y.float() * 1e6).sum()  # planted


FORWARD = {log_of_zero: ("inf", "log"), quotient: ("inf", "div"), half_product: ("inf", "mm")}
BACKWARD = {
    root_of_zero: ("inf", "div", "SqrtBackward0"),
    power: ("inf", "pow", "PowBackward0"),
    poisoned: ("nan", "mul", "PoisonedBackward"),
    poisoned_again: ("nan", "mul", "PoisonedAgainBackward"),
    half_gradient: ("inf", "_to_copy", "ToCopyBackward0"),
}


def by_backward(fn):
    def call(x):
        fn(x.detach().requires_grad_()).backward()

    return call


def by_checkpoint(fn):
    return fmp.grad(lambda x: checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False))


def by_members(fn):
    return lambda x: torch.func.vmap(torch.func.grad(fn))(torch.stack([x, x]))


GRADIENTS = {
    "fmp.grad": fmp.grad,
    "func.grad": torch.func.grad,
    "func.grad of func.grad": lambda fn: torch.func.grad(lambda x: torch.func.grad(fn)(x).sum()),
    "vmap of grad": by_members,
    "backward": by_backward,
    "remat": lambda fn: fmp.grad(fmp.remat(fn)),
    "func.grad of remat": lambda fn: torch.func.grad(fmp.remat(fn)),
    "vmap of grad of remat": lambda fn: by_members(fmp.remat(fn)),
    "torch's checkpoint": by_checkpoint,
}


@pytest.mark.parametrize("route", ["plain", "vmap", "remat", *GRADIENTS])
@pytest.mark.parametrize("fn", FORWARD, ids=lambda fn: fn.__name__)
def test_an_op_of_the_forward_pass_is_named(fn, route):
    others = {"plain": lambda fn: fn, "vmap": lambda fn: lambda x: torch.func.vmap(fn)(x[None]), "remat": fmp.remat}
    report = find_nonfinite((others | GRADIENTS)[route](fn), ONES)
    kind, op = FORWARD[fn]
    assert (report.kind, report.phase, report.node) == (kind, "forward", "")
    assert report.op in (op, f"b{op}")  # a product of many matrices has a name of its own
    assert report.line == planted(fn)
    assert report.source.endswith("# planted")


@pytest.mark.parametrize("route", GRADIENTS)
@pytest.mark.parametrize("fn", BACKWARD, ids=lambda fn: fn.__name__)
def test_an_op_of_the_backward_pass_is_named(fn, route):
    report = find_nonfinite(GRADIENTS[route](fn), ONES)
    assert (report.kind, report.op, report.node) == BACKWARD[fn]
    assert (report.level, report.phase) == ("error", "backward")
    assert report.line == planted(fn)
    assert report.backward_line == (planted(Poisoned.backward) if fn in (poisoned, poisoned_again) else "")
    assert report.backward_source.endswith("# planted") == (fn in (poisoned, poisoned_again))
    assert report.backward_source in str(report)


def test_the_second_derivative_belongs_to_the_line_of_the_op():
    def cube_root(x):
        y = x * 1.0
        return ((y - 1).abs() ** 1.5).sum()  # planted

    twice = torch.func.grad(lambda x: torch.func.grad(cube_root)(x).sum())
    assert find_nonfinite(torch.func.grad(cube_root), ONES) is None
    report = find_nonfinite(twice, ONES)
    assert report.phase == "backward"
    assert report.line == planted(cube_root)


class Poison(nn.Module):
    def __init__(self, in_backward):
        super().__init__()
        self.in_backward = in_backward

    def forward(self, x):
        return Poisoned.apply(x) if self.in_backward else torch.log(x - x)


@given(st.integers(1, 5), st.data(), st.booleans(), st.sampled_from([fmp.grad, torch.func.grad]))
def test_the_module_is_named_wherever_it_is(depth, data, in_backward, grad):
    at = data.draw(st.integers(0, depth - 1))
    model = nn.Sequential(*[Poison(in_backward) if index == at else nn.LeakyReLU() for index in range(depth)])
    report = find_nonfinite(grad(lambda x: model(x).sum()), ONES)
    assert report.module == str(at)
    assert report.phase == ("backward" if in_backward else "forward")


# Train steps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def step_of(model, scale, **options):
    def loss_fn(params, batch):
        x, y = batch
        out, _ = model.apply(params, {}, x)
        wide = out.float()  # planted
        return ((wide - y.float()) ** 2).mean()

    policy = fmp.opt_level("O2", half_dtype=torch.float16)
    scaler = fmp.DynamicLossScale(init_scale=scale)
    step = fmp.train_step(loss_fn, fmp.optim.adamw(1e-3), policy=policy, loss_scale=scaler, **options)
    return step, loss_fn


def batch_of():
    return torch.randn(8, 4), 100 * torch.randn(8, 2)


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"compile": True}, {"accumulate": 2}], ids=str)
def test_an_overflow_of_the_loss_scale_is_found_in_the_backward_pass(options):
    model = fmp.functionalize(Net())
    step, loss_fn = step_of(model, 2.0**24, **options)
    state = step.init(model.params)
    before = fmp.tree.map(lambda leaf: None if leaf is None else leaf.clone(), state)
    report = find_nonfinite(step, state, batch_of())
    assert (report.level, report.kind, report.phase) == ("error", "inf", "backward")
    assert (report.op, report.node, report.line) == ("_to_copy", "ToCopyBackward0", planted(loss_fn))
    assert report.result.dtype == torch.float16
    assert report.inputs[0].magnitude.largest > 65504
    assert report.was_compiled == bool(options.get("compile"))
    assert ("eagerly" in str(report)) == report.was_compiled
    assert all(map(torch.equal, fmp.tree.leaves(before.opt_state), fmp.tree.leaves(state.opt_state)))
    quiet, _ = step_of(model, 16.0, **options)
    assert find_nonfinite(quiet, quiet.init(model.params), batch_of()) is None


def test_parameters_are_named_as_leaves_also_after_a_cast():
    def loss_fn(params, x):
        return (x @ params["w"]).float().sum()

    policy = fmp.Policy.parse("params=f32,compute=f16,output=f32")
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy)
    report = find_nonfinite(step, step.init({"w": torch.full((4, 4), 300.0)}), torch.full((2, 4), 300.0))
    assert (report.op, report.phase) == ("mm", "forward")
    assert [item.name for item in report.inputs] == ["batch", "state/params/w"]
    assert [item.magnitude.largest for item in report.inputs] == [300.0, 300.0]


def test_a_functionalized_model_names_module_and_parameter():
    model = fmp.functionalize(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))))
    params = {**model.params, "1.1.weight": torch.full((2, 2), 3e38)}
    report = find_nonfinite(lambda params, x: model.apply(params, {}, x)[0], params, torch.full((3, 2), 100.0))
    assert (report.op, report.module) == ("addmm", "1.1")
    assert "params/1.1.weight" in [item.name for item in report.inputs]


def test_the_optimizer_is_named_where_it_is_at_fault():
    def update(grads, state, params):
        return fmp.tree.map(lambda grad: -grad / grad.abs(), grads), state  # planted

    tx = fmp.optim.GradientTransformation(lambda params: (), update)
    step = fmp.train_step(lambda params, x: (params["w"] * x).sum(), tx)
    report = find_nonfinite(step, step.init({"w": ONES}), torch.zeros(3))
    assert (report.kind, report.op, report.phase) == ("nan", "div", "forward")
    assert report.line.startswith(planted(update).split(" ")[0])


# What is meant


def attention(scores, mask):
    return torch.softmax(scores.masked_fill(mask, -math.inf), -1).sum(-1)


@pytest.mark.parametrize("grad", [lambda fn: fn, fmp.grad, torch.func.grad])
def test_masks_are_meant(grad):
    scores, mask = torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool).triu(1)

    def by_fill(scores):
        return attention(scores, mask)[0].square()

    def by_where(scores):
        return torch.where(mask, -math.inf, scores).softmax(-1)[0, 0]

    def by_constant(scores):
        return torch.where(mask, torch.tensor(-math.inf), scores).softmax(-1)[0, 0]

    def by_sum(scores):
        return (scores + torch.full((4, 4), -math.inf).triu(1)).softmax(-1)[0, 0]

    def by_product(scores):
        causal = torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, is_causal=True)
        return causal.sum()

    for fn in (by_fill, by_where, by_constant, by_sum, by_product):
        assert find_nonfinite(grad(fn), scores) is None
    as_argument = torch.full((4, 4), -math.inf).triu(1)
    assert find_nonfinite(grad(lambda s, m: (s + m).softmax(-1)[0, 0]), scores, as_argument) is None
    assert find_nonfinite(lambda s, m: s + m, scores, as_argument) is None


def classify(model, x):
    return nn.functional.cross_entropy(model(x), torch.arange(x.shape[0]) % 2)


def causal_attention(model, x):
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[:, -1] = True
    return model(x, x, x, attn_mask=mask, key_padding_mask=padding.float().masked_fill(padding, -math.inf))[0].sum()


def ctc(model, x):
    log_probabilities = model(x).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((x.shape[0],), x.shape[1]), torch.full((x.shape[0],), 2)
    return nn.functional.ctc_loss(log_probabilities, torch.ones(x.shape[0], 2, dtype=torch.long), *lengths)


def top_two(model, x):
    scores = model(x)
    least = scores.topk(2).values[..., -1:]
    scores[scores < least] = -math.inf
    return scores.softmax(-1).square().sum()


def smallest(model, x):
    y = model(x)
    y[y < 0] = math.inf
    return y.amin().clamp(max=10.0) + torch.full((3,), math.inf).clamp(max=1.0).sum()


def half_precision(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().sum()


HEALTHY = {
    "convolutions": (
        classify,
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)
        ),
        (4, 3, 8, 8),
    ),
    "normalized": (
        classify,
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Dropout(), nn.Linear(8, 2)),
        (4, 8),
    ),
    "recurrent": (lambda model, x: model(x)[0].sum(), lambda: nn.LSTM(3, 4, 2, batch_first=True), (2, 5, 3)),
    "attention": (causal_attention, lambda: nn.MultiheadAttention(4, 2, batch_first=True), (2, 5, 4)),
    "transformer": (lambda model, x: model(x).sum(), lambda: nn.TransformerEncoderLayer(4, 2, 8), (2, 5, 4)),
    "ctc": (ctc, lambda: nn.Linear(4, 4), (2, 6, 4)),
    "top two": (top_two, lambda: nn.Linear(4, 4), (2, 4)),
    "smallest": (smallest, lambda: nn.Linear(4, 4), (2, 4)),
    "autocast": (half_precision, lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), (2, 4)),
}


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_where_all_is_well(name):
    loss, make, shape = HEALTHY[name]
    model, x = make(), torch.randn(shape)
    loss(model, x)  # lazy layers
    assert find_nonfinite(lambda x: loss(model, x), x) is None
    assert find_nonfinite(fmp.grad(lambda x: loss(model, x)), x) is None
    assert find_nonfinite(lambda x: loss(model, x).backward(), x) is None


def test_a_row_that_is_masked_entirely_is_a_mistake():
    report = find_nonfinite(attention, torch.randn(2, 4), torch.tensor([[True], [False]]))
    assert (report.kind, report.op, report.result.nans) == ("nan", "_softmax", 4)
    assert [item.magnitude.minus_infs for item in report.inputs] == [4]
    assert "4 -inf of 8" in str(report)


def test_what_is_left_out_is_a_warning_and_hides_no_mistake():
    def kept_apart(x):
        y = torch.where(x > 0, torch.log(x), 0.0)
        return (y / (x - x).abs().clamp(max=1)).sum() if math.isnan(x[1].item() * 0) else y.sum()

    def with_mistake(x):
        y = torch.where(x > 0, torch.log(x), 0.0)
        return (y + torch.exp(x * 1e3)).sum()

    x = torch.tensor([1.0, 0.0])
    report = find_nonfinite(kept_apart, x)
    assert (report.level, report.op, report.reached_result) == ("warning", "log", False)
    assert re.fullmatch(r"where \(forward\), test_nonfinite.py:\d+ in kept_apart", report.left_out_by)
    assert f"the result is finite, as other ops left it out: {report.left_out_by}" in str(report)
    report = find_nonfinite(with_mistake, x)
    assert (report.level, report.op, report.left_out_by) == ("error", "exp", "")
    assert len(report.left_out) == 1
    assert re.search(r"left out   log \(forward\), .* in with_mistake; by where \(forward\), .*", str(report))


@pytest.mark.parametrize(
    ("leave_out", "by"),
    [
        (torch.tanh, "tanh"),
        (lambda y: y.clamp(max=1.0), "clamp"),
        (lambda y: torch.nan_to_num(y, posinf=1.0), "nan_to_num"),
        (lambda y: y.nan_to_num_(posinf=1.0), "nan_to_num_"),
        (lambda y: (y > 0).float(), "gt"),
        (lambda y: torch.where(y > 0, 1.0, y), "where"),
        (lambda y: torch.where(y.isfinite(), y, 0.0) + (y > 0), "where"),
    ],
)
def test_the_op_that_left_it_out_is_named(leave_out, by):
    report = find_nonfinite(lambda x: leave_out(x * 2e38).sum(), torch.tensor([1.0, 2.0]))
    assert (report.level, report.op) == ("warning", "mul")
    assert report.left_out_by.startswith(f"{by} (forward), test_nonfinite.py:")


def test_ignored_ops_are_meant():
    assert find_nonfinite(log_of_zero, ONES, ignore="log") is None
    assert find_nonfinite(log_of_zero, ONES, ignore=["mm", planted(log_of_zero).split(" ")[0]]) is None
    assert find_nonfinite(fmp.grad(root_of_zero), ONES, ignore="SqrtBackward0") is None
    assert find_nonfinite(nn.Sequential(nn.Tanh(), Poison(False)), ONES, ignore="1") is None
    assert find_nonfinite(log_of_zero, ONES, ignore="lo").op == "log"


def test_nan_numbers_and_constants_are_mistakes():
    assert find_nonfinite(lambda x: x * math.nan, ONES).op == "mul"
    assert find_nonfinite(lambda x: x + torch.full((3,), math.nan), ONES).op == "full"
    assert find_nonfinite(lambda x: x + torch.tensor(math.nan), ONES).op == "lift_fresh"
    assert find_nonfinite(lambda x: x * math.inf, ONES) is None
    assert find_nonfinite(lambda x: x * math.inf * 0, ONES).kind == "nan"
    assert find_nonfinite(lambda x: torch.full((2,), 1e9, dtype=torch.float32).half(), ONES).op == "_to_copy"


# What was there before


def test_arguments_that_are_not_finite_to_begin_with_are_named():
    def loss(params, batch):
        return (params["w"] * batch["x"]).sum()

    params, x = {"w": torch.tensor([1.0, math.inf])}, torch.ones(2)
    report = find_nonfinite(loss, params, {"x": x})
    assert (report.op, report.leaf, report.level, report.kind) == ("", "params/w", "error", "inf")
    assert [(item.name, item.magnitude.plus_infs) for item in report.begun_with] == [("params/w", 1)]
    assert "params/w, before the call" in str(report)
    report = find_nonfinite(fmp.grad(loss), {"w": x}, {"x": torch.tensor([math.nan, 1.0])})
    assert (report.leaf, report.kind) == ("batch/x", "nan")
    assert find_nonfinite(loss, params, {"x": x}, ignore="params/w") is None
    assert find_nonfinite(lambda x, y: x.sum(), x, params["w"]) is None


def test_what_a_function_closes_over_is_named():
    offset = torch.tensor([math.nan, 1.0, 1.0])
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    assert find_nonfinite(lambda x: x + offset, ONES).leaf == "offset"
    assert find_nonfinite(lambda x: model(x), ONES).leaf == "model/weight"
    assert find_nonfinite(model, ONES).leaf == "weight"
    assert find_nonfinite(model.forward, ONES).leaf == "weight"


def test_what_is_written_over_by_what_reads_it_is_followed():
    def reuses(x):
        y = x * 2
        y = torch.add(y, 1.0, out=y)
        return torch.mul(y, 3.0, out=y)

    report = find_nonfinite(reuses, torch.tensor([1.0, math.nan]))
    assert (report.op, report.leaf, report.left_out) == ("", "x", ())


def test_memory_that_was_never_written_counts_for_nothing():
    def copied(x):
        y = torch.empty(3)
        y.copy_(x)
        z = torch.empty_like(y)
        torch.add(x, y, out=z)
        return y + z

    def overflows(x):
        return torch.empty(3, dtype=torch.float16).copy_(x)

    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        assert torch.empty(3).isnan().all()
        assert find_nonfinite(copied, ONES) is None
        assert find_nonfinite(overflows, ONES * 1e9).op == "copy_"
    finally:
        torch.use_deterministic_algorithms(False)


# Near the largest number


def test_what_comes_near_is_a_warning():
    def product(x):
        y = (x * 650).half() * 100  # planted
        return y.float() * 2

    report = find_nonfinite(product, ONES)
    assert (report.level, report.kind, report.op, report.line) == ("warning", "near max", "mul", planted(product))
    assert round(report.result.of_max, 3) == 0.992
    assert "within 2 % of f16's max" in str(report)
    assert find_nonfinite(product, ONES * 0.98) is None
    assert find_nonfinite(product, ONES, ignore="mul") is None


def test_what_is_set_to_the_largest_number_is_not_near():
    largest = torch.finfo(torch.float16).max
    assert find_nonfinite(lambda x: x.half().masked_fill(x > 0, -largest), ONES) is None
    assert find_nonfinite(lambda x: x.half() * 1.0, ONES * largest) is None
    assert find_nonfinite(lambda x: (x * 448).to(torch.float8_e4m3fn).float(), ONES) is None


# Other functions


def test_in_place_and_out_and_lists_of_tensors():
    def in_place(x):
        y = x.clone()
        y.sub_(1).log_()
        return y

    def of_lists(x):
        return torch.ops.aten._foreach_div([x, x], [x, x - x])

    def in_place_of_lists(x):
        y = [x.clone(), x.clone()]
        torch.ops.aten._foreach_mul_(y, 1e30)
        torch.ops.aten._foreach_mul_(y, 1e30)
        return y

    def of_parts(x):
        y = x.clone()
        y[:1].div_(0)
        y[1:].mul_(2)
        return y * 2

    expected = {in_place: "log_", of_lists: "_foreach_div", in_place_of_lists: "_foreach_mul_", of_parts: "div_"}
    assert {fn: find_nonfinite(fn, ONES).op for fn in expected} == expected


def test_complex_and_sparse_numbers():
    assert find_nonfinite(lambda x: torch.complex(x, x) / 0, ONES).op == "div"
    assert find_nonfinite(lambda x: (x[:, None] * 1e38 * 10).to_sparse(), ONES).op == "mul"


def test_a_function_that_raises():
    def checked(x):
        torch.log(x - x)
        raise ValueError("the loss is not finite")

    def wrong(x):
        scores = x.masked_fill(x > 0, -math.inf)
        return scores @ torch.ones(7)

    report = find_nonfinite(checked, ONES)
    assert (report.op, report.level, report.error) == ("log", "error", "ValueError: the loss is not finite")
    with pytest.raises(RuntimeError, match="size"):
        find_nonfinite(wrong, ONES)


def test_gradients_left_on_tensors_count_as_results():
    x = ONES.clone().requires_grad_()

    def backward(x):
        return root_of_zero(x).backward()

    assert find_nonfinite(backward, x).reached_result
    assert x.grad is not None


def test_compiled_functions_run_eagerly():
    compiled = torch.compile(log_of_zero, backend="aot_eager")
    report = find_nonfinite(compiled, ONES)
    assert (report.op, report.line, report.was_compiled) == ("log", planted(log_of_zero), True)
    assert not find_nonfinite(log_of_zero, ONES).was_compiled


def test_a_policy_around_does_not_cast_what_is_measured():
    policy = fmp.opt_level("O1", half_dtype=torch.float16)
    report = find_nonfinite(fmp.autocast(lambda x: (x * 1000) @ (x * 1000), policy), torch.ones(3, 3))
    assert (report.op, report.result.described) == ("mm", "f16[3,3]")


def test_the_ops_before_are_shown():
    def chain(x):
        for _ in range(30):
            x = x * 2
        return torch.log(x - x)

    report = find_nonfinite(chain, ONES)
    assert len(report.ops_before) == 20
    assert [record.op for record in report.ops_before[-2:]] == ["mul", "sub"]
    assert report.ops_before[-2].result.largest == 2.0**30
    assert "1.074e+09  1.074e+09" in str(report)
    assert len(find_nonfinite(chain, ONES, ops_before=3).ops_before) == 3
    assert "before:" not in str(find_nonfinite(chain, ONES, ops_before=0))


def test_the_report_is_frozen():
    report = find_nonfinite(log_of_zero, ONES)
    with pytest.raises(AttributeError):
        report.op = "exp"


def test_inside_of_a_transform():
    with pytest.raises(RuntimeError, match="call it outside"):
        torch.func.vmap(lambda x: find_nonfinite(torch.log, x))(ONES)


def test_functions_without_tensors_and_without_results():
    assert find_nonfinite(lambda: None) is None
    assert find_nonfinite(lambda x, n: x.reshape(0) if n else x[:0], ONES[:0], 3) is None
    assert find_nonfinite(torch.log, ONES) is None
    assert find_nonfinite(torch.log, ONES * 0).op == "log"
    assert find_nonfinite(nn.Sequential(nn.Tanh()), ONES * math.nan).leaf == "input"
