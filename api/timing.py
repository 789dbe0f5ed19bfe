"""Timing of one answer, by this frontend's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timing:
    """Seconds of the monotonic clock; None: not yet."""

    submitted_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    last_token_s: float | None = None

    def token_came(self) -> float | None:
        """Marks new tokens; returns the seconds since the last ones, None for the first."""
        now_s = time.monotonic()
        gap_s = None if self.last_token_s is None else now_s - self.last_token_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        return gap_s

    @property
    def ttft_ms(self) -> float | None:
        """From submit to the first token, in milliseconds with one decimal."""
        if self.first_token_s is None:
            return None
        return round((self.first_token_s - self.submitted_s) * 1000, 1)
