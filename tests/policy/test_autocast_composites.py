"""What comes out of functions and layers that are made of several ops, in which dtype and close to float32."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmp
from fmp import tree

# Most calls here mix dtypes to see what becomes of them.
pytestmark = pytest.mark.mixed_dtypes

F32, BF16 = torch.float32, torch.bfloat16
LISTS = ["apex", "torch"]


def cast(fn, rules="apex", low=BF16):
    return fmp.autocast(fn, fmp.Policy("f32", low, None, op_rules=rules))


def _rand(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


X = _rand(4, 4) + 0.1
IMAGE = _rand(2, 4, 6, 6)
HEADS = _rand(1, 2, 4, 4)
LABELS = torch.arange(4)
MASK = torch.ones(4, 4, dtype=torch.bool).tril()


def inverse_of_product(x):
    return torch.linalg.inv(x @ x.t() + torch.eye(4))


def distance(x, y):
    return F.triplet_margin_with_distance_loss(x, y, x + 1.0, distance_function=nn.PairwiseDistance())


# Name, function, arguments, and what comes out by Apex's and by torch's rules: "low", "full", "as given" (the dtype of
# the first argument), "promoted".
CALLS = [
    ("cross_entropy of classes", F.cross_entropy, (X, LABELS), "full", "full"),
    ("cross_entropy of probabilities", F.cross_entropy, (X, X.softmax(-1)), "full", "full"),
    ("label smoothing", lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), (X,), "full", "full"),
    ("class weights", lambda x, w: F.cross_entropy(x, LABELS, w), (X, X[0]), "full", "full"),
    ("nll_loss", lambda x: F.nll_loss(x.log_softmax(-1), LABELS), (X,), "full", "full"),
    ("gaussian_nll_loss", F.gaussian_nll_loss, (X, X + 1.0, X), "full", "full"),
    ("triplet_margin_loss", F.triplet_margin_loss, (X, X + 1.0, X - 1.0), "full", "full"),
    ("triplet with a distance", distance, (X, X + 0.5), "full", "full"),
    ("huber_loss", F.huber_loss, (X, X + 1.0), "full", "full"),
    ("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, (X, X.round()), "full", "full"),
    ("normalize", F.normalize, (X,), "full", "full"),
    ("softmin", lambda x: F.softmin(x, -1), (X,), "full", "full"),
    ("local_response_norm", lambda x: F.local_response_norm(x, 2), (IMAGE[0],), "full", "full"),
    ("layer_norm", lambda x: F.layer_norm(x, (4,)), (X,), "full", "full"),
    ("LayerNorm", nn.LayerNorm(4), (X,), "full", "full"),
    ("GroupNorm", nn.GroupNorm(2, 4), (IMAGE,), "full", "full"),
    ("RMSNorm", nn.RMSNorm(4), (X,), "full", "full"),
    ("instance_norm", F.instance_norm, (IMAGE,), "as given", "as given"),
    ("InstanceNorm2d", nn.InstanceNorm2d(4, affine=True), (IMAGE,), "as given", "as given"),
    *[
        (f"interpolate {mode}", lambda x, mode=mode: F.interpolate(x, scale_factor=1.5, mode=mode), (x,), "full", other)
        for mode, x, other in [
            ("nearest", IMAGE, "full"),
            ("nearest-exact", IMAGE, "full"),
            ("linear", IMAGE[0], "full"),
            ("bilinear", IMAGE, "full"),
            ("bicubic", IMAGE, "full"),
            ("trilinear", IMAGE[None], "full"),
            ("area", IMAGE, "as given"),
        ]
    ],
    ("Upsample", nn.Upsample(scale_factor=2), (IMAGE,), "full", "full"),
    (
        "grid_sample",
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (IMAGE, _rand(2, 3, 3, 2)),
        "full",
        "promoted",
    ),
    ("einsum", lambda x, y: torch.einsum("ij,jk->ik", x, y), (X, X), "low", "low"),
    ("einsum of one", lambda x: torch.einsum("ij->ji", x), (X,), "low", "low"),
    ("tensordot", lambda x, y: torch.tensordot(x, y, 1), (X, X), "promoted", "promoted"),
    ("inner", torch.inner, (X, X), "promoted", "promoted"),
    ("Bilinear", nn.Bilinear(4, 4, 3), (X, X), "full", "full"),
    ("attention", F.scaled_dot_product_attention, (HEADS, HEADS, HEADS), "low", "low"),
    ("attention with a mask", lambda q, bias: F.scaled_dot_product_attention(q, q, q, bias), (HEADS, X), "low", "low"),
    ("attention, boolean mask", lambda q: F.scaled_dot_product_attention(q, q, q, MASK), (HEADS,), "low", "low"),
    ("causal", lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (HEADS,), "low", "low"),
    ("Conv2d", nn.Conv2d(4, 3, 2), (IMAGE,), "low", "low"),
    ("ConvTranspose2d", nn.ConvTranspose2d(4, 3, 2), (IMAGE,), "low", "low"),
    ("PReLU", nn.PReLU(), (X,), "low", "low"),
    ("Embedding", lambda w: F.embedding(LABELS, w), (X,), "as given", "as given"),
    ("embedding_bag", lambda w: F.embedding_bag(LABELS[None], w, mode="sum"), (X,), "as given", "as given"),
    ("gelu", F.gelu, (X,), "full", "as given"),
    ("dropout off", lambda x: F.dropout(x, training=False), (X,), "as given", "as given"),
    *[(str(cell), cell, (X,), "low", "low") for cell in (nn.RNNCell(4, 3), nn.GRUCell(4, 3), nn.LSTMCell(4, 3))],
    ("norm of a product", lambda x: (x @ x).norm(), (X,), "full", "full"),
    ("std", torch.std, (X,), "full", "as given"),
]


@pytest.mark.parametrize("given", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize(
    ("fn", "args", "apex", "torch_"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS]
)
def test_dtypes_and_values(fn, args, apex, torch_, rules, given):
    decision = apex if rules == "apex" else torch_
    narrowed = [args[0].to(given), *args[1:]]
    out = tree.leaves(cast(fn, rules)(*narrowed))
    widest = F32 if len(args) > 1 else given
    expected = {"low": BF16, "full": F32, "as given": given, "promoted": widest}[decision]
    assert {leaf.dtype for leaf in out} == {expected}
    torch.testing.assert_close([leaf.float() for leaf in out], tree.leaves(fn(*args)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("rules", LISTS)
def test_full_precision_composites_equal_those_of_float32(rules):
    half = X.to(BF16)
    for fn in (F.normalize, lambda x: F.cross_entropy(x, LABELS), lambda x: F.softmin(x, -1), lambda x: 2 / x):
        assert torch.equal(cast(fn, rules)(half), fn(half.float()))


def test_gumbel_softmax_is_full_and_seeded_by_its_seed():
    for rules in LISTS:
        for hard in (False, True):
            out = cast(lambda x, hard=hard: F.gumbel_softmax(x, hard=hard), rules)(X.to(BF16))
            assert out.dtype == F32
            torch.testing.assert_close(out.sum(-1), torch.ones(4))


def test_linear_algebra_and_transforms_of_a_product():
    """Apex's rules, with fmp's additions; torch's leave these in the 16 bits of the product, which have no kernel."""
    half = (X.to(BF16) @ X.to(BF16)).float()
    for fn in (torch.linalg.svdvals, torch.linalg.det, torch.linalg.qr, torch.fft.fft, torch.fft.rfft2):
        on_product = cast(lambda x, fn=fn: fn(x @ x))(X)
        torch.testing.assert_close(on_product, fn(half), rtol=0, atol=0)
    assert cast(inverse_of_product)(X).dtype == F32
    for fn in (torch.linalg.svdvals, torch.fft.fft):
        with pytest.raises(RuntimeError, match=r"(?i)bfloat16"):
            cast(lambda x, fn=fn: fn(x @ x), "torch")(X)


# --- batch norm


@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_matches_its_input_and_keeps_its_statistics_in_float32(rules, train):
    layer = nn.BatchNorm2d(4).train(train)
    reference, cast_layer = copy.deepcopy(layer), cast(layer, rules)
    half = IMAGE.to(BF16)
    for image in (IMAGE, half):
        out = cast_layer(image)
        expected = reference(image.float())
        assert out.dtype == image.dtype
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
        buffers = dict(layer.named_buffers())
        assert buffers["running_mean"].dtype == buffers["running_var"].dtype == F32
        torch.testing.assert_close(buffers, dict(reference.named_buffers()))
    assert layer.get_buffer("num_batches_tracked") == (2 if train else 0)
    mapped = torch.func.vmap(cast(lambda x: F.batch_norm(x, None, None, layer.weight, layer.bias, True), rules))
    assert mapped(half[None]).dtype == BF16


# --- attention


@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_multi_head_attention_is_cast_inside(rules, train, grad):
    layer = nn.MultiheadAttention(4, 2, batch_first=True).train(train)
    run = cast(layer, rules)
    with torch.set_grad_enabled(grad):
        for x in (X[None], X[None].to(BF16)):
            out, weights = run(x, x, x)
            assert (out.dtype, weights.dtype) == (BF16, F32)
            expected, expected_weights = layer(X[None], X[None], X[None])
            torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.02)
            torch.testing.assert_close(weights, expected_weights, rtol=0.05, atol=0.02)
            out, weights = run(x, x, x, attn_mask=MASK.logical_not(), need_weights=False)
            assert (out.dtype, weights) == (BF16, None)


@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_layers(rules, norm_first):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=norm_first, dropout=0.0)
    expected = layer(X[None])
    model = fmp.functionalize(layer)
    through = lambda x: model.apply(model.params, model.buffers, x, train=False)[0]
    for run in (layer, layer.eval(), torch.no_grad()(layer), through):
        out = cast(run, rules)(X[None])
        assert out.dtype == F32
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
        # Norms first, the residuals are added to the input; last, the layer ends in a LayerNorm.
        assert cast(run, rules)(X[None].to(BF16)).dtype == (BF16 if norm_first else F32)


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, q, mask=None, causal=False):
        return F.scaled_dot_product_attention(q, q, q, mask, self.dropout, causal)


@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize("kwargs", [{}, {"mask": X}, {"mask": MASK}, {"causal": True}], ids=str)
def test_seeded_dropout_does_not_change_the_dtype_of_attention(rules, kwargs):
    without, with_dropout = [fmp.functionalize(Attention(dropout)) for dropout in (0.0, 0.5)]
    run = lambda model, q: cast(lambda q: model.apply({}, {}, q, seed=3, **kwargs)[0], rules)(q)
    for q in (HEADS, HEADS.to(BF16)):
        assert run(without, q).dtype == run(with_dropout, q).dtype == BF16
        assert torch.equal(run(with_dropout, q), run(with_dropout, HEADS))
        assert not torch.equal(run(with_dropout, q), run(without, q))
    uncast = with_dropout.apply({}, {}, HEADS, seed=3, **kwargs)[0]
    torch.testing.assert_close(run(with_dropout, HEADS).float(), uncast, rtol=0.05, atol=0.02)


# --- recurrent networks

RECURRENT = {
    "RNN": lambda: nn.RNN(4, 5),
    "RNN with relu": lambda: nn.RNN(4, 5, nonlinearity="relu"),
    "LSTM": lambda: nn.LSTM(4, 5),
    "LSTM, two ways": lambda: nn.LSTM(4, 5, bidirectional=True),
    "LSTM, two layers": lambda: nn.LSTM(4, 5, num_layers=2, bias=False),
    "GRU": lambda: nn.GRU(4, 5),
    "GRU, two ways": lambda: nn.GRU(4, 5, bidirectional=True),
}


@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
def test_whole_recurrent_networks_run_low(make, rules):
    layer, x = make(), _rand(3, 2, 4)
    low = copy.deepcopy(layer).to(BF16)
    model = fmp.functionalize(layer)
    through = cast(lambda x, *state: model.apply(model.params, model.buffers, x, *state)[0], rules)
    packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2])
    narrow_packed = nn.utils.rnn.pack_padded_sequence(x.to(BF16), [3, 2])
    expected, state = low(x.to(BF16))
    for out, last in (
        cast(layer, rules)(x),
        through(x),
        through(x.to(BF16)),
        through(x, tree.cast(_start(state), F32)),
    ):
        assert torch.equal(out, expected)
        assert tree.all_finite(last)
        torch.testing.assert_close(last, state, rtol=0, atol=0)
    expected = low(narrow_packed)[0].data
    for out, _ in (cast(layer, rules)(packed), through(packed), through(narrow_packed)):
        assert torch.equal(out.data, expected)


def _start(state):
    return tree.map(torch.zeros_like, state)


def test_a_recurrent_layer_after_a_linear_one_needs_functionalize():
    layer = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 5))
    with pytest.raises(ValueError, match="RNN input dtype"):
        cast(layer)(_rand(3, 2, 4))
    model = fmp.functionalize(layer)
    out, _ = cast(lambda x: model.apply(model.params, model.buffers, x)[0])(_rand(3, 2, 4))
    assert out.dtype == BF16
    recurrent = fmp.functionalize(layer[1])
    with pytest.raises(RuntimeError, match="must be equal to input_size"):
        recurrent.apply(recurrent.params, recurrent.buffers, _rand(3, 2, 7))


def test_a_projecting_lstm():
    layer = nn.LSTM(4, 5, proj_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # oneDNN has none
        out, (last, cell) = cast(layer)(_rand(3, 2, 4))
    assert {out.dtype, last.dtype, cell.dtype} == {BF16}
