"""Fixtures: one service for a module, with an untouched script for each test.

A module whose app has settings of its own has `shared_service = module_service(...)`; one that
uses an SDK has `client = openai_client` or `client = anthropic_client`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.launched import REPOSITORY, Launched
from tests.support.redis_server import new_namespace, redis_url
from tests.support.running_service import (
    RunningService,
    make_tiny_checkpoint,
    running_frontend,
    running_service,
)
from tests.support.scripted_worker import Script
from tests.support.service_client import CLOSE_LOOK
from tests.support.service_processes import service_processes
from tests.support.throttle import FAULTS, Throttle

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

__all__ = [
    "anthropic_client",
    "base_url",
    "checkpoint",
    "client",
    "files_dir",
    "module_service",
    "openai_client",
    "other_url",
    "processes_url",
    "proxy",
    "redis_url",
    "service",
    "shared_service",
    "throttle",
    "two_frontends",
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


def processes_url(checkpoint: Callable[[], Path], **worker: str) -> Any:
    """A fixture with the base URL of a frontend and a worker, which are processes."""

    @pytest.fixture(scope="module")
    def base_url(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        directory, namespace = tmp_path_factory.mktemp("processes"), new_namespace()
        with service_processes(redis_url, namespace, checkpoint(), directory, **worker) as frontend:
            yield frontend.base_url

    return base_url


@pytest.fixture
def service(shared_service: RunningService) -> Iterator[RunningService]:
    """The module's service with an untouched script."""
    shared_service.worker.script = Script()
    shared_service.worker.seen.clear()
    shared_service.worker.dropped.clear()
    yield shared_service
    shared_service.worker.script = Script()


@pytest.fixture(scope="module")
def throttle(tmp_path_factory: pytest.TempPathFactory) -> Throttle:
    """Of the engines that were started with its `env`."""
    return Throttle(tmp_path_factory.mktemp("throttle") / "throttle")


@pytest.fixture(scope="module")
def two_frontends(
    tmp_path_factory: pytest.TempPathFactory, throttle: Throttle
) -> Iterator[Launched]:
    """A Penstock with two frontends, whose processes a test may kill: others follow soon."""
    env = {
        **CLOSE_LOOK,
        **throttle.env,
        "PYTHONPATH": f"{FAULTS}{os.pathsep}{REPOSITORY}",
        "ECHO_STEP_MS": "5",
        "FRONTENDS": "2",
        "LEASE_MS": "3000",
    }
    with Launched(tmp_path_factory.mktemp("client"), env) as made:
        yield made


@pytest.fixture
def proxy(service: RunningService) -> Iterator[CuttingProxy]:
    """It cuts the connections of the service's clients where a test says."""
    with cutting_proxy(service.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def other_url(shared_service: RunningService) -> Iterator[str]:
    """A further frontend over the module's store."""
    settings = shared_service.settings
    with running_frontend(settings.redis_url, settings.namespace, keepalive_s=0.1) as made:
        made.until_ready()
        yield made.base_url


@pytest.fixture
def client(service: RunningService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.base_url, timeout=60) as made:
        yield made


@pytest.fixture
def base_url(service: RunningService) -> str:
    """A module whose service is another one has a fixture of this name."""
    return service.base_url


@pytest.fixture
def openai_client(base_url: str) -> Iterator[OpenAI]:
    from openai import OpenAI  # half a second: only for tests that use it

    with OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def anthropic_client(base_url: str) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made
