"""The figures of a response's times, for requests with `return_metrics`."""

from __future__ import annotations

from api.generation.formatter import Timing


def metrics(timing: Timing, num_tokens: int) -> dict[str, float | None]:
    """Returns those of a response of one choice with `num_tokens`, by vLLM's names.

    Milliseconds, and tokens per second, with one decimal. None: not observed, since a worker's
    report that it took the job may be lost.
    """
    decoding_s = _between(timing.first_token_s, timing.last_token_s)
    working_s = _between(timing.started_s, timing.last_token_s)
    gaps = num_tokens - 1
    return {
        "time_to_first_token_ms": _ms(_between(timing.started_s, timing.first_token_s)),
        "generation_time_ms": _ms(decoding_s),
        "queue_time_ms": _ms(_between(timing.submitted_s, timing.started_s)),
        "mean_itl_ms": _ms(decoding_s / gaps) if decoding_s is not None and gaps > 0 else None,
        "tokens_per_second": round(num_tokens / working_s, 1) if working_s else None,
    }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
