"""Which inf and NaN an op made itself, beside those that it was given."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fmp
from fmp.numerics import nonfinite

find_nonfinite: Any = nonfinite.find_nonfinite  # its result may be None, which no test here expects by mistake

INF, NAN = math.inf, math.nan
MASK = torch.tensor([True, False, False])
SCORES = torch.tensor([1.0, 200.0, 300.0])


def told(fn, *args, **kwargs) -> Any:
    report = find_nonfinite(fn, *args, **kwargs)
    return None if report is None else (report.level, report.kind, report.op or report.leaf)


# Parts of one memory


def test_views_of_one_memory_are_told_apart():
    table = torch.tensor([[-INF, 0.0, 0.0], [NAN, 1.0, 1.0]])

    def loss(mask, y):
        return (mask * 2).softmax(-1).sum() + y.sum()

    assert told(loss, table[0], table[1]) == ("error", "nan", "y")
    assert told(loss, table[0], table[1], ignore="y") is None
    data = torch.randn(8, 6)
    data[3, 5] = NAN
    assert told(lambda x, y: x.sum() + y.sum(), data[:, :5], data[:, 5]) == ("error", "nan", "y")
    assert told(lambda x, y: x.sum(), data[:, :5], data[:, 5]) is None
    assert told(lambda a, b: (a / 0).sum(), data[:, :5], data[:, 5]) == ("error", "inf", "div")


def test_parts_that_ops_wrote_are_told_apart():
    def parts(x):
        buffer = torch.zeros(4)
        buffer[0] = torch.log(-x[0])
        buffer[1] = x[0] / 0
        return buffer

    assert told(lambda x: parts(x)[1], SCORES) == ("error", "inf", "div")
    assert told(lambda x: parts(x)[1] * 2, SCORES) == ("error", "inf", "div")
    assert told(lambda x: parts(x)[0], SCORES) == ("error", "nan", "log")
    assert told(lambda x: parts(x)[2:] + 1, SCORES)[0] == "warning"

    def masked(x):
        buffer = torch.full((2, 3), -INF)
        buffer[1] = torch.log(x - 200)
        return buffer[0].exp() + buffer[1]

    assert told(masked, SCORES) == ("error", "nan", "log")


def test_numbers_are_followed_where_they_are_moved():
    def both(x):
        return torch.cat([x / 0, torch.log(-x)]).view(2, 3).flip(0)

    for move in (
        lambda y, row: y[row],
        lambda y, row: y[torch.tensor([row])],
        lambda y, row: y.repeat(2, 1)[row],
        lambda y, row: y.index_select(0, torch.tensor(row)),
        lambda y, row: y.roll(2, 0).t().reshape(-1)[row::2] * 2,
    ):
        assert told(lambda x, move=move: move(both(x), 0), SCORES) == ("error", "nan", "log")
        assert told(lambda x, move=move: move(both(x), 1), SCORES) == ("error", "inf", "div")

    def put(x, at):
        y = torch.zeros(6)
        y[torch.arange(3)] = x / 0
        y[torch.arange(3, 6)] = torch.log(-x)
        return y[at]

    assert told(put, SCORES, 0)[2] == "div"
    assert told(put, SCORES, 5)[2] == "log"


def test_memory_that_is_read_before_it_is_written():
    def partly(x):
        y = torch.empty(3)
        y.numpy()[:] = NAN
        y[0] = x[0]
        return y.sum()

    assert told(partly, SCORES) == ("error", "nan", "empty")


# Beside what is meant


def overflow_of_exp(s):
    return torch.log(torch.exp(s.masked_fill(MASK, -INF)).sum())


def overflow_of_cast(s):
    return s.masked_fill(MASK, -INF).mul(1e4).half()


def overflow_in_place(s):
    return s.masked_fill(MASK, -INF).mul_(1e38)


def overflow_of_lists(s):
    return torch.ops.aten._foreach_mul([s.masked_fill(MASK, -INF), s], 1e38)[0]


def overflow_of_sum(s):
    return (s.masked_fill(MASK, -INF).clamp(min=-1) * 1e36).cumsum(0)


def overflow_of_product(s):
    return s.masked_fill(MASK, -INF)[None].half() @ torch.full((3, 2), 300.0).half()


BESIDE = {
    overflow_of_exp: "exp",
    overflow_of_cast: "_to_copy",
    overflow_in_place: "mul_",
    overflow_of_lists: "_foreach_mul",
    overflow_of_sum: "cumsum",
    overflow_of_product: "mm",
}


@pytest.mark.parametrize("fn", BESIDE, ids=lambda fn: fn.__name__)
def test_an_overflow_beside_a_mask_is_a_mistake(fn):
    assert told(fn, SCORES) == ("error", "inf", BESIDE[fn])


def test_an_overflow_beside_a_mask_among_the_arguments():
    assert told(lambda s, b: torch.exp(s + b), SCORES, torch.tensor([-INF, 0.0, 0.0])) == ("error", "inf", "exp")
    query, mask = torch.full((2, 16), 15.0).half(), torch.tensor([[False, True], [False, False]])

    def attention(q):
        return (q @ q.t()).masked_fill(mask, -INF) * 64

    assert told(lambda q: attention(q).amax(), query) == ("error", "inf", "mul")
    assert told(lambda q: attention(q).softmax(-1), query) == ("error", "inf", "mul")


def test_an_overflow_beside_what_is_ignored_is_a_mistake():
    x = torch.tensor([0.0, 5.0])
    assert told(lambda x: torch.log(x) * 1e38 * 1e38, x, ignore="log") == ("error", "inf", "mul")
    assert told(lambda x: torch.log(x - 1) * 1e38 * 1e38, x, ignore="log") == ("error", "inf", "mul")
    assert told(lambda x: -torch.log(x), x, ignore="log") is None
    assert told(lambda x: torch.stack([x[0] * 2, x[1] / 0]), torch.tensor([NAN, 1.0]), ignore="x")[2] == "div"


def test_a_mask_that_becomes_inf_is_a_mistake_if_it_comes_out():
    scores = torch.randn(3)
    assert told(lambda s: s.masked_fill(MASK, -INF).neg().sum(), scores) == ("error", "inf", "neg")
    assert told(lambda s, b: ((s + b) ** 2).sum(), scores, torch.tensor([-INF, 0, 0])) == ("error", "inf", "pow")
    assert told(lambda s: s.masked_fill(MASK, -INF) @ -torch.ones(3), scores) == ("error", "inf", "dot")
    assert told(lambda s: s.masked_fill(MASK, -INF).neg()[1:] + 1, scores) is None
    assert told(lambda s: s.masked_fill(MASK, -INF).log_softmax(0).neg()[1:] + 1, scores) is None


def test_masks_that_are_moved_and_spread_are_meant():
    places = torch.tensor([0, 0, 1, 2])
    for fn in (
        lambda s: s.masked_fill(MASK, -INF)[places].cumsum(0),
        lambda s: s.masked_fill(MASK, -INF).repeat(3) * 0.5,
        lambda s: s.masked_fill(MASK, -INF) @ torch.ones(3, 2),
        lambda s: torch.cat([s, s.masked_fill(MASK, -INF)]).flip(0),
        lambda s: torch.where(MASK, s.masked_fill(~MASK, INF), s),
        lambda s: s.masked_fill(MASK, INF).amin().clamp(max=1.0),
    ):
        assert told(fn, torch.rand(3)) is None


def test_the_choice_of_where_tells_what_came_through():
    def chosen(x, flag):
        return torch.where(flag, x / 0, torch.log(-x))

    assert told(chosen, SCORES, torch.tensor([True, True, True])) == ("error", "inf", "div")
    assert told(chosen, SCORES, torch.tensor([False, False, False])) == ("error", "nan", "log")


CHAIN = [
    torch.exp,
    torch.log,
    torch.sqrt,
    torch.square,
    lambda x: x * 30,
    lambda x: 1 / x,
    lambda x: x - x.max(),
    lambda x: x.softmax(-1),
    lambda x: x.half(),
    lambda x: x.float(),
    lambda x: x.masked_fill(x > 2, -INF),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.cumsum(-1),
    lambda x: torch.cat([x[:1], x[1:] * 2]),
    lambda x: x @ x.t() @ x,
    lambda x: torch.logsumexp(x, -1, keepdim=True) + x,
    lambda x: x.nan_to_num(0.0, 1.0, -1.0),
]


@pytest.mark.mixed_dtypes
@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 8))
def test_none_never_stands_for_inf_or_nan(seed, length):
    ops = random.Random(seed).choices(CHAIN, k=length)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) * 3

    def fn(x):
        for op in ops:
            x = op(x)
        return x

    result = fn(x)
    report = find_nonfinite(fn, x)
    if (result.isnan() | (result == INF)).any():
        assert report.level == "error"
    elif result.isfinite().all():
        assert report is None or report.level == "warning"


# Who has taken it


def test_a_finite_result_is_a_warning_however_it_came_about():
    p = torch.tensor([0.0, 1.0])
    for fn in (
        lambda p: torch.log(p).argmax(),
        lambda p: torch.where(torch.isfinite((1 / p).sum()), p, p * 0),
        lambda p: p[torch.log(p).argsort()],
        lambda p: p[torch.log(p).max(0).indices],
        lambda p: (1 / p).clamp(max=9).long(),
        lambda p: p * min(3.0, (1 / p).max().item()),
        lambda p: p if torch.equal(1 / p, p) else p * 2,
        lambda p: torch.log(p)[1:],
        lambda p: p * float((1 / p).sum() > 3),
    ):
        assert told(fn, p)[0] == "warning"


def test_a_number_that_python_has_got_keeps_its_source():
    p = torch.tensor([1.0, 2.0])
    assert told(lambda p: p * torch.log(p[0] - 1).item(), p) == ("error", "inf", "log")
    assert told(lambda p: p + torch.log(-p[0]).item(), p) == ("error", "nan", "log")
    assert told(lambda p: torch.log(-p).sum().item(), p) == ("error", "nan", "log")
    assert told(lambda p: {"loss": (1 / (p - 1)).sum().item()}, p) == ("error", "inf", "reciprocal")


# What was there before


def test_an_op_comes_before_a_leaf_unless_it_follows_from_it():
    ones, bad = torch.ones(3), torch.tensor([NAN, 1.0, 1.0])
    report = find_nonfinite(lambda s, u: u.sum() + s.sum() / 0, ones, bad)
    assert (report.op, [item.name for item in report.begun_with]) == ("div", ["u"])
    assert told(lambda s, u: s.sum() * u, ones, bad) == ("error", "nan", "u")
    endless = torch.tensor([INF, 1.0])
    assert told(lambda u: (u - u).sum(), endless) == ("error", "inf", "u")


def test_a_stale_gradient_counts_if_the_call_wrote_it():
    def weight(*values):
        w = torch.ones(3, requires_grad=True)
        w.grad = torch.tensor(values)
        return w

    def accumulates(w):
        (w * 2).sum().backward()

    def clears(w):
        w.grad = None
        (w * 2).sum().backward()

    assert told(lambda w: (w * 2).sum(), weight(NAN, 1.0, 1.0)) is None
    assert told(clears, weight(NAN, 1.0, 1.0)) is None
    assert told(accumulates, weight(NAN, 1.0, 1.0)) == ("error", "nan", "w.grad")
    assert told(accumulates, weight(1.0, 1.0, 1.0)) is None
    assert told(lambda w: w.grad.sum(), weight(1.0, 1.0, NAN)) == ("error", "nan", "w.grad")


def test_results_that_no_tree_knows():
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor

    class Options(dict):
        pass

    bad = torch.tensor([NAN])
    assert told(lambda x: Output(x), bad) == ("error", "nan", "x")
    assert told(lambda x: Options(loss=x), bad) == ("error", "nan", "x")
    assert told(lambda x: x["loss"].view(1), Options(loss=bad)) == ("error", "nan", "x/loss")


def test_lazy_modules_and_compressed_weights():
    assert told(torch.nn.LazyLinear(3), torch.ones(2, 3)) is None
    weight = torch.randn(64, 64).bfloat16()
    assert told(lambda p, x: x @ fmp.df11.decompress(p["w"]), {"w": fmp.df11.compress(weight)}, weight) is None
    weight[3, 4] = NAN
    compressed = {"w": fmp.df11.compress(weight)}
    assert told(lambda p, x: x @ fmp.df11.decompress(p["w"]), compressed, torch.ones_like(weight))[2] == "p/w"
    frozen = fmp.df11.FrozenWeight(compressed["w"])
    assert told(lambda w, x: x @ w.T, frozen, torch.ones_like(weight)) == ("error", "nan", "w")
    assert told(lambda w, x: x.sum(), frozen, torch.ones_like(weight)) is None
