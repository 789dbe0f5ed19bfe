"""What the tests that start vLLM themselves run under."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _sockets_are_removed() -> Iterator[None]:
    """vLLM leaves sockets in the temporary folder where it is interrupted, as in a worker, which
    gives it a folder of its own."""
    with (
        # Not below pytest's: the paths of Unix sockets have about a hundred characters.
        tempfile.TemporaryDirectory(prefix="vllm-of-tests-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        yield
