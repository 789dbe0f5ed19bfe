"""A row of a batch that is prepared more than once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from api.batches import row as row_run
from api.batches.endpoints import Endpoint
from api.batches.input import Row
from api.batches.lease import StopSign
from api.batches.row import RowRun
from api.batches.row_room import RowRoom
from api.errors import CallerError, unavailable
from api.generation.protocol import CompletionRequest
from api.generation.thread_pool import TextPool, request_bytes


async def test_each_try_counts_the_row_and_its_earlier_turns_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_run, "FIRST_RETRY_S", 0.01)
    body = json.dumps({"model": "m", "prompt": "water"}).encode()
    counted: list[int] = []

    async def prepare(frontend: Any, caller: Any, asked: Any) -> Any:
        request_bytes.set(request_bytes.get() + 1000)  # as earlier turns do
        counted.append(request_bytes.get())
        if len(counted) < 3:
            raise unavailable("No worker lives.")
        raise CallerError("enough")

    pool = TextPool(threads=1, max_waiting_bytes=2**20)
    room = RowRoom(
        services=SimpleNamespace(  # type: ignore[arg-type]
            pool=pool, settings=SimpleNamespace(refuse_unused_members=False)
        ),
        endpoint=Endpoint("completion", CompletionRequest, prepare),
        tenant="default",
        stop=StopSign(),
        submitting=asyncio.Lock(),
        preparing=asyncio.Semaphore(1),
        time_left_ms=lambda: 1000,
    )
    row = Row("r", body, "m")
    job_id = "0-0198c0de-0000-7000-8000-000000000001"
    try:
        result = await RowRun(room, row, 1, job_id, may_be_there=False).run()
    finally:
        pool.close()
    assert b"enough" in result.text
    assert counted == [len(body) + 1000] * 3
