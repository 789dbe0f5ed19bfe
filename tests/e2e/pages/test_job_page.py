"""The page of a job in a real browser, with a worker that does what a test says."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.pages.scripted_service import *  # noqa: F403
from tests.e2e.pages.scripted_service import begun, generated
from tests.support.browser import PATIENCE_MS, Tab, expect_accessible
from tests.support.expired_jobs import expire_record, expire_text
from tests.support.playground import poll
from tests.support.running_service import MODEL, RunningService

pytestmark = pytest.mark.browser


def fact(page: Page, name: str) -> Locator:
    return page.locator("#job-facts div", has=page.get_by_text(name, exact=True)).locator("dd")


def open_job(page: Page, name: str) -> None:
    page.goto(f"/dashboard#job={name}")
    expect(page.locator("#job-known")).to_be_visible(timeout=PATIENCE_MS)


def events_of(page: Page, number: int = 0) -> Locator:
    """The texts of the single events of a run, which is opened."""
    run = page.locator("#job-events > li").nth(number)
    run.locator("summary").click()
    return run.locator("td.log-text")


@pytest.mark.promise(
    "Dashboard: a job is found by its id, as the API or Redis has it, with its timeline, the "
    "workers that it survived and its events; it is cancelled there, and a dead letter is run "
    "again"
)
def test_a_job_is_found_by_its_id_and_shows_what_it_went_through(
    tab: Tab, service: RunningService
) -> None:
    answer = generated(service)
    page = tab.page
    page.goto("/dashboard")
    field = page.get_by_label("Job, response or chat id")
    for name in (answer["id"], answer["id"].removeprefix("gen-")):
        field.fill(f" {name} ")
        page.keyboard.press("Enter")
        title = page.get_by_role("heading", name=f"Job {answer['id']}")
        expect(title).to_be_visible(timeout=PATIENCE_MS)
        expect(title).to_be_focused()
        expect(page.locator("#jobs")).to_have_count(0)
        page.get_by_role("link", name="All jobs").click()
        expect(page.locator("#jobs")).to_be_visible()
        expect(page.locator("#job")).to_be_hidden()
    row = page.locator("#jobs tr", has_text=answer["id"][-8:])
    row.get_by_role("link").click()
    expect(page.locator("#job-badge")).to_have_text("finished")
    way = page.get_by_role("img", name=re.compile(r"^Queued .*, Prefill .*, Decode "))
    expect(way).to_be_visible()
    attempt = page.locator("#job-attempts tr")
    expect(attempt).to_have_count(1)
    expect(attempt).to_contain_text("w-scripted")
    expect(attempt).to_contain_text("ended the job")
    expect(fact(page, "Output tokens")).to_have_text("20")
    expect(fact(page, "Kind")).to_have_text("generate")
    expect(page.locator("#job-prefix")).to_contain_text("tokens")
    run = page.locator("#job-events summary")
    expect(run).to_have_text(re.compile(r"^Tokens 1–20 · attempt 1 on w-scripted · [\d.]+ m?s$"))
    expect(page.locator("#job-end")).to_have_text("End: finished · length")
    expect(page.locator("#job-events tbody tr")).to_have_count(0)  # read when it is opened
    said = events_of(page)
    expect(said).to_have_count(21)
    expect(page.locator("#job-events th", has_text="Choices")).to_have_count(0)
    texts = said.all_text_contents()
    assert "".join(texts[:-1]) == answer["text"]
    assert texts[-1] == "finished · length"
    expect(page.get_by_role("button", name="Cancel the job")).to_be_hidden()
    expect(page.get_by_role("button", name="Run again")).to_be_hidden()


@pytest.mark.parametrize(
    ("placed", "shown"),
    [
        ("prefix", "its prefix in the worker's cache"),
        ("late", "any worker, as the one with its prefix did not take it in time"),
        ("any", "no preference"),
    ],
)
def test_the_page_says_why_the_worker_got_the_job(
    tab: Tab, service: RunningService, placed: str, shown: str
) -> None:
    name = generated(service)["id"]
    redis: Any = service.transport.connections.commands
    key = service.transport.keys.job(name.removeprefix("gen-"))
    service.call(redis.hset(key, "placed", placed))
    open_job(tab.page, name)
    expect(fact(tab.page, "Placed by")).to_have_text(shown)


def test_a_running_job_is_followed_and_cancelled(tab: Tab, service: RunningService) -> None:
    service.script.step_s = 0.1
    name, page = begun(service), tab.page
    open_job(page, name)
    expect(page.locator("#job-badge")).to_have_text("running")
    said = events_of(page)
    expect(said.nth(5)).to_be_attached(timeout=PATIENCE_MS)  # it grows
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("#job-badge")).to_have_text("cancelled", timeout=PATIENCE_MS)
    expect(page.locator("#job-note")).to_have_text("The job is cancelled.")
    expect(page.get_by_role("button", name="Cancel the job")).to_be_hidden()
    expect(page.locator("#job-title")).to_be_focused()  # the button went, the place stays
    expect(said.last).to_contain_text("cancelled")
    assert service.job(name)["status"] == "cancelled"


def crashed(service: RunningService, name: str, *, is_last: bool) -> None:
    """The engine of the one worker that holds the job dies."""
    queue, worker_id = service.transport.queue, service.worker.worker_id
    if is_last:
        redis: Any = service.transport.connections.commands
        job_id = name.removeprefix("gen-")
        service.call(redis.hset(service.transport.keys.job(job_id), "crashes", 3))
    attempt = service.job(name)["attempt"]
    service.call(queue.crashed(worker_id, [(name.removeprefix("gen-"), attempt)]))


def held(service: RunningService) -> str:
    """The id of a job that the worker has taken and does nothing with."""
    service.park()
    name = begun(service, max_tokens=20)
    service.call(service.transport.queue.pull(service.worker.worker_id, 1, 0))
    return name


def test_the_workers_that_a_job_survived_are_named(tab: Tab, service: RunningService) -> None:
    name, page = held(service), tab.page
    open_job(page, name)
    attempts = page.locator("#job-attempts tr")
    expect(attempts).to_have_count(1)
    expect(attempts.first).to_contain_text("running")
    crashed(service, name, is_last=False)
    expect(attempts.first).to_contain_text("worker lost", timeout=PATIENCE_MS)
    expect(page.locator("#job-badge")).to_have_text("resuming")
    expect(page.locator("#job-reason")).to_have_text(
        "Engine lost before the first token, resuming."
    )
    service.call(service.transport.queue.recover(service.worker.worker_id, 1))
    expect(attempts).to_have_count(2, timeout=PATIENCE_MS)
    expect(attempts.first).to_contain_text("worker lost; the job resumed")
    expect(attempts.nth(1)).to_contain_text("running")
    expect(page.get_by_role("img", name=re.compile(", 2 attempts$"))).to_be_visible()
    httpx.delete(f"{service.base_url}/v1/jobs/{name}")
    expect(attempts.nth(1)).to_contain_text("ended the job", timeout=PATIENCE_MS)


@pytest.mark.parametrize("where", ["list", "page"])
def test_a_dead_letter_is_run_again(tab: Tab, service: RunningService, where: str) -> None:
    name, page = held(service), tab.page
    crashed(service, name, is_last=True)
    assert service.job(name)["error"]["code"] == "poison"
    service.script.pulls = True
    if where == "list":
        page.goto("/dashboard#tab=dead-letters")
        row = page.locator("#dead-letters tr", has_text=name[-8:])
        expect(row).to_contain_text("poison", timeout=PATIENCE_MS)
        row.get_by_role("button", name="Run job").click()
        link = page.locator("#dead-letter-status a")
        expect(link).to_be_focused()
        new = link.inner_text()
        expect(row).to_have_count(0, timeout=PATIENCE_MS)
        link.click()
    else:
        open_job(page, name)
        page.get_by_role("button", name="Run again").click()
        expect(page).not_to_have_url(re.compile(name))
        new = page.url.partition("#job=")[2]
    expect(page.get_by_role("heading", name=f"Job {new}")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator("#job-badge")).to_have_text("finished", timeout=PATIENCE_MS)
    open_job(page, name)
    page.get_by_role("link", name="Open its rerun").click()
    expect(page.get_by_role("heading", name=f"Job {new}")).to_be_visible()


def test_the_events_come_a_page_at_a_time(tab: Tab, service: RunningService) -> None:
    answer, page = generated(service, max_tokens=120), tab.page
    open_job(page, answer["id"])
    said, note = events_of(page), page.locator("#job-events .none")
    pages = []
    for number, length in ((1, 50), (2, 50), (3, 21)):
        expect(note).to_have_text(re.compile(f"^Page {number}: {length} events"))
        expect(said).to_have_count(length)
        pages += said.all_text_contents()
        if number < 3:
            page.get_by_role("button", name="Next events").click()
    assert "".join(pages[:-1]) == answer["text"]
    expect(page.get_by_role("button", name="Next events")).to_be_hidden()
    page.get_by_role("button", name="First events").click()
    expect(note).to_have_text(re.compile("^Page 1: 50 events"))
    expect(page.get_by_role("button", name="First events")).to_be_hidden()


def test_the_runs_of_a_job_that_was_taken_up_again_are_its_attempts(
    tab: Tab, service: RunningService
) -> None:
    service.script.stop_after = 7
    name, page = begun(service, max_tokens=12), tab.page
    open_job(page, name)
    runs = page.locator("#job-events summary")
    expect(runs).to_have_text(re.compile("^Tokens 1–7 · attempt 1 on w-scripted"))
    said = events_of(page)
    expect(said).to_have_count(7)
    queue, job_id = service.transport.queue, name.removeprefix("gen-")
    assert service.call(queue.release(service.worker.worker_id, job_id, 1))
    poll(lambda: not service.worker.jobs)
    service.script.stop_after = None
    service.call(service.worker.recover())
    expect(runs.nth(1)).to_have_text(re.compile("^Tokens 8–12 · attempt 2 on w-scripted"))
    expect(said).to_have_count(7)  # of its own attempt
    first = "".join(said.all_text_contents())
    later = events_of(page, 1)
    expect(later).to_have_count(6)
    texts = later.all_text_contents()
    assert texts[-1] == "finished · length"
    answer = httpx.get(f"{service.base_url}/v1/jobs/{name}/answer").json()
    assert first + "".join(texts[:-1]) == answer["choices"][0]["text"]


@pytest.mark.promise(
    "Dashboard: the page of a job shows its prompt and answer as text, also while it runs, and "
    "is not a reader of it; its tokens are a run for each attempt, whose events open on "
    "demand"
)
def test_the_text_of_a_running_job_is_followed_and_its_prompt_is_plain(
    tab: Tab, service: RunningService
) -> None:
    service.script.step_s = 0.05
    name, page = begun(service, prompt="**a gate** and a wheel, ", max_tokens=400), tab.page
    open_job(page, name)
    expect(page.locator("#job-prompt pre")).to_have_text("**a gate** and a wheel, ")
    expect(page.locator("#job-prompt .none")).to_contain_text("tokens, as the model got them.")
    strong = page.locator("#job-answer strong")
    expect(strong.first).to_have_text("a gate")
    seen = strong.count()
    expect(strong.nth(seen)).to_be_attached(timeout=PATIENCE_MS)  # it grows
    httpx.delete(f"{service.base_url}/v1/jobs/{name}")
    expect(page.locator("#job-badge")).to_have_text("cancelled", timeout=PATIENCE_MS)
    total = service.job(name)["usage"]["completion_tokens"]
    expect(page.locator("#job-events summary")).to_contain_text(f"Tokens 1–{total}")


def test_choices_are_shown_apart(tab: Tab, service: RunningService) -> None:
    body = {"model": MODEL, "prompt": "of gates", "n": 2, "max_tokens": 6}
    made = httpx.post(f"{service.base_url}/v1/completions", json=body, timeout=60).json()
    page = tab.page
    open_job(page, made["id"])
    expect(page.locator("#job-answer h4")).to_have_text(["Choice 1", "Choice 2"])
    texts = page.locator("#job-answer .markdown").all_inner_texts()
    assert texts == [choice["text"].strip() for choice in made["choices"]]
    events_of(page)
    expect(page.locator("#job-events th", has_text="Choices")).to_be_visible()


def test_a_long_text_is_shown_in_part_until_all_of_it_is_requested(
    tab: Tab, service: RunningService
) -> None:
    page = tab.page
    page.route(
        re.compile("answer.limit=16384"),
        lambda route: route.continue_(url=route.request.url.replace("16384", "5")),
    )
    page.route(
        re.compile("prompt.after=0"),
        lambda route: route.continue_(url=route.request.url + "&limit=5"),
    )
    made = generated(service, prompt="a gate and a wheel " * 3, max_tokens=40)
    open_job(page, made["id"])
    expect(page.locator("#job-answer > .none")).to_have_text("The first 5 tokens.")
    page.get_by_role("button", name="Show all of the answer").click()
    expect(page.locator("#job-answer .markdown")).to_have_text(made["text"].strip())
    expect(page.get_by_role("button", name="Show all of the answer")).to_be_hidden()
    shown = page.locator("#job-prompt pre")
    expect(page.locator("#job-prompt .none")).to_contain_text("The first 5 are shown.")
    page.get_by_role("button", name="Show more of the prompt").click()
    expect(shown).to_have_text("a gate and a wheel " * 3)
    expect(page.get_by_role("button", name="Show more of the prompt")).to_be_hidden()


def test_text_that_is_no_longer_stored_is_said_to_be(tab: Tab, service: RunningService) -> None:
    name, page = generated(service)["id"], tab.page
    redis: Any = service.transport.connections.commands
    keys, job_id = service.transport.keys, name.removeprefix("gen-")
    service.call(redis.delete(keys.log(job_id), keys.prompt(job_id)))
    open_job(page, name)
    expect(page.locator("#job-prompt .none")).to_contain_text("no longer stored")
    expect(page.locator("#job-prompt pre")).to_be_hidden()
    expect(page.locator("#job-answer .none")).to_contain_text("was lost")
    expect(page.locator("#job-facts")).to_contain_text("generate")  # what is left is shown


def test_a_record_is_shown_as_json(tab: Tab, service: RunningService) -> None:
    name, page = generated(service)["id"], tab.page
    open_job(page, name)
    page.get_by_text("Record as JSON").click()
    expect(page.locator("#job-record pre")).to_contain_text(f'"id": "{name}"')


def test_a_job_that_is_not_there_is_said_to_be_none(tab: Tab, service: RunningService) -> None:
    page = tab.page
    page.goto("/dashboard#job=gen-0-nothing")
    expect(page.locator("#job-note")).to_contain_text("gen-0-nothing", timeout=PATIENCE_MS)
    expect(page.locator("#job-known")).to_be_hidden()
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_focused()
    page.get_by_role("link", name="Workers").click()
    expect(page.locator("#workers tr")).to_have_count(1, timeout=PATIENCE_MS)
    tab.expect_complaint("404")


def test_a_job_that_has_expired_says_when_and_why(tab: Tab, service: RunningService) -> None:
    name, page = generated(service)["id"], tab.page
    expire_text(service, name)
    open_job(page, name)
    note = page.locator("#job-answer > .none")
    expect(note).to_contain_text("The text of this job expired at", timeout=PATIENCE_MS)
    expect(note).to_contain_text("PENSTOCK_TEXT_RETENTION_S")
    expire_record(service, name)
    page.goto("/")
    page.goto(f"/dashboard#job={name}")
    note = page.locator("#job-note")
    expect(note).to_contain_text("PENSTOCK_JOB_RETENTION_S", timeout=PATIENCE_MS)
    tab.expect_complaint("410")


def test_output_is_shown_as_text_and_never_as_markup(tab: Tab, service: RunningService) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script> "
    answer = generated(service, prompt=hostile * 2, max_tokens=60)
    assert "<" in answer["text"]
    page = tab.page
    open_job(page, answer["id"])
    expect(events_of(page)).to_have_count(50)
    expect(page.locator("#job-prompt pre")).to_have_text(hostile * 2)
    expect(page.locator("#job-answer")).to_contain_text("<img src=x")
    assert page.locator("#job-known :is(img, script)").count() == 0


def test_a_page_out_of_sight_has_no_stream(tab: Tab, service: RunningService) -> None:
    feed, page = service.app.state.services.feed, tab.page
    page.goto("/dashboard#tab=workers")
    expect(page.locator("#workers tr")).to_have_count(1, timeout=PATIENCE_MS)
    poll(lambda: feed.num_watchers == 1)
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    poll(lambda: feed.num_watchers == 0)
    page.evaluate(hide, False)
    poll(lambda: feed.num_watchers == 1)


@pytest.mark.promise(
    "Dashboard: lists and the page of a job are accessible, light and dark, on 320 pixels, by "
    "keyboard, and announce only what happened"
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_job_is_accessible_and_fits_a_phone(
    tab: Tab, service: RunningService, scheme: Any
) -> None:
    page = tab.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 320, "height": 568})
    name = generated(service)["id"]
    service.script.step_s = 0.2
    running = begun(service)
    page.goto("/dashboard#tab=jobs")
    expect(page.locator("#jobs tr", has_text=running[-8:])).to_be_visible()
    expect_fit(page)
    for shown in (name, running):
        open_job(page, shown)
        expect(events_of(page).first).to_be_visible(timeout=PATIENCE_MS)
        expect(page.locator("#job-prompt pre")).to_be_visible()
        expect_fit(page)
    httpx.delete(f"{service.base_url}/v1/jobs/{running}")


def expect_fit(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    expect_accessible(page)


def test_the_keyboard_reaches_a_job_and_the_skip_link_keeps_it(
    tab: Tab, service: RunningService
) -> None:
    name, page = generated(service)["id"], tab.page
    open_job(page, name)
    skip = page.get_by_role("link", name="Skip to the content")
    skip.focus()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    assert page.url.endswith(f"#job={name}")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="All jobs")).to_be_focused()
    expect(page.locator("#job-known")).to_be_visible()


def test_a_live_page_says_little_to_screen_readers(tab: Tab, service: RunningService) -> None:
    """Figures change each second; only what happened is announced."""
    page = tab.page
    page.add_init_script(
        """window.spoken = [];
        document.addEventListener("DOMContentLoaded", () => {
          for (const node of document.querySelectorAll("[aria-live], [role=status]")) {
            new MutationObserver(() => window.spoken.push(node.textContent)).observe(node, {
              childList: true, characterData: true, subtree: true,
            });
          }
        });"""
    )
    page.goto("/dashboard#tab=workers")
    beat = page.locator("#workers td[data-label='Last heartbeat']")
    expect(beat).to_be_visible(timeout=PATIENCE_MS)
    finished = threading.Thread(target=generated, args=(service,))
    finished.start()
    for _ in range(3):
        expect(beat).not_to_have_text(beat.inner_text(), timeout=PATIENCE_MS)
    finished.join()
    assert page.evaluate("window.spoken") == ["Healthy."]
