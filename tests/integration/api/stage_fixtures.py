"""Fixtures: one stage per module where tests leave no traces, one per test where they do.

A module whose app has settings of its own says `shared_stage = module_stage(...)`; one that asks by
the OpenAI SDK says `client = openai_client`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.integration.api.stage import Script, Stage, make_tiny_checkpoint, staged
from tests.support.redis_server import new_namespace, redis_url

__all__ = [
    "checkpoint",
    "client",
    "files_dir",
    "module_stage",
    "openai_client",
    "redis_url",
    "shared_stage",
    "stage",
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def files_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def module_stage(*, with_worker: bool = True, **settings: Any) -> Any:
    """A module's `shared_stage` fixture, whose app has these settings and FILES_DIR."""

    @pytest.fixture(scope="module")
    def shared_stage(redis_url: str, checkpoint: Path, files_dir: Path) -> Iterator[Stage]:
        with staged(
            redis_url,
            new_namespace(),
            checkpoint,
            with_worker=with_worker,
            files_dir=str(files_dir),
            **settings,
        ) as made:
            yield made

    return shared_stage


shared_stage = module_stage(keepalive_s=0.1)


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """The module's stage with an untouched script."""
    shared_stage.worker.script = Script()
    shared_stage.worker.seen.clear()
    shared_stage.worker.dropped.clear()
    yield shared_stage
    shared_stage.worker.script = Script()


@pytest.fixture
def client(stage: Stage) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stage.base_url, timeout=60) as made:
        yield made


@pytest.fixture
def openai_client(stage: Stage) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stage.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made
