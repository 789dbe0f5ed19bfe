"""How what is left of a tenant's allowances is written, in both dialects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from api.http.response_headers import duration, set_rate_limit_headers
from shared.transport.ports.jobs import Allowance

LEFT = (Allowance("requests", 60, 59, 1000), Allowance("tokens", 9000, 0, 72_001))


@pytest.mark.parametrize(
    ("ms", "output"),
    [
        (0, "0s"),
        (1, "1ms"),
        (120, "120ms"),
        (1000, "1s"),
        (1356, "1.356s"),
        (8640, "8.64s"),
        (59_999, "59.999s"),
        (60_000, "1m0s"),
        (72_500, "1m12.5s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (90_061_001, "25h1m1.001s"),
    ],
)
def test_a_duration_is_written_as_openai_writes_it(ms: int, output: str) -> None:
    assert duration(ms) == output


def result(path: str, now_s: float = 0.0) -> dict[str, str]:
    scope: dict[str, Any] = {"path": path}
    set_rate_limit_headers(scope, LEFT, now_s)
    return dict(scope["state"]["response_headers"])


def test_openais_headers_have_durations() -> None:
    assert result("/v1/chat/completions") == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "9000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m12.001s",
    }


def test_anthropics_headers_have_moments_that_are_not_too_early() -> None:
    noon_s = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC).timestamp()
    assert result("/v1/messages", noon_s) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2026-01-02T12:00:01Z",
        "anthropic-ratelimit-tokens-limit": "9000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2026-01-02T12:01:13Z",
    }


def test_no_allowance_sets_no_headers() -> None:
    scope: dict[str, Any] = {"path": "/generate"}
    set_rate_limit_headers(scope, ())
    assert scope == {"path": "/generate"}
