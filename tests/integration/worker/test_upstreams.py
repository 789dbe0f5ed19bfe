"""PENSTOCK_ENGINE=http as a worker: no upstream answers for longer than the engine waits."""

from __future__ import annotations

from pathlib import Path

from shared.text.checkpoint_text import load_tokenizer_and_eos
from shared.transport.connect import RedisTransport
from shared.transport.ports.queue import ClaimEnd
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import Frontend
from tests.support.launched import free_port
from tests.support.polling import until
from tests.support.scripted_upstream import ScriptedUpstream, continued

PROMPTS = [[40 + number, 41, 42] for number in range(3)]


async def test_an_outage_of_all_upstreams_costs_no_job_and_no_restart_that_is_counted(
    start_worker: StartWorker, transport: RedisTransport, checkpoint: Path
) -> None:
    tokenizer, _ = load_tokenizer_and_eos(checkpoint)
    frontend, port = Frontend(transport.store, checkpoint.name), free_port()
    settings = {"ENGINE": "http", "RUNNER": "model", "UPSTREAM_URLS": f"http://127.0.0.1:{port}"}
    worker = start_worker(**settings, MAX_NUM_SEQS=2, ENGINE_RESTARTS=0)
    with ScriptedUpstream(tokenizer, port=port) as upstream:
        await worker.ready()
        upstream.faults.is_stuck = True
        num_before = len(upstream.bodies)
        job_ids = [await frontend.submit(prompt, max_tokens=8) for prompt in PROMPTS]
        await until(lambda: len(upstream.bodies) == num_before + 2, "the requests of two slots")
    await until(lambda: "UpstreamsLost: no upstream answers" in worker.log, "the engine's end")
    with ScriptedUpstream(tokenizer, port=port):
        results = [await frontend.result(job_id) for job_id in job_ids]
    assert [r.token_ids for r in results] == [continued(prompt, 8) for prompt in PROMPTS]
    assert worker.alive
    for number, job_id in enumerate(job_ids):
        record = await transport.store.get(job_id)
        assert record is not None
        ends = [ClaimEnd.UPSTREAM_LOST, None] if number < 2 else [None]
        assert [claim.cause for claim in record.claims] == ends
        values = await transport.connections.commands.hgetall(transport.keys.job(job_id))
        assert values[b"crashes"] == b"0"
        assert b"deaths" not in values
