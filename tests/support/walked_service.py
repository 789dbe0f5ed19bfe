"""What somebody does with a service that runs in a terminal: in the page, the dashboard, the
command line and redis-cli. Each step checks what it shows."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, expect

from tests.support.browser import PATIENCE_MS, Tab, headless_chromium
from tests.support.launched import REPOSITORY
from tests.support.playground import (
    ask,
    expect_whole,
    last_answer,
    ready,
    response_of,
    set_settings,
    text_of,
)
from tests.support.terminal import Terminal
from tests.support.walk import Walk

READY = "Stop: Ctrl-C"
# Between what is over too soon to be reloaded in its middle, and what lasts.
SLOW_SHAPE = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 2048,
}
MAX_TOKENS = 400
WHOLE_MS = 180_000
KEPT = """() => Object.entries(localStorage)
  .filter(([key]) => key.startsWith("penstock-chat-"))
  .map(([, text]) => JSON.parse(text).turns.at(-1).answer.text)[0]"""
MIN_MORE = 20  # characters by which an answer has grown


def make_slow_model(directory: Path) -> Path:
    """A checkpoint with the demo's tokenizer and the shape of SmolLM2-135M, without weights: its
    answers last some seconds. For PENSTOCK_LOAD_FORMAT=dummy."""
    demo = REPOSITORY / "worker/demo/checkpoint"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, directory / name)
    config = json.loads((demo / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **SLOW_SHAPE}))
    return directory


class WalkedService:
    """A service that is ready, in the terminal in which it was started."""

    def __init__(
        self, terminal: Terminal, directory: Path, run: Callable[[Sequence[str]], str]
    ) -> None:
        """`run` runs a command as the user who walks, and returns what it printed."""
        self.terminal = terminal
        self.directory = directory
        self.run = run
        found = re.search(r"Penstock is ready: (http://\S+)", terminal.output)
        assert found is not None, terminal.output
        self.base_url = found[1]

    def get(self, path: str) -> Any:
        answer = httpx.get(self.base_url + path, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def look_inside(self) -> list[str]:
        """The printed command that connects to the server."""
        found = re.search(r"Look inside: (.+)", self.terminal.output)
        assert found is not None, self.terminal.output
        return shlex.split(found[1])

    def paste_curl_line(self) -> None:
        """Runs the printed line as it stands; the answer is streamed, and about Penstock."""
        found = re.search(r"(curl -N .*\\\n.*)\n", self.terminal.output)
        assert found is not None, self.terminal.output
        printed = self.run(["bash", "-c", found[1]])
        events = [line[6:] for line in printed.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", printed
        chunks = [json.loads(event) for event in events[:-1]]
        text = "".join(
            c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]
        )
        assert "Penstock" in text, printed

    def ask_in_the_page(self, walk: Walk) -> None:
        """Opens the playground and asks its first suggestion."""
        with headless_chromium() as browser:
            tab = Tab(browser, self.base_url)
            with walk.step("playground opened, until a question can be sent"):
                ready(tab.page)
            with walk.step("a suggested question, to its whole answer"):
                tab.page.get_by_role("button", name="What is Penstock?").click()
                if not tab.page.locator(".turn.assistant").count():  # it is put into the box
                    tab.page.keyboard.press("Enter")
                expect_whole(last_answer(tab.page))
                expect(text_of(last_answer(tab.page))).to_contain_text("Penstock")
            tab.close()

    def penstock(self, *words: str) -> str:
        """Runs the command `penstock` of the installation, as README says."""
        return self.run([*self.command, *words, "--url", self.base_url])

    @property
    def command(self) -> list[str]:
        own = self.directory / ".venv/bin/penstock"
        return [str(own)] if own.exists() else [sys.executable, "-m", "penstock"]


def walk_answers(walk: Walk, service: WalkedService, readme: Path) -> None:
    """An answer over a reload and a killed worker, found everywhere; another one cancelled."""
    with headless_chromium() as browser:
        tab = Tab(browser, service.base_url)
        page = ready(tab.page)
        set_settings(page, max_tokens=str(MAX_TOKENS), temperature="0")
        with walk.step("a question to the slow model, to the first text of its answer"):
            ask(page, "What happens when a worker dies?")
            expect(text_of(last_answer(page))).not_to_be_empty(timeout=PATIENCE_MS)
        job = response_of(last_answer(page))
        with walk.step("reload in mid-answer, until it goes on"):
            page.reload()
            expect(text_of(last_answer(page))).not_to_be_empty(timeout=PATIENCE_MS)
            _until_it_grows(page)
        assert response_of(last_answer(page)) == job
        with walk.step("`kill -9` of the only worker in mid-answer, until it goes on") as step:
            (worker,) = service.get("/health")["workers"]
            os.kill(worker["pid"], signal.SIGKILL)
            killed_s = time.monotonic()
            _until_it_grows(page, by_attempt=2, service=service, job=job)
            step.waits.append(
                f"{time.monotonic() - killed_s:.1f} s: another worker process starts, loads the "
                "model and computes the prompt and the tokens so far"
            )
        with walk.step("the rest of the answer"):
            expect(last_answer(page)).to_have_attribute("aria-busy", "false", timeout=WHOLE_MS)
        kept = page.evaluate(KEPT)
        assert kept == _output_of(service, job), "nothing is missing, and nothing there twice"
        expect(last_answer(page).locator(".rescue")).to_contain_text("nothing lost")
        _look_at_the_job(walk, service, page, job, readme)
        _cancel(walk, service, page)
        tab.close()


def _output_of(service: WalkedService, job: str) -> str:
    """The text of an answer that has ended, as the service has it."""
    (item,) = service.get(f"/v1/responses/{job}")["output"]
    return str(item["content"][0]["text"])


def _until_it_grows(
    page: Page, by_attempt: int = 1, service: WalkedService | None = None, job: str = ""
) -> None:
    """Waits for more text of an answer, and for the attempt that writes it."""
    while service is not None and service.get(f"/v1/jobs/{job}")["attempt"] < by_attempt:
        time.sleep(0.02)
    length = len(text_of(last_answer(page)).inner_text())
    page.wait_for_function(
        "more => document.querySelector('.turn.assistant:last-of-type > .text')"
        ".innerText.length >= more",
        arg=length + MIN_MORE,
        timeout=PATIENCE_MS,
    )


def _look_at_the_job(
    walk: Walk, service: WalkedService, page: Page, job: str, readme: Path
) -> None:
    plain = job.partition("_")[2]
    with walk.step("the job in the dashboard, with both its attempts"):
        page.get_by_role("link", name="Dashboard").click()
        page.get_by_role("link", name="Jobs", exact=True).click()
        row = page.locator("#jobs tr", has_text=plain[-8:])
        row.get_by_role("link").click()
        expect(page.locator("#job-badge")).to_have_text("finished", timeout=PATIENCE_MS)
        expect(page.locator("#job-attempts tr")).to_have_count(2)
    with walk.step("`penstock jobs list`"):
        assert plain in service.penstock("jobs", "list")
    with walk.step("`penstock jobs show`"):
        assert re.search(r"attempt +2", service.penstock("jobs", "show", job))
    with walk.step("`penstock jobs follow`"):
        assert service.penstock("jobs", "follow", job).strip()
    with walk.step("`redis-cli`, with README's line"):
        line = re.search(r"^redis-cli .*'penstock:.*'", readme.read_text(), re.MULTILINE)
        assert line is not None
        program, *words = shlex.split(line[0].replace("0-0197...", plain))
        if shutil.which(program) is None:  # what is printed in its place
            shown = service.run([*service.look_inside, *words[2:]])
        else:
            shown = service.run([program, *words])
        assert "finished" in shown, shown


def _cancel(walk: Walk, service: WalkedService, page: Page) -> None:
    ready(page)
    ask(page, "And then?")
    expect(text_of(last_answer(page))).not_to_be_empty(timeout=PATIENCE_MS)
    with walk.step("`penstock jobs cancel` of a running one, until the page says so"):
        shown = service.penstock("jobs", "cancel", response_of(last_answer(page)))
        assert re.search(r"status +cancelled", shown), shown
        expect_whole(last_answer(page))
    expect(last_answer(page)).to_contain_text("ancelled")
