"""Fixtures: one service for a module, with an untouched script for each test.

A module whose app has settings of its own has `shared_service = module_service(...)`; one that
uses the OpenAI SDK has `client = openai_client`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.redis_server import new_namespace, redis_url
from tests.support.running_service import RunningService, make_tiny_checkpoint, running_service
from tests.support.scripted_worker import Script

if TYPE_CHECKING:
    from openai import OpenAI

__all__ = [
    "checkpoint",
    "client",
    "files_dir",
    "module_service",
    "openai_client",
    "redis_url",
    "service",
    "shared_service",
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def files_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def module_service(**settings: Any) -> Any:
    """A module's `shared_service` fixture, whose app has these settings and FILES_DIR."""

    @pytest.fixture(scope="module")
    def shared_service(
        redis_url: str, checkpoint: Path, files_dir: Path
    ) -> Iterator[RunningService]:
        given = {"files_dir": str(files_dir), **settings}
        with running_service(redis_url, new_namespace(), checkpoint, **given) as made:
            yield made

    return shared_service


shared_service = module_service(keepalive_s=0.1)


@pytest.fixture
def service(shared_service: RunningService) -> Iterator[RunningService]:
    """The module's service with an untouched script."""
    shared_service.worker.script = Script()
    shared_service.worker.seen.clear()
    shared_service.worker.dropped.clear()
    yield shared_service
    shared_service.worker.script = Script()


@pytest.fixture
def client(service: RunningService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.base_url, timeout=60) as made:
        yield made


@pytest.fixture
def openai_client(service: RunningService) -> Iterator[OpenAI]:
    from openai import OpenAI  # half a second: only for tests that use it

    with OpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made
