"""Timing: when a response reached its stages, by this frontend's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timing:
    """Seconds of the monotonic clock; None: not yet."""

    submitted_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None  # a worker reported that it took the job
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

    def metrics(self, num_tokens: int) -> dict[str, float | None]:
        """Returns the figures of a response of one choice with `num_tokens`, by vLLM's names.

        Milliseconds, and tokens per second, with one decimal. None for what was not observed: a
        worker's report that it took the job may be lost.
        """
        decoding_s = _between(self.first_token_s, self.last_token_s)
        working_s = _between(self.started_s, self.last_token_s)
        gaps = num_tokens - 1
        return {
            "time_to_first_token_ms": _ms(_between(self.started_s, self.first_token_s)),
            "generation_time_ms": _ms(decoding_s),
            "queue_time_ms": _ms(_between(self.submitted_s, self.started_s)),
            "mean_itl_ms": _ms(decoding_s / gaps) if decoding_s is not None and gaps > 0 else None,
            "tokens_per_second": round(num_tokens / working_s, 1) if working_s else None,
        }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
