from collections.abc import Iterator

import pytest

from fmp.compat import amp


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    yield
    amp.shutdown()
