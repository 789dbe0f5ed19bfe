"""The client in TypeScript, in Node: streams over cuts and kills, errors, jobs, types."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd, WorkerReport
from tests.support.cutting_proxy import CuttingProxy
from tests.support.expired_jobs import expire_record
from tests.support.launched import REPOSITORY, Launched, free_port
from tests.support.listener import listener_on
from tests.support.node import NodeProgram, node_says, our_client
from tests.support.polling import wait_until
from tests.support.running_service import MODEL, RunningService
from tests.support.service_client import ServiceClient
from tests.support.service_fixtures import two_frontends
from tests.support.throttle import Throttle

pytestmark = [pytest.mark.node, pytest.mark.packages]

DIALECTS = ("chat", "completion", "generate")
ASKED: dict[str, Any] = {
    "prompt": "a gate and a wheel 😀 " * 4,
    "model": MODEL,
    "max_tokens": 120,
    "ignore_eos": True,
}


def says(url: str, case: str, **asked: Any) -> Any:
    return node_says("penstock_cases", url, case, json.dumps(asked), home=our_client())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_that_is_cut_is_the_undisturbed_one(
    service: RunningService, proxy: CuttingProxy, dialect: str
) -> None:
    whole = says(service.base_url, "read", dialect=dialect, **ASKED)
    proxy.cuts = [0, 150, 500, 900, 1300, 1700]
    read = says(proxy.base_url, "read", dialect=dialect, **ASKED)
    assert proxy.num_cut == 6
    for one in (whole, read):
        del one["answer"]["jobId"]
        one["answer"].pop("metrics")
    assert read == whole
    assert len(read["tokens"]) == read["answer"]["usage"]["completion_tokens"] == 120
    assert (read["ends"], read["answer"]["text"]) == (["length"], read["text"])
    assert len(service.worker.seen) == 2, "each was computed once"


def test_choices_and_log_probabilities_survive_cuts(
    service: RunningService, proxy: CuttingProxy
) -> None:
    asked = {**ASKED, "dialect": "chat", "logprobs": True, "top_logprobs": 2, "n": 3}
    asked["max_tokens"] = 30
    whole = says(service.base_url, "read", **asked)["answer"]["choices"]
    proxy.cuts = [900, 2500, 5000]
    assert says(proxy.base_url, "read", **asked)["answer"]["choices"] == whole
    assert proxy.num_cut == 3
    assert len(whole) == 3
    assert whole[0]["logprobs"]["content"]


def test_leaving_a_stream_cancels_its_job(service: RunningService) -> None:
    service.script.stop_after = 3
    left = says(service.base_url, "leaves", dialect="chat", **ASKED)
    assert [ended for _, ended in left] == [None, None, "AbortError"]
    with httpx.Client(base_url=service.base_url) as client:
        for job_id, _ in left:
            assert client.get(f"/v1/jobs/{job_id}").json()["status"] == "cancelled"


def test_each_error_has_a_class(service: RunningService) -> None:
    url = service.base_url
    refused = says(url, "fails", dialect="chat", **ASKED, temperature=9)
    assert (refused["class"], refused["status"], refused["param"]) == (
        "InvalidRequest",
        400,
        "temperature",
    )
    assert refused["name"] == "InvalidRequest"
    unknown = says(url, "fails", dialect="chat", **{**ASKED, "model": "nobody"})
    assert (unknown["class"], unknown["code"]) == ("NotFound", "model_not_found")
    service.script.stop_after = 2
    status, cancelled = says(url, "cancelled", dialect="chat", **ASKED)
    assert (status, cancelled["class"], cancelled["code"]) == (
        "cancelled",
        "JobCancelled",
        "cancelled",
    )
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.NONFINITE_LOGITS, Usage(1, 2), None, "The logits are not finite."
    )
    failed = says(url, "fails", dialect="generate", **ASKED)
    assert (failed["class"], failed["code"]) == ("JobFailed", "nonfinite_logits")
    assert "not finite" in failed["message"]
    assert failed["jobId"].startswith("gen-")
    assert says(url, "urls") == ["TypeError", "TypeError", "TypeError"]


def test_a_job_that_has_expired_is_gone(service: RunningService) -> None:
    done = says(service.base_url, "background", prompt="a", parameters={"model": MODEL})
    expire_record(service, done["id"])
    path = f"/v1/jobs/{done['id']}"
    requests = [("GET", path), ("GET", f"{path}/stream")]
    for outcome in says(service.base_url, "calls", requests=requests)["outcomes"]:
        assert (outcome["class"], outcome["code"]) == ("Gone", "job_expired")


def test_each_frontend_is_tried_once_without_patience(service: RunningService) -> None:
    away, options = f"http://127.0.0.1:{free_port()}", {"patienceMs": 0}
    requests = [("GET", "/v1/models"), ("POST", "/v1/jobs/none/requeue")]
    read = says(f"{away},{service.base_url}", "calls", options=options, requests=requests)
    assert read["outcomes"][0] is None
    assert read["url"] == service.base_url, "the next request begins there"
    posts = says(f"{away},{service.base_url}", "calls", options=options, requests=requests[1:])
    assert posts["outcomes"][0]["class"] == "NotFound", "nothing was sent to the first one"
    nobody = says(f"{away},{away}", "calls", options=options, requests=requests[:1])
    assert nobody["outcomes"][0]["class"] == "Unreachable"
    assert away in nobody["outcomes"][0]["message"]


def test_a_job_in_the_background_is_followed_again_and_over_cuts(
    service: RunningService, proxy: CuttingProxy
) -> None:
    parameters = {"model": MODEL, "max_tokens": 60}
    done = says(service.base_url, "background", prompt=ASKED["prompt"], parameters=parameters)
    assert len(set(done["texts"])) == 1
    assert done["texts"][0]
    assert (done["newest"], done["job"]["status"]) == (done["id"], "finished")
    assert done["usage"]["output_tokens"] == done["job"]["usage"]["completion_tokens"] > 0
    for raw in (False, True):
        proxy.cuts, proxy.num_cut = [400, 1500], 0
        read = says(proxy.base_url, "follows", id=done["id"], raw=raw)
        assert proxy.num_cut == 2
        assert read["text"] == done["texts"][0]


@pytest.mark.parametrize("raw", [False, True])
def test_a_lost_worker_and_its_successor_are_reported_to_a_client_that_asks(
    service: RunningService, raw: bool
) -> None:
    service.park()
    queue = service.transport.queue
    service.call(queue.heartbeat(WorkerReport("w-dies", 20_000, (MODEL,), {"step": 1}, ())))
    given = {"prompt": "a gate", "parameters": {"model": MODEL, "max_tokens": 20}, "raw": raw}
    with NodeProgram(
        "penstock_cases", service.base_url, "recoveries", json.dumps(given), home=our_client()
    ) as program:
        name = program.heard()
        service.call(queue.pull("w-dies", 1, 0))
        service.call(queue.declare_dead("w-dies"))
        assert program.heard()["state"] == "waiting"
        service.call(queue.recover(service.worker.worker_id, 1))
        assert program.heard()["state"] == "resumed"
        httpx.delete(f"{service.base_url}/v1/jobs/{name}")
        heard = program.heard()
    waiting, resumed = heard["told"]
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
    assert [heard[reader]["class"] for reader in ("asks", "plain")] == ["JobCancelled"] * 2


def test_an_error_of_the_function_that_takes_recoveries_is_its_caller_s(
    service: RunningService,
) -> None:
    """It is no lost connection, which would be tried again."""
    service.park()
    queue = service.transport.queue
    service.call(queue.heartbeat(WorkerReport("w-dies", 20_000, (MODEL,), {"step": 1}, ())))
    given = {"prompt": "a gate", "parameters": {"model": MODEL, "max_tokens": 20}}
    with NodeProgram(
        "penstock_cases", service.base_url, "throws", json.dumps(given), home=our_client()
    ) as program:
        assert program.heard() == "begun"
        wait_until(lambda: service.call(queue.pull("w-dies", 1, 0)), "the job")
        service.call(queue.declare_dead("w-dies"))
        thrown = program.heard()
        assert (thrown["class"], thrown["message"]) == ("RangeError", "mine")
        assert program.heard() == "cancelled", "as with any stream that is left"


def ai_says(url: str, case: str, **asked: Any) -> Any:
    given = json.dumps({"model": MODEL, "prompt": "a gate", **asked})
    return node_says("penstock_ai_cases", url, case, given, home=our_client())


def test_the_ai_sdk_s_chat_has_turns(service: RunningService) -> None:
    told = ai_says(service.base_url, "turns", max_tokens=12)
    assert told["roles"] == ["user", "assistant", "user", "assistant"]
    assert (told["status"], told["error"]) == ("ready", None)
    assert told["text"]
    first, second, regenerated = (
        service.text.tokenizer.decode(list(delivery.job.prompt_token_ids))
        for delivery in service.worker.seen
    )
    assert "again" not in first
    assert "again" in second == regenerated


def test_stop_of_the_ai_sdk_s_chat_cancels_the_job(service: RunningService) -> None:
    service.script.stop_after = 3
    told = ai_says(service.base_url, "stop", max_tokens=200)
    assert (told["status"], told["job"], told["left"]) == ("ready", "cancelled", 0)


def test_what_is_refused_is_the_chat_s_error(service: RunningService) -> None:
    told = ai_says(service.base_url, "fails", temperature=9)
    assert told["status"] == "error"
    assert "temperature" in told["error"]


def test_examples_have_types_and_run(service: RunningService) -> None:
    """Compiled with all checks, against the types that the package ships."""
    home = our_client()
    with tempfile.TemporaryDirectory(dir=home) as directory:
        (Path(directory) / "package.json").write_text('{"type": "module"}')
        names = [source.name for source in sorted((REPOSITORY / "examples").glob("*.ts"))]
        assert names
        for name in names:
            shutil.copy(REPOSITORY / "examples" / name, directory)
        package = home / "node_modules/penstock/node_modules"
        options = "--strict --skipLibCheck --target es2022 --module nodenext --types node"
        words = [*options.split(), "--typeRoots", str(package / "@types")]
        _run([str(package / ".bin/tsc"), *words, *names], directory)
        for name in names:
            shown = _run(["node", name.replace(".ts", ".js"), "a gate"], directory, service)
            assert len(shown) > 20, name


def _run(words: list[str], directory: str, service: RunningService | None = None) -> str:
    env = {**os.environ, "PENSTOCK_URL": service.base_url if service else ""}
    ended = subprocess.run(
        words, cwd=directory, env=env, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


# Killed processes.


penstock = two_frontends


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("victim", ["frontend", "worker"])
def test_a_killed_process_is_not_noticed_by_the_reader(
    penstock: Launched, throttle: Throttle, dialect: str, victim: str
) -> None:
    urls = [f"http://127.0.0.1:{penstock.port + place}" for place in range(2)]
    asked = {**ASKED, "model": "penstock-demo", "max_tokens": 80, "dialect": dialect}
    calm = says(",".join(urls), "read", **asked)
    throttle.apply(15)
    home, given = our_client(), json.dumps(asked)
    with NodeProgram("penstock_cases", ",".join(urls), "watched", given, home=home) as program:
        assert program.heard() == "ten"
        if victim == "frontend":
            os.kill(listener_on(urls[0]), signal.SIGKILL)
        else:
            with ServiceClient(penstock) as service:
                os.kill(service.pid_of("worker"), signal.SIGKILL)
        throttle.release()
        read = program.heard()
    assert (read["text"], read["tokens"]) == (calm["text"], calm["tokens"])
    assert len(read["tokens"]) == 80
    assert read["answer"]["choices"] == calm["answer"]["choices"]
    job = httpx.get(f"{urls[1]}/v1/jobs/{read['answer']['jobId']}", timeout=30).json()
    assert (job["status"], job["attempt"]) == ("finished", 2 if victim == "worker" else 1)
    wait_until(lambda: all(_is_whole(url) for url in urls), "the successor", 60)


def test_a_chat_resumes_in_a_new_page_over_a_killed_frontend(
    penstock: Launched, throttle: Throttle
) -> None:
    urls = [f"http://127.0.0.1:{penstock.port + place}" for place in range(2)]
    asked = {"model": "penstock-demo", "max_tokens": 120, "prompt": "The keeper of the gate"}
    throttle.apply(15)
    home, given = our_client(), json.dumps(asked)
    with NodeProgram("penstock_ai_cases", ",".join(urls), "resume", given, home=home) as program:
        assert program.heard() == "some"
        os.kill(listener_on(urls[0]), signal.SIGKILL)
        throttle.release()
        told = program.heard()
    first, second = told["first"], told["second"]
    assert first["text"] == second["text"] == told["text"]
    assert len(told["text"]) > 40
    assert first["id"] == second["id"], "it is the same message"
    assert second["roles"] == ["user", "assistant"]
    assert (first["error"], second["error"], second["status"]) == (None, None, "ready")
    assert (told["third"]["roles"], told["left"]) == ([], 0), (
        "an answer that has ended is not resumed"
    )
    wait_until(lambda: all(_is_whole(url) for url in urls), "the successor", 60)


def _is_whole(url: str) -> bool:
    try:
        return len(httpx.get(f"{url}/health", timeout=5).json()["workers"]) == 1
    except (httpx.HTTPError, ValueError, KeyError):
        return False
