"""What a frontend would see of a worker process: its jobs and their logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from shared.messages import (
    START,
    Cursor,
    Delta,
    Failed,
    Finished,
    JobState,
    PromptSlice,
)
from shared.transport.ports.admission import SubmittingStore
from shared.transport.ports.jobs import TransportError
from tests.support.jobs import accepted, make_job

TIMEOUT_S = 60.0


class Frontend:
    """Submits jobs and follows their logs."""

    def __init__(self, store: SubmittingStore, model: str) -> None:
        self.store = store
        self.model = model

    async def submit(self, prompt: Sequence[int], **members: Any) -> str:
        """The job's id. `members` of the job and of its sampling."""
        usual = {"max_tokens": 20, "seed": 1, "temperature": 0.0, "timeout_ms": 60_000}
        job = make_job(prompt=prompt, model=self.model, **(usual | members))
        return await accepted(self.store, job)

    async def result(self, job_id: str) -> Result:
        """Waits for the end; checks that the log has neither gap nor overlap nor a second end."""
        result = Result()
        deadline_s = time.monotonic() + TIMEOUT_S
        while result.end is None:
            assert time.monotonic() < deadline_s, await self.store.get(job_id)
            try:
                result.read(await self.store.read_log(job_id, result.cursor))
            except TransportError:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.005)
        return result

    async def num_tokens(self, job_id: str, at_least: int) -> None:
        """Returns when so many tokens are in the log."""
        deadline_s = time.monotonic() + TIMEOUT_S
        result = Result()
        while result.cursor.num_tokens < at_least:
            assert time.monotonic() < deadline_s, await self.store.get(job_id)
            result.read(await self.store.read_log(job_id, result.cursor))
            await asyncio.sleep(0.005)

    async def state(self, job_id: str) -> JobState:
        record = await self.store.get(job_id)
        assert record is not None
        return record.state


class Result:
    """What a log says, in order."""

    def __init__(self) -> None:
        self.cursor: Cursor = START
        self.token_ids: list[int] = []
        self.text = ""
        self.deltas: list[Delta] = []
        self.end: Finished | Failed | None = None

    def read(self, events: Sequence[object]) -> None:
        for event in events:
            assert self.end is None, "something came after the end"
            if isinstance(event, Delta):
                assert event.start == self.cursor, "a gap or an overlap"
                self.cursor = event.end
                self.token_ids += event.token_ids
                self.text += event.text
                self.deltas.append(event)
            elif isinstance(event, PromptSlice):
                assert self.cursor == START, "the prompt comes first"
            else:
                assert isinstance(event, Finished | Failed)
                self.end = event
        assert len(self.token_ids) == self.cursor.num_tokens
        assert len(self.text.encode()) == self.cursor.num_bytes

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end

    @property
    def failed(self) -> Failed:
        assert isinstance(self.end, Failed), self.end
        return self.end


def echo(prompt: Sequence[int], count: int) -> list[int]:
    """What the echo runner says to it."""
    return [prompt[i % len(prompt)] for i in range(count)]
