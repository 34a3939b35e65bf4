import json
from collections.abc import Callable, Sequence
from typing import Any, Optional

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import encoding

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(torch.bfloat16)
hashables = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3)
)


@given(hashables)
def test_values_come_back_through_json(value: Any) -> None:
    found = encoding.decode(json.loads(json.dumps(encoding.encode(value), allow_nan=False)))
    assert type(found) is type(value)
    assert encoding.encode(found) == encoding.encode(value)


@given(
    st.recursive(
        scalars.filter(lambda value: not isinstance(value, torch.dtype)),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["float", "tuple", "frozenset", "Size", "dtype", "device", "repr"]), inner
            )
        ),
        max_leaves=6,
    )
)
def test_anything_else_is_refused_in_one_of_three_ways(encoded: Any) -> None:
    try:
        value = encoding.decode(encoded)
    except (RuntimeError, TypeError, ValueError):
        return
    # What is not refused is a value that can be written again.
    assert repr(encoding.decode(encoding.encode(value))) == repr(value)


def test_a_repr_can_be_told_from_a_value() -> None:
    assert encoding.is_opaque(encoding.encode(range(3)))
    assert not encoding.is_opaque(encoding.encode((1,)))
    with pytest.raises(ValueError, match="unknown kind"):
        encoding.decode(encoding.encode(range(3)))


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        *[(3, int, True), (True, int, False), (3.0, int, False), (3, float, True), (True, float, False)],
        *[(None, int | None, True), ("a", int | None, False), (None, Optional[str], True), (None, str, False)],  # noqa: UP045
        *[((1,), tuple[int, ...], True), ([1], tuple, False), (torch.Size([1]), tuple, True)],
        *[(1, Any, True), (1, None, True), ("a", Sequence[str], True), ("a", Callable[[int], int], True)],
    ],
    ids=str,
)
def test_hints(value: Any, hint: Any, expected: bool) -> None:
    assert encoding.fits(value, hint) is expected
