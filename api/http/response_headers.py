"""Response headers of the routes that make jobs: rate limits and durability.

Rate limit headers have the names of the route's dialect and the values as of the job's admission,
also on a whole response, which is sent later. Tenants without limits have none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from starlette.types import Scope

from api.http.caller import set_headers, speaks_anthropic
from shared.messages import Durability
from shared.transport.ports.jobs import Allowance

DURABILITY_HEADER = "x-penstock-durability"
_NAMES = ("requests", "tokens")  # of an Allowance
_OPENAI = ("x-ratelimit-limit-{}", "x-ratelimit-remaining-{}", "x-ratelimit-reset-{}")
_ANTHROPIC = (
    "anthropic-ratelimit-{}-limit",
    "anthropic-ratelimit-{}-remaining",
    "anthropic-ratelimit-{}-reset",
)
RATE_LIMIT_HEADERS = tuple(
    header.format(name) for header in (*_OPENAI, *_ANTHROPIC) for name in _NAMES
)


def set_rate_limit_headers(
    scope: Scope, allowances: Sequence[Allowance], now_s: float | None = None
) -> None:
    """Sets the headers of the response; without allowances earlier ones stay.

    `now_s`: seconds since 1970, now by default.
    """
    if not allowances:
        return
    if speaks_anthropic(scope):
        now_s = time.time() if now_s is None else now_s
        headers = [pair for allowance in allowances for pair in _anthropic(allowance, now_s)]
    else:
        headers = [pair for allowance in allowances for pair in _openai(allowance)]
    set_headers(scope, dict(headers))


def set_durability_header(scope: Scope, durability: Durability) -> None:
    """Sets the header for what the acceptance has waited for, unless that is nothing."""
    if durability is not Durability.NONE:
        set_headers(scope, {DURABILITY_HEADER: durability.value})


def duration(ms: int) -> str:
    """Returns milliseconds as OpenAI writes them: `120ms`, `1.5s`, `6m0s`."""
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{whole}{ms / 1000:g}s"


def _openai(left: Allowance) -> Iterator[tuple[str, str]]:
    values = (str(left.per_minute), str(left.remaining), duration(left.full_in_ms))
    return zip((header.format(left.name) for header in _OPENAI), values, strict=True)


def _anthropic(left: Allowance, now_s: float) -> Iterator[tuple[str, str]]:
    # In whole seconds, rather too late than too early.
    reset = datetime.fromtimestamp(math.ceil(now_s + left.full_in_ms / 1000), UTC)
    values = (str(left.per_minute), str(left.remaining), f"{reset:%Y-%m-%dT%H:%M:%SZ}")
    return zip((header.format(left.name) for header in _ANTHROPIC), values, strict=True)
