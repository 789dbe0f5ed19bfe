"""What every module of this room may use without an import."""

from __future__ import annotations

from tests.support.service_fixtures import (  # noqa: F401
    checkpoint,
    client,
    files_dir,
    openai_client,
    redis_url,
    service,
    shared_service,
)
