import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from fmp import dropout, random
from fmp.dropout import SeededRandomness
from tests.versions import BEFORE_2_13

Draw = Callable[[torch.Tensor], torch.Tensor]


def seeded(draw: Draw) -> Callable[[torch.Tensor, torch.Tensor | int], torch.Tensor]:
    def run(x: torch.Tensor, seed: torch.Tensor | int) -> torch.Tensor:
        with SeededRandomness(seed):
            return draw(x)

    return run


# Each takes f32[2,3,4,5], and does not draw in place into it.
DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "dropout1d": lambda x: F.dropout1d(x[0], 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "dropout3d": lambda x: F.dropout3d(x, 0.3),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.3, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "torch.alpha_dropout": lambda x: torch.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "torch.feature_alpha_dropout": lambda x: torch.feature_alpha_dropout(x, 0.3, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "torch.rrelu": lambda x: torch.rrelu(x, 0.1, 0.4, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax_hard": lambda x: F.gumbel_softmax(x, tau=0.5, hard=True, dim=1),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_of_p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_method": lambda x: x.sigmoid().bernoulli(),
    "aten.dropout": lambda x: torch.ops.aten.dropout(x, 0.3, True),
    "aten.dropout.default": lambda x: torch.ops.aten.dropout.default(x, 0.3, True),
    "aten.bernoulli": lambda x: torch.ops.aten.bernoulli.p(x, 0.3),
    "aten.rand": lambda x: x[0, 0] + torch.ops.aten.rand.default([4, 5]),
    "rand": lambda x: x[0, 0] + torch.rand(4, 5),
    "rand_of_a_tuple": lambda x: x[0, 0] + torch.rand((4, 5)),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype, device=x.device),
    "randn_of_size": lambda x: x[0, 0, 0] + torch.randn(size=(5,)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "causal_attention": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.3, True),
    "two": lambda x: F.dropout(F.dropout(x, 0.3), 0.3),
}
IN_PLACE: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3, inplace=True),
    "dropout_by_place": lambda x: F.dropout(x, 0.3, True, True),
    "dropout1d": lambda x: F.dropout1d(x[0], 0.3, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x, 0.3, inplace=True),
    "dropout3d": lambda x: F.dropout3d(x, 0.3, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True, inplace=True),
    "rrelu": lambda x: F.rrelu(x, training=True, inplace=True),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_of_tensor": lambda x: x.bernoulli_(torch.full_like(x, 0.3)),
}
# The same on a copy: what is written in place is then made inside.
ALL = DRAWS | {f"{name}_in_place": (lambda x, draw=draw: draw(x * 1.0)) for name, draw in IN_PLACE.items()}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 4, 5)


@pytest.mark.parametrize("name", ALL)
def test_draws_depend_on_the_seed_alone(name: str, x: torch.Tensor) -> None:
    run = seeded(ALL[name])
    state = torch.get_rng_state()
    first = run(x, 7)
    torch.rand(3)
    assert torch.equal(run(x, torch.tensor(7)), first)
    assert not torch.equal(torch.stack([run(x, seed) for seed in range(8)]), first.expand(8, *first.shape))
    torch.set_rng_state(state)
    run(x, 7)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ALL)
def test_compiled_draws_are_the_eager_ones(name: str, x: torch.Tensor) -> None:
    if BEFORE_2_13 and name.startswith("rand"):
        pytest.skip("torch before 2.13 hides the call from modes")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(seeded(ALL[name]), backend=counter, fullgraph=True)
    for seed in map(torch.tensor, (1, 2, -3)):
        torch.testing.assert_close(compiled(x, seed), seeded(ALL[name])(x, seed), rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", DRAWS)
def test_a_batch_of_seeds_is_a_loop(name: str, x: torch.Tensor) -> None:
    run, seeds = seeded(DRAWS[name]), torch.tensor([1, 2, 3])
    torch.testing.assert_close(torch.func.vmap(run, (None, 0))(x, seeds), torch.stack([run(x, s) for s in seeds]))


@pytest.mark.parametrize("name", ALL)
def test_a_batch_of_seeds_and_data_is_a_loop(name: str, x: torch.Tensor) -> None:
    run, seeds, xs = seeded(ALL[name]), torch.tensor([1, 2, 3]), torch.stack([x, -x, 2 * x])
    mapped = torch.func.vmap(run)(xs, seeds)
    torch.testing.assert_close(mapped, torch.stack([run(*pair) for pair in zip(xs, seeds, strict=True)]))


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "bernoulli_method", "attention"])
def test_one_seed_gives_every_member_the_same_mask(name: str, x: torch.Tensor) -> None:
    run = seeded(DRAWS[name])
    mapped = torch.func.vmap(run, (0, None))(x.expand(3, *x.shape), torch.tensor(5))
    torch.testing.assert_close(mapped, run(x, 5).expand(mapped.shape))


@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "rrelu", "gumbel_softmax", "attention", "two"])
def test_gradients_go_through_the_mask_of_the_forward_pass(name: str, x: torch.Tensor) -> None:
    run = seeded(DRAWS[name])
    double = x.double()
    assert torch.autograd.gradcheck(lambda x: run(x, 3), double.requires_grad_())
    grads = torch.func.vmap(torch.func.grad(lambda x, seed: run(x, seed).square().sum()), (None, 0))(
        x, torch.tensor([1, 2])
    )
    for seed, grad in zip((1, 2), grads, strict=True):
        leaf = x.clone().requires_grad_()
        expected = torch.autograd.grad(run(leaf, seed).square().sum(), leaf)[0]
        torch.testing.assert_close(grad, expected)


def test_every_draw_has_noise_of_its_own(x: torch.Tensor) -> None:
    with SeededRandomness(0):
        masks = torch.stack([F.dropout(torch.ones(64)) > 0 for _ in range(50)])
    assert masks.unique(dim=0).shape[0] == 50
    assert abs(float(masks.float().mean()) - 0.5) < 0.05


@given(st.integers(0, 40), st.integers(0, 40))
def test_draws_can_be_resumed(before: int, after: int) -> None:
    with SeededRandomness(3) as mode:
        for _ in range(before):
            F.dropout(torch.ones(2))
        again = SeededRandomness(mode.seed, mode.calls)
        expected = [F.dropout(torch.ones(64)) for _ in range(after)]
    with again:
        assert all(torch.equal(F.dropout(torch.ones(64)), mask) for mask in expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "options"),
    [(F.dropout, {}), (F.dropout2d, {}), (F.alpha_dropout, {"training": True})],
)
def test_values_are_those_of_torch(
    function: Callable[..., torch.Tensor], options: dict[str, bool], dtype: torch.dtype
) -> None:
    x = torch.full((64, 64, 2), 3.0, dtype=dtype).unsqueeze(-1)
    ours = seeded(lambda x: function(x, 0.25, **options))(x, 0)
    theirs = function(x, 0.25, **options)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.unique(), theirs.unique(), rtol=2 * torch.finfo(dtype).eps, atol=0)


@given(st.integers(0, 1000), st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout_keeps_the_mean(seed: int, p: float) -> None:
    out = seeded(lambda x: F.dropout(x, p))(torch.ones(20_000), seed)
    assert float(out.mean()) == pytest.approx(1.0, abs=6 * math.sqrt(p / (1 - p) / 20_000))
    assert float((out == 0).float().mean()) == pytest.approx(p, abs=6 * math.sqrt(p * (1 - p) / 20_000))


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(200_000)
    for function in (F.alpha_dropout, lambda x, p, training: F.feature_alpha_dropout(x[:, None], p, training)):
        out = seeded(lambda x: function(x, 0.3, training=True))(x, 1)
        assert float(out.mean()) == pytest.approx(0.0, abs=0.02)
        assert float(out.var()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    ("function", "channels"),
    [(F.dropout1d, (2, 3, 7)), (F.dropout2d, (2, 3, 7, 2)), (F.dropout3d, (2, 3, 7, 2, 2))],
)
def test_channels_are_dropped_whole(function: Callable[..., torch.Tensor], channels: tuple[int, ...]) -> None:
    out = seeded(lambda x: function(x, 0.5))(torch.ones(channels), 4).reshape(6, -1)
    assert torch.equal(out, out[:, :1].expand(6, out.shape[1]))
    assert sorted(out[:, 0].unique().tolist()) == [0.0, 2.0]
    unbatched = seeded(lambda x: F.dropout1d(x, 0.5))(torch.ones(40, 5), 4)
    assert torch.equal(unbatched, unbatched[:, :1].expand(40, 5))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("function", [F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout])
def test_the_ends_of_the_range(function: Callable[..., torch.Tensor], inplace: bool, x: torch.Tensor) -> None:
    def run(p: float, training: bool) -> torch.Tensor:
        return seeded(lambda x: function(x, p, training, inplace))(x.clone(), 0)

    assert torch.equal(run(0.0, True), x)
    assert torch.equal(run(0.5, False), x)
    assert torch.equal(run(1.0, True), torch.zeros_like(x))
    with pytest.raises(ValueError, match="between 0 and 1"):
        run(1.5, True)


def test_dropped_values_leave_no_trace() -> None:
    x = torch.full((1000,), math.inf, requires_grad=True)
    out = seeded(lambda x: F.dropout(x, 0.5))(x, 0)
    assert sorted(out.unique().tolist()) == [0.0, math.inf]
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.where(out == 0, 0.0, 2.0))


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_forms_write_what_the_others_return(name: str, x: torch.Tensor) -> None:
    before = x.clone()
    out = seeded(IN_PLACE[name])(x, 6)
    assert out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(out, x.reshape(-1)[: out.numel()].reshape(out.shape))
    if (other := DRAWS.get(name)) is not None:
        assert torch.equal(out, seeded(other)(before, 6))


@pytest.mark.parametrize("name", ["dropout_by_place", "alpha_dropout", "rrelu", "bernoulli_"])
def test_in_place_forms_write_when_compiled(name: str, x: torch.Tensor) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        copy = x * 1.0
        IN_PLACE[name](copy)
        return copy

    compiled = torch.compile(seeded(write), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, torch.tensor(6)), seeded(IN_PLACE[name])(x.clone(), 6))


def test_drop_path_as_it_is_usually_written() -> None:
    def drop_path(x: torch.Tensor) -> torch.Tensor:
        keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(0.75)
        return x * keep.div_(0.75)

    out = seeded(drop_path)(torch.ones(4000, 3), 1)
    assert torch.equal(out, out[:, :1].expand(4000, 3))
    assert float(out.mean()) == pytest.approx(1.0, abs=0.05)


def test_bernoulli_takes_probabilities_at_their_word() -> None:
    p = torch.tensor([0.0, 0.2, 0.8, 1.0]).expand(20_000, 4)
    for draw in (torch.bernoulli, torch.Tensor.bernoulli, lambda p: torch.empty_like(p).bernoulli_(p)):
        out = seeded(draw)(p, 0)
        torch.testing.assert_close(out.mean(0), p[0], rtol=0, atol=0.02)
        assert out[:, 0].sum() == 0
        assert out[:, 3].sum() == 20_000


def test_factories_follow_their_arguments() -> None:
    with SeededRandomness(0):
        assert torch.rand(2, 3, dtype=torch.float64).dtype == torch.float64
        assert torch.randn((2, 3), dtype=torch.bfloat16).shape == (2, 3)
        assert torch.rand(2, device="meta").device.type == "meta"
        assert torch.rand(()).shape == ()
        numbers = torch.randn(100_000)
    assert float(numbers.std()) == pytest.approx(1.0, abs=0.01)


def test_gumbel_softmax_samples_from_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0])
    samples = seeded(lambda x: F.gumbel_softmax(x, hard=True))(logits.expand(40_000, 3), 2)
    assert torch.equal(samples.sum(-1), torch.ones(40_000))
    torch.testing.assert_close(samples.mean(0), logits.softmax(0), rtol=0, atol=0.01)
    soft = seeded(lambda x: F.gumbel_softmax(x, tau=0.1))(logits.expand(40_000, 3), 2)
    assert torch.equal(soft.argmax(-1), samples.argmax(-1))


def test_rrelu_slopes_are_uniform_between_the_bounds() -> None:
    x = torch.cat([-torch.ones(50_000), torch.ones(10)])
    out = seeded(lambda x: F.rrelu(x, 0.1, 0.5, training=True))(x, 0)
    assert torch.equal(out[-10:], torch.ones(10))
    slopes = -out[:-10]
    assert 0.1 <= float(slopes.min()) < 0.101
    assert 0.499 < float(slopes.max()) < 0.5
    assert float(slopes.mean()) == pytest.approx(0.3, abs=0.003)
    assert torch.equal(seeded(lambda x: F.rrelu(x))(x, 0), F.rrelu(x))


# A rate below 2^-33 drops nothing, but takes the way of a real one.
NOTHING = 2.0**-50
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": torch.rand(6, 6) < 0.7},
    "additive": {"attn_mask": torch.linspace(-2, 2, 36).reshape(6, 6)},
    "scaled": {"scale": 0.1},
    "unscaled": {"scale": 0.0},
    "blind": {"attn_mask": torch.ones(6, 6).tril(-1).bool()},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_weights_are_those_of_torch(kind: str, dtype: torch.dtype) -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 8, dtype=dtype).unbind()
    options = dict(ATTENTION[kind])
    if kind == "additive":
        options["attn_mask"] = options["attn_mask"].to(dtype)

    def attend(*tensors: torch.Tensor, p: float) -> torch.Tensor:
        with SeededRandomness(0):
            return F.scaled_dot_product_attention(*tensors, dropout_p=p, **options)

    expected = F.scaled_dot_product_attention(query, key, value, **options)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(attend(query, key, value, p=NOTHING), expected, rtol=0, atol=16 * eps)
    assert torch.equal(attend(query, key, value, p=0.0), expected)

    def loss_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, p=NOTHING).square().sum()

    grads = torch.func.grad(loss_of, argnums=(0, 1, 2))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    loss = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], **options).square().sum()
    for grad, other in zip(grads(query, key, value), torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(grad, other, rtol=64 * eps, atol=64 * eps)


def test_attention_drops_weights() -> None:
    query, key = torch.randn(2, 3, 50, 8).unbind()
    identity = torch.eye(50).expand(3, 50, 50)
    weights = F.scaled_dot_product_attention(query, key, identity)
    with SeededRandomness(1):
        dropped = F.scaled_dot_product_attention(query, key, identity, dropout_p=0.4)
    kept = dropped != 0
    assert float(kept.float().mean()) == pytest.approx(0.6, abs=0.03)
    torch.testing.assert_close(dropped, torch.where(kept, weights / 0.6, 0.0))


def test_grouped_attention_repeats_keys_and_values() -> None:
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    with SeededRandomness(0):
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=NOTHING, enable_gqa=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, enable_gqa=True))


def test_attention_refuses_two_masks(x: torch.Tensor) -> None:
    with SeededRandomness(0), pytest.raises(ValueError, match="attn_mask must be None with is_causal"):
        F.scaled_dot_product_attention(x, x, x, torch.zeros(4, 4), 0.3, True)


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_mode_reaches_inside_multi_head_attention(need_weights: bool) -> None:
    x = torch.randn(2, 5, 8)

    def attend(dropout: float) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        with SeededRandomness(3):
            return layer(x, x, x, need_weights=need_weights)[0]

    torch.testing.assert_close(attend(NOTHING), attend(0.0))
    assert torch.equal(attend(0.5), attend(0.5))
    assert not torch.allclose(attend(0.5), attend(0.0))


@pytest.mark.parametrize(
    ("layer", "name"),
    [(torch.nn.LSTM, "lstm"), (torch.nn.GRU, "gru"), (torch.nn.RNN, "rnn_tanh")],
)
def test_dropout_inside_recurrent_layers_is_refused(layer: Any, name: str) -> None:
    x = torch.randn(3, 2, 4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
    deep, flat = layer(4, 5, num_layers=2, dropout=0.5), layer(4, 5)
    for batch in (x, packed):
        with SeededRandomness(0), pytest.raises(ValueError, match=rf"torch.{name} draws its mask.*dropout=0.5"):
            deep(batch)
    deep.eval()
    with SeededRandomness(0):
        assert torch.equal(deep(x)[0], deep(x)[0])
        # One layer has no dropout to draw.
        flat(packed)


def test_every_random_function_is_seeded_or_refused() -> None:
    """Asks torch itself which of its operations draw."""
    # The mode's own table, since nobody says what arguments to call each of them with.
    known = set(dropout._HANDLERS)
    aten = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    missing, drawing = [], 0
    for name in sorted({name.partition(".")[0] for name in aten} - {"random"}):
        packet = getattr(torch.ops.aten, name)
        if not any(torch.Tag.nondeterministic_seeded in getattr(packet, form).tags for form in packet.overloads()):
            continue
        drawing += 1
        owners = (torch, torch.Tensor, F, torch._C._nn)  # pyright: ignore[reportAttributeAccessIssue]
        spellings = [getattr(owner, name, None) for owner in owners]
        missing += [(name, spelling) for spelling in spellings if spelling is not None and spelling not in known]
    assert missing == []
    assert drawing > 50


def words_of(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(words_of, inner))


def test_no_function_hides_its_draws_from_the_mode() -> None:
    """A mode is off in the body of a function of Python that asks for overrides. Which of them draw there?"""
    names = {func.__name__ for func in dropout._HANDLERS if hasattr(func, "__name__")}
    overridable = [func for funcs in torch.overrides.get_overridable_functions().values() for func in funcs]
    hiding = set()
    for func in (*overridable, *vars(torch.nn.init).values()):
        words = words_of(func.__code__) if isinstance(func, types.FunctionType) else set()
        if words & names and any(word.startswith("has_torch_function") for word in words):
            hiding.add(func)
    assert F.dropout in hiding
    assert hiding <= set(dropout._HANDLERS) | {torch.svd_lowrank, torch.pca_lowrank}


def test_low_rank_decompositions_draw_from_the_seed() -> None:
    # Both ask for overrides too, but not where all arguments are plain tensors.
    x = torch.randn(20, 10)
    for decompose in (torch.svd_lowrank, torch.pca_lowrank):
        assert torch.equal(seeded(lambda x: decompose(x, 3)[1])(x, 1), seeded(lambda x: decompose(x, 3)[1])(x, 1))


@torch.library.custom_op("fmp_test::noise", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


OPERATORS: dict[str, Draw] = {
    "native_dropout": lambda x: torch.ops.aten.native_dropout.default(x, 0.5, True)[0],
    "native_dropout_packet": lambda x: torch.ops.aten.native_dropout(x, 0.5, None)[0],
    "rand_like": lambda x: torch.ops.aten.rand_like.default(x),
    "prims": lambda x: torch.ops.prims.normal.default(
        [3], mean=0.0, std=1.0, dtype=x.dtype, device=x.device, requires_grad=False
    ),
    "custom": lambda x: noise(x),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("compiled", [False, True])
def test_operators_that_draw_are_refused(name: str, compiled: bool) -> None:
    run = seeded(OPERATORS[name])
    if compiled:
        run = torch.compile(run, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="cannot draw from a seed"):
        run(torch.ones(4, 5), torch.tensor(0))


def test_operators_with_their_draws_turned_off_pass_through(x: torch.Tensor) -> None:
    with SeededRandomness(0):
        assert torch.equal(torch.ops.aten.native_dropout.default(x, 0.5, False)[0], x)
        assert torch.equal(torch.ops.aten.dropout.default(x, 0.5, False), x)
        torch.ops.aten._scaled_dot_product_attention_math.default(x, x, x)
        with pytest.raises(ValueError, match="_scaled_dot_product_attention_math cannot draw"):
            torch.ops.aten._scaled_dot_product_attention_math(x, x, x, None, 0.5)


@pytest.mark.parametrize("inplace", [False, True])
def test_exported_modules_draw_from_the_seed(inplace: bool, x: torch.Tensor) -> None:
    exported = torch.export.export(torch.nn.Sequential(torch.nn.Dropout(0.3, inplace)), (x.clone(),)).module()
    if inplace:
        with pytest.raises(ValueError, match=r"dropout_.* cannot draw from a seed"):
            seeded(exported)(x, 3)
    else:
        assert torch.equal(seeded(exported)(x, 3), seeded(lambda x: F.dropout(x, 0.3))(x, 3))


class Dropped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * ctx.saved_tensors[0]


class DroppedByRows(Dropped):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return DroppedByRows.apply(x), 0


def test_custom_functions_draw_from_the_seed_under_transforms() -> None:
    x = torch.ones(20, 30)
    mask = seeded(lambda x: F.dropout(x))(x, 3)
    for function in (Dropped, DroppedByRows):
        grad = torch.func.grad(lambda x, function=function: function.apply(x).sum())
        assert torch.equal(seeded(function.apply)(x, 3), mask)
        assert torch.equal(seeded(lambda x, function=function: torch.func.vjp(function.apply, x)[0])(x, 3), mask)
        assert torch.equal(seeded(grad)(x, 3), mask)
        assert torch.equal(seeded(torch.func.vmap(DroppedByRows.apply))(x, 3), mask)
        state = torch.get_rng_state()
        seeded(torch.func.vmap(grad))(x, 3)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draws", [0, 1, 20])
def test_the_seeds_of_draws_are_not_those_a_user_folds(draws: int) -> None:
    mode = SeededRandomness(5)
    for _ in range(draws):
        mode.next_seed()
    seed, folded = mode.next_seed(), random.fold_in(5, torch.arange(100))
    assert seed not in folded
    assert seed != 5


def test_factories_write_into_out() -> None:
    for draw in (torch.rand, torch.randn, torch.ops.aten.rand.out):
        out = torch.full((5,), 7.0)
        with SeededRandomness(0):
            returned = draw([5], out=out)
        with SeededRandomness(0):
            expected = torch.randn(5) if draw is torch.randn else torch.rand(5)
        assert returned is out
        assert torch.equal(out, expected)
    drawn = torch.empty(0)
    with SeededRandomness(0):
        assert torch.bernoulli(torch.ones(2, 3), out=drawn) is drawn
    assert torch.equal(drawn, torch.ones(2, 3))


def test_factories_honor_or_refuse_their_options() -> None:
    with SeededRandomness(0):
        assert torch.rand(3, requires_grad=True).requires_grad
        assert not torch.randn(3).requires_grad
        for dtype in (torch.complex64, torch.int64):
            with pytest.raises(
                ValueError, match=f"randn draws only floating-point numbers from a seed, got dtype={dtype}"
            ):
                torch.randn(3, dtype=dtype)
        with pytest.raises(ValueError, match="rand with names or pin_memory cannot draw"):
            torch.rand(2, pin_memory=True)


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.randint(0, 5, (3,)),
        lambda x: torch.randperm(5),
        lambda x: torch.multinomial(x, 1),
        lambda x: torch.normal(x, 1.0),
        lambda x: x.clone().uniform_(),
        lambda x: x.clone().normal_(),
        lambda x: torch.dropout_(x.clone(), 0.5, True),
        lambda x: torch.distributions.Gamma(x, x).rsample(),
        lambda x: torch.distributions.Beta(x, x).rsample(),
        lambda x: torch.distributions.Dirichlet(x).rsample(),
        lambda x: torch._C._nn.rrelu_with_noise(x, x.clone(), 0.1, 0.4, True),  # pyright: ignore
        torch.nn.init.uniform_,
        torch.nn.init.normal_,
        lambda x: torch.nn.init.kaiming_uniform_(x, mode="fan_out"),
        torch.nn.init.kaiming_normal_,
        torch.nn.init.xavier_normal_,
        torch.nn.init.trunc_normal_,
        torch.nn.init.orthogonal_,
        lambda x: F.fractional_max_pool2d(x[None, None], 2, output_size=2),
    ],
)
def test_other_random_functions_are_refused(draw: Draw) -> None:
    with SeededRandomness(0), pytest.raises(ValueError, match="cannot draw from a seed; draw with"):
        draw(torch.full((4, 5), 0.5))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, generator: torch.rand(3, generator=generator),
        lambda x, generator: torch.bernoulli(x, generator=generator),
        lambda x, generator: x.clone().bernoulli_(0.5, generator=generator),
    ],
)
def test_a_generator_and_a_seed_exclude_each_other(draw: Callable[..., torch.Tensor]) -> None:
    with SeededRandomness(0), pytest.raises(ValueError, match="a generator and a seed exclude each other"):
        draw(torch.full((3,), 0.5), torch.Generator())


def test_other_functions_pass_through(x: torch.Tensor) -> None:
    with SeededRandomness(0) as mode:
        assert torch.equal(torch.linspace(0, 1, 4).unflatten(0, (2, 2)), torch.linspace(0, 1, 4).reshape(2, 2))
        F.layer_norm(x, (5,))
        F.dropout(x, 0.5, training=False)
    assert mode.calls == 0


def test_seeds_are_checked() -> None:
    with pytest.raises(TypeError, match="seed must be an integer"):
        SeededRandomness(1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seed must be a scalar"):
        SeededRandomness(torch.tensor([1, 2]))
