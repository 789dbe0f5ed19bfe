"""Fixtures: one stage per module where tests leave no traces, one per test where they do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.api.stage import Script, Stage, make_tiny_checkpoint, staged
from tests.support.redis_server import new_namespace, redis_url

__all__ = ["checkpoint", "redis_url", "shared_stage", "stage"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def shared_stage(
    redis_url: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    files_dir = str(tmp_path_factory.mktemp("files"))
    with staged(
        redis_url, new_namespace(), checkpoint, keepalive_s=0.1, files_dir=files_dir
    ) as stage:
        yield stage


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """The module's stage with an untouched script."""
    shared_stage.worker.script = Script()
    shared_stage.worker.seen.clear()
    shared_stage.worker.dropped.clear()
    yield shared_stage
    shared_stage.worker.script = Script()
