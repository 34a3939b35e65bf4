"""What `fmp.explain` says about a call is what happened, and it warns of mistakes only."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmp
from fmp.dropout import SeededRandomness
from fmp.policy.grouping import common, family
from tests.bits import same_bits

O1 = fmp.opt_level("O1", half_dtype=torch.bfloat16)
TORCH = fmp.opt_level("O1", half_dtype=torch.bfloat16, op_rules="torch")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

explain = functools.partial(fmp.explain, show=False)


def with_rules(rules):
    return fmp.Policy("f32", "bf16", "f32", op_rules=rules)


def x(*shape, dtype=F32):
    return torch.randn(shape or (3, 4), dtype=dtype)


def row_of(explanation, op):
    (row,) = [row for row in explanation.rows if row.op == op]
    return row


def lines(explanation):
    return str(explanation).splitlines()


# --- rows


def test_a_row_tells_the_dtypes_before_the_cast_in_the_op_and_after():
    def attend(x, w):
        return (x @ w).softmax(-1)

    explanation = explain(attend, x(3, 4), x(4, 4), policy=O1)
    product, softmax = explanation.rows
    assert (product.op, product.rule, product.why, product.count) == ("matmul", "low", "Apex's list", 1)
    assert (product.dtypes_in, product.dtypes_ran, product.dtypes_out) == ((F32, F32), (BF16, BF16), (BF16,))
    assert (softmax.op, softmax.rule) == ("softmax", "full")
    assert (softmax.dtypes_in, softmax.dtypes_ran, softmax.dtypes_out) == ((BF16,), (F32,), (F32,))
    assert lines(explanation)[0] == f"attend under {O1}"
    assert lines(explanation)[-1] == "2 calls: 1 low, 1 full"


def test_it_prints_what_it_returns_unless_told_not_to(capsys):
    explanation = fmp.explain(torch.mm, x(2, 2), x(2, 2), policy=O1)
    assert capsys.readouterr().out == f"{explanation}\n"
    fmp.explain(torch.mm, x(2, 2), x(2, 2), policy=O1, show=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("policy", [O1, TORCH], ids=["apex", "torch"])
@pytest.mark.mixed_dtypes
def test_watching_changes_no_bit(policy):
    model = fmp.functionalize(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    args = (model.params, model.buffers, x(2, 3, 8))
    seeded = functools.partial(model.apply, seed=3, train=True)
    assert same_bits(explain(seeded, *args, policy=policy).output, fmp.autocast(seeded, policy)(*args))


def test_calls_that_are_alike_share_a_row():
    def loop(x):
        for _ in range(3):
            x = x.sigmoid()
        return x

    (row,) = explain(loop, x(), policy=O1).rows
    assert (row.op, row.rule, row.why, row.count) == ("sigmoid", "-", "no rule", 3)


def test_views_and_bookkeeping_have_no_rows():
    def shapes(x):
        assert x.dtype == F32
        assert x.shape[0] == 3
        return x.reshape(2, 6).unflatten(1, (2, 3))[0].T.detach().requires_grad_()

    assert explain(shapes, x(), policy=O1).rows == ()


def test_in_place_ops_have_rows():
    def relu(x):
        y = x + 1.0
        y.relu_()
        return y

    assert [row.op for row in explain(relu, x(), policy=O1).rows] == ["add", "relu"]


def test_a_rule_of_ones_own_is_named():
    rules = fmp.OpRules.apex().full(torch.relu)
    explanation = explain(torch.relu, x(), policy=with_rules(rules))
    assert (row_of(explanation, "relu").rule, row_of(explanation, "relu").why) == ("full", "your rule")
    assert "ops=apex and 1 of your own" in lines(explanation)[0]


def test_the_parts_of_a_python_function_have_rows_and_it_says_that_it_was_entered():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    explanation = explain(lambda q: attention(q, q, q)[0], x(2, 3, 8), policy=O1)
    entered = row_of(explanation, "multi_head_attention_forward")
    assert (entered.rule, entered.why, entered.dtypes_ran) == ("-", "entered", ())
    assert sum(row.count for row in explanation.rows if row.op == "linear" and row.rule == "low") >= 2
    assert lines(explanation)[-1].startswith(f"{sum(row.count for row in explanation.rows) - 1} calls: ")


def test_what_runs_inside_a_decorated_function_is_named_so():
    @fmp.full_precision
    def distance(x, y):
        return (x @ y).exp()

    explanation = explain(lambda x: distance(x @ x, x), x(4, 4), policy=O1)
    assert [(row.op, row.rule, row.why) for row in explanation.rows] == [
        ("matmul", "low", "Apex's list"),
        ("distance", "full", "fmp.full_precision"),
        ("matmul", "-", "inside fmp.full_precision"),
        ("exp", "-", "inside fmp.full_precision"),
    ]
    assert explanation.rows[2].dtypes_ran == (F32, F32)
    assert lines(explanation)[-1] == "2 calls: 1 low, 1 full; inside fmp.full_precision: 2"


@pytest.mark.parametrize(
    ("decorate", "rule", "ran"),
    [(fmp.low_precision, "low", BF16), (fmp.full_precision, "full", F32), (fmp.promote, "promote", F32)],
)
@pytest.mark.mixed_dtypes
def test_a_decorated_function_is_an_op(decorate, rule, ran):
    @decorate
    def mix(pair, *, scale):
        return {"out": (pair[0] + pair[1]) * scale, "count": torch.arange(2)}

    explanation = explain(lambda x, y: mix((x, y), scale=2.0), x(), x(dtype=BF16), policy=O1)
    row, *inside = explanation.rows
    assert (row.op, row.rule, row.why) == ("mix", rule, f"fmp.{decorate.__name__}")
    assert (row.dtypes_in, row.dtypes_ran, row.operand) == ((F32, BF16), (ran, ran), "")
    assert (set(row.dtypes_out), row.count) == ({ran, torch.int64}, 1)
    assert {row.why for row in inside} == {f"inside fmp.{decorate.__name__}"}


def test_a_decorated_function_names_its_operand_if_it_takes_one():
    @fmp.full_precision
    def penalty(leaves):
        return sum(leaf.square().sum() for leaf in leaves)

    def operand(take):
        return row_of(
            explain(lambda params: penalty(take(params)), [{"w": x()}, {"w": x(), "b": x()}]), "penalty"
        ).operand

    explain = functools.partial(fmp.explain, policy=O1, show=False)
    assert operand(lambda params: [params[1]["w"], params[0]["w"].exp()]) == "params/1/w"
    assert operand(lambda params: [params[0]["w"], params[1]["w"]]) == "params/*/w"
    assert operand(lambda params: [params[1]["w"], params[1]["b"]]) == ""


def test_a_decorated_function_in_another_is_no_op():
    inner = fmp.low_precision(lambda x: x.exp())

    @fmp.full_precision
    def outer(x):
        return inner(x)

    explanation = explain(lambda x: (outer(x), torch.func.vmap(outer)(x)), x(), policy=O1)
    assert [(row.op, row.why) for row in explanation.rows] == [
        ("outer", "fmp.full_precision"),
        ("exp", "inside fmp.full_precision"),
    ]
    assert explain(outer, x()).rows[0].why == "no op rules"


def test_a_decorated_method_is_named_with_its_class():
    class Router(nn.Module):
        @fmp.full_precision
        def forward(self, x):
            return x.exp()

    explanation = explain(nn.Sequential(nn.Linear(4, 4), Router()), x(), policy=O1)
    assert (row_of(explanation, "Router.forward").where, row_of(explanation, "exp").where) == ("1", "1")


def test_a_torch_function_that_is_decorated_has_a_row_for_itself_and_for_what_it_calls():
    explanation = explain(fmp.low_precision(torch.matmul), x(4, 4), x(4, 4), policy=O1)
    assert [(row.op, row.why) for row in explanation.rows] == [
        ("matmul", "fmp.low_precision"),
        ("matmul", "inside fmp.low_precision"),
    ]


def test_an_error_in_a_decorated_function_keeps_its_row():
    @fmp.full_precision
    def fails(x):
        return x @ x

    with pytest.raises(RuntimeError) as caught:
        explain(fails, x(2, 3), policy=O1)
    note = caught.value.__notes__[0].splitlines()
    assert note[2].split()[:2] == ["fails", "full"]
    assert note[-1] == "1 call: 1 full; inside fmp.full_precision: 1"


@pytest.mark.mixed_dtypes
def test_what_only_moves_or_creates_numbers_has_no_row_but_a_cast_by_hand_has():
    def shuffle(x, index):
        x = torch.cat([x[index], x.index_select(0, index)]).clone().T.contiguous()
        x = torch.stack([x, torch.zeros_like(x), torch.ones(x.shape)]).repeat(2, 1, 1)
        return x.gather(0, torch.zeros(x.shape, dtype=torch.int64)).half().to("cpu").float().float()

    explanation = explain(shuffle, x(), torch.tensor([0, 2]), policy=TORCH)
    assert [(row.op, row.rule, row.why, row.dtypes_in, row.dtypes_out) for row in explanation.rows] == [
        ("to", "-", "cast by hand", (F32,), (torch.float16,)),
        ("to", "-", "cast by hand", (torch.float16,), (F32,)),
    ]
    assert lines(explanation)[-1] == "2 calls: 2 cast by hand"
    mixed = explain(lambda x, y: torch.cat([x, y]), x(), x(dtype=BF16), policy=TORCH)
    assert row_of(mixed, "cat").dtypes_in == (F32, BF16)
    apex = explain(shuffle, x(), torch.tensor([0, 2]), policy=O1)
    assert [row.op for row in apex.rows] == ["cat", "stack", "to", "to"]


def test_a_policy_inside_is_explained_without_one_of_its_own():
    inner = fmp.autocast(torch.mm, O1)
    explanation = explain(lambda x: inner(x, x).sum(), x(2, 2))
    assert [(row.op, row.why) for row in explanation.rows] == [("mm", "Apex's list"), ("sum", "no op rules")]
    assert "inside it ops=apex with bf16" in lines(explanation)[0]


def test_a_policy_inside_that_casts_nothing_is_named():
    off = fmp.autocast(torch.mm, fmp.Policy(None, None, None))
    (row,) = explain(lambda x: off(x, x), x(2, 2), policy=O1).rows
    assert (row.op, row.why, row.dtypes_ran) == ("mm", "inside another policy", (F32, F32))
    outside = explain(lambda x: (off(x, x), x @ x), x(2, 2), policy=O1)
    assert lines(outside)[-1] == "1 call: 1 low; inside another policy: 1"


# --- where, and on which argument


def test_the_operand_is_the_path_of_an_argument():
    def project(params, inputs):
        return F.linear(inputs[0], params["blocks"][0]["w"], params["b"])

    params = {"blocks": [{"w": x(5, 4)}], "b": x(5)}
    row = explain(project, params, (x(),), policy=O1).rows[0]
    assert row.operand == "params/blocks/0/w"
    assert row.where.startswith("test_explain.py:")
    assert explain(project, params, inputs=(x(),), policy=O1).rows[0].operand == "params/blocks/0/w"
    assert explain(lambda *xs: xs[1].exp(), x(), x(), policy=O1).rows[0].operand == "xs/1"


def test_the_operand_is_found_below_transforms():
    def loss(params, x):
        return (x @ params["w"]).square().sum()

    model = {"w": x(4, 2)}
    assert explain(fmp.value_and_grad(loss), model, x(), policy=O1).rows[0].operand == "params/w"
    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    product = explain(lambda params, batch: mapped(params, batch), model, x(5, 3, 4), policy=O1).rows[0]
    assert (product.op, product.operand, product.dtypes_ran) == ("matmul", "params/w", (BF16, BF16))


def test_the_place_is_a_module_or_a_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    explanation = explain(lambda x: model(x).exp(), x(), policy=O1)
    assert [row.where for row in explanation.rows[:3]] == ["0", "1.0", "1.1"]
    assert row_of(explanation, "exp").where.startswith("test_explain.py:")


def test_the_place_in_the_outermost_module_is_a_line_too():
    class Outer(nn.Module):
        def forward(self, x):
            return x.exp()

    line = Outer.forward.__code__.co_firstlineno + 1
    assert explain(Outer(), x(), policy=O1).rows[0].where == f"test_explain.py:{line}"
    assert explain(nn.Softmax(-1), x(), policy=O1).rows[0].where == "Softmax"
    assert explain(torch.exp, x(), policy=O1).rows[0].where == "-"


def test_calls_of_one_line_share_a_row_whatever_their_operand():
    def products(x, v, w):
        return x @ w, x @ v, (x + 1.0) @ (x - 1.0)

    explanation = explain(products, x(4, 4), x(4, 4), x(4, 4), policy=O1)
    row = row_of(explanation, "matmul")
    assert (row.dtypes_in, row.count, row.operand) == ((F32, F32), 3, "")
    assert row_of(explanation, "add").operand == "x"


def test_a_table_without_operands_has_no_column_for_them():
    assert "operand" in lines(explain(torch.exp, x(), policy=O1))[1]
    assert "operand" not in lines(explain(lambda: x().exp(), policy=O1))[1]


def test_functional_models_show_the_names_of_their_parameters():
    model = fmp.functionalize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    explanation = explain(functools.partial(model.apply, train=True), model.params, model.buffers, x(), policy=O1)
    assert (row_of(explanation, "linear").where, row_of(explanation, "linear").operand) == ("0", "params/0.weight")
    assert row_of(explanation, "batch_norm").operand == "params/1.weight"


@pytest.mark.mixed_dtypes
def test_equal_layers_share_rows():
    def rows(depth):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = fmp.functionalize(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False))
        return explain(model.apply, model.params, model.buffers, x(2, 3, 8), policy=O1).rows

    two, six = rows(2), rows(6)
    assert [dataclasses.replace(row, count=1) for row in two] == [dataclasses.replace(row, count=1) for row in six]
    assert [3 * row.count for row in two] == [row.count for row in six]
    (first,) = [row for row in six if row.where == "layers.*.linear1"]
    assert (first.operand, first.count) == ("params/layers.*.linear1.weight", 6)


def test_equal_layers_share_rows_only_if_they_run_alike():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first, others = explain(model, x(), policy=O1).rows
    assert (first.where, first.operand, first.count) == ("0", "input", 1)
    assert (others.where, others.operand, others.count) == ("*", "", 2)


def test_paths_of_one_family_are_written_as_one():
    assert common(["a.0.b1", "a.1.b1"]) == "a.*.b1"
    assert common(["a.0.b1", "a.12.b2"]) == "a.*.b*"
    assert common(["a.0.b1", "a.0.c1"]) == ""
    assert common(["a.0.b1", "a.0"]) == ""
    assert family("conv2d.3") == "conv2d.*"
    assert family("layer_3_attn") == "layer_*_attn"
    assert family("model.py:3") != family("model.py:4")


# --- what can be explained


@pytest.mark.mixed_dtypes
def test_a_train_step_is_explained_by_its_own_policy():
    model = fmp.functionalize(nn.Linear(4, 2))

    def loss(params, batch):
        return F.mse_loss(model.apply(params, model.buffers, batch)[0], torch.zeros(3, 2))

    step = fmp.train_step(loss, fmp.optim.adamw(1e-3), policy=O1)
    state = step.init(model.params)
    batch = x()
    explanation = explain(step, state, batch)
    assert [row.op for row in explanation.rows if row.rule != "-"] == ["linear", "mse_loss"]
    assert row_of(explanation, "linear").operand == "state/params/weight"
    assert all(row.why == "no rule" for row in explanation.rows if row.rule == "-")
    assert explanation.warnings == ()
    assert same_bits(explanation.output, step(state, batch))


def test_custom_functions_are_entered_under_transforms():
    class Double(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, w):
            return (x @ w).relu()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    def use(x, w):
        return torch.func.vmap(Double.apply, in_dims=(0, None))(x, w)

    explanation = explain(use, x(2, 3, 4), x(4, 4), policy=O1)
    assert row_of(explanation, "Double").why == "entered"
    assert row_of(explanation, "matmul").dtypes_ran == (BF16, BF16)
    assert row_of(explanation, "relu").dtypes_in == (BF16,)


def test_a_compiled_function_or_step_is_refused():
    step = fmp.train_step(lambda params, x: (x @ params).sum(), fmp.optim.sgd(0.1), policy=O1, compile=True)
    with pytest.raises(ValueError, match="compiled"):
        explain(step, step.init(x(4, 2)), x())
    with pytest.raises(ValueError, match="compiled"):
        explain(torch.compile(torch.exp, backend="eager"), x(), policy=O1)


def test_a_compiled_part_runs_eagerly():
    part = torch.compile(lambda x: x.exp(), backend="eager", fullgraph=True)
    assert [row.op for row in explain(lambda x: part(x @ x), x(2, 2), policy=O1).rows] == ["matmul", "exp"]


def test_only_functions_can_be_explained():
    not_a_function: Any = 7
    not_a_policy: Any = "O1"
    with pytest.raises(TypeError, match="explain runs a function"):
        explain(not_a_function)
    with pytest.raises(TypeError, match="policy must be a Policy"):
        explain(torch.exp, x(), policy=not_a_policy)


def test_a_substitute_of_seeded_dropout_is_one_op_or_its_parts():
    def attend(q):
        with SeededRandomness(0):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    assert [row.op for row in explain(attend, x(1, 2, 3, 4), policy=O1).rows] == ["scaled_dot_product_attention"]
    rules = fmp.OpRules.apex().leave(F.scaled_dot_product_attention)
    policy = with_rules(rules)
    q = x(1, 2, 3, 4)
    assert same_bits(explain(attend, q, policy=policy).output, fmp.autocast(attend, policy)(q))


def test_the_table_fits_and_is_aligned():
    class Deep(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.a_submodule_with_a_long_name = Deep(depth - 1) if depth else nn.LayerNorm(4)

        def forward(self, x):
            return self.a_submodule_with_a_long_name(x + 1.0)

    rules = fmp.OpRules.apex()
    text = str(explain(Deep(5), x(), policy=with_rules(rules.promote("where"))))
    assert max(map(len, text.splitlines())) <= 120
    assert "long_name  " in text
    heading, *rows = text.splitlines()[1:-1]
    assert {len(row) for row in rows} == {len(heading)}


def test_a_long_reason_becomes_a_note_where_the_table_is_too_wide():
    fits = explain(lambda x: F.huber_loss(x, x), x(), policy=O1)
    assert "  losses next to the listed ones  " in lines(fits)[2]
    too_wide = explain(lambda x: torch.hypot(x, x), x(), policy=O1)
    reason = "elementwise ops where a 0-dim float32 operand is rounded to the other's 16 bits"
    assert too_wide.rows[0].why == reason
    assert "  note 1  " in lines(too_wide)[2]
    assert lines(too_wide)[3] == f"note 1: {reason}"
    assert max(map(len, lines(fits) + lines(too_wide))) <= 120
    assert "…" not in f"{fits}{too_wide}"


# --- errors


def test_a_banned_op_raises_with_the_table_as_a_note():
    def loss(x, y):
        return F.binary_cross_entropy((x @ x).relu(), y)

    with pytest.raises(fmp.BannedOpError) as caught:
        explain(loss, x(2, 2), x(2, 2), policy=O1)
    (note,) = caught.value.__notes__
    assert "matmul" in note
    assert any(line.startswith("binary_cross_entropy") and "banned" in line for line in note.splitlines())


def test_another_error_carries_the_table_too():
    with pytest.raises(RuntimeError) as caught:
        explain(lambda x: (x @ x) @ x(), x(2, 3), policy=O1)
    assert "matmul" in caught.value.__notes__[0]


# --- warnings


@pytest.mark.mixed_dtypes
def test_mixed_dtypes_without_a_rule_are_warned_of():
    def mix(x, y):
        return torch.hypot(x, y)

    rules = fmp.OpRules.apex().leave(torch.hypot)
    explanation = explain(mix, x(), x(dtype=BF16), policy=with_rules(rules))
    (warning,) = explanation.warnings
    assert re.fullmatch(
        r"'hypot' at test_explain.py:\d+ has no rule; it took f32 and bf16, and gave f32. Give it a rule, .*", warning
    )
    assert str(explanation).endswith(f"warning: {warning}")


@pytest.mark.mixed_dtypes
def test_a_wide_number_that_does_not_promote_is_warned_of():
    scale = torch.tensor(2.0)
    rules = fmp.OpRules.torch()
    (warning,) = explain(lambda x: x.bfloat16() * scale, x(), policy=with_rules(rules)).warnings
    assert "took bf16 and a f32 tensor without dimensions, and did not promote. If" in warning


@pytest.mark.mixed_dtypes
def test_float64_that_slips_in_is_warned_of():
    def noise(x):
        return x + torch.linspace(0, 1, 4, dtype=F64)

    (warning,) = explain(noise, x(), policy=O1).warnings
    assert warning.startswith("'linspace' at test_explain.py:")
    assert "gives float64, though none went in. " in warning

    constant = torch.ones(4, dtype=F64)
    (warning,) = explain(lambda x: x + constant, x(), policy=O1).warnings
    assert "takes a float64 tensor that is no argument" in warning
    assert explain(lambda x, y: x + y, x(), x(dtype=F64), policy=O1).warnings == ()


def test_float64_that_a_rule_takes_away_is_warned_of():
    (warning,) = explain(torch.mm, x(2, 2, dtype=F64), x(2, 2, dtype=F64), policy=O1).warnings
    assert "'mm' casts float64 to bf16 by its rule. " in warning
    assert explain(torch.mm, x(2, 2, dtype=F64), x(2, 2, dtype=F64), policy=TORCH).warnings == ()


def test_a_cast_back_and_forth_is_warned_of():
    weight = nn.Parameter(x(4, 4))

    def widen(x):
        return F.linear((x @ weight).float().reshape(4, 3).T, weight)

    (warning,) = explain(widen, x(), policy=O1).warnings
    place = r"at test_explain.py:\d+"
    assert re.match(rf"'linear' {place} casts back to bf16 what 'to' {place} has just cast to f32\. ", warning)
    assert explain(lambda x: F.linear((x @ weight).float().exp(), weight), x(), policy=O1).warnings == ()


@pytest.mark.mixed_dtypes
def test_the_casts_of_a_decorated_function_count():
    @fmp.low_precision
    def attend(q):
        return q.exp()

    assert explain(lambda q: attend(q.exp()), x(), policy=O1).warnings == ()
    (warning,) = explain(lambda q: attend((q @ q).float()), x(4, 4), policy=O1).warnings
    assert warning.startswith("'attend' at test_explain.py:")
    assert "casts back to bf16" in warning


def test_the_output_cast_of_one_policy_before_the_next_is_warned_of():
    layer = fmp.autocast(nn.Linear(4, 4), O1)
    (warning,) = explain(lambda x: layer(layer(x)), x()).warnings
    assert "casts back to bf16" in warning
    free = fmp.autocast(nn.Linear(4, 4), O1.with_output_dtype(None))
    assert explain(lambda x: free(free(x)), x()).warnings == ()


def test_a_closed_over_tensor_that_is_cast_at_each_use_is_warned_of():
    weight = x(4, 4)

    def power(x):
        for _ in range(3):
            x = x @ weight
        return x

    (warning,) = explain(power, x(), policy=O1).warnings
    assert " (2 times) casts f32[4, 4] to bf16 again" in warning
    assert "Pass it as an argument" in warning

    def given(x, weight):
        for _ in range(3):
            x = x @ weight
        return x

    assert explain(given, x(), weight, policy=O1).warnings == ()


def test_a_mistake_in_equal_layers_is_one_warning():
    class Layer(nn.Module):
        def forward(self, x):
            return (x @ x).float() @ x

    (warning,) = explain(nn.Sequential(Layer(), Layer(), Layer()), x(4, 4), policy=O1).warnings
    assert warning.startswith("'matmul' at * (3 times) casts back to bf16 what 'to' at * has just cast to f32. ")


def test_a_closed_over_tensor_that_changes_between_its_uses_is_not():
    weight = x(4, 4)

    def change(x):
        x = x @ weight
        weight.add_(1.0)
        return x @ weight

    assert explain(change, x(), policy=O1).warnings == ()


def test_a_transposed_view_of_a_closed_over_tensor_counts_as_it():
    weight = x(4, 4)
    (warning,) = explain(lambda x: x @ weight.T @ weight.T, x(), policy=O1).warnings
    assert "casts f32[4, 4] to bf16 again" in warning


# --- no false alarms


def test_what_is_made_in_the_call_may_be_cast_at_each_use():
    def project(x, w):
        left, right = (x.sigmoid() + 1.0).chunk(2)
        return left @ w + left.T.T @ w + right @ w + right @ w

    with torch.no_grad():
        assert explain(project, x(4, 4), x(4, 4), policy=O1).warnings == ()
    mapped = torch.func.vmap(project, in_dims=(0, None))
    assert explain(lambda x, w: mapped(x, w), x(3, 4, 4), x(4, 4), policy=O1).warnings == ()


def test_a_policy_with_rules_inside_another_has_rows_of_its_own_only():
    inner = fmp.autocast(lambda x: (x @ x).exp(), TORCH)
    explanation = explain(lambda x: inner(x @ x), x(2, 2), policy=O1)
    assert [(row.op, row.why) for row in explanation.rows] == [
        ("matmul", "Apex's list"),
        ("matmul", "torch's list"),
        ("exp", "torch's list"),
    ]
    assert explanation.warnings == ()


def transformer():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


def perceptron():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Softplus(), nn.LayerNorm(8))


def convolutional():
    down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    return nn.Sequential(down, nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.lstm(x)[0]).log_softmax(-1)


MODELS = {
    transformer: (2, 3, 8),
    perceptron: (4, 8),
    convolutional: (2, 2, 8, 8),
    Recurrent: (2, 3, 8),
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("policy", [O1, TORCH], ids=["apex", "torch"])
@pytest.mark.mixed_dtypes
def test_plain_models_give_no_warnings(make, policy):
    module, inputs = make(), x(*MODELS[make])
    model = fmp.functionalize(module)

    def square(params, x):
        return model.apply(params, model.buffers, x, train=True)[0].float().square().mean()

    for found in (
        explain(module, inputs, policy=policy),
        explain(module.eval(), inputs, policy=policy),
        explain(fmp.value_and_grad(square), model.params, inputs, policy=policy),
    ):
        assert found.warnings == ()
        assert any(row.rule == "low" and row.dtypes_ran[0] == BF16 for row in found.rows)
