"""Queue priorities that a client may choose: default, or behind all others."""

from __future__ import annotations

from api.errors import unsupported
from api.generation.protocol import TierFields
from shared.keys import NUM_LANES
from shared.messages import InvalidParameter

MAX_PRIORITY = NUM_LANES - 2  # the last lane is for batches
FLEX_LANE = 4
_TIERS = {"auto": 0, "default": 0, "flex": FLEX_LANE}


def job_lane(request: TierFields) -> int:
    """By `priority` (0, the default, goes first) or `service_tier`. Raises InvalidParameter."""
    tier, priority = request.service_tier, request.priority
    if tier is not None and tier not in _TIERS:
        raise unsupported("service_tier", f"the tiers are {', '.join(_TIERS)}")
    if priority is None:
        return _TIERS[tier or "auto"]
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidParameter("priority", f"must be between 0 (goes first) and {MAX_PRIORITY}")
    if tier == "flex":
        raise InvalidParameter("priority", "excludes the service tier 'flex'")
    return priority


def served_tier(request: TierFields) -> str | None:
    """What an answer says of its tier; None where the request says nothing of it."""
    if request.service_tier is None:
        return None
    return "flex" if request.service_tier == "flex" else "default"
