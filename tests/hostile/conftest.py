"""One service whose pots are small, which two tenants and an operator share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.auth.keys import new_key
from tests.neighbours.conftest import STEP_MS, Shared, launched

METRICS_KEY = new_key()  # the metrics are of all tenants


@pytest.fixture(scope="module")
def small_pots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The pots that are thousands of places, or hundreds of MiB, are scaled down."""
    env = {
        "RUNNER": "echo",
        "METRICS_KEY": METRICS_KEY,
        "ECHO_STEP_MS": str(STEP_MS),
        "MAX_OPEN_REQUESTS": "100",
        "MAX_BODY_BYTES": str(2**20),
        "MAX_OPEN_BODY_BYTES": str(4 * 2**20),
        "MAX_OPEN_ANSWER_BYTES": str(2**20),
        "MAX_ANSWER_BYTES": str(2**20),
        "MAX_WAITING_TEXT_BYTES": str(2**19),
    }
    yield from launched(tmp_path_factory.mktemp("hostile"), env)
