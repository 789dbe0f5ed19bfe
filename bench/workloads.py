"""The workloads of `make bench`, and what is reported of a run.

    w1    throughput  32 requests at once, prompts of 100 to 512 tokens, outputs of 64 to 192
    w2    prefix      48 requests, 8 at a time: 512 tokens in common and 64 of their own, 64 out
    w3    latency     one stream, 128 tokens in, 128 out
    turns latency     8 requests, one after the other, 128 tokens in, 64 out
    w4    stall       4 streams decode while a prompt of 1500 tokens comes in
    sweep scaling     1, 2, 4, ... 32 closed loops of 128 in, 64 out
    burst many        192 requests in one instant, prompts of 16 to 64 tokens, outputs of 32 to 64
    long  prefill     6 requests at once, prompts of 3000 tokens, 32 out

Work comes from a seed, so every server gets the same; outputs run to their length (`ignore_eos`).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

clock = time.perf_counter

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True)
class Seen:
    """What a client saw of one request: `times` has one entry per chunk with text."""

    num_in: int
    start_s: float = 0.0
    end_s: float = 0.0
    times: list[float] = field(default_factory=list)
    num_out: int = 0
    answer_id: str = ""  # as the server names it
    error: str | None = None

    @property
    def ttft_ms(self) -> float:
        return (self.times[0] - self.start_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first."""
        return (self.times[-1] - self.times[0]) * 1e3 / max(1, self.num_out - 1)

    @property
    def gaps_ms(self) -> list[float]:
        return [
            (after - before) * 1e3
            for before, after in zip(self.times, self.times[1:], strict=False)
        ]


Send = Callable[[Work, Seen], Awaitable[None]]


class Prompts:
    """Random prompts over token ids that stand for ordinary words."""

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self.random = random.Random(seed)
        self._token_ids = token_ids

    def take(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.choices(self._token_ids, k=length))


async def run_all(send: Send, works: Sequence[Work], concurrency: int) -> list[Seen]:
    """Closed loop: at most `concurrency` requests under way, in order."""
    seen = [Seen(len(work.prompt)) for work in works]
    todo = iter(zip(works, seen, strict=True))

    async def client() -> None:
        for work, one in todo:
            await _guarded(send, work, one)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return seen


async def _guarded(send: Send, work: Work, seen: Seen) -> None:
    try:
        await send(work, seen)
    except Exception as error:  # counted as failed; the others go on
        seen.error = f"{type(error).__name__}: {error}"
        seen.end_s = clock()


async def w1(send: Send, prompts: Prompts) -> list[Row]:
    draw = prompts.random
    works = [Work(prompts.take(draw.randint(100, 512)), draw.randint(64, 192)) for _ in range(32)]
    return [summary(await run_all(send, works, len(works)))]


async def w2(send: Send, prompts: Prompts) -> list[Row]:
    prefix = prompts.take(512)
    works = [Work(prefix + prompts.take(64), 64) for _ in range(48)]
    return [summary(await run_all(send, works, 8))]


async def w3(send: Send, prompts: Prompts) -> list[Row]:
    return [summary(await run_all(send, [Work(prompts.take(128), 128)], 1))]


async def turns(send: Send, prompts: Prompts) -> list[Row]:
    works = [Work(prompts.take(128), 64) for _ in range(8)]
    return [summary(await run_all(send, works, 1))]


async def w4(send: Send, prompts: Prompts) -> list[Row]:
    streams = [Work(prompts.take(64), 192) for _ in range(4)]
    return [await streams_beside(send, streams, send, [Work(prompts.take(1500), 16)])]


async def streams_beside(
    send: Send, streams: Sequence[Work], send_long: Send, long: Sequence[Work]
) -> Row:
    """Returns how long `streams` stand still while `long` prompts come in, one after the other,
    once all have begun to flow."""
    seen = [Seen(len(work.prompt)) for work in streams]
    running = [
        asyncio.create_task(_guarded(send, work, one))
        for work, one in zip(streams, seen, strict=True)
    ]
    while any(len(one.times) < 24 and not one.end_s for one in seen):
        await asyncio.sleep(0.002)
    beside = [Seen(len(work.prompt)) for work in long]
    for work, one in zip(long, beside, strict=True):
        await _guarded(send_long, work, one)
    await asyncio.gather(*running)
    row = summary([*seen, *beside])
    if any(one.error is not None or not one.times for one in beside):
        return row
    ttft_ms = statistics.median(one.ttft_ms for one in beside)
    stalls = _stalls(seen, beside[0].start_s, beside[-1].times[0])
    if not stalls:
        row["failed"] += 1
        row["errors"] = [*row.get("errors", ()), "the streams ended before a long prompt came in"]
    return row | stalls | {"long_ttft_ms": ttft_ms}


def _stalls(streams: Sequence[Seen], begin_s: float, end_s: float) -> Row:
    """Returns nothing where no stream ran between `begin_s` and `end_s`."""
    before: list[float] = []
    during: list[float] = []
    for one in streams:
        for earlier, later in zip(one.times[4:], one.times[5:], strict=False):
            if later <= begin_s:
                before.append((later - earlier) * 1e3)
            elif earlier < end_s:
                during.append((later - earlier) * 1e3)
    if not during:
        return {}
    return {
        "base_gap_p50_ms": percentile(before, 50),
        "stall_p50_ms": percentile(during, 50),
        "stall_p99_ms": percentile(during, 99),
        "stall_max_ms": max(during),
    }


async def sweep(send: Send, prompts: Prompts) -> list[Row]:
    rows = []
    for concurrency in (1, 2, 4, 8, 16, 32):
        works = [Work(prompts.take(128), 64) for _ in range(max(4, 2 * concurrency))]
        seen = await run_all(send, works, concurrency)
        rows.append({"concurrency": concurrency} | summary(seen))
    return rows


async def burst(send: Send, prompts: Prompts) -> list[Row]:
    draw = prompts.random
    works = [Work(prompts.take(draw.randint(16, 64)), draw.randint(32, 64)) for _ in range(192)]
    return [summary(await run_all(send, works, len(works)))]


async def long(send: Send, prompts: Prompts) -> list[Row]:
    works = [Work(prompts.take(3000), 32) for _ in range(6)]
    seen = await run_all(send, works, len(works))
    row = summary(seen)
    return [row | {"in_tok_s": row["in_tokens"] / row["wall_s"]} if "wall_s" in row else row]


WORKLOADS: dict[str, Callable[[Send, Prompts], Awaitable[list[Row]]]] = {
    "w1": w1,
    "w2": w2,
    "w3": w3,
    "turns": turns,
    "w4": w4,
    "sweep": sweep,
    "burst": burst,
    "long": long,
}


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(seen: Sequence[Seen]) -> Row:
    """Totals over requests that succeeded; `failed` counts the others."""
    done = [one for one in seen if one.error is None and one.times]
    row: Row = {"ok": len(done), "failed": len(seen) - len(done)}
    if row["failed"]:
        row["errors"] = sorted({one.error or "no output" for one in seen if one not in done})[:3]
    if not done:
        return row
    wall_s = max(one.end_s for one in done) - min(one.start_s for one in done)
    num_out = sum(one.num_out for one in done)
    ttft = [one.ttft_ms for one in done]
    tpot = [one.tpot_ms for one in done if one.num_out > 1]
    gaps = [gap for one in done for gap in one.gaps_ms]
    return row | {
        "wall_s": wall_s,
        "in_tokens": sum(one.num_in for one in done),
        "out_tokens": num_out,
        "chunks": sum(len(one.times) for one in done),
        "out_tok_s": num_out / wall_s,
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p99_ms": percentile(ttft, 99),
        "tpot_p50_ms": percentile(tpot, 50),
        "tpot_p99_ms": percentile(tpot, 99),
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
        "gap_max_ms": max(gaps, default=float("nan")),
    }


def median_row(rows: Sequence[Row]) -> Row:
    """Of each number over several runs of the same workload."""
    return {
        name: statistics.median(row[name] for row in rows if name in row)
        if isinstance(value, int | float)
        else value
        for name, value in rows[0].items()
    }
