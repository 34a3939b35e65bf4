import os
import zlib
from pathlib import Path

import pytest

from fmp import df11
from tests.bits import same_bits
from tests.df11 import trained


@pytest.mark.parametrize("name", trained.NAMES)
def test_trained_weights_get_smaller_than_by_zlib_and_come_back(name: str, tmp_path: Path) -> None:
    weights = trained.load(name)
    if weights is None:
        pytest.skip("the package with these weights is not installed")
    df11.save(df11.compress(weights), tmp_path / "w")
    assert same_bits(df11.load(tmp_path / "w", decompress=True), weights)

    size = os.path.getsize(tmp_path / "w")
    exponents, rest = trained.planes(weights)
    assert size < len(zlib.compress(exponents.tobytes())) + rest.size
    if name == "MiniLM":
        assert size <= 0.669 * trained.nbytes(weights)
