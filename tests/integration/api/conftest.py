"""What every module of this room may use without an import."""

from __future__ import annotations

from tests.support.service_fixtures import (  # noqa: F401
    anthropic_client,
    base_url,
    checkpoint,
    client,
    files_dir,
    openai_client,
    other_url,
    redis_url,
    service,
    shared_service,
    throttle,
)
