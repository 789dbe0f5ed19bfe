"""The service that the clients speak to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.agent_checks import DEMO
from tests.support.document_check import CHECKED, collect_written
from tests.support.launched import Launched
from tests.support.service_fixtures import (  # noqa: F401
    checkpoint,
    files_dir,
    proxy,
    redis_url,
    service,
    shared_service,
    throttle,
)
from tests.support.tool_models import make_demo_with_tools


@pytest.fixture(scope="module", autouse=True)
def _processes_check_bodies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the clients send to frontends in processes of their own keeps to the document, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHECKED, str(tmp_path_factory.mktemp("document") / "mismatches"))
        yield


@pytest.fixture(autouse=True)
def _mismatches_are_collected(_processes_check_bodies: None) -> Iterator[None]:
    yield
    collect_written()


@pytest.fixture(scope="module")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a service as `make run` starts it, with the demo model and tools."""
    directory = tmp_path_factory.mktemp("demo")
    env = {
        "MODEL": str(make_demo_with_tools(directory / DEMO)),
        "SERVED_MODEL_NAME": DEMO,
        "DTYPE": "float32",
        "KV_CACHE_MEMORY_GB": "0.2",
    }
    with Launched(directory, env) as penstock:
        yield penstock.base_url
