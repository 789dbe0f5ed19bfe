"""A killed worker is seen: while no worker lives, the pages and the command say that the job waits
for another one; afterwards who resumed it, where, and that nothing was lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import PATIENCE_MS, Tab
from tests.support.launched import Launched
from tests.support.playground import (
    expect_whole,
    job_of,
    last_answer,
    poll,
    ready,
    response_of,
    say,
    text_of,
)

pytestmark = pytest.mark.browser

SERVICE = {"WORKERS": "1", "LEASE_MS": "1500"}
# Long enough that it runs while the pages are opened.
TEXT = (
    "The **gate** is open, and water runs over the `wheel`. " * 6
    + "\n\n- one wheel\n- two wheels\n\nThe *iron* holds. "
    + "Nothing of it is said twice, and nothing is left out. " * 6
)
WAITING = re.compile(r"Worker lost after token \d+, resuming")
RESUMED = re.compile(
    r"Worker lost after token \d+; resumed on worker \S+ after \d+\.\d s, nothing lost"
)


@contextmanager
def without_workers(service: Launched) -> Iterator[None]:
    """Kills the only worker; its launcher stands still and starts none until this ends."""
    (worker,) = httpx.get(f"{service.base_url}/health").json()["workers"]
    os.kill(service.pid, signal.SIGSTOP)
    try:
        os.kill(worker["pid"], signal.SIGKILL)
        yield
    finally:
        os.kill(service.pid, signal.SIGCONT)


def penstock(service: Launched, *words: str) -> str:
    """What the command says, on stdout and stderr."""
    command = [sys.executable, "-m", "penstock", *words, "--url", service.base_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout + done.stderr


@contextmanager
def begun(service: Launched, name: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command, running; what it says goes to the files `<name>.out` and `<name>.err`."""
    command = [sys.executable, "-m", "penstock", *words, "--url", service.base_url]
    out, err = name.with_suffix(".out"), name.with_suffix(".err")
    with (
        out.open("wb") as stdout,
        err.open("wb") as stderr,
        subprocess.Popen(command, stdout=stdout, stderr=stderr) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def open_page(browser: Browser, service: Launched, path: str) -> tuple[Tab, Page]:
    tab = Tab(browser, service.base_url)
    tab.page.goto(path)
    return tab, tab.page


@pytest.mark.promise(
    "Runtime: a killed worker is seen: the chat, the job's page and the command show that the job "
    "waits after which token, then which worker resumed it, where and after how long; the answer "
    "is the undisturbed one"
)
def test_a_rescue_is_seen_while_no_worker_lives_and_afterwards(
    tab: Tab, browser: Browser, service: Launched
) -> None:
    page = ready(tab.page)
    calm = say(page, TEXT)
    expect_whole(calm)
    undisturbed = text_of(calm).inner_html()

    page.locator("#new-chat").click()
    answer = say(page, TEXT)
    expect(text_of(answer)).to_contain_text("open", timeout=PATIENCE_MS)
    job_id = response_of(answer)
    overview, dashboard = open_page(browser, service, "/dashboard#tab=jobs")
    of_job, job_page = open_page(browser, service, f"/dashboard#job={job_id}")
    badge = answer.locator(".rescue")
    expect(badge).to_be_hidden()
    link = dashboard.locator(f'a[href="#job={job_id}"]')
    row = dashboard.locator("#jobs tr").filter(has=link)
    expect(row).to_contain_text("running", timeout=PATIENCE_MS)

    with without_workers(service):
        expect(badge).to_have_text(WAITING, timeout=PATIENCE_MS)
        expect(page.locator("#status")).to_have_text(WAITING)
        job = job_of(service, answer)
        recovery, (attempt,) = job["recovery"], job["attempts"]
        assert job["status"] == "running"
        assert (recovery["cause"], recovery["lost_worker"]) == ("worker_lost", attempt["worker"])
        assert recovery["tokens"] == attempt["generated_tokens"]
        assert recovery["since"] == attempt["ended_at"]
        assert f"token {recovery['tokens']}," in badge.inner_text()
        expect(row).to_contain_text("resuming", timeout=PATIENCE_MS)
        dashboard.goto("/dashboard")
        expect(dashboard.locator("#status")).to_have_text("No worker is alive.")
        expect(dashboard.locator("#numbers")).to_contain_text(re.compile("Running1Waiting"))
        expect(job_page.locator("#job-badge")).to_have_text("resuming", timeout=PATIENCE_MS)
        expect(job_page.locator("#job-reason")).to_have_text(WAITING)
        expect(job_page.get_by_role("img", name=re.compile("No worker"))).to_be_visible()
        assert "resuming" in penstock(service, "jobs", "list")
        assert WAITING.search(penstock(service, "jobs", "show", job_id))

    expect(badge).to_have_text(RESUMED, timeout=PATIENCE_MS)
    expect_whole(answer)
    shown = text_of(answer).inner_html()
    mark = answer.get_by_role("img", name=RESUMED)
    expect(mark).to_have_count(1)
    assert shown.replace(mark.evaluate("mark => mark.outerHTML"), "") == undisturbed
    job = job_of(service, answer)
    first, second = job["attempts"]
    assert (job["status"], job["recovery"]) == ("finished", None)
    assert (first["cause"], second["outcome"], second["cause"]) == ("worker_lost", "ended", None)
    assert first["started_at"] < first["ended_at"] < second["started_at"] < second["ended_at"]
    made = first["generated_tokens"] + second["generated_tokens"]
    assert made == job["usage"]["completion_tokens"]
    assert second["completion_tokens"] == recovery["tokens"]

    expect(job_page.locator("#job-reason")).to_have_text(RESUMED, timeout=PATIENCE_MS)
    names = job_page.locator(".timeline .workers li")
    expect(names).to_have_text([first["worker"], second["worker"]])
    expect(job_page.locator("#job-badge")).to_have_text("finished", timeout=PATIENCE_MS)
    bar = job_page.locator("svg.way rect.gap")
    gap_s = second["started_at"] - first["ended_at"]
    share = gap_s / (job["ended_at"] - job["created_at"])
    assert float(bar.get_attribute("width") or 0) == pytest.approx(1000 * share, rel=0.01)
    assert RESUMED.search(penstock(service, "jobs", "show", job_id))
    log = penstock(service, "logs", job_id)
    assert f"Worker lost after token {recovery['tokens']}: {first['worker']}\n" in log
    assert (
        f"attempt 2 started on worker {second['worker']}, after token {recovery['tokens']}" in log
    )
    page.reload()  # it is kept with the chat
    expect(last_answer(page).locator(".rescue")).to_have_text(RESUMED)
    expect(last_answer(page).get_by_role("img", name=RESUMED)).to_have_count(1)
    overview.close()
    of_job.close()


def test_the_command_tells_of_a_rescue(service: Launched, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("water\niron\n", encoding="utf-8")
    tokens = ("--max-tokens", "300")
    chat, follow, generate = (tmp_path / name for name in ("chat", "follow", "generate"))

    def running() -> list[dict[str, Any]]:
        jobs = httpx.get(f"{service.base_url}/v1/jobs?state=running").json()["data"]
        return [job for job in jobs if job["usage"]["completion_tokens"] > 9]

    def noted(name: Path) -> str:
        return name.with_suffix(".err").read_text(encoding="utf-8")

    def said(name: Path) -> str:
        return name.with_suffix(".out").read_text(encoding="utf-8")

    with (
        begun(service, chat, "chat", "Say it.", *tokens) as chatting,
        begun(service, generate, "generate", str(prompts), *tokens) as generating,
    ):
        poll(lambda: len(running()) == 3)
        (name,) = [job["id"] for job in running() if job["kind"] == "response"]
        with begun(service, follow, "jobs", "follow", name) as following:
            poll(lambda: said(follow) != "")
            with without_workers(service):
                for reader in (chat, follow):
                    poll(lambda reader=reader: WAITING.search(noted(reader)) is not None)  # type: ignore[misc]
            for process in (chatting, following, generating):
                assert process.wait(60) == 0
    again = re.compile(r"penstock: resumed on worker \S+ after \d+\.\d s, nothing lost\.")
    for reader in (chat, follow):
        assert again.search(noted(reader))
    assert said(chat) == said(follow)
    assert "2 of 2 finished; 2 lost a worker and resumed on another one" in noted(generate)
