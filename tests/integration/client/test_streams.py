"""penstock.client against a running service: streams that are cut, errors, jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.client import (
    AsyncClient,
    Client,
    Delta,
    Gone,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    NotFound,
    Overloaded,
    PenstockError,
    Stream,
    Unreachable,
)
from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd, WorkerReport
from tests.support.cutting_proxy import CuttingProxy
from tests.support.expired_jobs import expire_record, expire_text
from tests.support.launched import free_port
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_service, wait_until
from tests.support.service_fixtures import *  # noqa: F403

PROMPT = "a gate and a wheel 😀 "
TOKENS: dict[str, Any] = {"max_tokens": 120, "model": MODEL, "ignore_eos": True}


@pytest.fixture
def ours(service: RunningService) -> Iterator[Client]:
    with Client(service.base_url, patience_s=20.0) as client:
        yield client


@pytest.fixture
def cut(proxy: CuttingProxy) -> Iterator[Client]:
    """A client whose connections the proxy cuts."""
    with Client([proxy.base_url], patience_s=20.0) as client:
        yield client


def started(client: Client, dialect: str, **more: Any) -> Stream:
    options = {**TOKENS, **more}
    if dialect == "chat":
        return client.chat(PROMPT * 4, return_token_ids=True, **options)
    if dialect == "completion":
        return client.complete(PROMPT * 4, return_token_ids=True, **options)
    return client.generate(PROMPT * 4, **options)


@pytest.mark.promise(
    "Client: a stream of `penstock.client` continues over cut connections, a killed frontend and a "
    "killed worker, with the text and the tokens of a calm run"
)
@pytest.mark.parametrize("dialect", ["chat", "completion", "generate"])
def test_a_stream_that_is_cut_is_the_undisturbed_one(
    ours: Client, cut: Client, proxy: CuttingProxy, service: RunningService, dialect: str
) -> None:
    whole = started(ours, dialect).result()
    service.script.step_s = 0.002
    proxy.cuts = [0, 150, 500, 900, 1300, 1700]
    stream = started(cut, dialect)
    deltas = list(stream)
    assert proxy.num_cut == 6
    assert "".join(delta.text for delta in deltas) == whole.text
    read = tuple(token for delta in deltas for token in delta.token_ids)
    assert read == whole.choices[0].token_ids
    assert len(read) == whole.usage["completion_tokens"] == 120
    assert stream.answer.choices == whole.choices
    assert len(service.worker.seen) == 2, "each was computed once"


def test_choices_and_log_probabilities_survive_cuts(
    ours: Client, cut: Client, proxy: CuttingProxy
) -> None:
    more = {"logprobs": True, "top_logprobs": 2, "n": 3, "max_tokens": 30}
    whole = started(ours, "chat", **more).result()
    proxy.cuts = [900, 2500, 5000]
    read = started(cut, "chat", **more).result()
    assert proxy.num_cut == 3
    assert read.choices == whole.choices
    assert len(read.choices) == 3
    assert len((read.choices[0].logprobs or {})["content"]) > 0


async def test_the_client_for_asyncio_reads_over_cuts(ours: Client, proxy: CuttingProxy) -> None:
    whole = started(ours, "generate").result()
    proxy.cuts = [300, 2000]
    async with (
        AsyncClient([proxy.base_url]) as client,
        client.generate(PROMPT * 4, **TOKENS) as stream,
    ):
        read = [token async for delta in stream for token in delta.token_ids]
    assert proxy.num_cut == 2
    assert tuple(read) == whole.choices[0].token_ids


def test_a_frontend_that_is_away_is_passed_over(service: RunningService) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    with Client([away, service.base_url]) as client:
        assert started(client, "chat", max_tokens=4).result().usage["completion_tokens"] == 4
        assert client.url == service.base_url, "the next request begins there"
    with Client(away, patience_s=0.3) as client, pytest.raises(Unreachable, match=away):
        started(client, "chat").result()


@pytest.mark.promise("Client: leaving a stream cancels its job, leaving a followed one does not")
def test_leaving_a_stream_cancels_its_job(ours: Client, service: RunningService) -> None:
    service.script.stop_after = 3
    with started(ours, "chat") as stream:
        for delta in stream:
            if delta.text:
                break
    wait_until(lambda: ours.job(stream.job_id)["status"] == "cancelled", "the cancel")


def test_a_job_that_somebody_cancels_is_an_error_of_its_kind(
    ours: Client, service: RunningService
) -> None:
    service.script.stop_after = 3
    stream = started(ours, "chat")
    next(stream)
    assert ours.cancel(stream.job_id)["status"] == "cancelled"
    with pytest.raises(JobCancelled) as cancelled:
        stream.result()
    assert (cancelled.value.code, cancelled.value.job_id) == ("cancelled", stream.job_id)


def test_a_job_that_fails_says_why(ours: Client, service: RunningService) -> None:
    service.script.stop_after = 2
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.NONFINITE_LOGITS, Usage(1, 2), None, "The logits are not finite."
    )
    for dialect in ("chat", "generate"):
        with pytest.raises(JobFailed, match="not finite") as failed:
            started(ours, dialect).result()
        assert failed.value.code == "nonfinite_logits"


def test_what_is_refused_names_the_parameter(ours: Client) -> None:
    with pytest.raises(InvalidRequest, match="temperature") as refused:
        started(ours, "chat", temperature=9).result()
    assert (refused.value.status, refused.value.param) == (400, "temperature")
    with pytest.raises(NotFound) as missing:
        ours.chat("x", model="none").result()
    assert missing.value.code == "model_not_found"
    for call in (ours.job, ours.cancel):
        with pytest.raises(NotFound, match="No job"):
            call("none")
    with pytest.raises(NotFound):
        ours.follow("none").result()


def test_a_job_that_has_expired_is_gone_and_says_so(ours: Client, service: RunningService) -> None:
    job_id = ours.submit("x", model=MODEL)
    assert ours.follow(job_id).result().text
    expire_text(service, job_id)
    with pytest.raises(Gone, match="expires_after") as gone:
        ours.follow(job_id, raw=True).result()
    assert (gone.value.status, gone.value.code) == (410, "job_expired")
    expire_record(service, job_id)
    with pytest.raises(Gone, match="expired at 20"):
        ours.follow(job_id).result()
    with pytest.raises(Gone):
        ours.job(job_id)


def test_a_full_queue_is_an_error_of_its_kind(redis_url: str, checkpoint: Path) -> None:
    settings = {"max_queued_jobs": 1, "max_queue_share_per_tenant": 1.0}
    with (
        running_service(redis_url, new_namespace(), checkpoint, **settings) as full,
        Client(full.base_url, patience_s=0.0) as client,
    ):
        full.park()
        waiting = client.submit("x", model=MODEL)
        with pytest.raises(Overloaded) as refused:
            client.chat("x", model=MODEL).result()
        assert (refused.value.retry_after_s or 0) >= 1
        client.cancel(waiting)


def test_a_background_job_is_looked_at_followed_and_listed(
    ours: Client, cut: Client, proxy: CuttingProxy, service: RunningService
) -> None:
    options = {"model": MODEL, "ignore_eos": True}
    whole = ours.chat(PROMPT, max_tokens=60, **options).result()
    proxy.cuts = [100]  # the acceptance is lost, and sent again
    name = cut.submit(PROMPT, max_output_tokens=60, **options)
    proxy.cuts = [2000, 5000]
    with Client(proxy.base_url) as later:
        followed = later.follow(name).result()
    assert followed.text == whole.text
    assert followed.usage["output_tokens"] == 60
    assert ours.follow(name, raw=True).result().text == whole.text
    assert ours.job(name)["status"] == "finished"
    assert ours.jobs(state="finished", limit=1)[0]["id"] == name
    assert proxy.num_cut == 3
    assert len(service.worker.seen) == 2


def test_the_same_key_is_the_same_answer(ours: Client, service: RunningService) -> None:
    first, again = (
        ours.chat(PROMPT, model=MODEL, max_tokens=9, idempotency_key="one of this test").result()
        for _ in range(2)
    )
    assert first == again
    assert len(service.worker.seen) == 1


def test_every_error_of_a_client_is_a_penstock_error(ours: Client) -> None:
    with pytest.raises(PenstockError):
        ours.call("GET", "/v1/none")


@pytest.mark.parametrize("dialect", ["response", "log"])
def test_a_lost_worker_and_the_next_one_are_told_to_who_asks_for_it(
    service: RunningService, dialect: str
) -> None:
    """Another reader of the same job, which did not ask, gets the events of the job alone."""
    service.park()
    queue, told, others = service.transport.queue, list[Any](), list[Delta]()
    report = WorkerReport("w-dies", 20_000, (MODEL,), {"step": 1}, ())
    service.call(queue.heartbeat(report))
    with (
        Client(service.base_url, patience_s=20.0, on_recovery=told.append) as client,
        Client(service.base_url, patience_s=20.0) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        name = client.submit(PROMPT, model=MODEL, max_tokens=20)
        service.call(queue.pull("w-dies", 1, 0))
        is_log = dialect == "log"
        asked = pool.submit(client.follow(name, raw=is_log).result)
        plain = pool.submit(lambda: others.extend(other.follow(name, raw=is_log)))
        service.call(queue.declare_dead("w-dies"))
        wait_until(lambda: len(told) == 1, "the loss to be told")
        service.call(queue.recover(service.worker.worker_id, 1))
        wait_until(lambda: len(told) == 2, "the next worker to be told")
        client.cancel(name)
        for reader in (asked, plain):
            with pytest.raises(JobCancelled):
                reader.result()
    waiting, resumed = told
    assert waiting == {
        "type": "recovery",
        "state": "waiting",
        "tokens": 0,
        "cause": "worker_lost",
    }
    assert resumed.pop("after_s") > 0
    assert resumed == {
        "type": "recovery",
        "state": "resumed",
        "tokens": 0,
        "worker": service.worker.worker_id,
    }
    assert all(delta.event.get("type") != "recovery" for delta in others)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"]
)
def test_each_dialect_reports_a_lost_worker_to_who_asks_as_documented(
    service: RunningService, path: str
) -> None:
    """The service of these tests compares each event with the document."""
    service.park()
    queue = service.transport.queue
    service.call(queue.heartbeat(WorkerReport("w-dies", 20_000, (MODEL,), {"step": 1}, ())))
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "stream": True}
    is_chat = path in ("/v1/chat/completions", "/v1/messages")
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
    with (
        httpx.Client(base_url=service.base_url, timeout=20) as http,
        http.stream("POST", path, json=body, headers={"Penstock-Events": "recovery"}) as answer,
    ):
        service.call(queue.pull("w-dies", 1, 0))
        service.call(queue.declare_dead("w-dies"))
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("event: ")) == "event: recovery"
        assert json.loads(next(lines).removeprefix("data: "))["state"] == "waiting"
        http.delete(f"/v1/jobs/{answer.headers['x-request-id']}")
        assert "event: recovery" not in list(lines)


def test_who_asks_for_recoveries_of_a_whole_answer_gets_the_answer_alone(
    service: RunningService,
) -> None:
    """A body without a stream takes no such events: nothing may wait for them."""
    service.park()
    queue = service.transport.queue
    service.call(queue.heartbeat(WorkerReport("w-dies", 20_000, (MODEL,), {"step": 1}, ())))
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20}
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=service.base_url, timeout=20) as http:
        headers = {"penstock-events": "recovery"}
        asked = pool.submit(http.post, "/v1/completions", json=body, headers=headers)
        listed = "/v1/jobs?state=queued"
        wait_until(lambda: http.get(listed).json()["data"], "the job")
        (job,) = http.get(listed).json()["data"]
        service.call(queue.pull("w-dies", 1, 0))
        service.call(queue.declare_dead("w-dies"))
        recovering = f"/v1/jobs/{job['id']}"
        wait_until(lambda: http.get(recovering).json()["recovery"], "the loss")
        service.call(queue.recover(service.worker.worker_id, 1))
        wait_until(lambda: http.get(recovering).json()["attempt"] == 2, "the next worker")
        http.delete(recovering)
        assert asked.result(20).json()["error"]["code"] == "cancelled"
