"""`penstock bench`: what a running service does under a load of equal requests."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Annotated

import typer

from penstock.cli.exits import CommandError
from penstock.cli.live import Counted
from penstock.cli.options import DEFAULT_URL, Json, Key, ModelName, Url
from penstock.cli.output import milliseconds, note, print_facts, print_json, print_text
from penstock.cli.service import chosen_model, client_of
from penstock.client import Client

BARS = " ▏▎▍▌▋▊▉█"
PLOT_WIDTH = 40
PLOT_ROWS = 8

WORDS = (
    *("river", "dam", "gate", "pipe", "wheel", "turbine", "valley", "stone", "water", "level"),
    *("flow", "spring", "winter", "bridge", "mill", "channel", "basin", "lock", "tide", "wave"),
    *("storm", "snow", "melt", "pressure", "valve", "pump", "tower", "field", "forest", "road"),
)


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: seconds to its first text and to its end, and tokens."""

    first_s: float
    total_s: float
    num_prompt_tokens: int
    num_tokens: int


def bench(
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    model: ModelName = None,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, max=1_000_000)] = 32,
    at_once: Annotated[int, typer.Option(min=1, max=1024, help="Requests under way.")] = 8,
    words: Annotated[int, typer.Option(min=1, help="Words of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
) -> None:
    """Sends identical requests and reports throughput and latency, without a warm-up request.

    Progress is printed on stderr. Ctrl-C ends it early, with the figures of the requests that have
    ended by then.

    Prompts differ from their first word on, so that no prefix is found in a cache. What the
    measuring machine computes beside it is in the figures. Ends with 1 where a request failed.
    """
    client = client_of(url, key)
    name = chosen_model(client, model)
    draw = random.Random(seed)
    prompts = [" ".join(draw.choices(WORDS, k=words)) for _ in range(requests + 1)]

    def send(prompt: str) -> Timing:
        return _timing(client, name, prompt, max_tokens)

    send(prompts.pop())
    timings: list[Timing] = []
    started_s = time.perf_counter()
    pool = ThreadPoolExecutor(at_once)
    try:
        with Counted(requests) as progress:

            def one(prompt: str) -> None:
                timings.append(timing := send(prompt))
                progress.add(timing.num_tokens)

            done, _ = wait([pool.submit(one, each) for each in prompts], None, FIRST_EXCEPTION)
            for request in done:
                request.result()
    except KeyboardInterrupt:
        note(f"interrupted after {len(timings)} of {requests} requests.")
        if timings:
            _print(name, timings[:], time.perf_counter() - started_s, at_once, as_json=json)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    _print(name, timings, time.perf_counter() - started_s, at_once, as_json=json)


def _print(
    model: str, timings: list[Timing], wall_s: float, at_once: int, *, as_json: bool
) -> None:
    figures = _figures(model, timings, wall_s, at_once)
    if as_json:
        print_json(figures)
        return
    print_facts([(what, _shown(what, value)) for what, value in figures.items()])
    print_text(f"\n{_plot('time to first token', [timing.first_s for timing in timings])}")


def _plot(title: str, seconds: Sequence[float]) -> str:
    """Returns how many requests took how long, a bar for each range."""
    low, high = min(seconds), max(seconds)
    span = (high - low) / PLOT_ROWS or 1.0
    counts = [0] * PLOT_ROWS
    for each in seconds:
        counts[min(PLOT_ROWS - 1, int((each - low) / span))] += 1
    lines = [f"{title}, requests by milliseconds"]
    for row, count in enumerate(counts):
        eighths = round(8 * PLOT_WIDTH * count / max(counts))
        bar = BARS[8] * (eighths // 8) + BARS[eighths % 8].rstrip()
        lines.append(f"{1000 * (low + row * span):>9.1f}  {bar} {count or ''}".rstrip())
    return "\n".join(lines) + "\n"


def _timing(client: Client, model: str, prompt: str, max_tokens: int) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s, first_s, usage = time.perf_counter(), None, None
    for event in client.events("POST", "/v1/completions", body):
        data = event or {}
        if "error" in data:
            raise CommandError(f"a request failed: {data['error']['message']}")
        if first_s is None and any(choice["text"] for choice in data.get("choices", ())):
            first_s = time.perf_counter() - started_s
        usage = data.get("usage") or usage
    total_s = time.perf_counter() - started_s
    if usage is None:
        raise CommandError("a stream ended before its answer did.")
    return Timing(
        total_s if first_s is None else first_s,
        total_s,
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def _figures(
    model: str, timings: list[Timing], wall_s: float, at_once: int
) -> dict[str, str | int | float]:
    first = sorted(timing.first_s for timing in timings)
    per_token = sorted(
        (timing.total_s - timing.first_s) / (timing.num_tokens - 1)
        for timing in timings
        if timing.num_tokens > 1
    )
    return {
        "model": model,
        "requests": len(timings),
        "at_once": at_once,
        "wall_s": round(wall_s, 3),
        "prompt_tokens": sum(timing.num_prompt_tokens for timing in timings),
        "output_tokens": sum(timing.num_tokens for timing in timings),
        "output_tokens_per_s": round(sum(t.num_tokens for t in timings) / wall_s, 1),
        "ttft_p50_ms": _ms(first, 0.5),
        "ttft_p99_ms": _ms(first, 0.99),
        "tpot_p50_ms": _ms(per_token, 0.5),
        "tpot_p99_ms": _ms(per_token, 0.99),
    }


def _ms(ascending: list[float], share: float) -> float:
    """Returns the nearest-rank percentile in milliseconds; 0 of nothing."""
    if not ascending:
        return 0.0
    return round(1000 * ascending[min(len(ascending) - 1, int(share * len(ascending)))], 2)


def _shown(what: str, value: str | int | float) -> object:
    return milliseconds(float(value)) if what.endswith("_ms") else value
