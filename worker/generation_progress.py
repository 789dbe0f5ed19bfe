"""GenerationProgress: a bar with live prefill and decode rates on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from worker.engine.engine import EngineStats

RATE_INTERVAL_S = 0.5  # rates are averages over at least this long


class GenerationProgress:
    """Counts finished prompts; rates are tokens per second over the last interval.

    Writes to stderr, and only while that is a terminal: a file gets no control characters.
    """

    def __init__(self, num_prompts: int, stats: EngineStats, *, shown: bool) -> None:
        self._bar = tqdm(
            total=num_prompts,
            desc="generate",
            unit=" prompts",
            dynamic_ncols=True,
            file=sys.stderr,
            disable=None if shown else True,
        )
        self._seen = stats
        self._seen_at_s = time.monotonic()

    def finished(self, num_prompts: int) -> None:
        self._bar.update(num_prompts)

    def stepped(self, stats: EngineStats) -> None:
        elapsed_s = time.monotonic() - self._seen_at_s
        if elapsed_s < RATE_INTERVAL_S:
            return
        self._bar.set_postfix_str(rates(self._seen, stats, elapsed_s))
        self._seen = stats
        self._seen_at_s += elapsed_s

    def close(self) -> None:
        self._bar.close()


def rates(before: EngineStats, after: EngineStats, elapsed_s: float) -> str:
    prefill = (after.prompt_tokens - before.prompt_tokens) / elapsed_s
    decode = (after.generated_tokens - before.generated_tokens) / elapsed_s
    return f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s"
