"""How long an ended job is kept, if its request sets `store` or `expires_after`."""

from __future__ import annotations

from api.generation.models import JobDefaults
from api.generation.protocol import MIN_RETENTION_S, JobParameters
from shared.messages import InvalidParameter

UNSTORED_TEXT_MS = 600_000  # for a slow reader; a minute once it has all (lua/lib/retention.lua)


def retention(params: JobParameters, defaults: JobDefaults) -> tuple[int | None, int | None]:
    """Returns `retain_ms` and `text_ms` of the job. Raises InvalidParameter."""
    if (after := params.expires_after) is None:
        unstored_ms = UNSTORED_TEXT_MS if params.store is False else None
        return defaults.retention_ms if params.store else None, unstored_ms
    if params.store is False:
        raise InvalidParameter("expires_after", "needs 'store' to be true")
    if after.anchor != "completed_at":
        raise InvalidParameter("expires_after.anchor", "must be 'completed_at'")
    most_s = defaults.max_retention_ms // 1000
    if not MIN_RETENTION_S <= after.seconds <= most_s:
        raise InvalidParameter(
            "expires_after.seconds",
            f"must be between {MIN_RETENTION_S} and {most_s}, this server's maximum",
        )
    return after.seconds * 1000, None
