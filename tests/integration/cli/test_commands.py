"""The command `penstock` against a running service: what it prints, and what it ends with."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.ids import parse_job_id
from penstock.cli import bench as bench_module
from penstock.cli.application import main
from penstock.cli.exits import ExitCode
from penstock.cli.jobs import State
from penstock.client import Client
from shared.messages import JobState
from shared.process import dying_with_this_process
from shared.transport.ports.deployment import ProcessKind
from shared.transport.ports.queue import WorkerReport
from tests.support.cutting_proxy import cutting_proxy
from tests.support.expired_jobs import expire_record, expire_text
from tests.support.launched import REPOSITORY, free_port
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_service, wait_until
from tests.support.service_fixtures import *  # noqa: F403
from tests.support.service_fixtures import module_service

pytestmark = pytest.mark.usefixtures("own_environment")
# A limit of tokens above the context is a 400, not clipped.
shared_service = module_service(keepalive_s=0.1, refuse_unused_parameters=True)

PROMPT = {"prompt": "a gate and a wheel", "max_tokens": 8, "on_disconnect": "continue"}


class Ran:
    """What one run of the command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def objects(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def penstock(
    service: RunningService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    def run(*words: str, url: str | None = None) -> Ran:
        monkeypatch.setenv("PENSTOCK_URL", url or service.base_url)
        code = main(list(words))
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


@pytest.fixture
def job(client: httpx.Client) -> str:
    """The id of a job that has finished."""
    return str(client.post("/generate", json={**PROMPT, "stream": False}).json()["id"])


def test_status_shows_the_service_its_models_and_its_queue(penstock: Any) -> None:
    shown = penstock("status")
    assert shown.code == ExitCode.OK
    assert MODEL in shown.out
    (found,) = penstock("status", "--json").objects
    assert (found["ready"], found["models"]) == (True, [MODEL])
    assert found["health"]["redis"]["reachable"]


def test_workers_are_listed(penstock: Any) -> None:
    assert "w-scripted" in penstock("workers").out
    (worker,) = penstock("workers", "--json").objects
    assert (worker["id"], worker["models"]) == ("w-scripted", [MODEL])


def test_a_worker_that_loads_its_model_is_shown_with_its_stage(
    penstock: Any, service: RunningService, client: httpx.Client
) -> None:
    stats = {"model": "m2", "stage": "loading weights", "percent": 43}
    service.call(service.transport.deployment.report(ProcessKind.LOADING, "w-loads", stats))
    wait_until(lambda: client.get("/health").json()["loading"], "a look at the store")
    assert re.search(r"w-loads +loading weights, 43 % +m2 ", penstock("workers").out)
    _, worker = penstock("workers", "--json").objects
    assert (worker["status"], worker["stage"], worker["percent"]) == (
        "loading",
        "loading weights",
        43,
    )
    assert re.search(r"loading +m2: loading weights, 43 %\n", penstock("status").out)


def test_top_shows_queue_and_workers(penstock: Any) -> None:
    assert re.search(r"ok: \d+ running, \d+ waiting, 1 workers", penstock("top", "--once").out)
    (look,) = penstock("top", "--once", "--json").objects
    assert [worker["id"] for worker in look["health"]["workers"]] == ["w-scripted"]


def test_jobs_are_listed_and_shown(penstock: Any, job: str) -> None:
    listed = penstock("jobs", "list")
    assert job in listed.out
    assert "finished" in listed.out
    newest, *_ = penstock("jobs", "list", "--json", "--state", "finished").objects
    assert newest["id"] == job
    shown = penstock("jobs", "show", job)
    assert "prefix" in shown.out
    assert f"{PROMPT['max_tokens']}" in shown.out
    assert re.search(r"placed by +no preference *\n", shown.out)
    assert "preemptions" not in shown.out
    assert penstock("jobs", "show", newest["job_id"], "--json").objects[0]["id"] == job
    refused = penstock("jobs", "list", "--state", "asleep")
    assert (refused.code, refused.out) == (ExitCode.UNUSABLE, "")
    assert "'queued'" in refused.err, "the flag lists its values"


def test_a_job_that_was_preempted_shows_how_often(
    penstock: Any, service: RunningService, job: str
) -> None:
    record = service.transport.keys.job(parse_job_id(job))
    service.call(service.transport.connections.commands.hset(record, "preemptions", 3))
    assert re.search(r"preemptions +3 *\n", penstock("jobs", "show", job).out)


def test_states_of_the_command_are_the_service_s() -> None:
    assert [str(state) for state in State] == [str(state) for state in JobState]


def test_a_flag_that_only_the_service_can_refuse_is_a_bad_flag(
    penstock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_many = ("--max-tokens", str(2**31))
    for words in (("chat", "x"), ("bench",)):
        refused = penstock(*words, *too_many)
        assert (refused.code, refused.out) == (ExitCode.UNUSABLE, ""), words
        assert "max" in refused.err
    for words in (("chat", "x"), ("generate", "x")):
        assert penstock(*words, "--temperature", "9").code == ExitCode.UNUSABLE
    file = tmp_path / "prompts.txt"
    file.write_text("a gate\n")
    assert penstock("generate", str(file), *too_many).code == ExitCode.UNUSABLE
    lines = io.StringIO("a question\nanother one\n")
    monkeypatch.setattr("sys.stdin", lines)
    monkeypatch.setattr(lines, "isatty", lambda: True)
    assert penstock("chat", *too_many).code == ExitCode.UNUSABLE
    assert lines.read() == "another one\n", "no further question would be answered"


def test_each_frontend_is_tried_where_one_is_away(
    penstock: Any, free: str, service: RunningService, job: str
) -> None:
    both = f"{free},{service.base_url}"
    for words in (("status",), ("workers",), ("jobs", "list"), ("jobs", "show", job)):
        assert penstock(*words, url=both).code == ExitCode.OK, words
    assert penstock("bench", "-n", "1", "--max-tokens", "2", url=both).code == ExitCode.OK
    assert penstock("jobs", "requeue", job, url=both).code == ExitCode.NOT_FOUND
    away = penstock("status", url=f"{free},{free}")
    assert away.code == ExitCode.NO_SERVICE


def test_what_is_not_there_ends_with_its_own_code(penstock: Any, free: str) -> None:
    for words in (("show", "none"), ("cancel", "none"), ("requeue", "none"), ("follow", "none")):
        assert penstock("jobs", *words).code == ExitCode.NOT_FOUND
    assert penstock("logs", "none", url=free).code == ExitCode.NO_SERVICE
    away = penstock("jobs", "list", url=free)
    assert (away.code, away.out) == (ExitCode.NO_SERVICE, "")
    assert away.err.count("\n") == 1
    assert "(Connection refused). `penstock up` starts one here" in away.err
    assert penstock("generate", "none", url=free).code == ExitCode.UNUSABLE, "the file comes first"
    assert penstock("status", url="gopher://x").code == ExitCode.UNUSABLE
    assert penstock("jobs", "nonsense").code == ExitCode.UNUSABLE


def test_an_expired_job_is_told_with_its_time_and_its_setting(
    penstock: Any, service: RunningService, job: str
) -> None:
    assert "text kept until" in penstock("jobs", "show", job).out
    expire_text(service, job)
    followed = penstock("jobs", "follow", job)
    assert (followed.code, followed.out) == (ExitCode.NOT_FOUND, "")
    assert "PENSTOCK_TEXT_RETENTION_S" in followed.err
    expire_record(service, job)
    shown = penstock("jobs", "show", job)
    assert (shown.code, shown.out) == (ExitCode.NOT_FOUND, "")
    assert "PENSTOCK_JOB_RETENTION_S" in shown.err


@pytest.fixture
def free() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_a_job_is_followed_to_its_end_over_lost_connections(
    penstock: Any, service: RunningService, client: httpx.Client
) -> None:
    whole = client.post("/generate", json={**PROMPT, "max_tokens": 60, "stream": False}).json()
    with cutting_proxy(service.base_url) as proxy:
        proxy.cuts = [700, 900, 1100]
        followed = penstock("jobs", "follow", whole["id"], url=proxy.base_url)
        assert proxy.num_cut == 3
    assert followed.code == ExitCode.OK
    assert followed.out == whole["text"] + "\n"
    events = penstock("jobs", "follow", whole["id"], "--json").objects
    assert "".join(event["text"] for event in events) == whole["text"]
    assert events[-1]["done"]


def test_the_log_of_a_job_is_followed_over_a_lost_worker_to_its_end(
    penstock: Any, service: RunningService, client: httpx.Client
) -> None:
    service.park()
    queue = service.transport.queue
    with Client(service.base_url) as submitting:
        name = submitting.submit("a gate", model=MODEL)
    service.call(queue.heartbeat(WorkerReport("w-dies", 20_000, (MODEL,), {"step": 1}, ())))
    service.call(queue.pull("w-dies", 1, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "logs", name, "-f", "--json", "--url", service.base_url],
        stdout=subprocess.PIPE,
        preexec_fn=dying_with_this_process(),
    ) as process:
        assert process.stdout is not None
        lines = map(json.loads, process.stdout)
        assert [next(lines)["event"], next(lines)["worker"]] == ["queued", "w-dies"]
        service.call(queue.declare_dead("w-dies"))
        lost = next(lines)
        assert (lost["event"], lost["attempt"], lost["cause"]) == ("lost", 1, "worker_lost")
        service.call(queue.recover(service.worker.worker_id, 1))
        resumed = next(lines)
        assert (resumed["attempt"], resumed["worker"]) == (2, service.worker.worker_id)
        client.delete(f"/v1/jobs/{name}")
        (end,) = lines
        assert (end["event"], end["reason"]) == ("cancelled", "cancelled")
        assert process.wait(30) == ExitCode.OK
    shown = penstock("logs", name)
    assert shown.code == ExitCode.OK
    for sentence, line in zip(
        (
            f"queued for {MODEL}, ",
            "attempt 1 started on worker w-dies",
            "Worker lost before the first token: w-dies",
            f"attempt 2 started on worker {service.worker.worker_id}",
            "cancelled (cancelled) with 0 output tokens",
        ),
        shown.out.splitlines(),
        strict=True,
    ):
        assert re.search(rf" \+\d+\.\d{{3}} s  {re.escape(sentence)}", line)


def test_the_log_of_a_job_folds_its_tokens_into_its_attempt(penstock: Any, job: str) -> None:
    *_, started, first, end = penstock("logs", job, "--json").objects
    assert [one["event"] for one in (started, first, end)] == ["started", "first_token", "finished"]
    assert started["at"] <= first["at"] <= end["at"]
    assert (end["tokens"], end["reason"]) == (PROMPT["max_tokens"], "length")
    assert penstock("logs", "none").code == ExitCode.NOT_FOUND


def test_a_running_job_is_cancelled_and_its_follower_is_told(
    penstock: Any, service: RunningService, client: httpx.Client
) -> None:
    service.script.stop_after = 3
    with client.stream("POST", "/generate", json={**PROMPT, "max_tokens": 60}) as answer:
        name = answer.headers["x-request-id"]
    wait_until(
        lambda: client.get(f"/v1/jobs/{name}").json()["usage"]["completion_tokens"] == 3, "tokens"
    )
    cancelled = penstock("jobs", "cancel", name, "--json")
    assert cancelled.objects[0]["status"] == "cancelled"
    followed = penstock("jobs", "follow", name)
    assert followed.code == ExitCode.FAILED
    assert "cancelled" in followed.err


def test_a_dead_letter_is_listed_and_requeued(
    penstock: Any, service: RunningService, client: httpx.Client
) -> None:
    service.park()
    queue, worker_id = service.transport.queue, service.worker.worker_id
    redis: Any = service.transport.connections.commands
    with client.stream("POST", "/generate", json=PROMPT) as answer:
        name = answer.headers["x-request-id"]
        (delivery,) = service.call(queue.pull(worker_id, 1, 0))
        job_id = delivery.job.job_id
        service.call(redis.hset(service.transport.keys.job(job_id), "crashes", 3))
        service.call(queue.crashed(worker_id, [(job_id, delivery.attempt)]))
        answer.read()
    service.script.pulls = True
    assert name in penstock("jobs", "list", "--dead").out
    assert penstock("jobs", "list", "--dead", "--json").objects[0]["code"] == "poison"
    ignored = penstock("jobs", "list", "--dead", "--tenant", "acme", "--state", "failed")
    assert (ignored.code, ignored.out) == (ExitCode.UNUSABLE, "")
    assert "without --state, --tenant" in ignored.err
    (ran,) = penstock("dead-letters", "requeue", "--error", "poison", "--yes", "--json").objects
    assert (ran["matched"], ran["requeued"], ran["failed"]) == (1, 1, 0)
    requeued = penstock("jobs", "requeue", name, "--json").objects[0]
    assert requeued["id"] != name
    assert penstock("jobs", "follow", requeued["id"]).code == ExitCode.OK
    assert penstock("jobs", "requeue", name, "--json").objects[0]["id"] == requeued["id"]


@pytest.mark.promise(
    "Command: `chat` and `jobs follow` print every text once over lost connections; a request of "
    "`generate` whose answer was lost is computed once"
)
def test_an_answer_goes_on_where_a_lost_connection_left_it(
    penstock: Any, service: RunningService
) -> None:
    question = ("chat", "a gate and a wheel, " * 8, "--max-tokens", "200")
    whole = penstock(*question)
    assert whole.code == ExitCode.OK
    assert len(whole.out) > 60
    with cutting_proxy(service.base_url) as proxy:
        # The creation, whose answer is lost and which is sent again; then the stream behind it.
        proxy.cuts = [50, 9000, 5000]
        cut = penstock(*question, "--model", MODEL, url=proxy.base_url)
        assert proxy.num_cut == 3
    assert (cut.code, cut.out) == (ExitCode.OK, whole.out)
    assert len(service.worker.seen) == 2, "each question was computed once"


def test_a_conversation_has_its_earlier_turns(
    penstock: Any, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.StringIO(
        "the first question\nthe second question\n/help\n/new\n/mew\nthe third\n/exit\n"
    )
    monkeypatch.setattr("sys.stdin", lines)
    monkeypatch.setattr(lines, "isatty", lambda: True)
    chatted = penstock("chat", "--max-tokens", "4")
    assert chatted.code == ExitCode.OK
    assert chatted.err.count("/new ") == 2, "of /help, and after a word that is no command"
    assert "/mew is no command." in chatted.err
    first, second, third = (
        service.text.tokenizer.decode(list(delivery.job.prompt_token_ids))
        for delivery in service.worker.seen
    )
    assert "first" in second
    assert "second" in second
    assert "second" not in first
    assert "first" not in third


@pytest.mark.promise("Command: Ctrl-C in `chat` cancels the job")
def test_ctrl_c_cancels_the_answer(service: RunningService, client: httpx.Client) -> None:
    service.script.stop_after = 3
    die_with_parent = dying_with_this_process()

    def as_in_the_foreground() -> None:
        """Restores what a shell ignores in the background, where these tests may run."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if die_with_parent is not None:
            die_with_parent()

    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "chat", "a gate", "--url", service.base_url],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_the_foreground,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert "Traceback" not in err
    assert client.get("/v1/jobs?limit=1").json()["data"][0]["status"] == "cancelled"


def test_a_file_of_requests_is_answered_in_order(penstock: Any, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    batch = {"model": MODEL, "messages": [{"role": "user", "content": "four"}], "max_tokens": 2}
    rows = [
        "one plain prompt",
        json.dumps({"prompt": "two", "max_tokens": 3}),
        json.dumps({"messages": [{"role": "user", "content": "three"}]}),
        json.dumps(
            {"custom_id": "d", "method": "POST", "url": "/v1/chat/completions", "body": batch}
        ),
    ]
    file.write_text("\n".join(rows) + "\n")
    ran = penstock("generate", str(file), "--max-tokens", "5")
    assert ran.code == ExitCode.OK, ran.err
    assert [row["index"] for row in ran.objects] == [0, 1, 2, 3]
    assert [row["usage"]["completion_tokens"] for row in ran.objects] == [5, 3, 5, 2]
    assert ran.objects[3]["custom_id"] == "d"
    file.write_text('{"prompt": "x", "temperature": -1}\nfine\n')
    written = tmp_path / "out.jsonl"
    partly = penstock("generate", str(file), "-o", str(written), "--max-tokens", "2")
    assert partly.code == ExitCode.FAILED
    bad, good = map(json.loads, written.read_text().splitlines())
    assert "temperature" in bad["error"]
    assert good["finish_reason"] == "length"
    for text in ("", "{", '{"prompt": "x", "messages": []}', '{"prompt": "x", "stream": true}'):
        file.write_text(text)
        assert penstock("generate", str(file)).code == ExitCode.UNUSABLE
    assert penstock("generate", str(tmp_path / "none")).code == ExitCode.UNUSABLE


def test_a_request_whose_answer_was_lost_is_computed_once(
    penstock: Any, service: RunningService, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one prompt\n")
    with cutting_proxy(service.base_url) as proxy:
        proxy.cuts = [30]
        words = ("generate", str(file), "--model", MODEL, "--max-tokens", "5")
        ran = penstock(*words, url=proxy.base_url)
        assert proxy.num_cut == 1
    assert ran.code == ExitCode.OK
    assert len(service.worker.seen) == 1


def test_bench_says_rates_and_waits(penstock: Any) -> None:
    words = ("bench", "-n", "6", "--at-once", "3", "--words", "5", "--max-tokens", "4")
    (figures,) = penstock(*words, "--json").objects
    assert (figures["requests"], figures["output_tokens"]) == (6, 24)
    assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]
    assert "output_tokens_per_s" in penstock(*words).out


def test_bench_shows_how_far_it_is(penstock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.live.NOTE_S", 0.001)
    shown = penstock("bench", "-n", "4", "--at-once", "1", "--max-tokens", "4", "--json")
    assert "of 4 requests" in shown.err
    assert len(shown.objects) == 1


def test_an_interrupted_bench_keeps_what_it_has(
    penstock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(under_way: Sequence[Future[None]], *_: Any) -> None:
        wait(under_way)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_module, "wait", interrupt)
    shown = penstock("bench", "-n", "3", "--max-tokens", "4", "--json")
    assert shown.code == ExitCode.INTERRUPTED
    assert "interrupted after 3 of 3 requests" in shown.err
    (figures,) = shown.objects
    assert (figures["requests"], figures["output_tokens"]) == (3, 12)


@pytest.mark.promise(
    "Command: with `--json` stdout has JSON alone; exit codes are those of the page"
)
def test_with_json_stdout_has_objects_alone(
    penstock: Any, service: RunningService, job: str, tmp_path: Path
) -> None:
    """Each of the commands that a service answers, or a file."""
    keys = tmp_path / "keys.txt"
    keys.write_text(penstock("keys", "new").out)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    short = ("--max-tokens", "3")
    for words in (
        ("status",),
        ("workers",),
        ("jobs", "list"),
        ("jobs", "show", job),
        ("jobs", "follow", job),
        ("jobs", "cancel", job),
        ("chat", "a gate", *short),
        ("generate", str(prompts), *short),
        ("bench", "-n", "2", *short),
        ("keys", "new"),
        ("keys", "list", str(keys)),
    ):
        shown = penstock(*words, "--json")
        assert shown.code == ExitCode.OK, (words, shown.err)
        assert shown.objects, words
        assert all(isinstance(found, dict) for found in shown.objects), words


def test_a_service_that_accepts_nothing_is_a_failure_of_status(
    penstock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: Client, method: str, path: str, **_: Any) -> Any:
        return {"ready": False, "status": "draining", "closed": "it stops", "models": []}

    monkeypatch.setattr(Client, "call", answer)
    shown = penstock("status", "--json")
    assert shown.code == ExitCode.FAILED
    assert shown.objects[0]["ready"] is False
    assert "it stops" in shown.err


def test_a_key_is_made_used_and_asked_for(
    penstock: Any, redis_url: str, checkpoint: Path, tmp_path: Path
) -> None:
    made = penstock("keys", "new", "--tenant", "acme", "--name", "laptop", "--max-jobs", "3")
    assert made.code == ExitCode.OK
    key = made.err.strip()
    assert key not in made.out
    file = tmp_path / "keys.txt"
    file.write_text(made.out)
    (listed,) = penstock("keys", "list", str(file), "--json").objects
    assert (listed["tenant"], listed["name"]) == ("acme", "laptop")
    assert listed["limits"] == {"max_jobs_per_tenant": 3}
    assert "laptop" in penstock("keys", "list", str(file)).out
    (both,) = penstock("keys", "new", "--json").objects
    assert both["line"].startswith("sha256:")
    assert penstock("keys", "new", "--tenant", "not a name").code == ExitCode.UNUSABLE
    file.write_text("nonsense\n")
    assert penstock("keys", "list", str(file)).code == ExitCode.UNUSABLE
    file.write_text(made.out)
    with running_service(redis_url, new_namespace(), checkpoint, api_keys_file=str(file)) as closed:
        refused = penstock("jobs", "list", url=closed.base_url)
        assert refused.code == ExitCode.REFUSED
        assert "PENSTOCK_KEY" in refused.err
        assert penstock("workers", url=closed.base_url).code == ExitCode.REFUSED
        assert penstock("jobs", "list", "--key", key, url=closed.base_url).code == ExitCode.OK


def test_a_worker_is_drained_and_resumed(penstock: Any, service: RunningService) -> None:
    worker = service.worker.worker_id
    (order,) = penstock("workers", "drain", worker, "--json").objects
    assert (order["id"], order["order"]) == (worker, "drain")
    wait_until(lambda: "draining" in penstock("workers").out, "the list to show it")
    resumed = penstock("workers", "resume", worker)
    assert (resumed.code, resumed.out) == (ExitCode.OK, "")
    assert "takes jobs again" in resumed.err
    assert penstock("workers", "drain", "nobody").code == ExitCode.NOT_FOUND


def test_a_queue_is_paused_and_resumed(penstock: Any) -> None:
    assert "is paused" in penstock("models", "pause", MODEL).err
    assert "was already paused" in penstock("models", "pause", MODEL).err
    wait_until(lambda: "paused" in penstock("models", "list").out, "the list to show it")
    assert penstock("models", "resume", MODEL).code == ExitCode.OK
    wait_until(lambda: " served " in penstock("models", "list").out, "the list to show it")
    assert penstock("models", "pause", "no/such").code == ExitCode.NOT_FOUND


def test_jobs_that_match_are_cancelled_after_their_number_is_confirmed(
    penstock: Any, client: httpx.Client, service: RunningService
) -> None:
    service.park()
    body = {"model": MODEL, "input": "a gate", "background": True}
    ids = [client.post("/v1/responses", json=body).json()["id"] for _ in range(3)]
    asked = penstock("jobs", "cancel", "--state", "queued", "--model", MODEL)
    assert (asked.code, asked.err) == (
        ExitCode.FAILED,
        "penstock: 3 jobs; --yes does it without a question.\n",
    )
    (found,) = penstock("jobs", "list", "--id", ids[0][-12:], "--json").objects
    assert (found["id"], found["status"]) == (ids[0], "queued")
    done = penstock("jobs", "cancel", "--model", MODEL, "--yes")
    assert (done.code, done.err) == (ExitCode.OK, "penstock: 3 matched, 3 cancelled\n")
    assert "nothing matches" in penstock("jobs", "cancel", "--all", "--yes").err
    listed = penstock("jobs", "list", "--error", "cancelled", "--json", "--limit", "3").objects
    assert {job["id"] for job in listed} == set(ids)
    shown = penstock("jobs", "list", "--error", "cancelled", "--limit", "3").out
    assert re.search(r"^id +status +error +model", shown)
    assert len(re.findall(r" cancelled +cancelled ", shown)) == 3
    for words in (("jobs", "cancel"), ("jobs", "cancel", ids[0], "--all")):
        assert penstock(*words).code == ExitCode.UNUSABLE


def test_no_dead_letter_that_matches_is_requeued(penstock: Any) -> None:
    none = penstock("dead-letters", "requeue", "--error", "poison", "--yes", "--json")
    assert (none.code, none.objects) == (
        ExitCode.OK,
        [
            {
                "matched": 0,
                "not_found": 0,
                "requeued": 0,
                "already_requeued": 0,
                "failed": 0,
                "stopped": None,
            }
        ],
    )
    unknown = penstock("dead-letters", "requeue", "resp_0-none", "--yes")
    assert "1 not found" in unknown.err
