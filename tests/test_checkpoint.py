import json
import math
import os
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from fmp import checkpoint, files, tree
from fmp.errors import CheckpointError
from fmp.scaling import DynamicLossScale, NoOpLossScale, StaticLossScale

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
]


@tree.dataclass
class Moments:
    count: torch.Tensor
    mu: Any
    nu: Any
    decay: float = tree.static(default=0.9)
    note: Any = tree.static(default=None)


class Pair(NamedTuple):
    first: Any
    second: Any


def same(one: Any, other: Any) -> bool:
    """Says whether two trees agree in structure, static fields, types, dtypes, shapes and bits."""

    def same_leaf(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(files.raw_bytes(a), files.raw_bytes(b))
        return type(a) is type(b) and repr(a) == repr(b)

    if tree.structure(one) != tree.structure(other):
        return False
    return all(same_leaf(a, b) for a, b in zip(tree.leaves(one), tree.leaves(other), strict=True))


def blank(state: Any) -> Any:
    """Makes the tree to restore into: the same structure with other values."""

    def blank_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty_like(leaf, device="meta")
        return None if leaf is None else type(leaf)()

    return tree.map(blank_leaf, state)


def example() -> dict[str, Any]:
    torch.manual_seed(0)
    w = torch.randn(3, 4)
    return {
        "params": {"w": w.bfloat16(), "norm": torch.ones(4)},
        "master": {"w": w, "norm": None},
        "opt_state": (Moments(torch.tensor(3), {"w": w * 0.1, "norm": w[0]}, None, decay=0.95, note=("é", 1)),),
        "loss_scale": DynamicLossScale(1024.0, growth_interval=7, min_scale=1 / 64),
        "epoch": 3,
        "name": "résumé",
    }


def fresh() -> dict[str, Any]:
    """Makes what a resuming script has: the example's structure, with default static fields."""
    state = blank(example())
    state["opt_state"] = (tree.replace(state["opt_state"][0], decay=0.9, note=None),)
    state["loss_scale"] = DynamicLossScale()
    return state


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte % 2 for byte in data)
    raw = torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    tensor = raw.clone().view(dtype).reshape(shape)
    return tensor.mT if tensor.ndim >= 2 and draw(st.booleans()) else tensor


values = st.one_of(tensors(), st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
keys = st.text("aé.~/_0\0 ", max_size=3) | st.sampled_from(["__metadata__", "0"]) | st.integers(0, 2)
trees = st.recursive(
    values,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.builds(lambda a, b: (a, b), inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Moments, inner, inner, inner, decay=st.floats(allow_nan=False), note=st.text(max_size=2) | st.none()),
        st.builds(OrderedDict, st.dictionaries(keys, inner, max_size=2)),
    ),
    max_leaves=8,
)


@given(state=trees)
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "state"
    before = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
    checkpoint.save(state, path)
    assert same(state, before)
    assert same(checkpoint.load(blank(state), path), state)


@given(leaf=tensors())
def test_every_dtype_and_bit_pattern_comes_back(tmp_path_factory: pytest.TempPathFactory, leaf: torch.Tensor) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "state"
    checkpoint.save(leaf, path)
    restored = checkpoint.load(torch.empty_like(leaf), path)
    assert same(restored, leaf)
    assert restored.stride() == torch.empty_like(leaf).stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_through_strides_and_devices(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    leaf = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(2, 3).t()
    checkpoint.save({"w": leaf, "one": leaf[1, 1]}, tmp_path / "state")
    for like in (leaf, leaf.contiguous(), torch.empty_like(leaf, device="meta")):
        restored = checkpoint.load({"w": like, "one": like[1, 1]}, tmp_path / "state")
        assert same(restored, {"w": leaf, "one": leaf[1, 1]})
        assert restored["w"].device.type == "cpu"
        assert restored["w"].stride() == like.stride()


def test_nan_payloads_and_signed_zeros(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 1, 0x7F800000], dtype=torch.int32)
    checkpoint.save(bits.view(torch.float32), tmp_path / "state")
    assert torch.equal(checkpoint.load(torch.zeros(6), tmp_path / "state").view(torch.int32), bits)


@pytest.mark.parametrize("form", [str, Path, lambda path: _PathLike(path)])
def test_paths_of_any_kind(tmp_path: Path, form: Callable[[Path], Any]) -> None:
    path = form(tmp_path / "state.safetensors")
    assert checkpoint.save(example(), path) is None
    assert same(checkpoint.load(fresh(), path), example())
    assert os.listdir(tmp_path) == ["state.safetensors"]


class _PathLike:
    def __init__(self, path: Path):
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_static_fields_of_a_scaler_are_restored(tmp_path: Path) -> None:
    scaler = DynamicLossScale(2.0**-3, growth_interval=7, growth_factor=1.5, min_scale=1 / 64, max_scale=2.0**30)
    scaler = scaler.adjust(torch.tensor(True))
    checkpoint.save(scaler, tmp_path / "state")
    restored = checkpoint.load(DynamicLossScale(), tmp_path / "state")
    assert same(restored, scaler)
    assert (restored.growth_interval, restored.min_scale, restored.growth_factor) == (7, 1 / 64, 1.5)
    assert [type(getattr(restored, name)) for name in ("growth_interval", "min_scale")] == [int, float]
    assert restored.growth_count.dtype == torch.int32
    for _ in range(6):
        restored = restored.adjust(torch.tensor(True))
    assert restored.loss_scale == 1.5 * 2.0**-3
    assert DynamicLossScale().growth_interval == 2000


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 2**70, -0.0, 1e300, math.inf, math.nan, "\ud800", (), (1, ("a", (None,)))),
        *(torch.bfloat16, torch.Size([2, 3]), torch.device("cuda", 1), frozenset({("b",)}), frozenset()),
    ],
    ids=repr,
)
def test_static_values_keep_value_and_type(tmp_path: Path, value: Any) -> None:
    checkpoint.save(Moments(torch.tensor(0), None, None, note=value), tmp_path / "state")
    restored = checkpoint.load(Moments(torch.tensor(1), None, None, note="other"), tmp_path / "state")
    assert type(restored.note) is type(value)
    assert repr(restored.note) == repr(value)


def test_sets_do_not_depend_on_their_order(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    # 0 and 8 share a slot of the hash table, so these two iterate in different orders.
    for path, numbers in zip(paths, [(0, 8), (8, 0)], strict=True):
        checkpoint.save(Moments(torch.tensor(0), None, None, note=frozenset(numbers)), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "scaler": DynamicLossScale(), "epoch": 3}
    found = set()
    for index in range(8):
        checkpoint.save(state, tmp_path / str(index))
        found.add((tmp_path / str(index)).read_bytes())
    assert len(found) == 1


def _cosine(count: torch.Tensor) -> torch.Tensor:
    return torch.cos(count)


@pytest.mark.parametrize(
    "note", [_cosine, (1, _cosine), frozenset({_cosine}), range(3)], ids=["function", "tuple", "frozenset", "range"]
)
def test_static_values_without_an_encoding_must_match(tmp_path: Path, note: Any) -> None:
    checkpoint.save([Moments(torch.tensor(5), None, None, note=note)], tmp_path / "state")
    [restored] = checkpoint.load([Moments(torch.tensor(0), None, None, note=note)], tmp_path / "state")
    assert restored.note is note
    assert restored.count == 5
    with pytest.raises(CheckpointError, match=r"0: the static field note is .* in the file and 'other' in `like`"):
        checkpoint.load([Moments(torch.tensor(0), None, None, note="other")], tmp_path / "state")


def test_containers_keep_their_kind_and_order(tmp_path: Path) -> None:
    one = torch.ones(())
    state = {
        "z": OrderedDict(b=one, a=2 * one),
        "a": defaultdict(list, {"k": one}),
        "d": deque([one, None], maxlen=5),
        "e": [(), {}, [], NoOpLossScale(), Pair(one, {"y": one, "x": one})],
    }
    checkpoint.save(state, tmp_path / "state")
    restored = checkpoint.load(blank(state), tmp_path / "state")
    assert same(restored, state)
    assert list(restored) == list(state)
    assert restored["a"].default_factory is list
    assert restored["d"].maxlen == 5


def test_odd_keys_do_not_collide(tmp_path: Path) -> None:
    numbers = iter(range(100))

    def leaf() -> torch.Tensor:
        return torch.tensor(next(numbers))

    state = {
        "a/b": leaf(),
        "a": {"b": leaf(), "~1b": leaf()},
        "a~1b": leaf(),
        "": {"": leaf(), "/": leaf()},
        "/": leaf(),
        "__metadata__": leaf(),
        "~": leaf(),
        "0": leaf(),
        0: leaf(),
        (1, "x/y"): leaf(),
        "~int 0": leaf(),
        "é\n\0": leaf(),
    }
    checkpoint.save(state, tmp_path / "state")
    assert same(checkpoint.load(blank(state), tmp_path / "state"), state)
    checkpoint.save({"__metadata__": leaf()}, tmp_path / "state")
    assert checkpoint.load({"__metadata__": torch.tensor(0)}, tmp_path / "state")


def test_keys_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    with pytest.raises(ValueError, match=r"a/~Key key: two leaves have this path"):
        checkpoint.save({"a": {Key(): 1, Key(): 2}}, tmp_path / "state")
    with pytest.raises(ValueError, match=r"ud800.*not valid Unicode"):
        checkpoint.save({"\ud800": torch.ones(1)}, tmp_path / "state")
    assert os.listdir(tmp_path) == []


def test_shared_memory_views_and_gradients(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    weight = torch.nn.Parameter(base.clone())
    state = {
        "base": base,
        "row": base[1],
        "columns": base[:, 1:3],
        "bits": base.view(torch.int32),
        "broadcast": base[0].expand(3, 6),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": weight,
        "computed": weight * 2,
    }
    checkpoint.save(state, tmp_path / "state")
    restored = checkpoint.load(state, tmp_path / "state")
    assert same(restored, state)
    assert all(type(leaf) is torch.Tensor and not leaf.requires_grad for leaf in tree.leaves(restored))
    pointers = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(restored)}
    assert len(pointers) == len(state)
    # The restored state no longer depends on the file.
    for leaf in tree.leaves(restored):
        leaf.view(torch.uint8).fill_(7)
    assert same(checkpoint.load(state, tmp_path / "state"), state)


def test_the_file_opens_as_plain_safetensors(tmp_path: Path) -> None:
    state = example()
    checkpoint.save(state, tmp_path / "state")
    plain = safetensors.torch.load_file(tmp_path / "state")
    expected = {path: leaf for path, leaf in tree.items(state) if isinstance(leaf, torch.Tensor)}
    assert plain.keys() == expected.keys()
    assert same(plain, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["params"].pop("norm"), r"params/norm is f32\[4\] in the file and absent in `like`"),
        (lambda s: s["params"].update(b=torch.ones(2)), r"params/b is absent in the file and f32\[2\] in `like`"),
        (lambda s: s["params"].update(w=torch.ones(3, 4)), r"params/w is bf16\[3,4\] in the file and f32\[3,4\] in"),
        (lambda s: s["params"].update(norm=torch.ones(1, 4)), r"params/norm is f32\[4\] in the file and f32\[1,4\] in"),
        (lambda s: s["master"].update(w=None), r"master/w is f32\[3,4\] in the file and None in `like`"),
        (lambda s: s["master"].update(norm=torch.ones(4)), r"master/norm is None in the file and f32\[4\] in `like`"),
        (lambda s: s.update(epoch=3.0), r"epoch is int in the file and float in `like`"),
        (lambda s: s.update(epoch=True), r"epoch is int in the file and bool in `like`"),
        (lambda s: s.update(name={}), r"name is str in the file and dict in `like`"),
        (lambda s: s.update(opt_state=list(s["opt_state"])), r"opt_state is tuple in the file and list in `like`"),
        (
            lambda s: s.update(loss_scale=StaticLossScale(1.0)),
            r"loss_scale is fmp.scaling.DynamicLossScale in the file and fmp.scaling.StaticLossScale in `like`\n"
            r"  loss_scale/growth_count is i32\[\] in the file and absent in `like`",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    checkpoint.save(example(), tmp_path / "state")
    like = fresh()
    change(like)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(like, tmp_path / "state")
    assert str(caught.value).startswith(f"{tmp_path / 'state'}: the checkpoint does not fit `like`:\n")


def test_many_misfits_are_counted(tmp_path: Path) -> None:
    checkpoint.save({str(i): torch.ones(1) for i in range(25)}, tmp_path / "state")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load({str(i): torch.ones(2) for i in range(25)}, tmp_path / "state")
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert lines[1] == "  0 is f32[1] in the file and f32[2] in `like`"
    assert lines[-1] == "  and 15 more"


def test_a_single_leaf_is_a_tree(tmp_path: Path) -> None:
    checkpoint.save(torch.tensor(2.0), tmp_path / "state")
    assert checkpoint.load(torch.tensor(0.0), tmp_path / "state") == 2.0
    with pytest.raises(CheckpointError, match=r"the tree itself is f32\[\] in the file and None in `like`"):
        checkpoint.load(None, tmp_path / "state")
    checkpoint.save({}, tmp_path / "state")
    assert checkpoint.load({}, tmp_path / "state") == {}


def test_added_and_removed_static_fields_are_named(tmp_path: Path) -> None:
    def make(**fields: Any) -> Any:
        cls = type("Part", (), {"__annotations__": dict.fromkeys(fields, Any), "__module__": "a.b", **fields})
        return tree.dataclass(cls)()

    checkpoint.save(make(x=torch.ones(1), kept=tree.static(default=1), old=tree.static(default=2)), tmp_path / "state")
    like = make(x=torch.ones(1), kept=tree.static(default=5), new=tree.static(default=None))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(like, tmp_path / "state")
    assert str(caught.value).splitlines()[1:] == [
        "  the tree itself: the static field old is 2 in the file and absent in `like`",
        "  the tree itself: the static field new is absent in the file and None in `like`",
    ]


def test_a_class_may_be_saved_by_the_script_that_defines_it(tmp_path: Path) -> None:
    def state(module: str, name: str, value: float) -> Any:
        cls = type(name, (), {"__annotations__": {"w": Any}, "__module__": module, "__qualname__": name})
        return tree.dataclass(cls)(torch.tensor(value))

    for saving, loading in [("__main__", "train"), ("pkg.train", "__main__")]:
        checkpoint.save(state(saving, "State", 2.0), tmp_path / "state")
        assert checkpoint.load(state(loading, "State", 0.0), tmp_path / "state").w == 2.0
        with pytest.raises(CheckpointError, match=r"the tree itself is .*\.State in the file and .*\.Other in"):
            checkpoint.load(state(loading, "Other", 0.0), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"is pkg\.train\.State in the file and train\.State in"):
        checkpoint.load(state("train", "State", 0.0), tmp_path / "state")


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (b"bytes", "bytes"),
        (1j, "complex"),
        (torch.float32, "dtype"),
        (torch.ones(2).numpy(), "ndarray"),
        (torch.ones(2).numpy()[0], "float32"),
        (torch.ones(2).double().numpy()[0], "float64"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.eye(2).to_sparse(), "Tensor of layout torch.sparse_coo"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter of layout torch.strided"),
    ],
)
def test_leaves_that_a_file_cannot_hold_are_refused(tmp_path: Path, leaf: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"a/0 is a {found}"):
        checkpoint.save({"a": [leaf]}, tmp_path / "state")
    checkpoint.save({"a": [1.0]}, tmp_path / "other")
    with pytest.raises(TypeError, match=f"a/0 is a {found}"):
        checkpoint.load({"a": [leaf]}, tmp_path / "other")
    assert os.listdir(tmp_path) == ["other"]


def test_arguments_in_the_wrong_order_are_told_apart(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    path = tmp_path / "state.fmp"
    with pytest.raises(TypeError, match=r"path must be .*, got a dict; the order is save\(state, path\)"):
        checkpoint.save(path, state)  # pyright: ignore[reportArgumentType]
    checkpoint.save(state, path)
    with pytest.raises(TypeError, match=r"path must be .*, got a dict; the order is load\(like, path\)"):
        checkpoint.load(path, state)  # pyright: ignore[reportArgumentType]


def test_meta_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w is on the meta device"):
        checkpoint.save({"w": torch.ones(1, device="meta")}, tmp_path / "state")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = {"w": torch.arange(5.0), "n": 3}
    checkpoint.save(state, path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="state: "):
            checkpoint.load(blank(state), path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="incomplete"):
        checkpoint.load(blank(state), path)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = {
        "w": torch.arange(5.0),
        "é": torch.zeros(2, 3, dtype=torch.int16),
        "c": torch.ones(1, dtype=torch.complex64),
        "scaler": DynamicLossScale(),
        "note": "né",
        "x": math.inf,
    }
    checkpoint.save(state, path)
    data = path.read_bytes()
    like = blank(state)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="state: "):
            checkpoint.load(like, path)


@given(data=st.data())
def test_scrambled_files_raise_or_do_no_harm(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "state"
    checkpoint.save(example(), path)
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=8))
    content[start : start + len(patch)] = patch
    path.write_bytes(content)
    try:
        restored = checkpoint.load(fresh(), path)
    except CheckpointError:
        return
    assert same(restored, example())


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.save({"w": torch.ones(2), "v": torch.zeros(2)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\x41")
    with pytest.raises(CheckpointError, match=f"{path}: w is damaged, its checksum does not match"):
        checkpoint.load({"w": torch.ones(2), "v": torch.zeros(2)}, path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    like = {"w": torch.zeros(2)}
    torch.save(like, tmp_path / "torch.pt")
    safetensors.torch.save_file(like, tmp_path / "plain.safetensors")
    safetensors.torch.save_file(like, tmp_path / "other.safetensors", {"format": "pt"})
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello" * 100)
    (tmp_path / "folder").mkdir()
    for name, reason in [
        ("torch.pt", "not a checkpoint file"),
        ("plain.safetensors", "not a checkpoint of fmp"),
        ("other.safetensors", "not a checkpoint of fmp"),
        ("empty", "not a checkpoint file"),
        ("text", "not a checkpoint file"),
        ("folder", "a folder"),
    ]:
        with pytest.raises(CheckpointError, match=f"{tmp_path / name}: .*{reason}"):
            checkpoint.load(like, tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nothing"):
        checkpoint.load(like, tmp_path / "nothing")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    manifest = json.dumps({"format": 2, "something": "else"})
    metadata = {"fmp_checkpoint": f"{files.sha256(manifest.encode())} {manifest}"}
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "state", metadata)
    with pytest.raises(CheckpointError, match="has format 2, this fmp reads format 1"):
        checkpoint.load({"w": torch.zeros(2)}, tmp_path / "state")


def craft(path: Path, change: Callable[[Any, dict[str, torch.Tensor]], Any]) -> Any:
    """Changes the manifest and the tensors of a checkpoint, and gives it the checksum that belongs to it."""
    state = {"w": torch.ones(2), "c": torch.ones(1, dtype=torch.complex64), "e": 3, "s": DynamicLossScale()}
    checkpoint.save(state, path)
    with safetensors.safe_open(path, "pt") as file:
        manifest = json.loads(file.metadata()["fmp_checkpoint"].partition(" ")[2])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    changed = change(manifest, stored)
    text = changed if isinstance(changed, str) else json.dumps(manifest)
    metadata = {"fmp_checkpoint": f"{files.sha256(text.encode())} {text}"}
    safetensors.torch.save_file(stored, path, metadata)
    return checkpoint.load(blank(state) | {"s": DynamicLossScale()}, path)


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "{", "3", '{"format":1}', '{"format":1,"entries":[]}', "[" * 200_000],
    ids=lambda text: text[:9],
)
def test_crafted_manifests_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match="state: the manifest is not one that fmp writes"):
        craft(tmp_path / "state", lambda manifest, stored: text)


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        *[("w", entry) for entry in (3, None, [], {}, {"dtype": "float32", "shape": [2]})],
        ("w", {"dtype": "float31", "shape": [2], "sha256": ""}),
        ("w", {"dtype": "float32", "shape": "2", "sha256": ""}),
        ("w", {"dtype": "float32", "shape": ["2"], "sha256": ""}),
        ("w", {"dtype": "float32", "shape": [2], "sha256": "", "value": 1}),
        ("e", {"node": "int", "static": {}}),
        ("e", {"node": "absent", "static": {}}),
        ("new", {"node": "absent", "static": {}}),
        ("s", {"node": "fmp.scaling.DynamicLossScale"}),
        ("s", {"value": 1}),
        *[("e", {"value": {kind: [[]]}}) for kind in ("float", "frozenset", "Size", "dtype", "device", "foo", "repr")],
        *[("e", {"value": {kind: "abc"}}) for kind in ("float", "tuple", "Size", "dtype", "device", "foo", "repr")],
        *[("e", {"value": value}) for value in ([1], {}, {"float": "1", "tuple": []})],
    ],
    ids=str,
)
def test_crafted_entries_are_refused(tmp_path: Path, path: str, entry: Any) -> None:
    with pytest.raises(CheckpointError, match="state: "):
        craft(tmp_path / "state", lambda manifest, stored: manifest["entries"].update({path: entry}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("growth_interval", value) for value in ("abc", 1.5, True, None, {"tuple": []}, {"device": "bogus"})],
        *[("min_scale", value) for value in ("abc", False, None, {"Size": [1]}, [1.0])],
        ("__class__", 5),
    ],
    ids=str,
)
def test_crafted_static_fields_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match="state: "):
        craft(tmp_path / "state", lambda manifest, stored: manifest["entries"]["s"]["static"].update({field: value}))


@pytest.mark.parametrize("name", ["w", "c"])
@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.ones(3), torch.ones(1), torch.ones(2, 1), torch.ones(2, dtype=torch.int32), torch.ones(1).double()),
        *(torch.ones(3, dtype=torch.uint8), torch.ones(2, 4, dtype=torch.uint8), torch.ones(0)),
    ],
    ids=tree.describe,
)
def test_crafted_tensors_are_refused(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    def change(manifest: Any, stored: dict[str, torch.Tensor]) -> None:
        stored[name] = tensor
        manifest["entries"][name]["sha256"] = files.sha256(tensor)

    with pytest.raises(CheckpointError, match=f"state: {name} is damaged, it is stored as "):
        craft(tmp_path / "state", change)


def test_a_crafted_file_with_nothing_changed_loads(tmp_path: Path) -> None:
    assert craft(tmp_path / "state", lambda manifest, stored: None)["e"] == 3


def test_a_class_that_breaks_its_own_hints_is_not_held_to_them(tmp_path: Path) -> None:
    for saved, like in [("a", "b"), (None, 0.5), (3, 0.5)]:
        checkpoint.save(Moments(torch.tensor(0), None, None, decay=saved), tmp_path / "state")  # pyright: ignore
        if saved is None:
            with pytest.raises(CheckpointError, match="the static field decay is None, which is no float"):
                checkpoint.load(Moments(torch.tensor(0), None, None, decay=like), tmp_path / "state")
        else:
            restored = checkpoint.load(Moments(torch.tensor(0), None, None, decay=like), tmp_path / "state")
            assert restored.decay == saved


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_saving_inside_a_transform_is_refused(tmp_path: Path, transform: Callable[..., Any]) -> None:
    def save(x: torch.Tensor) -> torch.Tensor:
        checkpoint.save({"w": x}, tmp_path / "state")
        return x.sum()

    with pytest.raises(RuntimeError, match="save cannot run inside vmap, grad or another transform"):
        transform(save)(torch.ones(3))
    assert os.listdir(tmp_path) == []


def test_a_replaced_checkpoint_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.save({"w": torch.zeros(1)}, path)
    path.chmod(0o600)
    checkpoint.save({"w": torch.ones(1)}, path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(example(), tmp_path / "state")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.Unpickler", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("pickle.load", refuse)
    monkeypatch.setattr("torch.load", refuse)
    assert same(checkpoint.load(fresh(), tmp_path / "state"), example())


def test_an_unwritable_checkpoint_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.save({"text": "old"}, path)
    # safetensors would write such a header, and then refuse to read it.
    with pytest.raises(OSError, match=r"state: the checkpoint could not be written: .*header"):
        checkpoint.save({"text": "x" * 100_000_001}, path)
    with pytest.raises(TypeError):
        checkpoint.save({"text": b"new"}, path)
    assert checkpoint.load({"text": ""}, path) == {"text": "old"}
    assert os.listdir(tmp_path) == ["state"]


def _fail_at(patch: pytest.MonkeyPatch, step: int, error: type[BaseException]) -> list[str]:
    """Makes the `step`-th of the calls that change the disk raise; a failing write has written half."""
    steps: list[str] = []

    def failing(name: str, genuine: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            steps.append(name)
            if len(steps) == step:
                if half:
                    half(*args)
                raise error("injected")
            return genuine(*args, **kwargs)

        return call

    def half_written(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(safetensors.torch.save(tensors, metadata)[:-20])

    for name in ("open", "chmod", "fsync", "replace"):
        patch.setattr(os, name, failing(name, getattr(os, name)))
    write = safetensors.torch.save_file
    patch.setattr(safetensors.torch, "save_file", failing("write", write, half_written))
    return steps


STEPS = ["open", "write", "chmod", "open", "fsync", "replace", "open", "fsync"]


def test_the_steps_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        steps = _fail_at(patch, 0, OSError)
        checkpoint.save(example(), tmp_path / "state")
    assert steps == STEPS


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("kind", ["error", "interrupt", "killed"])
@pytest.mark.parametrize("step", range(1, len(STEPS) + 1))
def test_a_crash_at_any_step_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, kind: str, exists: bool
) -> None:
    path = tmp_path / "state"
    old, new = {"w": torch.zeros(9)}, {"w": torch.ones(9)}
    if exists:
        checkpoint.save(old, path)
    with monkeypatch.context() as patch:
        if kind == "killed":
            # A killed process cleans nothing up.
            patch.setattr(os, "unlink", lambda path: None)
        error = OSError if kind == "error" else KeyboardInterrupt
        _fail_at(patch, step, error)
        with pytest.raises(error, match="injected"):
            checkpoint.save(new, path)
    if STEPS.index("replace") < step - 1:
        assert same(checkpoint.load(blank(new), path), new)
    elif exists:
        assert same(checkpoint.load(blank(old), path), old)
    else:
        assert not path.exists()
    if kind != "killed":
        assert os.listdir(tmp_path) == (["state"] if path.exists() else [])
    checkpoint.save(new, path)
    assert same(checkpoint.load(blank(new), path), new)


def test_readers_see_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    small, large = {"w": torch.zeros(1000), "n": 0}, {"w": torch.ones(1000), "n": 1}
    checkpoint.save(small, path)

    def write() -> None:
        for _ in range(20):
            checkpoint.save(large, path)
            checkpoint.save(small, path)

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while writer.is_alive() or not seen:
        restored = checkpoint.load(blank(small), path)
        assert same(restored, large if restored["n"] else small)
        seen += 1
    writer.join()


STATE = """
import os, sys, torch
from fmp import checkpoint
from fmp.scaling import DynamicLossScale

def state(seed):
    noise = torch.randn(64, 3, generator=torch.Generator().manual_seed(seed))
    scaler = DynamicLossScale(2.0**seed, growth_interval=seed)
    return {"w": noise.half(), "m": noise, "p": torch.exp(noise).t(), "scaler": scaler, "epoch": seed}

def bits(tree):
    tensors = [tree[name].contiguous().view(torch.uint8).flatten().tolist() for name in "wmp"]
    return tensors, repr(tree["scaler"]), tree["epoch"]
"""


def _run(code: str, path: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, "-c", STATE + code, str(path)], env=environment, timeout=120).returncode


def test_another_process_reads_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert _run("checkpoint.save(state(5), sys.argv[1])", path) == 0
    assert _run("assert bits(checkpoint.load(state(2), sys.argv[1])) == bits(state(5))", path) == 0


def test_a_killed_process_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    killed = """
checkpoint.save(state(5), sys.argv[1])
os.fsync = lambda descriptor: os.kill(os.getpid(), 9)
checkpoint.save(state(6), sys.argv[1])
"""
    assert _run(killed, path) == -9
    like = {"w": torch.zeros(64, 3).half(), "m": torch.zeros(64, 3), "p": torch.zeros(3, 64)}
    restored = checkpoint.load({**like, "scaler": DynamicLossScale(), "epoch": 0}, path)
    assert restored["epoch"] == restored["scaler"].growth_interval == 5
