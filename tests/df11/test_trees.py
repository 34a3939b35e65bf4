"""fmp.df11.compress and decompress: which leaves of a tree are compressed, and what becomes of the others."""

from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import fmp
from fmp import tree
from fmp.df11 import CompressedTensor, compress, decompress
from tests.bits import same_bits, snapshot
from tests.df11.test_compressed import EVERY_PATTERN, weights


def params_like() -> dict[str, Any]:
    return {
        "blocks": [{"w": weights(80, 80), "norm": weights(80)}, {"w": weights(80, 80), "norm": weights(80)}],
        "embed": weights(100, 64),
        "f32": torch.randn(80, 80),
        "step": 3,
        "none": None,
        "ids": torch.arange(5000),
    }


def compressed_paths(compressed: Any) -> list[str]:
    is_node = lambda node: isinstance(node, CompressedTensor)
    paths, leaves, _ = optree.tree_flatten_with_path(compressed, is_leaf=is_node, none_is_leaf=True)
    return [tree.join(path) for path, leaf in zip(paths, leaves, strict=True) if is_node(leaf)]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ["blocks/0/w", "blocks/1/w", "embed"]),
        ({"min_numel": 80}, ["blocks/0/norm", "blocks/0/w", "blocks/1/norm", "blocks/1/w", "embed"]),
        ({"min_numel": 6401}, []),
        ({"select": ["blocks"]}, ["blocks/0/w", "blocks/1/w"]),
        ({"select": ["blocks.*.w"]}, ["blocks/0/w", "blocks/1/w"]),
        ({"select": lambda path: path == "embed"}, ["embed"]),
        ({"select": ["step", "none", "embed"]}, ["embed"]),
        ({"select": []}, []),
    ],
)
def test_which_leaves_are_compressed(options: dict[str, Any], chosen: list[str]) -> None:
    params = params_like()
    before = snapshot(params)
    compressed = compress(params, **options)
    assert compressed_paths(compressed) == chosen
    restored = decompress(compressed)
    assert same_bits(restored, before)
    assert same_bits(params, before)
    assert restored["ids"] is params["ids"]


def test_select_by_a_tree_of_bools() -> None:
    params = {"a": weights(80, 80), "b": {"c": weights(80, 80), "d": weights(80, 80)}}
    assert compressed_paths(compress(params, select={"a": False, "b": True})) == ["b/c", "b/d"]


@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        (["f32"], TypeError, r"f32 is f32\[80,80\]; only bf16"),
        (["ids"], TypeError, r"ids is i64\[5000\]"),
        (["nothing"], ValueError, "none of the patterns"),
        (lambda path: 1, TypeError, "select must say True or False"),
        ({"blocks": True}, ValueError, "select does not fit"),
    ],
)
def test_a_wrong_choice_is_refused(select: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compress(params_like(), select=select)


def test_tied_leaves_are_compressed_once_and_stay_tied() -> None:
    weight = weights(80, 80)
    params = {"embed": weight, "head": weight.detach(), "view": weight.t(), "copy": weight.clone()}
    compressed = compress(params)
    assert compressed["embed"] is compressed["head"]
    assert compressed["view"] is not compressed["embed"] is not compressed["copy"]
    # A map takes nodes apart and makes new ones of the same parts.
    for carried in (compressed, tree.map(lambda leaf: leaf, compressed)):
        restored = decompress(carried)
        assert restored["embed"] is restored["head"]
        assert restored["copy"] is not restored["embed"]
        assert same_bits(restored, params)


def test_what_is_compressed_stays_as_it_is() -> None:
    once = compress({"a": weights(80, 80), "b": weights(4000)})
    twice = compress(once, select=["a", "b"], min_numel=1)
    assert twice["a"] is once["a"]
    assert compressed_paths(twice) == ["a", "b"]


def test_single_tensors_and_empty_trees() -> None:
    weight = weights(80, 80)
    assert same_bits(decompress(compress(weight)), weight)
    assert compress({}) == decompress({}) == {}
    assert compress(None) is decompress(None) is None


@pytest.mark.parametrize("min_numel", [float("nan"), 1e3, "4096", None])
def test_min_numel_is_a_whole_number(min_numel: Any) -> None:
    with pytest.raises(TypeError, match="min_numel must be a whole number"):
        compress({"w": weights(80, 80)}, min_numel=min_numel)


def test_a_tree_in_which_nothing_is_bf16_is_refused() -> None:
    weights = {"weight": torch.ones(64, 64), "bias": torch.zeros(64)}
    with pytest.raises(ValueError, match=r"no tensor of the tree is bf16.*it has f32\[64,64\].*fmp\.cast\(tree"):
        fmp.df11.compress(weights)
    compressed = fmp.df11.compress(fmp.cast(weights, torch.bfloat16))
    assert compressed_paths(compressed) == ["weight"]
    # Nothing to do is no mistake: no tensor is large enough, all are compressed already, or chosen by hand.
    for values, select in (
        ({"bias": torch.zeros(64), "ids": torch.zeros(64, 64, dtype=torch.int64)}, None),
        ({"done": compressed["weight"], "full": torch.ones(64, 64)}, None),
        (weights, {"weight": False, "bias": False}),
    ):
        found = fmp.df11.compress(values, select=select)
        assert all(found[name] is leaf for name, leaf in values.items())


def test_a_module_is_refused() -> None:
    for params in (torch.nn.Linear(80, 80).bfloat16(), {"layers": [torch.nn.Linear(80, 80)]}):
        with pytest.raises(TypeError, match=r"is a Linear, no tensor; compress its state_dict\(\)"):
            compress(params)


def test_what_is_too_small_passes_whatever_it_is() -> None:
    class Named(torch.Tensor): ...

    small = {"named": weights(3).as_subclass(Named), "meta": weights(3).to("meta")}
    assert all(found is small[name] for name, found in compress(small).items())
    for name in small:
        with pytest.raises(TypeError, match=f"{name} is a .*only plain tensors with values"):
            compress(small, min_numel=3, select=[name])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_does_not_matter(device: str, tmp_path: Path) -> None:
    params = {"w": weights(64, 96), "raw": EVERY_PATTERN, "empty": torch.empty(0, 3), "steps": torch.tensor(3)}
    params |= {"deflated": torch.ones(5000).bfloat16(), "none": torch.empty(0, 3).bfloat16()}
    with torch.device(device):
        compressed = compress(params, min_numel=0)
        fmp.df11.save(compressed, tmp_path / "w")
        loaded = [fmp.df11.load(tmp_path / "w"), compressed]
        restored = [decompress(nodes) for nodes in loaded] + [fmp.df11.load(tmp_path / "w", decompress=True)]
    assert {part.device.type for part in tree.leaves([loaded, restored])} == {"cpu"}
    assert all(same_bits(found, params) for found in restored)


def test_keys_that_look_alike_as_paths() -> None:
    params = {"a/b": weights(80, 80), "a": {"b": weights(80, 80)}}
    assert same_bits(decompress(compress(params)), params)


def test_progress_wraps_the_work() -> None:
    seen: list[int] = []

    def progress(work: list[int]) -> Any:
        for count, item in enumerate(work, 1):
            yield item
            seen.append(count)

    compress(params_like(), progress=progress)
    assert seen == [1, 2, 3]


def test_a_function_of_path_and_leaf_chooses():
    params = {"wide": torch.full((64, 128), 0.5).bfloat16(), "long": torch.full((8192,), 0.5).bfloat16()}
    compressed = compress(params, select=lambda path, leaf: leaf.ndim == 2)
    assert isinstance(compressed["wide"], CompressedTensor)
    assert compressed["long"] is params["long"]
