"""The operator's tasks, walked with the command lines of their pages. Each step checks what the
page promises of it."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import trustme
from playwright.sync_api import expect

from penstock.client import Client, Stream
from tests.support.browser import Tab, headless_chromium
from tests.support.launched import REPOSITORY, descendants_of, free_port
from tests.support.operator_pages import Page, Shell, access_list
from tests.support.polling import wait_until
from tests.support.terminal import Terminal
from tests.support.two_machines import ADDRESSES, two_machines
from tests.support.walk import Step, Walk
from tests.support.walked_service import READY

START_S = 240.0
STOP_S = 60.0
# What is waited for from a line on.
STARTING = (
    ("", "the process starts"),
    ("private (valkey|redis)", "workers and a frontend start"),
    ("starting the worker", "the worker's engine starts"),
)
PROMPT = "one gate two gates three gates four gates "
MODEL = "penstock-demo"
# An engine that repeats the prompt, at some speed: what is watched is what surrounds it.
ECHO = {"PENSTOCK_RUNNER": "echo", "PENSTOCK_ECHO_STEP_MS": "10", "OMP_NUM_THREADS": "1"}
ENDS_IN_S = 6  # an answer at that speed
MAX_TOKENS = ENDS_IN_S * 100
WHOLE = f"an answer of {MAX_TOKENS} tokens, one each 10 ms"
COMMANDS = "each command starts an interpreter and imports the command line"
DEMO = REPOSITORY / "worker/demo/checkpoint"
SERVER_READY, FRONTEND_READY = "Ready to accept", "Uvicorn running"
WORKER_READY = "the worker is ready"
OF_SECOND = "of-the-second"
# Ends TLS, as Redis' own tls-port does; the server that tests find has none.
TLS_PROXY = """defaults
  mode tcp
  timeout connect 5s
  timeout client 1h
  timeout server 1h
listen redis
  bind {}:6379 ssl crt {}
  server redis 127.0.0.1:6380
"""
FILE = b'{"custom_id": "a"}\n'


@contextmanager
def lasting(
    walk: Walk, name: str, shell: Shell, line: str, ready: str, **env: str
) -> Iterator[Terminal]:
    """Yields the terminal of a command that lasts, once it shows that it is ready; then presses
    Ctrl-C, if it still runs, and expects a good end."""
    with shell.start(line, **env) as terminal:
        step = Step(name, terminal.until(ready, START_S), cpu_s=terminal.cpu_s())
        walk.phases(step, terminal, STARTING, step.seconds)
        walk.add(step)
        yield terminal
        if terminal.process.poll() is None:
            terminal.press_ctrl_c()
            assert terminal.wait(STOP_S) == 0, terminal.output
        assert "Traceback" not in terminal.output, terminal.output


class Answer:
    """An answer that is streamed while its service is worked on. It has every token, once each."""

    def __init__(self, client: Client, max_tokens: int = MAX_TOKENS) -> None:
        options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
        self._stream: Stream = client.complete(PROMPT, model=MODEL, **options)
        self._max_tokens = max_tokens
        next(self._stream)
        self.job = self._stream.job_id

    def expect_whole(self) -> None:
        answer = self._stream.result()
        assert answer.usage["completion_tokens"] == self._max_tokens
        repeated = PROMPT * (1 + len(answer.text) // len(PROMPT))
        assert repeated.startswith(answer.text), answer.text


class Deployment:
    """A service that is up, as its operator has it: a shell with its URL and a key."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.url = shell.env["PENSTOCK_URL"]

    @property
    def key(self) -> str:
        return self.shell.env.get("PENSTOCK_KEY", "")

    def client(self) -> Client:
        return Client(self.url, key=self.key or None)

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        headers = {"x-api-key": self.key if key is None else key}
        return httpx.get(self.url + path, headers=headers, timeout=30)

    def accepts(self, key: str) -> bool:
        return self.get("/v1/models", key).status_code == 200

    def job(self, name: str) -> dict[str, Any]:
        return dict(self.get(f"/v1/jobs/{name}").json())

    def worker(self, worker_id: str) -> dict[str, Any]:
        """A worker as the service lists it; fails where it does not."""
        (found,) = (one for one in self.workers() if one["id"] == worker_id)
        return found

    def workers(self) -> list[dict[str, Any]]:
        return list(self.get("/health").json()["workers"])


def shell_in(directory: Path) -> Shell:
    """Returns a shell whose lines use ports and paths that are free here."""
    port = free_port(3)
    env = {
        "PENSTOCK_PORT": str(port),
        "PENSTOCK_URL": f"http://127.0.0.1:{port}",
        "OMP_NUM_THREADS": "1",
    }
    places = {
        "PENSTOCK_PORT=8001": f"PENSTOCK_PORT={port + 1}",
        "--port 6379": f"--port {port + 2}",
        "/var/lib/redis": str(directory / "redis"),
    }
    return Shell(directory, env, places)


def make_key(shell: Shell, line: str) -> str:
    """Runs `penstock keys new`; returns the key that the terminal shows."""
    (key,) = re.findall(r"^sk-\S+$", shell.run(line), re.M)
    return str(key)


def walk_install(walk: Walk, shell: Shell) -> None:
    """The demo model, started and asked."""
    page = Page("install")
    with walk.step("install: `penstock doctor`", COMMANDS):
        shell.run(page.take("penstock doctor"))
    with (
        lasting(walk, "install: `penstock up`", shell, page.take("penstock up"), READY),
        walk.step("install: ready, and its status", COMMANDS),
    ):
        shell.run(page.take("/ready"))
        assert re.search(r"ready +yes", shell.run(page.take("penstock status")))
    assert page.unwalked == []


def walk_service(walk: Walk, shell: Shell) -> None:
    """One service, from its first key to a worker that is killed."""
    with walk_secure(walk, shell) as (deployment, terminal):
        walk_watch(walk, deployment)
        walk_drain(walk, deployment)
        walk_rotation(walk, deployment, terminal)
        walk_incident(walk, deployment)


@contextmanager
def walk_secure(walk: Walk, shell: Shell) -> Iterator[tuple[Deployment, Terminal]]:
    """Yields a service with keys and two workers, and its terminal."""
    page = Page("secure")
    with walk.step("secure: `penstock keys new`", COMMANDS):
        key = make_key(shell, page.take("penstock keys new"))
    up = page.take("penstock up")
    env = {**ECHO, "PENSTOCK_WORKERS": "2"}
    with lasting(
        walk, "secure: `penstock up` with two workers", shell, up, READY, **env
    ) as terminal:
        with walk.step("secure: 401 without a key, status with one", COMMANDS):
            assert " 401 " in shell.run(page.take("curl "))
            status = page.take("penstock status")
            assert "running jobs" not in shell.run(status), "that is for operators"
            shell.env["PENSTOCK_KEY"] = key
            assert "running jobs" in shell.run(status)
            assert "old" in shell.run(page.take("penstock keys list"))
        assert page.unwalked == []
        yield Deployment(shell), terminal


def walk_watch(walk: Walk, deployment: Deployment) -> None:
    """Every view of the page, in the terminal and in the browser."""
    page, shell = Page("watch"), deployment.shell
    with walk.step("watch: `penstock status`, `penstock workers`", COMMANDS):
        assert re.search(r"ready +yes", shell.run(page.take("penstock status")))
        listed = shell.run(page.take("penstock workers"))
        assert len(re.findall(rf"\bok +{MODEL}\b", listed)) == 2, listed
    with (
        walk.step("watch: `penstock top`", COMMANDS),
        shell.start(page.take("penstock top")) as terminal,
    ):
        terminal.until(MODEL, STOP_S)
        terminal.press_ctrl_c()
        assert terminal.wait(STOP_S) == 130, terminal.output
    with walk.step("watch: /metrics and /metrics/deployment"):
        assert "\npenstock:" in shell.run(page.take("/metrics/deployment"))
        assert "\npenstock:" in shell.run(page.take("/metrics"))
    assert page.unwalked == []
    with walk.step("watch: the dashboard", "the browser starts"), headless_chromium() as browser:
        tab = Tab(browser, deployment.url)
        tab.page.goto("/dashboard#tab=workers")
        tab.page.get_by_label("API key").fill(deployment.key)
        tab.page.get_by_role("button", name="Use this key").click()
        expect(tab.page.get_by_text("Healthy.")).to_be_visible()
        for worker in deployment.workers():
            expect(tab.page.get_by_text(worker["id"]).first).to_be_visible()
        tab.expect_complaint("401")
        tab.close()


def walk_drain(walk: Walk, deployment: Deployment) -> None:
    """A drained worker ends its job, the other one has the next; then it is resumed."""
    page, shell = Page("drain"), deployment.shell
    with deployment.client() as client:
        answer = Answer(client)
        worker = deployment.job(answer.job)["worker"]
        with walk.step("drain: the order, until the worker drains", COMMANDS):
            shell.run(page.take("penstock workers drain", WORKER=worker))
            wait_until(lambda: deployment.worker(worker)["status"] == "draining", "the order")
        with walk.step("drain: its job, to its end", WHOLE):
            answer.expect_whole()
            wait_until(lambda: deployment.worker(worker)["jobs"] == 0, "a worker without jobs")
        assert deployment.job(answer.job)["attempt"] == 1, "it was not moved"
        after = Answer(client, 8)
        after.expect_whole()
        assert deployment.job(after.job)["worker"] != worker
        with walk.step("drain: `penstock workers` shows it without a job", COMMANDS):
            listed = shell.run(page.take("penstock workers"))
            assert re.search(rf"^{worker} +draining +{MODEL} +0 ", listed, re.M), listed
        with walk.step("drain: `penstock workers resume`, until it takes jobs", COMMANDS):
            shell.run(page.take("penstock workers resume", WORKER=worker))
            wait_until(lambda: deployment.worker(worker)["status"] == "ok", "its resumption")
    assert page.take("penstock workers") == "penstock workers"
    assert page.unwalked == []


def walk_incident(walk: Walk, deployment: Deployment) -> None:
    """A worker is killed in mid-answer: the commands of the page show it, and what became of it."""
    page, shell = Page("incident"), deployment.shell
    with deployment.client() as client:
        answer = Answer(client)
        worker = deployment.job(answer.job)["worker"]
        os.kill(deployment.worker(worker)["pid"], signal.SIGKILL)
        with walk.step("incident: `kill -9` of a worker, until its job has another one"):
            wait_until(lambda: deployment.job(answer.job)["attempt"] == 2, "a second attempt")
        other = deployment.job(answer.job)["worker"]
        with walk.step("incident: the rest of its answer", WHOLE):
            answer.expect_whole()
        with walk.step("incident: status, workers and the job, by the lines of the page", COMMANDS):
            assert re.search(r"ready +yes", shell.run(page.take("penstock status")))
            assert re.search(rf"^{other} +ok", shell.run(page.take("penstock workers")), re.M)
            shown = shell.run(page.take("penstock jobs show", JOB=answer.job))
            assert re.search(rf"^worker +{other} *$(.*\n)*attempt +2 ", shown, re.M), shown
            logged = shell.run(page.take("penstock logs", JOB=answer.job))
            assert worker in logged, logged
            assert other in logged, logged
        with walk.step("incident: no failed job, no dead letter", COMMANDS):
            assert answer.job not in shell.run(page.take("penstock jobs list --state failed"))
            assert "no dead letters" in shell.run(page.take("penstock jobs list --dead"))
    assert other != worker
    assert page.unwalked == []


def walk_rotation(walk: Walk, deployment: Deployment, terminal: Terminal) -> None:
    """A key more, then one less, of processes that are not restarted."""
    page, shell = Page("rotate-keys"), deployment.shell
    old, running = deployment.key, set(descendants_of(terminal.process.pid))
    new = make_key(shell, page.take("penstock keys new"))
    with walk.step("rotate keys: from the new line to its acceptance"):
        wait_until(lambda: deployment.accepts(new), "the new key to be accepted")
    assert deployment.accepts(old)
    assert len(re.findall("acme|ops", shell.run(page.take("penstock keys list")))) == 2
    shell.run(page.take("sed "))
    with walk.step("rotate keys: from the removed line to its refusal"):
        wait_until(lambda: not deployment.accepts(old), "the old key to be refused")
    assert deployment.accepts(new)
    shell.env["PENSTOCK_KEY"] = new
    assert running <= set(descendants_of(terminal.process.pid)), "nothing was restarted"
    assert page.unwalked == []


def walk_processes(walk: Walk, shell: Shell) -> None:
    """Redis, workers and frontends by themselves: measured, upgraded one by one under a stream
    that is whole, backed up, and restored elsewhere."""
    back_up, upgrade = Page("back-up"), Page("upgrade")
    server = back_up.take("redis-server")
    files = shell.directory / "files"
    files.mkdir()
    port = int(shell.env["PENSTOCK_PORT"])
    shell.env |= {
        **ECHO,
        "PENSTOCK_REDIS_URL": f"redis://127.0.0.1:{port + 2}/0",
        "PENSTOCK_SERVED_MODEL_NAME": MODEL,
        "PENSTOCK_FILES_DIR": str(files),
    }
    worker = upgrade.take("penstock worker", MODEL=DEMO)
    (shell.directory / "redis").mkdir()
    with ExitStack() as running:
        running.enter_context(lasting(walk, "Redis", shell, server, SERVER_READY))
        old = running.enter_context(lasting(walk, "a worker", shell, worker, WORKER_READY))
        frontend = running.enter_context(
            lasting(walk, "a frontend", shell, "penstock api", FRONTEND_READY)
        )
        deployment = Deployment(shell)
        wait_until(lambda: deployment.get("/ready").status_code == 200, "a served model")
        walk_size(walk, deployment)
        with deployment.client() as client:
            stored = client.submit("a gate", model=MODEL, max_output_tokens=8)
            text = client.follow(stored).result().text
        file_id = httpx.post(
            f"{deployment.url}/v1/files",
            files={"file": ("rows.jsonl", FILE)},
            data={"purpose": "batch"},
        ).json()["id"]
        next_url = f"http://127.0.0.1:{port + 1}"
        (old_id,) = (one["id"] for one in deployment.workers())
        running.enter_context(lasting(walk, "upgrade: the new worker", shell, worker, WORKER_READY))
        with Client([deployment.url, next_url]) as client:
            answers = [Answer(client)]
            while deployment.job(answers[-1].job)["worker"] != old_id:
                assert len(answers) < 8, "the old worker takes no job"
                answers.append(Answer(client))
            with walk.step("upgrade: the old worker drained, until its process has ended", WHOLE):
                shell.run(upgrade.take("penstock workers drain", WORKER=old_id))
                assert old.wait(STOP_S) == 0, old.output
            line = upgrade.take("penstock api")
            running.enter_context(
                lasting(walk, "upgrade: the new frontend", shell, line, FRONTEND_READY)
            )
            answers.append(Answer(client))
            with walk.step(
                "upgrade: SIGTERM to the old frontend, until all answers are whole", WHOLE
            ):
                shell.run(upgrade.take("kill -TERM", PID=frontend.process.pid))
                for answer in answers:
                    answer.expect_whole()
        with walk.step("upgrade: the old frontend's process has ended"):
            assert frontend.wait(STOP_S) == 0, frontend.output
        shell.env["PENSTOCK_URL"] = next_url
        with walk.step("upgrade: `penstock status`, `penstock jobs list --dead`", COMMANDS):
            assert re.search(r"ready +yes", shell.run(upgrade.take("penstock status")))
            assert "no dead letters" in shell.run(upgrade.take("penstock jobs list --dead"))
        assert upgrade.unwalked == []
        with walk.step("back up: Redis' directory and the files"):
            shell.run(back_up.take("percentage 0"))
            shell.run(back_up.take("in_progress"))
            shell.run(back_up.take("mkdir"))
            shell.run(back_up.take("appendonlydir backup/"))
            shell.run(back_up.take("percentage 100"))
            shell.run(back_up.take("backup/files"))
    restored = Shell(shell.directory, {**shell.env, "PENSTOCK_FILES_DIR": "backup/files"})
    restored.places = {**shell.places, "/var/lib/redis": str(shell.directory / "restored")}
    (shell.directory / "restored").mkdir()
    restored.run(back_up.take("cp -a backup/appendonlydir"))
    assert back_up.unwalked == []
    with (
        lasting(walk, "back up: the restored Redis", restored, server, SERVER_READY),
        lasting(walk, "back up: its worker", restored, worker, WORKER_READY),
        lasting(walk, "back up: its frontend", restored, line, FRONTEND_READY),
        walk.step("back up: the stored response and the file are there, and it serves"),
        Client(next_url) as client,
    ):
        (item,) = client.call("GET", f"/v1/responses/{stored}")["output"]
        assert item["content"][0]["text"] == text
        assert httpx.get(f"{next_url}/v1/files/{file_id}/content").content == FILE
        Answer(client, 8).expect_whole()


def walk_size(walk: Walk, deployment: Deployment) -> None:
    page, shell = Page("size"), deployment.shell
    with walk.step("size: `penstock bench`", "32 requests of 64 tokens, 8 at once"):
        shell.run(page.take("penstock bench"))
    with walk.step("size: `penstock capacity`", COMMANDS):
        assert "workers" in shell.run(page.take("penstock capacity"))
    with walk.step("size: what Redis uses, and each tenant"):
        assert "used_memory:" in shell.run(page.take("info memory"))
        shell.run(page.take("penstock:{p0}:held"))
    assert page.unwalked == []


def walk_machines(walk: Walk, root: Path) -> None:
    """A worker on a second machine joins the private server of the first, with its password; then
    a Redis with the access list and TLS."""
    page = Page("add-a-machine")
    with two_machines() as machines:
        first, second = (
            _on_machine(root / name, machine) for name, machine in zip("ab", machines, strict=True)
        )
        _join_private_server(walk, page, first, second)
        _join_by_tls(walk, page, first, second)
    assert page.unwalked == []


def _on_machine(directory: Path, machine: Sequence[str]) -> Shell:
    directory.mkdir()
    ca = str(directory.parent / "ca.pem")
    return Shell(directory, ECHO, {"/etc/redis/ca.pem": ca}, machine)


def _join_private_server(walk: Walk, page: Page, first: Shell, second: Shell) -> None:
    up = page.take("--listen-redis")
    with lasting(walk, "add a machine: `penstock up --listen-redis`", first, up, READY) as terminal:
        password = (first.directory / ".penstock/redis/password").read_text()
        assert password not in terminal.output
        printed = re.search(r"another machine joins: (PENSTOCK_REDIS_URL=.*);", terminal.output)
        line = page.take("penstock worker")
        assert printed is not None
        assert line.startswith(printed[1]), printed[1]
        line = line.replace("PASSWORD", password).replace("MODEL", str(DEMO))
        name = {"PENSTOCK_SERVED_MODEL_NAME": OF_SECOND}
        with lasting(walk, "add a machine: a worker on B", second, line, WORKER_READY, **name):
            _expect_an_answer(walk, first)


def _join_by_tls(walk: Walk, page: Page, first: Shell, second: Shell) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(first.directory.parent / "ca.pem")
    certificate = first.directory / "server.pem"
    authority.issue_cert(ADDRESSES[0]).private_key_and_cert_chain_pem.write_to_path(certificate)
    (first.directory / "tls.cfg").write_text(TLS_PROXY.format(ADDRESSES[0], certificate))
    line = page.take("export")
    for shell in (first, second):
        url = shell.run(f'{line}; printf %s "$PENSTOCK_REDIS_URL"')
        shell.env |= {"PENSTOCK_REDIS_URL": url, "PENSTOCK_SERVED_MODEL_NAME": OF_SECOND}
    api, worker = page.take("penstock api"), page.take("penstock worker", MODEL=DEMO)
    server = "redis-server --port 6380 --appendonly yes --maxmemory-policy noeviction"
    with (
        lasting(walk, "add a machine: a Redis by itself", first, server, SERVER_READY),
        first.start("PATH=$PATH:/usr/sbin exec haproxy -db -f tls.cfg"),
    ):
        first.run(f"redis-cli -p 6380 {shlex.join(access_list('SECRET'))}")
        with (
            lasting(walk, "add a machine: a frontend by TLS on A", first, api, FRONTEND_READY),
            lasting(walk, "add a machine: a worker by TLS on B", second, worker, WORKER_READY),
        ):
            _expect_an_answer(walk, first)


def _expect_an_answer(walk: Walk, shell: Shell) -> None:
    ask = f"penstock chat --model {OF_SECOND} --max-tokens 8 'a gate'"
    with walk.step("add a machine: an answer of B's worker by A's frontend", COMMANDS):
        wait_until(lambda: shell.run(ask).strip(), "an answer")
