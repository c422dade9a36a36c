"""Commands say where logs go, for the whole process; here each test begins as if none had."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logs_as_by_default() -> Iterator[None]:
    yield
    structlog.reset_defaults()
