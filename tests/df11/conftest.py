"""What tests of compressed weights share."""

import pytest

from fmp.df11_codec import codec
from tests.df11.frozen_blocks import Decoded


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    watch = Decoded(codec.decode)
    monkeypatch.setattr(codec, "decode", watch)
    return watch
