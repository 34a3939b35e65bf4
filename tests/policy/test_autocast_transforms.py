"""Models cast op by op: the same dtypes and values eagerly, under every transform of torch.func, and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, hessian, jacrev, jvp, linearize, vmap

import fmp
from fmp import tree
from tests.bits import same_bits

# torch's lists leave mixed additions to torch.
pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),  # torch.func.linearize
]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MEMBERS = 3
See = Callable[[torch.Tensor], torch.Tensor]

# --- models: they show every intermediate to `see`, and return a loss


def mlp(see: See, params: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = see(torch.tanh(see(F.linear(x, params["w"], params["b"]))))
    out = see(see(hidden @ params["v"]) + params["b"])
    return see(((out - x).float() ** 2).mean())


def cnn(see: See, params: Any, x: torch.Tensor) -> torch.Tensor:
    image = x.reshape(2, 2, 2, 2)
    features = see(F.conv2d(image, params["conv"], padding=1))
    features = see(F.batch_norm(features, None, None, params["scale"], params["shift"], training=True))
    features = see(F.avg_pool2d(see(F.relu(features)), 2)).flatten(1)
    return see(see(F.linear(features, params["head"])).square().sum())


def transformer(see: See, params: Any, x: torch.Tensor) -> torch.Tensor:
    normed = see(F.layer_norm(x, (4,), params["scale"], params["shift"]))
    query, key, value = see(F.linear(normed, params["qkv"])).chunk(3, -1)
    scores = see(see(query @ key.transpose(-1, -2)) / 2.0)
    e = see(torch.exp(scores - scores.amax(-1, keepdim=True)))
    weights = see(e / see(e.sum(-1, keepdim=True)))
    x = see(x + see(F.linear(see(weights @ value), params["w"])))
    x = see(x + see(F.linear(see(F.gelu(see(F.linear(x, params["w"])))), params["v"])))
    return see(x.float().square().mean())


def composites(see: See, params: Any, x: torch.Tensor) -> torch.Tensor:
    unit = see(F.normalize(see(x @ params["w"]), dim=-1))
    logits = see(F.linear(unit, F.normalize(params["v"], dim=-1)))
    loss = see(F.cross_entropy(logits, torch.arange(4) % 3, label_smoothing=0.1))
    return see(loss + see(F.cosine_similarity(logits, x)).mean())


def promotions(see: See, params: Any, x: torch.Tensor) -> torch.Tensor:
    low = see(x @ params["w"])
    scaled = see(see(low * params["s"]) + params["s"].to(low.dtype))
    mixed = see(torch.where(low > params["s"], low, see(torch.addcmul(x, low, scaled))))
    joined = see(torch.cat([see(torch.stack([mixed, x])), see(torch.maximum(low, x))[None]]))
    return see(joined.float().mean())


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "composites": composites, "promotions": promotions}
EXPECTED = {  # what the reader of Apex's lists would say
    "mlp": [BF16, BF16, BF16, F32, F32],
    "cnn": [BF16, BF16, BF16, BF16, BF16, F32],
    "transformer": [F32, *[BF16] * 3, *[F32] * 3, *[BF16] * 2, F32, BF16, F32, BF16, F32, F32],
    "composites": [BF16, F32, BF16, F32, F32, F32],
    "promotions": [BF16, F32, F32, F32, F32, F32, F32, F32, F32],
}
RULES = {"apex": fmp.OpRules.apex(), "torch": fmp.OpRules.torch()}
LOWS = [BF16, F16]
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
every_policy = pytest.mark.parametrize(
    "policy",
    [fmp.Policy("f32", low, None, op_rules=rules) for rules in RULES.values() for low in LOWS],
    ids=[f"{name}-{fmp.tree.describe(torch.empty((), dtype=low))[:-2]}" for name in RULES for low in LOWS],
)
APEX = fmp.Policy("f32", "bf16", None, op_rules="apex")


def params() -> Any:
    generator = torch.Generator().manual_seed(1)
    sizes = {"w": (4, 4), "v": (4, 4), "b": (4,), "conv": (2, 2, 3, 3), "head": (3, 2), "qkv": (12, 4), "s": ()}
    random = {name: torch.randn(size, generator=generator) / 2 for name, size in sizes.items()}
    return {**random, "scale": torch.ones(4), "shift": torch.zeros(4)}


def params_of(model: Any) -> Any:
    norm = {"scale": torch.ones(2), "shift": torch.zeros(2)} if model is cnn else {}
    return {**params(), **norm}


def inputs() -> torch.Tensor:
    return torch.randn(MEMBERS, 4, 4, generator=torch.Generator().manual_seed(2))


def recording(model: Any) -> Any:
    """Makes a function that returns the loss and all intermediates."""

    def run(params: Any, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        seen: list[torch.Tensor] = []

        def see(value: torch.Tensor) -> torch.Tensor:
            seen.append(value)
            return value

        loss = model(see, params, x)
        return loss.float(), seen

    return run


def ones_like(values: Any) -> Any:
    return tree.map(torch.ones_like, values)


def transformed(run: Any) -> dict[str, Any]:
    """Each is a function of (params, x) that returns something of which the last part is the intermediates."""
    derivative = grad(run, has_aux=True)
    return {
        "grad": derivative,
        "vmap": lambda p, x: vmap(run, in_dims=(None, 0))(p, x.expand(MEMBERS, 4, 4)),
        "vmap(grad)": lambda p, x: vmap(derivative, in_dims=(None, 0))(p, x.expand(MEMBERS, 4, 4)),
        "jvp": lambda p, x: jvp(run, (p, x), (ones_like(p), torch.ones_like(x)), has_aux=True),
        "jvp(grad)": lambda p, x: jvp(derivative, (p, x), (ones_like(p), torch.ones_like(x)), has_aux=True),
        "jacrev": jacrev(run, has_aux=True),
    }


def of_each_member(intermediates: list[torch.Tensor], plain: list[torch.Tensor]) -> list[torch.Tensor]:
    return [a[0] if a.ndim > b.ndim else a for a, b in zip(intermediates, plain, strict=True)]


def dtypes(values: list[torch.Tensor]) -> list[torch.dtype]:
    return [value.dtype for value in values]


def check_alike(found: list[torch.Tensor], expected: list[torch.Tensor], low: Any) -> None:
    assert dtypes(found) == dtypes(expected)
    for one, other in zip(of_each_member(found, expected), expected, strict=True):
        # A mapped product may sum in another order, and an intermediate may then round to a neighbor.
        torch.testing.assert_close(one, other, rtol=8 * torch.finfo(low).eps, atol=4 * torch.finfo(low).eps)


# --- the same under every transform


@pytest.mark.parametrize("name", MODELS)
def test_the_dtypes_are_those_of_the_lists(name):
    _, seen = fmp.autocast(recording(MODELS[name]), APEX)(params_of(MODELS[name]), inputs()[0])
    assert dtypes(seen) == EXPECTED[name]


@every_policy
@every_model
def test_every_transform_sees_the_same(model, policy):
    run = recording(model)
    p, x = params_of(model), inputs()[0]
    _, expected = fmp.autocast(run, policy)(p, x)
    assert policy.compute_dtype in dtypes(expected)
    for inside, outside in zip(transformed(fmp.autocast(run, policy)).items(), transformed(run).items(), strict=True):
        name, inner = inside
        for where, fn in {"inside": inner, "outside": fmp.autocast(outside[1], policy)}.items():
            *values, seen = fn(p, x)
            assert dtypes(seen) == dtypes(expected), (name, where)
            check_alike(seen, expected, policy.compute_dtype)
            assert {leaf.dtype for leaf in tree.leaves(values)} == {F32}


@every_policy
@every_model
def test_transforms_that_give_no_intermediates(model, policy):
    run = fmp.autocast(recording(model), policy)
    p, x = params_of(model), inputs()
    _, expected = run(p, x[0])
    kinds: list[list[torch.dtype]] = []

    def loss(p, x):
        value, seen = run(p, x)
        kinds.append(dtypes(seen))
        return value

    together = grad(lambda p: vmap(loss, in_dims=(None, 0))(p, x).sum())(p)
    each = tree.map(lambda *leaves: sum(leaves), *[grad(loss)(p, one) for one in x])
    for path, leaf in tree.items(together):
        torch.testing.assert_close(leaf, dict(tree.items(each))[path], rtol=0.1, atol=0.05)
    value, pushforward = linearize(lambda x: loss(p, x), x[0])
    torch.testing.assert_close(value, loss(p, x[0]))
    torch.testing.assert_close(
        pushforward(torch.ones_like(x[0])), grad(loss, argnums=1)(p, x[0]).sum(), rtol=0.1, atol=0.05
    )
    curvature = hessian(lambda b: loss({**p, "b": b}, x[0]))(p["b"])
    assert curvature.dtype == F32
    assert curvature.isfinite().all()
    assert all(kind == dtypes(expected) for kind in kinds)


@every_policy
@every_model
def test_gradients_are_those_of_autograd(model, policy):
    cast = fmp.autocast(recording(model), policy)
    p, x = params_of(model), inputs()[0]
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), p)
    taped = torch.autograd.grad(cast(leaves, x)[0], tree.leaves(leaves), allow_unused=True)
    expected = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(taped, tree.leaves(leaves), strict=True)]
    assert {g.dtype for g in expected} == {F32}
    derive = lambda p: torch.autograd.grad(recording(model)(p, x)[0], tree.leaves(p), allow_unused=True)
    assert same_bits(fmp.autocast(derive, policy)(leaves), taped)
    for derivative in (fmp.grad(cast, has_aux=True), fmp.autocast(fmp.grad(recording(model), has_aux=True), policy)):
        assert same_bits(tree.leaves(derivative(p, x)[0]), expected)
    for derivative in (grad(cast, has_aux=True), fmp.autocast(grad(recording(model), has_aux=True), policy)):
        gradient = tree.leaves(derivative(p, x)[0])
        if model is cnn:  # under a transform torch takes the derivative of batch_norm apart
            torch.testing.assert_close(gradient, expected, rtol=0.1, atol=0.05)
        else:
            assert same_bits(gradient, expected)


# --- the same compiled


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", ["inside", "outside", "around"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_functions_see_the_same_and_compile_once(name, form, backend):
    policy = APEX if form != "outside" else fmp.Policy("f32", "f16", None, op_rules="torch")
    run = recording(MODELS[name])
    p, x = params_of(MODELS[name]), inputs()[0]
    _, expected = fmp.autocast(run, policy)(p, x)
    for transform in ("grad", "jvp") if backend == "eager" else ("vmap(grad)",):
        counter = CompileCounterWithBackend(backend)
        fn = transformed(fmp.autocast(run, policy) if form == "inside" else run)[transform]
        fn = torch.compile(fmp.autocast(fn, policy) if form == "outside" else fn, backend=counter, fullgraph=True)
        fn = fmp.autocast(fn, policy) if form == "around" else fn
        for _ in range(3):
            *values, seen = fn(p, x + 0.0)
            check_alike(seen, expected, policy.compute_dtype)
            assert {leaf.dtype for leaf in tree.leaves(values)} == {F32}
        assert counter.frame_count == 1


def test_one_compiled_function_under_several_policies_and_none():
    counter = CompileCounterWithBackend("eager")
    run = recording(mlp)
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    p, x = params(), inputs()[0]
    policies = [fmp.Policy("f32", low, None, op_rules=rules) for low in LOWS for rules in RULES.values()]
    for _ in range(2):
        for policy in policies:
            check_alike(fmp.autocast(compiled, policy)(p, x)[1], fmp.autocast(run, policy)(p, x)[1], BF16)
        check_alike(compiled(p, x)[1], run(p, x)[1], BF16)
    assert counter.frame_count == len(policies) + 1


def test_taped_gradients_through_a_compiled_function():
    run = fmp.autocast(recording(transformer), APEX)
    p, x = tree.map(torch.Tensor.requires_grad_, params()), inputs()[0]
    expected = torch.autograd.grad(run(p, x)[0], tree.leaves(p), allow_unused=True)
    for compiled in (
        torch.compile(run, backend="aot_eager", fullgraph=True),
        fmp.autocast(torch.compile(recording(transformer), backend="aot_eager", fullgraph=True), APEX),
    ):
        found = torch.autograd.grad(compiled(p, x)[0], tree.leaves(p), allow_unused=True)
        assert [g is None for g in found] == [g is None for g in expected]
        for one, other in zip(tree.leaves(found), tree.leaves(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.01)


def test_what_follows_a_graph_break_is_cast_too():
    def run(x, w):
        first = x @ w
        torch._dynamo.graph_break()
        second = (first @ w).softmax(-1)
        return first.dtype, second.dtype, (second @ w).dtype

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    compiled = torch.compile(fmp.autocast(run, APEX), backend="eager")
    for _ in range(2):
        assert compiled(x, w) == fmp.autocast(run, APEX)(x, w) == (BF16, F32, BF16)
    assert (x @ w).dtype == F32


@pytest.mark.parametrize("dtype", [torch.bool, F32])
def test_attention_with_a_padding_mask_compiles(dtype):
    layer = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    model = fmp.functionalize(layer)
    query, mask = torch.randn(2, 4, 8), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).to(dtype)
    options: Any = {"key_padding_mask": mask, "train": True}
    for apply in (model.apply, fmp.autocast(model.apply, APEX)):
        run = lambda seed, apply=apply: apply(model.params, {}, query, query, query, seed=seed, **options)[0]
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        for one, other in zip(compiled(1), run(1), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.01)
