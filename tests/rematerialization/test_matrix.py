"""remat changes nothing: every kind of function under every transform, against the function without remat."""

from typing import Any

import pytest
import torch

import fmp
from fmp import tree
from tests.bits import differing
from tests.rematerialization.cases import CASES, TRANSFORMS, Wrap, refused, rounded


def without_remat(fn: Any, **options: Any) -> Any:
    return fn


def run(case: str, transform: str, wrap: Wrap) -> Any:
    torch.manual_seed(7)
    result = TRANSFORMS[transform](CASES[case](wrap))
    return result, torch.rand(1)  # what is drawn afterwards is the same, too


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch.func.linearize itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
@pytest.mark.mixed_dtypes  # a policy multiplies bf16 by fp32
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_same_results_with_and_without_remat(case, transform):
    if refused(case, transform):
        for wrap in (without_remat, fmp.remat):
            with pytest.raises(RuntimeError, match="randomness"):
                run(case, transform, wrap)
        return
    want, got = run(case, transform, without_remat), run(case, transform, fmp.remat)
    assert tree.structure(want) == tree.structure(got)
    if not rounded(case, transform):
        assert differing(want, got) == set()
        return
    tolerance = 2e-2 if case.startswith("policy") else 2e-6
    for left, right in zip(tree.leaves(want), tree.leaves(got), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
