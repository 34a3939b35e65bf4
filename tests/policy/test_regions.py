"""Functions of one's own as ops: low_precision, full_precision and promote."""

import pytest
import torch
from torch import nn

import fmp
from fmp.policy.caster import casters

# What the regions take mixes dtypes on purpose.
pytestmark = pytest.mark.mixed_dtypes

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
O1 = fmp.Policy("f32", "bf16", None, op_rules="apex")
REGIONS = {"low": fmp.low_precision, "full": fmp.full_precision, "promote": fmp.promote}


def ops(x, y):
    """The dtypes of what arrives, and of a product, an exponential and a sum of it."""
    return [tensor.dtype for tensor in (x, y, x @ x, y.softmax(-1), x[:1] * 2 + y[:1] * 2)]


@pytest.fixture
def x():
    return torch.rand(4, 4)


@pytest.fixture(params=REGIONS)
def region(request):
    return REGIONS[request.param]


# --- what a region casts


def test_everything_in_a_region_runs_in_one_dtype(x):
    half = x.to(BF16)
    assert fmp.autocast(fmp.low_precision(ops), O1)(x, half) == [BF16] * 5
    assert fmp.autocast(fmp.full_precision(ops), O1)(half, half) == [F32] * 5
    assert fmp.autocast(fmp.promote(ops), O1)(half, x) == [F32] * 5
    assert fmp.autocast(fmp.promote(ops), O1)(half, half) == [BF16] * 5
    assert fmp.autocast(fmp.promote(ops), O1)(half, x.to(F16)) == [F32] * 5
    # Without a region each op has its own dtype.
    assert fmp.autocast(ops, O1)(half, x) == [BF16, F32, BF16, F32, F32]


def test_low_is_the_compute_dtype_of_the_policy(x):
    for dtype in (F16, BF16):
        policy = fmp.Policy("f32", dtype, None, op_rules=fmp.OpRules())
        assert fmp.autocast(fmp.low_precision(ops), policy)(x, x) == [dtype] * 5


def test_the_ops_around_a_region_are_cast_as_ever(x):
    inner = fmp.full_precision(lambda a: a @ a)

    def fn(a):
        before, inside = a @ a, inner(a)
        return before, inside, inside @ inside

    assert [out.dtype for out in fmp.autocast(fn, O1)(x)] == [BF16, F32, BF16]


@pytest.mark.parametrize(
    "policy", [None, fmp.Policy("f32", None, None), fmp.Policy("f32", None, None, op_rules="apex")]
)
def test_a_region_does_nothing_where_no_op_is_cast(policy, region, x):
    half = x.to(BF16)
    seen = []

    def fn(a, b):
        seen.extend([a is x, b is half])
        return a @ a, b.exp()

    run = region(fn) if policy is None else fmp.autocast(region(fn), policy)
    assert [out.dtype for out in run(x, half)] == [F32, BF16]
    assert seen == [True, True]


def test_a_policy_without_op_rules_casts_at_its_border_only(region, x):
    run = fmp.autocast(region(lambda a: (a, a @ a, a.exp())), fmp.Policy("f32", "bf16", None))
    assert [out.dtype for out in run(x)] == [BF16] * 3


# --- arguments


def test_trees_and_keywords_are_cast_and_the_rest_is_left_alone(x):
    @fmp.low_precision
    def fn(batch, *, scale, options):
        return batch, scale, options

    labels, phase = torch.arange(4), torch.ones(2, dtype=torch.complex64)
    batch = {"x": x, "pair": (x.double(), [labels, None]), "phase": phase}
    cast, scale, options = fmp.autocast(fn, O1)(batch, scale=x, options={"eps": 1e-6, "name": "a", "flag": True})
    assert (cast["x"].dtype, cast["pair"][0].dtype, scale.dtype) == (BF16, BF16, BF16)
    assert cast["pair"][1][0] is labels
    assert cast["pair"][1][1] is None
    assert cast["phase"] is phase
    assert options == {"eps": 1e-6, "name": "a", "flag": True}
    assert batch["x"].dtype == F32  # the caller's tree is as it was


def test_float64_is_left_alone_under_torch_rules(region, x):
    run = fmp.autocast(region(lambda a, b: (a, b)), fmp.Policy("f32", "bf16", None, op_rules="torch"))
    wide, _ = run(x.double(), x)
    assert wide.dtype == F64


def test_a_region_without_tensors_runs(region):
    assert fmp.autocast(region(lambda n: n + 1), O1)(1) == 2


def test_what_a_function_closes_over_is_not_cast(x):
    weight = torch.rand(4, 4)
    run = fmp.autocast(fmp.low_precision(lambda a: a @ weight), O1)
    with pytest.raises(RuntimeError, match="dtype"):
        run(x)


def test_a_decorated_forward(x):
    class Router(nn.Module):
        """A layer that scores in float32 whatever the ops around it do."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @fmp.full_precision
        def forward(self, x):
            """Scores."""
            return self.linear(x)

    model = nn.Sequential(nn.Linear(4, 4), Router(), nn.Linear(4, 4))
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda layer, args, out: seen.append((args[0].dtype, out.dtype)))
    fmp.autocast(model, O1)(x)
    assert seen == [(F32, BF16), (BF16, F32), (F32, BF16)]
    assert Router.forward.__doc__ == "Scores."


def test_a_module_can_be_a_region(x):
    assert fmp.autocast(fmp.full_precision(nn.Linear(4, 4)), O1)(x.to(BF16)).dtype == F32


def test_only_functions_can_be_decorated(region, x):
    with pytest.raises(TypeError, match=r"fmp\.\w+ transforms a function, got tensor"):
        region(x)


# --- nesting and errors


def test_a_region_in_a_region_is_part_of_it(x):
    inner = fmp.full_precision(lambda a: (a @ a).dtype)
    assert fmp.autocast(fmp.low_precision(lambda a: inner(a)), O1)(x) == BF16
    assert fmp.autocast(lambda a: inner(a), O1)(x) == F32


def test_a_policy_in_a_region_casts_again(x):
    inner = fmp.autocast(torch.matmul, fmp.Policy("f32", "f16", None, op_rules="apex"))

    def fn(a):
        return [(a @ a).dtype, inner(a, a).dtype, fmp.low_precision(torch.matmul)(a, a).dtype, (a @ a).dtype]

    assert fmp.autocast(fmp.full_precision(fn), O1)(x) == [F32, F16, F32, F32]


def test_a_region_in_an_inner_policy_takes_its_dtype(x):
    low = fmp.low_precision(lambda a: a.dtype)
    inner = fmp.autocast(low, fmp.Policy("f32", "f16", None, op_rules="apex"))
    off = fmp.autocast(low, fmp.Policy(None, None, None))
    assert fmp.autocast(lambda a: [low(a), inner(a), off(a), low(a)], O1)(x) == [BF16, F16, F32, BF16]


def test_an_error_inside_ends_the_region(region, x):
    @region
    def fails(a):
        raise KeyError("inside")

    def fn(a):
        with pytest.raises(KeyError, match="inside"):
            fails(a)
        return a @ a

    assert fmp.autocast(fn, O1)(x).dtype == BF16
    with pytest.raises(KeyError, match="inside"):
        fmp.autocast(fails, O1)(x)
    assert casters() == []
    assert (x @ x).dtype == F32


# --- transforms


def loss(x, y):
    return (x @ y).exp().mean()


@pytest.mark.parametrize(("decorate", "dtype"), [(fmp.low_precision, BF16), (fmp.full_precision, F32)])
def test_gradients_pass_through_the_casts(decorate, dtype, x):
    y = torch.rand(4, 4)

    def by_hand(a, b):
        return loss(a.to(dtype), b.to(dtype))

    for run in (fmp.autocast(decorate(loss), O1), fmp.autocast(lambda a, b: decorate(loss)(a, b) * 1, O1)):
        value, (gx, gy) = fmp.value_and_grad(run, argnums=(0, 1))(x, y)
        expected, (ex, ey) = fmp.value_and_grad(by_hand, argnums=(0, 1))(x, y)
        assert value.dtype == dtype
        assert gx.dtype == gy.dtype == F32
        assert torch.equal(value, expected)
        assert torch.equal(gx, ex)
        assert torch.equal(gy, ey)


def test_regions_inside_transforms(region, x):
    half = x.to(BF16)
    run = fmp.autocast(region(lambda a, b: a @ b.to(a.dtype)), O1)
    eager = run(half, x)
    mapped = torch.func.vmap(run, in_dims=(0, None))(half[None], x)
    tangent = torch.func.jvp(run, (half, x), (half, x))[1]
    grad = torch.func.grad(lambda a, b: run(a, b).float().sum())(half, x)
    assert mapped.dtype == tangent.dtype == eager.dtype
    assert grad.dtype == BF16
    torch.testing.assert_close(mapped[0], eager)
    inside = fmp.autocast(lambda a, b: torch.func.vmap(region(torch.matmul))(a[None], b[None]), O1)
    assert inside(x, x).dtype == (BF16 if region is fmp.low_precision else F32)


def test_regions_are_compiled_like_eager(region, x):
    def fn(a, b):
        hidden = a @ a
        return region(lambda p, q: p * 2 + q)(hidden, b), hidden.softmax(-1)

    run = fmp.autocast(fn, O1)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x), run(x, x), rtol=0, atol=0)
