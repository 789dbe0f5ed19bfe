"""`python -m api` as a process: its start without a Redis, outages, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from penstock.launcher.redis_server import PrivateServer
from shared.text.checkpoint_text import card_from_checkpoint, load_tokenizer
from shared.transport.connect import open_transport
from tests.neighbours.joining_model import write_tokenizer
from tests.support.document_check import (
    CHECKED,
    collect_written,
    raise_mismatch,
    write_mismatch,
)
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_service, wait_until
from tests.support.service_processes import REPOSITORY, process
from tests.support.sse_readers import payloads
from tests.support.variables import with_prefix

WORK_S = 16.0  # of the largest text here; twice what an end may take
ABSENT = "unix:///nonexistent/penstock.sock"


@pytest.fixture
def scripted(redis_url: str, checkpoint: Path) -> Iterator[RunningService]:
    """A worker (and a frontend that the test does not use)."""
    with running_service(redis_url, new_namespace(), checkpoint) as service:
        yield service


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PORT", "x"), ("KEEPALIVE_S", "60"), ("REDIS_URL", "http://x"), ("CORS_ORIGINS", "x")],
)
def test_a_bad_setting_ends_it_with_one_sentence_and_2(variable: str, value: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "api"],
        cwd=REPOSITORY,
        env=with_prefix({"PATH": os.environ["PATH"], "REDIS_URL": ABSENT, variable: value}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert variable in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_it_starts_without_redis_and_reports_it() -> None:
    with process(ABSENT, new_namespace()) as frontend:
        health = httpx.get(f"{frontend.base_url}/health").json()
        assert (health["status"], health["redis"]["reachable"]) == ("degraded", False)
        assert frontend.answers("/ready", 503)
        refused = httpx.post(
            f"{frontend.base_url}/v1/completions", json={"model": "m", "prompt": "a"}, timeout=30
        )
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "service_unavailable"
        assert refused.headers["retry-after"]
        assert refused.headers["x-request-id"].startswith("cmpl-")
        frontend.popen.send_signal(signal.SIGTERM)
        assert frontend.popen.wait(60) == 0


def test_its_bodies_are_compared_with_its_document_where_a_variable_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECKED, str(tmp_path / "mismatches"))
    with process(ABSENT, new_namespace()):
        assert (tmp_path / "mismatches").read_text() == ""
    write_mismatch("POST /x: it differs")
    collect_written()
    with pytest.raises(AssertionError, match="POST /x: it differs"):
        raise_mismatch()


def test_it_needs_no_file_of_the_model(scripted: RunningService) -> None:
    settings = scripted.settings
    with process(settings.redis_url, settings.namespace) as frontend:
        wait_until(lambda: frontend.answers("/ready", 200), "readiness")
        answer = httpx.post(
            f"{frontend.base_url}/v1/completions", json={"model": MODEL, "prompt": "hello"}
        )
        assert answer.json()["choices"][0]["text"].startswith("hello")


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_streams_and_refuses_new_work(
    scripted: RunningService, stop_signal: signal.Signals
) -> None:
    settings = scripted.settings
    scripted.script.stop_after = 10
    with process(settings.redis_url, settings.namespace, SHUTDOWN_TIMEOUT_S="60") as frontend:
        wait_until(lambda: frontend.answers("/ready", 200), "readiness")
        body = {"prompt": "drain", "max_tokens": 60}
        with httpx.stream("POST", f"{frontend.base_url}/generate", json=body) as stream:
            parts = stream.iter_lines()
            next(parts)
            frontend.popen.send_signal(stop_signal)
            wait_until(lambda: frontend.answers("/ready", 503), "the end of readiness")
            assert frontend.answers("/health", 200)
            refused = httpx.post(f"{frontend.base_url}/generate", json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            scripted.script.stop_after = None
            lines = list(parts)
        assert last_of(lines) == "data: [DONE]"
        assert payloads(lines)[-1]["done"]
        assert frontend.popen.wait(60) == 0


def test_a_text_thread_at_work_does_not_hold_up_the_end(
    scripted: RunningService, checkpoint: Path
) -> None:
    """A thread cannot be ended, and the interpreter would wait for it."""
    tokenizer = load_tokenizer(checkpoint)
    begin = time.monotonic()
    tokenizer.encode("ab " * 100_000)
    text = "ab " * round(100_000 * WORK_S / (time.monotonic() - begin))
    settings = scripted.settings
    params: list[str] = []

    def send(base_url: str) -> None:
        try:
            answer = httpx.post(
                f"{base_url}/tokenize", json={"model": MODEL, "prompt": text}, timeout=120
            )
            params.append(f"answered {answer.status_code}")
        except httpx.TransportError:
            params.append("cut off")

    with process(settings.redis_url, settings.namespace, MAX_BODY_BYTES=str(2**27)) as frontend:
        wait_until(lambda: frontend.answers("/ready", 200), "readiness", 60)
        thread = threading.Thread(target=send, args=(frontend.base_url,))
        thread.start()
        time.sleep(1.5)  # until its thread is at it
        frontend.popen.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert frontend.popen.wait(120) == 0
        end_s = time.monotonic() - begin
        thread.join()
    assert len(params) == 1
    assert "answered 200" not in params, "it ended before it was asked to: nothing was shown"
    assert end_s < WORK_S / 2


def test_a_stream_that_outlasts_the_drain_goes_on_elsewhere(scripted: RunningService) -> None:
    settings = scripted.settings
    scripted.script.stop_after = 20  # until the frontend is gone
    with process(settings.redis_url, settings.namespace, SHUTDOWN_TIMEOUT_S="0.2") as frontend:
        wait_until(lambda: frontend.answers("/ready", 200), "readiness")
        body = {"prompt": "goes on ", "max_tokens": 80}
        with httpx.stream("POST", f"{frontend.base_url}/generate", json=body) as stream:
            name = stream.headers["x-request-id"]
            parts = stream.iter_lines()
            first = next(parts)
            frontend.popen.send_signal(signal.SIGTERM)
            sent = [first, *parts]
        assert frontend.popen.wait(60) == 0
    assert last_of(sent) == "data: [DONE]"
    *pieces, last = payloads(sent)
    error = last["error"]
    assert error["code"] == "frontend_draining"
    cursor = error["message"].split("Last-Event-ID: ")[1].split("'")[0]
    had = "".join(piece["text"] for piece in pieces)
    other = scripted.base_url
    scripted.script.stop_after = None
    tail = httpx.get(
        f"{other}/v1/jobs/{name}/stream", headers={"last-event-id": cursor}, timeout=30
    )
    events = payloads(tail.text)
    assert events[-1]["finish_reason"] == "length"
    text = had + "".join(event["text"] for event in events)
    prompt_ids = scripted.text.tokenizer.encode("goes on ")
    assert text == scripted.text.tokenizer.decode((prompt_ids * 80)[:80])


def test_a_redis_restart_is_a_pause_not_an_end(tmp_path: Path, checkpoint: Path) -> None:
    server = PrivateServer(tmp_path / "redis")
    url = server.start()
    namespace = new_namespace()
    try:
        with (
            running_service(url, namespace, checkpoint) as worker,
            process(url, namespace) as frontend,
        ):
            wait_until(lambda: frontend.answers("/ready", 200), "readiness")
            worker.script.step_s = 0.02
            worker.script.stop_after = 10
            body = {"prompt": "restart ", "max_tokens": 30}
            with httpx.stream(
                "POST", f"{frontend.base_url}/generate", json=body, timeout=30
            ) as stream:
                lines = stream.iter_lines()
                wait_until(
                    lambda: any(len(job.token_ids) == 10 for job in worker.worker.jobs.values()),
                    "ten tokens",
                )
                server.stop()
                wait_until(
                    lambda: (
                        not httpx.get(f"{frontend.base_url}/health").json()["redis"]["reachable"]
                    ),
                    "the outage to be seen",
                )
                assert frontend.answers("/ready", 503)
                refused = httpx.post(f"{frontend.base_url}/generate", json=body, timeout=30)
                assert refused.status_code == 503
                server.start()
                wait_until(lambda: frontend.answers("/ready", 200), "readiness")
                worker.script.stop_after = None
                events = payloads(lines)
            assert events[-1]["finish_reason"] == "length"
            assert events[-1]["usage"]["completion_tokens"] == 30
            assert events[-1]["full_text"] == "".join(event["text"] for event in events)
    finally:
        server.stop()


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_its_end_leaves_no_process_and_closes_what_it_opened(
    redis_url: str, tmp_path: Path, stop_signal: signal.Signals
) -> None:
    """A large vocabulary and a chat template have processes beside the frontend."""
    namespace = new_namespace()
    asyncio.run(announce_large_vocabulary(redis_url, namespace, tmp_path))
    settings = {"PYTHONWARNINGS": "error::ResourceWarning"}
    with process(redis_url, namespace, **settings) as frontend:
        assert not frontend.popen.is_forked, "a forked one would not read the variable"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        url = f"{frontend.base_url}/tokenize"
        wait_until(
            lambda: httpx.post(url, json=body, timeout=60).status_code == 200, "the text is loaded"
        )
        children = children_of(frontend.popen.pid)
        frontend.popen.send_signal(stop_signal)
        assert frontend.popen.wait(60) == 0
        left = [pid for pid in children if Path(f"/proc/{pid}").exists()]
    modules = set(children.values())
    assert modules == {"shared.text.text_process", "shared.text.rendering_process"}
    assert left == []
    output = "".join(frontend.lines)
    assert "ResourceWarning" not in output, output
    assert "Traceback" not in output, output


def last_of(lines: Iterable[str]) -> str:
    """Returns the last one that is not empty."""
    return [line for line in lines if line][-1]


def children_of(pid: int) -> dict[int, str]:
    """Returns the modules that its child processes run, by their pids."""
    children = [
        child
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    commands = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}
    return {
        int(child): command.rpartition("-m\0")[2].split("\0")[0]
        for child, command in commands.items()
    }


async def announce_large_vocabulary(redis_url: str, namespace: str, directory: Path) -> None:
    """Announces a model whose tokenizer.json is above the bound of those that a frontend parses."""
    write_tokenizer(directory, 20_000)
    card, blobs = card_from_checkpoint(
        directory, name=MODEL, max_model_len=64, kv_capacity_tokens=64, dtype="", num_parameters=1
    )
    transport = await open_transport(redis_url, namespace=namespace)
    await transport.queue.setup([MODEL])
    await transport.queue.announce(MODEL, card.to_json(), blobs)
    await transport.aclose()
