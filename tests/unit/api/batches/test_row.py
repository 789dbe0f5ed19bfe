"""A row of a batch: tried again until it can be prepared, under half of every limit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

import api.batches.row
from api.batches.input import Row
from api.batches.lease import StopEvent
from api.batches.protocol import ENDPOINT_PATHS
from api.batches.row import Endpoint, RowContext, RowTask, halved_limits, make_endpoints
from api.dialects.completions.protocol import CompletionRequest
from api.errors import unavailable
from api.generation.thread_pool import TextPool, request_bytes
from api.request_errors import ClientError
from shared.tracing import Tracing
from shared.transport.ports.admission import AdmissionLimits


async def test_each_try_counts_the_row_and_its_earlier_turns_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api.batches.row, "FIRST_RETRY_S", 0.01)
    body = json.dumps({"model": "m", "prompt": "water"}).encode()
    counted: list[int] = []

    async def prepare(caller: Any, request: Any) -> Any:
        request_bytes.set(request_bytes.get() + 1000)  # as earlier turns do
        counted.append(request_bytes.get())
        if len(counted) < 3:
            raise unavailable("No worker lives.")
        raise ClientError("enough")

    pool = TextPool(threads=1, max_waiting_bytes=2**20)
    run = SimpleNamespace(
        pool=pool,
        refuse_unused_parameters=False,
        preparing=asyncio.Semaphore(1),
        tracing=Tracing(),
    )
    endpoint = Endpoint("completion", CompletionRequest, prepare)
    lease = SimpleNamespace(stop=StopEvent())
    context = RowContext(run, endpoint, "default", lease)  # type: ignore[arg-type]
    row = Row("r", body, "m")
    job_id = "0-0198c0de-0000-7000-8000-000000000001"
    try:
        result = await RowTask(context, row, 1, job_id, may_exist=False).run()
    finally:
        pool.close()
    assert b"enough" in result.text
    assert counted == [len(body) + 1000] * 3


def test_every_endpoint_that_a_batch_may_name_can_be_run() -> None:
    part: Any = None
    assert tuple(make_endpoints(part, part)) == ENDPOINT_PATHS


def test_half_of_every_bound_is_left_to_others() -> None:
    limits = AdmissionLimits(
        max_queued_jobs=11,
        max_queued_tokens=1000,
        max_queue_share_per_tenant=0.75,
        max_queued_jobs_per_tenant=1,
        max_queued_tokens_per_tenant=500,
        max_jobs_per_tenant=8,
        requests_per_minute=None,
        tokens_per_minute=600,
    )
    assert asdict(halved_limits(limits, 10)) == asdict(
        AdmissionLimits(
            max_queued_jobs=5,
            max_queued_tokens=500,
            max_queue_share_per_tenant=0.75,
            max_queued_jobs_per_tenant=1,
            max_queued_tokens_per_tenant=250,
            max_jobs_per_tenant=4,
            requests_per_minute=None,
            tokens_per_minute=300,
        )
    )


def test_a_prompt_larger_than_its_share_fits_an_empty_queue() -> None:
    share = halved_limits(AdmissionLimits(max_queued_tokens=1000), 900)
    assert (share.max_queued_tokens, share.max_queued_tokens_per_tenant) == (900, None)
