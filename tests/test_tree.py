import copy
import dataclasses
import io
import pickle
from collections import OrderedDict
from typing import Any, ClassVar

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, strategies as st
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fmp.tree
from fmp import dtypes
from fmp.scaling import DynamicLossScale, NoOpLossScale, StaticLossScale
from tests.host import NoHostSync

vjp: Any = torch.func.vjp  # its annotation leaves the length of the result open
INF, NAN = float("inf"), float("nan")
FLOATING = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and value.is_floating_point and "float4" not in str(value)
    },
    key=str,
)
COMPLEX = [torch.complex64, torch.complex128]


@fmp.tree.dataclass
class Average:
    total: torch.Tensor
    count: torch.Tensor
    parts: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    unit: str = fmp.tree.static(default="nats")
    decay: float = fmp.tree.static(default=0.9, kw_only=True)


@fmp.tree.dataclass
class Checked:
    value: torch.Tensor
    limit: int = fmp.tree.static(default=3)
    kind: ClassVar[str] = "checked"

    def __post_init__(self) -> None:
        if not isinstance(self.value, torch.Tensor):
            raise TypeError("value must be a tensor")


@fmp.tree.dataclass
class Renamed(Checked):
    """Adds nothing."""


@fmp.tree.dataclass
class Extended(Checked):
    extra: torch.Tensor | None = None
    unit: str = fmp.tree.static(default="m")


@fmp.tree.dataclass
class Patient(DynamicLossScale):
    """Inherits a constructor of its own making."""

    def adjust(self, grads_finite):
        return self


def average(**changes):
    fields = {"total": torch.tensor(1.5), "count": torch.tensor(2, dtype=torch.int32)}
    return Average(
        **{**fields, "parts": {"b": torch.ones(2).half(), "a": None}, "unit": "bits", "decay": 0.5, **changes}
    )


def scaler():
    return DynamicLossScale(init_scale=2.0**10, min_scale=1 / 64, growth_interval=7)


def same(left, right):
    """Says whether two trees are equal in every field, static ones included, in type and dtype too."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def saved_and_loaded(tree):
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ROUND_TRIPS = {
    "optree": lambda tree: optree.tree_map(lambda leaf: leaf, tree),
    "optree, None is a leaf": lambda tree: fmp.tree.map(lambda leaf: leaf, tree),
    "flatten": lambda tree: fmp.tree.unflatten(fmp.tree.structure(tree), fmp.tree.leaves(tree)),
    "torch pytree": lambda tree: torch_pytree.tree_map(lambda leaf: leaf, tree),
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": saved_and_loaded,
    "replace": lambda tree: fmp.tree.replace(tree) if dataclasses.is_dataclass(tree) else tree,
    "vmap": lambda tree: fmp.tree.map(
        lambda leaf: leaf if leaf is None else leaf[1],
        torch.func.vmap(lambda tree: tree)(
            fmp.tree.map(lambda leaf: leaf if leaf is None else torch.stack([leaf, leaf]), tree)
        ),
    ),
    "vmap, one for all": lambda tree: torch.func.vmap(lambda x, tree: tree, in_dims=(0, None), out_dims=None)(
        torch.ones(2), tree
    ),
    "vjp": lambda tree: vjp(lambda x: (x, tree), torch.ones(()), has_aux=True)[2],
    "grad": lambda tree: torch.func.grad(lambda x: (x, tree), has_aux=True)(torch.ones(()))[1],
    "compiled by eager": lambda tree: torch.compile(lambda tree: tree, backend="eager", fullgraph=True)(tree),
    "compiled": lambda tree: torch.compile(
        lambda tree: fmp.tree.map(lambda leaf: leaf if leaf is None else leaf + 0, tree),
        backend="aot_eager",
        fullgraph=True,
    )(tree),
}


@pytest.mark.parametrize("make", [average, scaler, lambda: {"a": average(), "b": [scaler(), StaticLossScale(8.0)]}])
@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_every_field_survives_a_round_trip(make, round_trip):
    tree = make()
    assert same(round_trip(tree), tree)
    assert same(round_trip(round_trip(tree)), make())


def test_same_notices_each_difference():
    for change in ({"total": torch.tensor(1.0)}, {"total": torch.tensor(1.5).double()}, {"unit": "m"}, {"decay": 1}):
        assert not same(average(), average(**change))
    assert not same(average(), average(parts={"b": torch.ones(2).half()}))


@pytest.mark.parametrize("fill", [None, object(), "x", NAN])
def test_unflatten_never_validates(fill):
    with pytest.raises(TypeError):
        Checked(fill)
    node: Any = Checked(torch.ones(1))
    for mapped in (
        fmp.tree.map(lambda _: fill, node),
        optree.tree_map(lambda _: fill, node),
        torch_pytree.tree_map(lambda _: fill, node),
        fmp.tree.replace(node, value=fill),
    ):
        assert mapped.value is fill
        assert mapped.limit == 3


def test_a_node_may_have_no_fields_at_all():
    assert fmp.tree.leaves(NoOpLossScale()) == []
    assert isinstance(fmp.tree.map(lambda leaf: leaf, NoOpLossScale()), NoOpLossScale)
    _, returned = torch.func.vmap(lambda x, scaler: (x, scaler), (0, None))(torch.ones(2), NoOpLossScale())
    assert isinstance(returned, NoOpLossScale)


def test_nodes_are_frozen():
    for name in ("total", "unit", "anything"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(average(), name, 1)


def test_nodes_compare_by_identity_and_hash():
    node = average()
    assert node == node
    assert node != average()
    assert len({node, average()}) == 2


def test_defaults_and_keyword_only_fields():
    node = Average(torch.ones(()), torch.ones(()))
    assert (node.parts, node.unit, node.decay) == ({}, "nats", 0.9)
    assert node.parts is not Average(torch.ones(()), torch.ones(())).parts
    with pytest.raises(TypeError):
        Average(torch.ones(()), torch.ones(()), {}, "bits", 0.5)  # pyright: ignore[reportCallIssue]


def test_static_fields_are_structure():
    assert fmp.tree.structure(average()) == fmp.tree.structure(average(total=3))
    assert fmp.tree.structure(average()) != fmp.tree.structure(average(unit="m"))
    with pytest.raises(ValueError, match=r"(?i)mismatch|differ"):
        fmp.tree.map(lambda a, b: a, average(), average(unit="m"))


def test_subclasses_are_nodes_of_their_own_class():
    for node in (Renamed(torch.ones(1), 5), Extended(torch.ones(1), 5, torch.zeros(1), "s")):
        mapped = fmp.tree.map(lambda leaf: leaf * 2, node)
        assert type(mapped) is type(node)
        assert mapped.limit == 5
        assert mapped.kind == "checked"
    assert fmp.tree.paths(Extended(torch.ones(1))) == ["value", "extra"]
    assert fmp.tree.structure(Extended(torch.ones(1))) != fmp.tree.structure(Extended(torch.ones(1), unit="s"))
    with pytest.raises(TypeError, match="value must be a tensor"):
        Extended(1)  # pyright: ignore[reportArgumentType]


def test_a_subclass_without_fields_inherits_the_constructor():
    patient: Any = Patient  # type checkers expect the constructor of a dataclass
    node = patient(init_scale=4.0, max_scale=8.0)
    assert (float(node.loss_scale), node.max_scale) == (4.0, 8.0)
    assert same(fmp.tree.map(lambda leaf: leaf, node), node)
    with pytest.raises(ValueError, match="init_scale"):
        patient(init_scale=0.0)


def test_defining_a_class_twice_registers_both():
    def define(unit):
        @fmp.tree.dataclass
        class Cell:
            value: int
            kind: str = fmp.tree.static(default=unit)

        return Cell

    first, second = define("a"), define("b")
    assert [fmp.tree.map(lambda leaf: leaf + 1, cls(1)).kind for cls in (first, second, first)] == ["a", "b", "a"]
    assert torch_pytree.tree_map(lambda leaf: leaf + 1, second(1)).value == 2


def test_replace():
    node = average()
    changed = fmp.tree.replace(node, total=torch.tensor(9.0), unit="m")
    assert float(changed.total) == 9.0
    assert (changed.unit, changed.decay) == ("m", 0.5)
    assert changed.parts is node.parts
    assert node.unit == "bits"
    with pytest.raises(TypeError, match=r"Average has no field \['sum'\]; its fields are \['total', 'count'"):
        fmp.tree.replace(node, sum=1)
    with pytest.raises(TypeError):
        fmp.tree.replace({"a": 1}, a=2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_nodes_inside_a_compiled_function(backend):
    def step(node, x):
        made = Average(x.sum(), node.count + 1, {"x": x, "none": None}, unit=node.unit)
        moved = fmp.tree.replace(made, total=made.total + node.total)
        mapped = fmp.tree.map(lambda leaf: leaf if leaf is None else leaf * 2, {"moved": moved, "old": node})
        chosen = fmp.tree.select(x.sum() > 0, mapped["moved"], moved)
        return chosen, DynamicLossScale(growth_interval=3, min_scale=0.1), fmp.tree.all_finite(mapped)

    expected = step(average(), torch.ones(3))
    found = torch.compile(step, backend=backend, fullgraph=True)(average(), torch.ones(3))
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_a_static_field_recompiles_and_a_tensor_does_not():
    counter = CompileCounter()
    compiled = torch.compile(lambda node: node.total * node.decay, backend=counter, fullgraph=True)
    for total in range(5):
        assert float(compiled(average(total=torch.tensor(float(total))))) == total * 0.5
    assert counter.frame_count == 1
    assert float(compiled(average(decay=0.25))) == 1.5 * 0.25
    assert counter.frame_count == 2


def test_vmap_over_some_arguments_of_nodes():
    ensemble = fmp.tree.map(lambda *leaves: torch.stack(leaves), *[StaticLossScale(float(2**k)) for k in range(3)])
    scaled = torch.func.vmap(lambda scaler, loss: scaler.scale(loss), in_dims=(0, None))(ensemble, torch.tensor(1.5))
    assert scaled.tolist() == [1.5, 3.0, 6.0]
    dims = fmp.tree.map(lambda _: 0, ensemble)
    scaled = torch.func.vmap(lambda scaler, loss: scaler.scale(loss), in_dims=(dims, None))(ensemble, torch.tensor(1.5))
    assert scaled.tolist() == [1.5, 3.0, 6.0]


def test_gradients_with_respect_to_a_node():
    node = Average(torch.tensor(3.0), torch.tensor(2.0), {"a": torch.tensor(1.0)})
    grads = torch.func.grad(lambda node: node.total**2 * node.count + node.parts["a"])(node)
    assert same(grads, Average(torch.tensor(12.0), torch.tensor(9.0), {"a": torch.tensor(1.0)}))
    _, pull = vjp(lambda node: fmp.tree.map(lambda leaf: leaf * 2, node), node)
    assert same(pull(node)[0], fmp.tree.map(lambda leaf: leaf * 2, node))


# ---------------------------------------------------------------------------------------------------------------- trees

TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.just("text")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text("ab/.", max_size=3), st.integers(0, 3)), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: fmp.tree.replace(average(), total=pair[0], parts=pair[1])),
    ),
    max_leaves=8,
)


@given(TREES)
def test_paths_leaves_and_items_agree(tree):
    leaves, spec = fmp.tree.flatten(tree)
    assert len(fmp.tree.paths(tree)) == len(leaves) == spec.num_leaves
    assert list(fmp.tree.items(tree)) == list(zip(fmp.tree.paths(tree), leaves, strict=True))
    assert fmp.tree.leaves(fmp.tree.unflatten(spec, leaves)) == leaves
    assert fmp.tree.structure(tree) == spec


@given(TREES)
def test_map_with_path_gives_each_leaf_its_path(tree):
    seen = []
    mapped = fmp.tree.map_with_path(lambda path, leaf, other: seen.append((path, leaf, other)) or leaf, tree, tree)
    assert [(path, leaf) for path, leaf, _ in seen] == list(fmp.tree.items(tree))
    assert all(leaf is other for _, leaf, other in seen)
    assert fmp.tree.structure(mapped) == fmp.tree.structure(tree)


def test_paths():
    tree = {"blocks": [{"w": 0}, ({"w": None},)], "node": average(), 3: 4}
    assert sorted(fmp.tree.paths(tree)) == sorted(
        ["3", "blocks/0/w", "blocks/1/0/w", "node/count", "node/parts/a", "node/parts/b", "node/total"]
    )
    assert fmp.tree.paths(None) == fmp.tree.paths(5) == [""]
    assert fmp.tree.paths({}) == fmp.tree.paths(()) == fmp.tree.leaves([]) == []


def test_map_follows_keys_not_order_and_passes_none():
    left, right = {"b": 1, "a": None}, OrderedDict(a=10, b=20)
    assert fmp.tree.map(lambda a, b: (a, b), left, dict(right)) == {"b": (1, 20), "a": (None, 10)}
    assert list(fmp.tree.map(lambda leaf: leaf, left)) == ["b", "a"]
    assert fmp.tree.map(lambda old, new: new, {"a": 1}, {"a": None}) == {"a": None}
    assert fmp.tree.map(lambda old, new: new, {"a": 1}, {"a": [1, 2]}) == {"a": [1, 2]}
    with pytest.raises(ValueError, match="key"):
        fmp.tree.map(lambda a, b: a, {"a": 1}, {"b": 1})


def test_describe():
    tree = {"w": torch.ones(3, 4).bfloat16(), "n": None, "k": 2, "s": "adam", "e": [torch.ones(0, 2, dtype=torch.bool)]}
    assert fmp.tree.describe(tree) == "{'w': bf16[3,4], 'n': None, 'k': 2, 's': 'adam', 'e': [bool[0,2]]}"
    assert fmp.tree.describe(torch.ones(2, dtype=torch.complex64)) == "c64[2]"
    assert fmp.tree.describe(StaticLossScale(2.0)) == "StaticLossScale(loss_scale=f32[])"
    descriptions = []
    torch.func.vmap(lambda x: descriptions.append(fmp.tree.describe(x)) or x)(torch.ones(2, 3))
    assert descriptions == ["f32[3]"]


# ----------------------------------------------------------------------------------------------------------------- cast


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_cast_touches_floating_tensors_only(dtype):
    tree = {
        **{str(source): torch.ones(2).to(source) for source in FLOATING},
        **{str(source): torch.ones(2).to(source) for source in (*COMPLEX, torch.int32, torch.uint8, torch.bool)},
        "none": None,
        "number": 1.5,
        "text": "f32",
    }
    cast = fmp.tree.cast(tree, dtype)
    for key, leaf in cast.items():
        if dtypes.is_castable(tree[key]):
            assert leaf.dtype == dtype
            assert (leaf.float() == 1).all()
        if not dtypes.is_castable(tree[key]) or tree[key].dtype == dtype:
            assert leaf is tree[key]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, "bf16", None, float, 16])
def test_cast_refuses_other_targets(dtype):
    with pytest.raises(TypeError, match="cast needs a floating-point torch dtype"):
        fmp.tree.cast({"w": torch.ones(2)}, dtype)


def test_cast_is_differentiable_and_vmaps():
    grad = torch.func.grad(lambda x: fmp.tree.cast([x], torch.bfloat16)[0].sum())(torch.ones(2))
    assert (grad.dtype, grad.tolist()) == (torch.float32, [1.0, 1.0])
    assert torch.func.vmap(lambda x: fmp.tree.cast(x, torch.float16))(torch.ones(2, 3)).dtype == torch.float16


# --------------------------------------------------------------------------------------------------------------- select


@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX, torch.int8, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("pred", [True, False])
def test_select_takes_every_dtype(dtype, pred):
    true, false = torch.ones(2, 3).to(dtype), torch.zeros(2, 3).to(dtype)
    chosen = fmp.tree.select(torch.tensor(pred), [true], [false])[0]
    assert chosen.dtype == dtype
    assert torch.equal(chosen.to(torch.complex64), (true if pred else false).to(torch.complex64))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_select_leaves_no_trace_of_the_other_tree(bad):
    good, poisoned = {"w": torch.randn(3), "n": None, "k": 3}, {"w": torch.full((3,), bad), "n": None, "k": 3}
    assert same(fmp.tree.select(torch.tensor(True), good, poisoned), good)
    assert same(fmp.tree.select(torch.tensor(False), poisoned, good), good)
    grad = torch.func.grad(lambda w: fmp.tree.select(torch.tensor(True), w, poisoned["w"] * w.detach()).sum())(
        good["w"]
    )
    assert grad.tolist() == [1.0, 1.0, 1.0]


def test_select_keeps_negative_zero_and_subnormals():
    values = torch.tensor([-0.0, 1e-45])
    chosen = fmp.tree.select(torch.tensor(True), values, torch.ones(2))
    assert torch.equal(chosen.view(torch.int32), values.view(torch.int32))


def test_select_with_one_predicate_a_member():
    pred = torch.tensor([True, False])
    tree = (torch.ones(2, 3), {"b": torch.ones(2)})
    other = fmp.tree.map(lambda leaf: leaf * NAN, tree)
    chosen = torch.func.vmap(fmp.tree.select)(pred, tree, other)
    assert chosen[0][0].tolist() == [1.0, 1.0, 1.0]
    assert chosen[0][1].isnan().all()
    shared = torch.func.vmap(fmp.tree.select, in_dims=(0, None, None))(pred, torch.ones(3), torch.zeros(3))
    assert shared.tolist() == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    ("true", "false", "error", "message"),
    [
        ({"a": {"b": torch.ones(2)}}, {"a": {"b": torch.ones(2).half()}}, TypeError, r"a/b: .*f32\[2\].*f16\[2\]"),
        ([torch.ones(2)], [torch.ones(3)], ValueError, r"0: .*f32\[2\].*f32\[3\]"),
        ([torch.ones(2, 1)], [torch.ones(2)], ValueError, r"0: .*f32\[2,1\].*f32\[2\]"),
        ([torch.ones(2)], [None], TypeError, r"0: .*f32\[2\].*None"),
        ([1], [2], TypeError, "0: on_true is 1, on_false is 2"),
        ([1], [1.0], TypeError, "0: on_true is 1, on_false is 1.0"),
        ([1], [True], TypeError, "0: on_true is 1, on_false is True"),
        ([1, 2], [1], ValueError, "differ in structure"),
        ({"a": 1}, {"b": 1}, ValueError, "differ in structure"),
        (StaticLossScale(1.0), DynamicLossScale(), ValueError, "differ in structure"),
        (DynamicLossScale(), DynamicLossScale(growth_interval=3), ValueError, "differ in structure"),
    ],
)
def test_select_names_what_differs(true, false, error, message):
    with pytest.raises(error, match=message):
        fmp.tree.select(torch.tensor(True), true, false)


@pytest.mark.parametrize(
    ("pred", "error", "message"),
    [
        (True, TypeError, "pred must be a boolean tensor, .* got True"),
        (None, TypeError, "pred must be a boolean tensor"),
        (torch.tensor(1), TypeError, r"pred must be a boolean tensor, .* got i64\[\]"),
        (torch.tensor(1.0), TypeError, r"f32\[\]"),
        (torch.ones(2, dtype=torch.bool), ValueError, r"pred must be a scalar, got bool\[2\]"),
        (torch.ones(1, dtype=torch.bool), ValueError, r"pred must be a scalar, got bool\[1\]"),
    ],
)
def test_select_refuses_other_predicates(pred, error, message):
    with pytest.raises(error, match=message):
        fmp.tree.select(pred, torch.ones(2), torch.ones(2))


# ----------------------------------------------------------------------------------------------------------- all_finite


@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX], ids=str)
def test_all_finite_in_every_dtype(dtype):
    ones = torch.ones(2, 3).to(dtype)
    assert bool(fmp.tree.all_finite([ones, None]))
    for bad in (INF, -INF, NAN):
        poisoned = torch.tensor([[1.0, bad], [0.0, 1.0]]).to(dtype)
        finite = bool(torch.isfinite(poisoned.to(torch.complex128)).all())  # some 8-bit formats have no inf
        assert bool(fmp.tree.all_finite({"a": ones, "b": poisoned})) == finite
        assert bool(fmp.tree.all_finite(torch.tensor(bad).to(dtype))) == bool(
            torch.isfinite(torch.tensor(bad).to(dtype).to(torch.complex128))
        )
    assert bool(fmp.tree.all_finite(torch.ones(0, 3).to(dtype)))


@given(st.lists(st.floats(width=32), max_size=5), st.lists(st.floats(width=16), max_size=5))
def test_all_finite_equals_isfinite(singles, halves):
    tree = {"single": torch.tensor(singles), "half": [torch.tensor(halves, dtype=torch.float16)]}
    expected = all(torch.isfinite(leaf).all() for leaf in fmp.tree.leaves(tree))
    assert bool(fmp.tree.all_finite(tree)) == expected


def test_all_finite_keeps_large_numbers_of_wide_dtypes():
    assert fmp.tree.all_finite([torch.tensor(1e300, dtype=torch.float64), torch.ones(2).half(), torch.tensor(1e38)])
    assert fmp.tree.all_finite([torch.tensor(3e38).bfloat16(), torch.tensor(6e4).half()])


@pytest.mark.parametrize("imaginary", [INF, NAN])
def test_all_finite_looks_at_imaginary_parts(imaginary):
    leaf = torch.complex(torch.ones(2), torch.tensor([0.0, imaginary]))
    assert not fmp.tree.all_finite(leaf)
    assert not fmp.tree.all_finite(leaf.conj())
    assert fmp.tree.all_finite(torch.ones(2).to(torch.complex64).conj())


@pytest.mark.parametrize("tree", [{}, [], None, 1.0, NAN, "x", [torch.arange(3)], [torch.tensor(True), torch.ones(0)]])
def test_all_finite_of_trees_without_numbers_to_check(tree):
    finite = fmp.tree.all_finite(tree)
    assert finite.shape == ()
    assert finite.dtype == torch.bool
    assert bool(finite)


def test_all_finite_looks_at_every_leaf():
    for position in range(4):
        tree = {"a": [torch.ones(2), torch.ones(3)], "node": average(total=torch.ones(()), count=torch.ones(()))}
        leaves, spec = fmp.tree.flatten(tree)
        floating = [index for index, leaf in enumerate(leaves) if dtypes.is_castable(leaf)]
        leaves[floating[position]] = torch.full_like(leaves[floating[position]], NAN)
        assert not fmp.tree.all_finite(fmp.tree.unflatten(spec, leaves))


def test_all_finite_answers_for_each_member():
    ensemble = {"w": torch.ones(3, 4), "b": torch.tensor([[1.0], [NAN], [1.0]])}
    assert torch.func.vmap(fmp.tree.all_finite)(ensemble).tolist() == [True, False, True]
    ensemble["w"][2, 3] = -INF
    assert torch.func.vmap(fmp.tree.all_finite)(ensemble).tolist() == [True, False, False]
    mixed = {
        "w": torch.ones(2, 3).half(),
        "b": torch.tensor([1e300, INF], dtype=torch.float64),
        "c": torch.ones(2) * 1j,
    }
    assert torch.func.vmap(fmp.tree.all_finite)(mixed).tolist() == [True, False]
    shared = torch.func.vmap(lambda w, b: fmp.tree.all_finite([w, b]), in_dims=(0, None))
    assert shared(torch.ones(2, 3), torch.tensor(NAN)).tolist() == [False, False]


def test_nothing_waits_for_the_device():
    tree = {"w": torch.randn(3), "h": torch.ones(2).half(), "s": scaler(), "c": torch.ones(2, dtype=torch.complex64)}
    with pytest.raises(AssertionError, match="waits for the device"), NoHostSync():
        bool(fmp.tree.all_finite(tree))
    for mode in (NoHostSync(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            finite = fmp.tree.all_finite(tree)
            assert fmp.tree.all_finite({}).shape == finite.shape == fmp.tree.global_norm(tree).shape == ()
            fmp.tree.select(finite, tree, fmp.tree.cast(tree, torch.float32) | {"h": tree["h"]})


# ---------------------------------------------------------------------------------------------------------- global_norm


def exact_norm(tree):
    return torch.cat([leaf.to(torch.complex128).flatten() for leaf in tree]).abs().square().sum().sqrt()


@pytest.mark.parametrize(
    "tree",
    [
        [torch.randn(50, 40), torch.randn(7)],
        [torch.randn(100).half() * 100, torch.randn(100)],
        [torch.randn(100).bfloat16()],
        [torch.randn(100).to(torch.float8_e5m2), torch.randn(5).to(torch.float8_e4m3fn)],
        [torch.randn(10, dtype=torch.complex64), torch.randn(4)],
        [torch.tensor(-2.0)],
        [torch.full((100_000,), 1e-3)],
        [torch.full((300, 1000), 1e-3).half().t(), torch.randn(2**14 + 1, 2)[:, 0]],
    ],
    ids=fmp.tree.describe,
)
def test_global_norm_against_double_precision(tree):
    norm = fmp.tree.global_norm(tree)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    torch.testing.assert_close(norm.double(), exact_norm(tree), rtol=2e-6, atol=0)


def test_global_norm_of_half_precision_does_not_overflow():
    grads = torch.full((1000,), 3000.0, dtype=torch.float16)
    torch.testing.assert_close(fmp.tree.global_norm([grads]), torch.tensor(3000.0 * 1000**0.5))
    small = torch.full((1000,), 2.0**-24, dtype=torch.float16)
    torch.testing.assert_close(fmp.tree.global_norm([small]), torch.tensor(2.0**-24 * 1000**0.5))


def test_global_norm_does_not_drift_over_many_entries():
    for entries in (torch.full((3_000_000,), 1e-3), torch.full((1000, 3000), 3000.0, dtype=torch.float16)):
        torch.testing.assert_close(
            fmp.tree.global_norm(entries).double(),
            entries[..., :1].double().abs().max() * entries.numel() ** 0.5,
            rtol=1e-5,
            atol=0,
        )


def test_global_norm_is_double_if_any_tensor_is():
    tree = [torch.tensor([3.0]), torch.tensor([1e-9], dtype=torch.float64), torch.tensor([4.0]).half()]
    norm = fmp.tree.global_norm(tree)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, exact_norm(tree), rtol=1e-15, atol=0)
    assert fmp.tree.global_norm([torch.ones(4, dtype=torch.complex128)]).dtype == torch.float64


@pytest.mark.parametrize("tree", [{}, None, [torch.arange(5), 3.0, None], [torch.ones(0)], torch.ones(0, 3).half()])
def test_global_norm_of_nothing(tree):
    norm = fmp.tree.global_norm(tree)
    assert (norm.dtype, norm.shape, float(norm)) == (torch.float32, (), 0.0)


def test_global_norm_does_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert fmp.tree.global_norm({}).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_global_norm_of_something_not_finite(bad):
    assert not torch.isfinite(fmp.tree.global_norm([torch.ones(3), torch.tensor([bad])]))


def test_global_norm_of_each_member():
    ensemble = {"a": torch.randn(3, 4), "b": torch.randn(3, 2, 2).half()}
    norms = torch.func.vmap(fmp.tree.global_norm)(ensemble)
    members = [fmp.tree.global_norm(fmp.tree.map(lambda leaf: leaf[i], ensemble)) for i in range(3)]
    torch.testing.assert_close(norms, torch.stack(members))


def test_global_norm_agrees_with_torch():
    grads = [torch.randn(30, 20), torch.randn(11)]
    torch.testing.assert_close(fmp.tree.global_norm(grads), torch.nn.utils.get_total_norm(grads))


def test_global_norm_has_a_gradient_even_at_zero():
    grad = torch.func.grad(fmp.tree.global_norm)({"a": torch.zeros(2), "b": torch.zeros(3)})
    assert all(leaf.eq(0).all() for leaf in grad.values())
    grad = torch.func.grad(fmp.tree.global_norm)({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    torch.testing.assert_close(grad, {"a": torch.tensor([0.6]), "b": torch.tensor([0.8])})
