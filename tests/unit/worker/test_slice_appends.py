"""Slices of prompts share the publisher's calls: tokens wait behind a few of them at most."""

from __future__ import annotations

import asyncio
from collections import Counter

from shared.messages import PROMPT_SLICE_TOKENS, START, PromptLogprob
from shared.transport.ports.queue import Append, AppendResult
from tests.support.polling import until
from tests.unit.worker.fakes import accepted
from tests.unit.worker.test_publisher import END, Bench, running
from worker.outbox import Outbox, PromptLog
from worker.publisher import MAX_SLICES

NUM_SLICES = 3
ENTRIES = [PromptLogprob(i, -0.5, 1) for i in range(NUM_SLICES * PROMPT_SLICE_TOKENS)]
SCORING = [f"0-scores-{i:02}" for i in range(MAX_SLICES * 4 + 1)]
SPEAKING = [f"0-speaks-{i:02}" for i in range(8)]


def score(bench: Bench, job_id: str) -> None:
    """Adds a whole prompt's log probabilities, as after an outage."""
    bench.open(Outbox(job_id, 1, START, (), prompt=PromptLog(len(ENTRIES))))
    bench.outboxes[job_id].add_of_prompt(ENTRIES)
    bench.publisher.notice(bench.outboxes[job_id])


def slices_of(items: list[Append]) -> list[str]:
    return [item.job_id for item in items if item.prompt_slice is not None]


async def test_a_call_has_a_few_slices_and_everybodys_tokens() -> None:
    async with running() as bench:
        bench.queue.away = True
        for job_id in SCORING:
            score(bench, job_id)
        for job_id in SPEAKING:
            bench.open(Outbox(job_id, 1, START, ()))
            bench.say(job_id, (1,), "x")
        await until(lambda: bench.num_troubles)
        bench.queue.away = False
        await bench.publisher.flushed()
        numbers = [len(slices_of(items)) for items in bench.queue.appended]
        assert max(numbers) == MAX_SLICES
        assert sum(numbers) == NUM_SLICES * len(SCORING)
        first = bench.queue.appended[0]
        assert [item.job_id for item in first if item.prompt_slice is None] == SPEAKING


async def test_tokens_that_come_while_slices_wait_go_with_the_next_call() -> None:
    async with running() as bench:
        bench.open(Outbox("0-speaks", 1, START, ()))

        num_calls = NUM_SLICES * len(SCORING) // MAX_SLICES

        def go_on(item: Append) -> AppendResult:
            if item.job_id == "0-speaks" and item.delta.token_ids[0] < num_calls - 1:
                bench.say("0-speaks", (item.delta.token_ids[0] + 1,), "x")
            return accepted(item)

        bench.queue.answer = go_on
        for job_id in SCORING:
            score(bench, job_id)
        bench.say("0-speaks", (0,), "x")
        await bench.publisher.flushed()
        for number, items in enumerate(bench.queue.appended[:num_calls]):
            tokens = [item.delta.token_ids for item in items if item.job_id == "0-speaks"]
            assert tokens == [(number,)]
            assert len(slices_of(items)) <= MAX_SLICES


async def test_the_scored_jobs_take_turns() -> None:
    async with running() as bench:
        for job_id in SCORING:
            score(bench, job_id)
        await bench.publisher.flushed()
        turns = [job_id for items in bench.queue.appended for job_id in slices_of(items)]
        for number in range(NUM_SLICES):
            round_of_all = turns[number * len(SCORING) : (number + 1) * len(SCORING)]
            assert round_of_all == SCORING


async def test_each_scored_job_sends_its_slices_in_order_then_its_end() -> None:
    async with running() as bench:
        for job_id in SCORING:
            score(bench, job_id)
            bench.say(job_id, (1,), "x")
            bench.finish(job_id, END)
        await asyncio.wait_for(bench.publisher.flushed(), 5)
        assert Counter(settled.job_id for settled in bench.settled) == Counter(SCORING)
        for job_id in SCORING:
            output = [item.prompt_slice for item in bench.sent if item.job_id == job_id]
            assert [part and part.index for part in output] == [*range(NUM_SLICES), None]
