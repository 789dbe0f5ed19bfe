"""Traces of real frontends and workers, as a collector gets them."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from tests.integration.worker.conftest import StartWorker
from tests.support.otlp import Collector, ReceivedSpan, collecting, wait_for_spans
from tests.support.polling import until
from tests.support.service_processes import FrontendProcess, WorkerProcess, process
from tests.support.throttle import Throttle

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"
NUM_TOKENS = 60
PARTS = ("wait", "prefill", "decode")  # of an attempt
OF_A_JOB = ("queue", "attempt", *PARTS)
# Between clocks of processes that say when one thing was: a busy machine holds one of them up.
SLACK_S = 0.5
QUESTION = "how much water is in the lake behind the dam"


@pytest.fixture(autouse=True)
def _no_tracing_of_the_test_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@asynccontextmanager
async def serving(
    redis_url: str, namespace: str, settings: dict[str, str]
) -> AsyncIterator[tuple[httpx.AsyncClient, FrontendProcess]]:
    """A frontend that sees a worker, and a client of it."""
    async with AsyncExitStack() as stack:
        frontend = stack.enter_context(
            process(redis_url, namespace, HEALTH_INTERVAL_S="0.1", LOG_FORMAT="text", **settings)
        )
        await until(lambda: frontend.answers("/ready", 200), "a frontend that sees the workers")
        client = httpx.AsyncClient(base_url=frontend.base_url, timeout=60)
        yield await stack.enter_async_context(client), frontend


async def chat(
    client: httpx.AsyncClient, model: str, headers: dict[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of an answer of NUM_TOKENS tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0.5,
        "seed": 7,
        "stream": True,
    }
    sent = client.stream("POST", "/v1/chat/completions", json=body, headers=headers or {})
    async with sent as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def one(spans: list[ReceivedSpan], name: str, parent_id: str | None = None) -> ReceivedSpan:
    (span,) = (s for s in spans if s.name == name and parent_id in (None, s.parent_id))
    return span


class Migrated:
    """An answer that two workers have given a part of, and what it was called."""

    def __init__(self) -> None:
        self.job_id = ""
        self.text = ""
        self.first_id = ""
        self.second_id = ""


async def migrate(
    client: httpx.AsyncClient,
    workers: list[WorkerProcess],
    throttle: Throttle,
    collector: Collector,
    stop: signal.Signals,
) -> Migrated:
    """Has a job traced as TRACE_ID and its worker stopped in mid-stream."""
    (model,) = (m["id"] for m in (await client.get("/v1/models")).json()["data"])
    found = Migrated()
    throttle.apply(5)
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=value"}
    num_chunks = 0
    async for chunk in chat(client, model, headers):
        found.text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
        num_chunks += 1
        if num_chunks == 8:  # more than the throttle lets through at once
            found.job_id = chunk["id"].removeprefix("chatcmpl-")
            record = (await client.get(f"/v1/jobs/{chunk['id']}")).json()
            found.first_id = record["worker"]
            (first,) = (w for w in workers if w.worker_id == found.first_id)
            (other,) = (w for w in workers if w is not first)
            found.second_id = other.worker_id
            # Spans are sent when they end: what this worker never ends, it never sends.
            await until(
                lambda: any(s.name == "prefill" for s in collector.of_trace(TRACE_ID)),
                "the first worker's spans",
            )
            first.signal(stop)
            await taken_up(other, found.job_id)
            throttle.release()
    return found


async def taken_up(worker: WorkerProcess, job_id: str) -> None:
    await until(lambda: f"job_id={job_id} attempt=2" in worker.log, "the second attempt")


@pytest.mark.promise(
    "Telemetry: one trace covers frontend, queue, and the prefill and decode of each attempt, also "
    "of a job whose worker was killed or drained; a worker that was only taken for dead sends no "
    "span twice (a killed worker's decode is what the log has of it)"
)
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_trace_covers_frontend_queue_and_both_workers_of_a_job_whose_worker_was_lost(
    stop: signal.Signals,
    start_worker: StartWorker,
    throttle: Throttle,
    collector: Collector,
    redis_url: str,
    namespace: str,
) -> None:
    """SIGKILL, or SIGSTOP and SIGCONT: one that was only taken for dead sends nothing twice."""
    workers = [start_worker(**collector.settings) for _ in range(2)]
    for worker in workers:
        await worker.ready()
    async with serving(redis_url, namespace, collector.settings) as (client, _):
        migrated = await migrate(client, workers, throttle, collector, stop)
        if stop is signal.SIGSTOP:
            (first,) = (w for w in workers if w.worker_id == migrated.first_id)
            first.signal(signal.SIGCONT)
            ended = f"job ended job_id={migrated.job_id} attempt=1"
            await until(lambda: ended in first.log, "the end of the attempt that was taken away")
            assert "reason=fenced" in first.log.partition(ended)[2].splitlines()[0]
        names = ["queue", *("attempt", *PARTS) * 2]
        (model,) = (m["id"] for m in (await client.get("/v1/models")).json()["data"])
        root_name = f"chat {model}"
        spans = await asyncio.to_thread(wait_for_spans, collector, TRACE_ID, [root_name, *names])
    assert len({span.span_id for span in spans}) == len(spans)
    root = one(spans, root_name)
    assert (root.kind, root.parent_id, root.tracestate) == (
        "SERVER",
        CLIENT_SPAN_ID,
        "vendor=value",
    )
    assert root.resource["service.name"] == "penstock-frontend"
    assert not root.is_error
    usage = root.attributes
    assert usage["gen_ai.usage.input_tokens"] > len(QUESTION.split())
    assert 0 < usage["gen_ai.response.time_to_first_chunk"] < root.end_s - root.start_s
    assert {
        name: usage[name]
        for name in usage
        if name not in ("gen_ai.usage.input_tokens", "gen_ai.response.time_to_first_chunk")
    } == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": NUM_TOKENS,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": f"chatcmpl-{migrated.job_id}",
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": NUM_TOKENS,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "penstock.job.id": migrated.job_id,
        "penstock.outcome": "length",
    }

    attempts = {span.attempt: span for span in spans if span.name == "attempt"}
    lost, taken_over = attempts[1], attempts[2]
    queue = one(spans, "queue")
    for span in (queue, lost, taken_over):
        assert span.parent_id == root.span_id
        assert span.attributes["penstock.job.id"] == migrated.job_id
        assert span.attributes["gen_ai.request.model"] == model
    assert queue.attempt == 1
    assert queue.resource["service.instance.id"] == migrated.first_id
    # The first worker could not send its attempt: its successor did, with what the log knows of it.
    resumed = taken_over.attributes["penstock.tokens.resumed"]
    assert 5 <= resumed < NUM_TOKENS
    assert lost.resource["service.instance.id"] == migrated.second_id
    assert lost.is_error
    assert {k: v for k, v in lost.attributes.items() if k.startswith(("penstock", "error"))} == {
        "penstock.job.id": migrated.job_id,
        "penstock.attempt": 1,
        "penstock.worker.id": migrated.first_id,
        "penstock.outcome": "worker_lost",
        "penstock.reported_by": migrated.second_id,
        "penstock.tokens.input": usage["gen_ai.usage.input_tokens"],
        "penstock.tokens.resumed": 0,
        "penstock.tokens.output": resumed,
        "error.type": "worker_lost",
    }
    assert lost.kind == taken_over.kind == "CONSUMER"
    assert taken_over.links == ((TRACE_ID, lost.span_id),)
    assert not taken_over.is_error
    assert taken_over.attributes["penstock.tokens.output"] == NUM_TOKENS - resumed
    assert taken_over.attributes["penstock.outcome"] == "length"
    assert taken_over.attributes["penstock.worker.id"] == migrated.second_id

    wait, prefill, decode = (one(spans, name, lost.span_id) for name in PARTS)
    assert wait.resource["service.instance.id"] == migrated.first_id, "sent before it was killed"
    assert prefill.resource["service.instance.id"] == migrated.first_id
    assert decode.resource["service.instance.id"] == migrated.second_id
    assert decode.is_error
    assert decode.attributes == {
        "penstock.tokens.output": resumed,
        "penstock.reported_by": migrated.second_id,
        "error.type": "worker_lost",
    }
    assert_in_order([root, queue, lost], [queue, lost, taken_over])
    assert_in_order([lost, wait, prefill, decode])
    # Of more than one call: the last tokens came with the steps of the throttled model.
    assert 0 < decode.end_s - decode.start_s < lost.end_s - lost.start_s
    assert decode.end_s <= lost.end_s + 0.001
    parts = [one(spans, name, taken_over.span_id) for name in PARTS]
    assert taken_over.start_s == parts[0].start_s
    for earlier, later in itertools.pairwise(parts):
        assert earlier.start_s <= earlier.end_s == pytest.approx(later.start_s, abs=1e-5)
    assert parts[-1].end_s <= taken_over.end_s
    assert parts[-1].attributes["penstock.tokens.output"] == NUM_TOKENS - resumed
    assert lost.end_s == pytest.approx(taken_over.start_s, abs=1e-5), "until it was taken over"
    assert prefill.end_s < lost.end_s
    assert taken_over.end_s < root.end_s + SLACK_S
    assert_no_content(spans, migrated.text)


def assert_in_order(*groups: list[ReceivedSpan]) -> None:
    """Each span begins with the one before it, or later."""
    for group in groups:
        for earlier, later in itertools.pairwise(group):
            assert earlier.start_s <= later.start_s + SLACK_S, (earlier, later)


def assert_no_content(spans: list[ReceivedSpan], text: str) -> None:
    """No attribute has words of the question or of the answer; those of GenAI are known ones."""
    known = {
        value
        for name, value in vars(gen_ai_attributes).items()
        if name.startswith("GEN_AI") and isinstance(value, str)
    }
    content = {"gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.prompt"}
    for span in spans:
        names = {name for name in span.attributes if name.startswith("gen_ai.")}
        assert names <= known - content, names - known
        values = json.dumps(span.attributes)
        assert "dam" not in values
        assert text[:20] not in values


async def test_a_drained_workers_attempt_ends_well_and_the_queue_is_in_the_trace_once_more(
    start_worker: StartWorker,
    throttle: Throttle,
    collector: Collector,
    redis_url: str,
    namespace: str,
) -> None:
    workers = [start_worker(DRAIN_TIMEOUT_S="0.1", **collector.settings) for _ in range(2)]
    for worker in workers:
        await worker.ready()
    async with serving(redis_url, namespace, collector.settings) as (client, _):
        migrated = await migrate(client, workers, throttle, collector, signal.SIGTERM)
        (model,) = (m["id"] for m in (await client.get("/v1/models")).json()["data"])
        names = [f"chat {model}", *OF_A_JOB * 2]
        spans = await asyncio.to_thread(wait_for_spans, collector, TRACE_ID, names)
    first, second = sorted((s for s in spans if s.name == "attempt"), key=lambda s: s.attempt)
    assert first.attributes["penstock.outcome"] == "handed_back"
    assert not first.is_error
    assert first.resource["service.instance.id"] == migrated.first_id
    assert second.links == ((TRACE_ID, first.span_id),)
    queues = sorted((s for s in spans if s.name == "queue"), key=lambda s: s.attempt)
    assert [queue.attempt for queue in queues] == [1, 2]
    assert queues[1].resource["service.instance.id"] == migrated.second_id
    assert queues[1].start_s > first.start_s
    assert queues[1].end_s == pytest.approx(second.start_s, abs=1e-5)
    tokens = [span.attributes["penstock.tokens.output"] for span in (first, second)]
    assert sum(tokens) == NUM_TOKENS
    assert tokens[0] == second.attributes["penstock.tokens.resumed"]


def loads_protobuf(pid: int) -> bool:
    return "_upb" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.promise(
    "Telemetry: without configuration nothing of OpenTelemetry is loaded by us, and nothing is sent"
)
async def test_without_configuration_nothing_is_loaded_and_nothing_is_sent(
    start_worker: StartWorker,
    collector: Collector,
    redis_url: str,
    namespace: str,
) -> None:
    """The context of a client reaches the worker all the same: both logs name its trace."""
    worker = await start_worker().ready()
    async with serving(redis_url, namespace, {}) as (client, frontend):
        (model,) = (m["id"] for m in (await client.get("/v1/models")).json()["data"])
        chunks = [c async for c in chat(client, model, {"traceparent": TRACEPARENT})]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        untraced = [c async for c in chat(client, model)]
        await until(lambda: worker.log.count("job ended") == 2, "the ends")
        lines = "".join(frontend.lines).splitlines()
        pids = [worker.pid, *worker.engine_pids(), frontend.popen.pid]
        assert len(pids) == 3
        assert not any(loads_protobuf(pid) for pid in pids)
    assert collector.num_requests == 0
    first_id, second_id = (c[0]["id"].removeprefix("chatcmpl-") for c in (chunks, untraced))
    for line in worker.log.splitlines() + lines:
        if first_id in line:
            assert f"trace_id={TRACE_ID}" in line
        if second_id in line:
            assert "trace_id" not in line
    assert sum(first_id in line for line in worker.log.splitlines()) >= 2
    assert sum(first_id in line for line in lines) >= 2


@pytest.mark.promise(
    "Telemetry: a collector that does not answer delays and fails no job, and is one line in a log"
)
async def test_a_collector_that_never_answers_holds_up_no_job_and_is_one_line(
    start_worker: StartWorker, redis_url: str, namespace: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        worker = await start_worker(**settings).ready()
        async with serving(redis_url, namespace, settings) as (client, frontend):
            (model,) = (m["id"] for m in (await client.get("/v1/models")).json()["data"])
            num_ended = 0
            # Jobs are begun and ended all the time, while each try of the exporters hangs.
            while worker.log.count("traces cannot be sent") < 1 or num_ended < 20:
                chunks = [chunk async for chunk in chat(client, model)]
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
                num_ended += 1
            assert num_ended >= 20
            await until(lambda: "traces cannot be sent" in frontend.log, "the frontend's line")
            for _ in range(3):
                assert [chunk async for chunk in chat(client, model)]
            assert frontend.log.count("traces cannot be sent") == 1
            assert worker.log.count("traces cannot be sent") == 1
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
        assert "Traceback" not in worker.log


async def test_every_way_to_make_jobs_is_traced(
    start_worker: StartWorker,
    collector: Collector,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    """Several prompts of one request, a background response, rows of a batch, a refused request."""
    await start_worker(**collector.settings).ready()
    settings = {**collector.settings, "FILES_DIR": str(tmp_path / "files")}
    async with serving(redis_url, namespace, settings) as (client, _):
        (model,) = (m["id"] for m in (await client.get("/v1/models")).json()["data"])

        async def traced(
            number: int, path: str, body: dict[str, Any], names: list[str]
        ) -> list[ReceivedSpan]:
            trace_id = f"{number:032x}"
            headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN_ID}-01"}
            await client.post(path, json={"model": model, **body}, headers=headers)
            return await asyncio.to_thread(wait_for_spans, collector, trace_id, names)

        body: dict[str, Any] = {"prompt": ["a b c", "d e f"], "max_tokens": 4, "temperature": 0}
        root_name = f"text_completion {model}"
        spans = await traced(1, "/v1/completions", body, [root_name, *OF_A_JOB * 2])
        assert one(spans, root_name).attributes["gen_ai.request.choice.count"] == 2
        assert len({s.attributes["penstock.job.id"] for s in spans if s.name == "attempt"}) == 2

        body = {"input": "hello", "background": True, "max_output_tokens": 16}
        spans = await traced(2, "/v1/responses", body, [f"chat {model}", *OF_A_JOB])
        assert "gen_ai.usage.output_tokens" not in one(spans, f"chat {model}").attributes
        assert one(spans, "attempt").attributes["penstock.tokens.output"] > 0

        (refused,) = await traced(3, "/generate", {"prompt": 7}, ["POST /generate"])
        assert refused.attributes["http.response.status_code"] == 400
        assert not refused.is_error, "the client's fault"

        message = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        rows = [
            {
                "custom_id": f"row-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": model, **message},
            }
            for number in range(2)
        ]
        content = "".join(json.dumps(row) + "\n" for row in rows)
        files = {"file": ("rows.jsonl", content)}
        uploaded = await client.post("/v1/files", files=files, data={"purpose": "batch"})
        batch = {
            "input_file_id": uploaded.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch_id = (await client.post("/v1/batches", json=batch)).json()["id"]

        def roots() -> list[ReceivedSpan]:
            return [s for s in list(collector.spans) if not s.parent_id]

        await until(lambda: len(roots()) == 2, "a trace of each row")
        assert (await client.get(f"/v1/batches/{batch_id}")).json()["request_counts"]["total"] == 2
        for root in roots():
            assert (root.name, root.kind) == (f"chat {model}", "INTERNAL")
            names = [root.name, *OF_A_JOB]
            spans = await asyncio.to_thread(wait_for_spans, collector, root.trace_id, names)
            assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
            assert one(spans, "attempt").parent_id == root.span_id
