"""A batch outlives the frontend that runs it: every row once, and the answers it would have had."""

from __future__ import annotations

import collections
import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from penstock.launcher.redis_server import PrivateServer
from tests.support.redis_server import new_namespace
from tests.support.running_service import (
    MODEL,
    RunningService,
    running_frontend,
    running_service,
    wait_until,
)
from tests.support.service_fixtures import module_service, openai_client
from tests.support.service_processes import FrontendProcess, process

LIMIT_S = 60.0
NUM_ROWS = 60
RUNNER = {"FRONTEND_LEASE_MS": "2000", "BATCH_ROWS_IN_FLIGHT": "8", "HEALTH_INTERVAL_S": "0.05"}

# A worker, and a frontend that takes batches in and leaves them to others.
shared_service = module_service(batches_at_once=0)
client = openai_client


def killable(service: RunningService, files_dir: Path, **settings: str) -> Any:
    """A frontend in a process of its own that runs batches."""
    return process(
        service.settings.redis_url,
        service.settings.namespace,
        FILES_DIR=str(files_dir),
        **(RUNNER | settings),
    )


def runner(service: RunningService, files_dir: Path, **settings: Any) -> Any:
    """A frontend in this process that runs batches."""
    return running_frontend(
        service.settings.redis_url,
        service.settings.namespace,
        files_dir=str(files_dir),
        **{name.lower(): value for name, value in (RUNNER | settings).items()},
    )


def begin(client: OpenAI, num_rows: int = NUM_ROWS) -> str:
    def row(index: int) -> dict[str, Any]:
        # Every ninth is refused: both files must be put together.
        body = {"model": MODEL, "prompt": f"row {index} ", "max_tokens": 6 + index % 5}
        return {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": body | ({"temperature": 9} if index % 9 == 4 else {}),
        }

    content = b"".join(json.dumps(row(index)).encode() + b"\n" for index in range(num_rows))
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    return batch.id


def num_done(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed + counts.failed


def completed(client: OpenAI, batch_id: str) -> None:
    wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", "its end", LIMIT_S)


def answers(client: OpenAI, batch_id: str) -> dict[str, Any]:
    """What was said of each row, without ids and times; each row must be there once."""
    batch = client.batches.retrieve(batch_id)
    lines = [
        json.loads(line)
        for file_id in (batch.output_file_id, batch.error_file_id)
        for line in client.files.content(file_id or "").text.splitlines()
    ]
    output = {}
    for line in lines:
        body = line["response"]["body"]
        for name in ("id", "created"):
            body.pop(name, None)
        output[line["custom_id"]] = (line["response"]["status_code"], body)
    assert len(output) == len(lines) == NUM_ROWS
    return output


@pytest.fixture(scope="module")
def expected(shared_service: RunningService, files_dir: Path) -> dict[str, Any]:
    """The answers of a run that nothing disturbs."""
    url = f"{shared_service.base_url}/v1"
    with (
        runner(shared_service, files_dir),
        OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        batch_id = begin(client)
        completed(client, batch_id)
        return answers(client, batch_id)


def end_in_the_middle(
    service: RunningService, client: OpenAI, files_dir: Path, how: signal.Signals
) -> tuple[str, FrontendProcess]:
    """A batch of which a part is done when its frontend ends; and that frontend."""
    service.worker.seen.clear()
    service.script.step_s = 0.1
    with killable(service, files_dir) as first:
        batch_id = begin(client)
        wait_until(lambda: num_done(client, batch_id) >= 15, "a part of the rows", LIMIT_S)
        first.popen.send_signal(how)
        first.popen.wait(30)
    service.script.step_s = 0.0
    return batch_id, first


@pytest.mark.promise(
    "Batches: after any failure every row has one result, and runs once while its job is kept (ten "
    "minutes)"
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_another_frontend_goes_on_and_no_row_runs_twice(
    service: RunningService,
    client: OpenAI,
    files_dir: Path,
    expected: dict[str, Any],
    how: signal.Signals,
) -> None:
    batch_id, first = end_in_the_middle(service, client, files_dir, how)
    done = num_done(client, batch_id)
    assert 15 <= done < NUM_ROWS
    assert client.batches.retrieve(batch_id).status == "in_progress"
    if how is signal.SIGTERM:
        assert first.popen.returncode == 0
    with runner(service, files_dir):
        completed(client, batch_id)
    assert answers(client, batch_id) == expected
    runs = collections.Counter(delivery.job.job_id for delivery in service.worker.seen)
    assert set(runs.values()) == {1}
    assert len(runs) == sum(status == 200 for status, _ in expected.values())


def test_frontends_killed_again_and_again_lose_and_double_nothing(
    service: RunningService, client: OpenAI, files_dir: Path, expected: dict[str, Any]
) -> None:
    service.worker.seen.clear()
    service.script.step_s = 0.1
    batch_id = begin(client)
    for _ in range(3):
        done = num_done(client, batch_id)
        with killable(service, files_dir) as frontend:
            wait_until(
                lambda done=done: num_done(client, batch_id) >= done + 10, "some rows", LIMIT_S
            )
            frontend.popen.kill()
    assert num_done(client, batch_id) < NUM_ROWS
    service.script.step_s = 0.0
    with runner(service, files_dir):
        completed(client, batch_id)
    assert answers(client, batch_id) == expected
    runs = collections.Counter(delivery.job.job_id for delivery in service.worker.seen)
    assert set(runs.values()) == {1}


def test_a_frontend_that_was_taken_for_dead_writes_nothing_that_counts(
    service: RunningService, client: OpenAI, files_dir: Path, expected: dict[str, Any]
) -> None:
    service.script.step_s = 0.1
    with ExitStack() as stack:
        first = stack.enter_context(killable(service, files_dir))
        batch_id = begin(client)
        wait_until(lambda: num_done(client, batch_id) >= 10, "a part of the rows", LIMIT_S)
        first.popen.send_signal(signal.SIGSTOP)
        stack.callback(first.popen.send_signal, signal.SIGCONT)
        done = num_done(client, batch_id)
        stack.enter_context(runner(service, files_dir))
        wait_until(lambda: num_done(client, batch_id) > done, "the second to go on", LIMIT_S)
        first.popen.send_signal(signal.SIGCONT)  # and speaks under its old fence
        service.script.step_s = 0.0
        completed(client, batch_id)
        wait_until(
            lambda: "lost the lease of a batch" in "".join(first.lines),
            "the first to notice",
            LIMIT_S,
        )
    assert answers(client, batch_id) == expected


def test_a_batch_leaves_half_of_the_queue_to_interactive_requests(
    service: RunningService, client: OpenAI, files_dir: Path
) -> None:
    service.park()
    with (
        runner(service, files_dir, MAX_QUEUED_JOBS="6", MAX_QUEUE_SHARE_PER_TENANT="1") as frontend,
        ExitStack() as stack,
    ):
        url = f"{frontend.base_url}/ready"
        wait_until(lambda: httpx.get(url).status_code == 200, "readiness", LIMIT_S)
        batch_id = begin(client)

        def waiting() -> int:
            return int(httpx.get(f"{frontend.base_url}/health").json()["waiting"])

        wait_until(lambda: waiting() == 3, "half of the queue", LIMIT_S)
        body = {"prompt": "me too", "max_tokens": 2}
        for _ in range(3):
            params = httpx.stream("POST", f"{frontend.base_url}/generate", json=body, timeout=60)
            assert stack.enter_context(params).status_code == 200
        assert httpx.post(f"{frontend.base_url}/generate", json=body).status_code == 503
        service.script.pulls = True
        completed(client, batch_id)


def test_a_row_larger_than_the_batches_share_waits_for_an_empty_queue(
    service: RunningService, client: OpenAI, files_dir: Path
) -> None:
    with runner(service, files_dir, MAX_QUEUED_TOKENS="2"):
        batch_id = begin(client, 4)
        completed(client, batch_id)
    assert num_done(client, batch_id) == 4


def test_a_batch_goes_on_after_an_outage_of_redis(
    tmp_path: Path,
    checkpoint: Path,
) -> None:
    server = PrivateServer(tmp_path / "redis")
    url, namespace = server.start(), new_namespace()
    files = str(tmp_path / "files")
    try:
        with (
            running_service(
                url, namespace, checkpoint, files_dir=files, batch_rows_in_flight=8
            ) as service,
            OpenAI(base_url=f"{service.base_url}/v1", api_key="x", max_retries=50) as client,
        ):
            service.script.step_s = 0.1
            batch_id = begin(client)
            wait_until(lambda: num_done(client, batch_id) >= 10, "a part of the rows", LIMIT_S)
            server.stop()
            wait_until(
                lambda: not httpx.get(f"{service.base_url}/health").json()["redis"]["reachable"],
                "the outage to be seen",
                LIMIT_S,
            )
            server.start()
            service.script.step_s = 0.0
            completed(client, batch_id)
            answers(client, batch_id)
    finally:
        server.stop()


def test_a_cancel_reaches_the_next_owner(
    service: RunningService, client: OpenAI, files_dir: Path
) -> None:
    service.script.stop_after = 3  # every row of more tokens hangs there
    with killable(service, files_dir) as first:
        batch_id = begin(client)
        wait_until(lambda: len(service.worker.jobs) == 8, "a window of rows", LIMIT_S)
        first.popen.kill()
    assert client.batches.cancel(batch_id).status == "cancelling"
    time_out = time.monotonic() + LIMIT_S
    with runner(service, files_dir):
        while client.batches.retrieve(batch_id).status != "cancelled":
            assert time.monotonic() < time_out, client.batches.retrieve(batch_id)
            time.sleep(0.05)
    wait_until(lambda: not service.worker.jobs, "the worker to drop its rows", LIMIT_S)
    assert len(service.worker.seen) == 8


@pytest.mark.promise(
    "Batches: a frontend that cannot access the files reports it and leaves batches to others"
)
def test_a_frontend_without_the_files_reports_it_and_leaves_batches_alone(
    service: RunningService, client: OpenAI, files_dir: Path, tmp_path: Path
) -> None:
    with killable(service, tmp_path / "elsewhere") as blind:
        batch_id = begin(client, 1)
        with OpenAI(base_url=f"{blind.base_url}/v1", api_key="x", max_retries=0) as other:
            file_id = other.batches.retrieve(batch_id).input_file_id
            answer = other.files.with_raw_response.retrieve(file_id)
            assert answer.http_response.status_code == 200
            with pytest.raises(Exception, match="missing or damaged"):
                other.files.content(file_id)
        wait_until(
            lambda: "frontend cannot run the batch" in "".join(blind.lines), "its look", LIMIT_S
        )
        with runner(service, files_dir):
            completed(client, batch_id)
