"""The stage that the clients speak to."""

from __future__ import annotations

from tests.integration.api.stage_fixtures import (  # noqa: F401
    checkpoint,
    files_dir,
    redis_url,
    shared_stage,
    stage,
)
