"""An operator's work in a real browser: find jobs, cancel many, drain a worker, pause a queue."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.pages.scripted_service import *  # noqa: F403
from tests.e2e.pages.scripted_service import begun, generated
from tests.support.browser import Tab, expect_accessible
from tests.support.running_service import MODEL, RunningService

pytestmark = pytest.mark.browser

BACKGROUND = {"model": MODEL, "input": "a gate", "max_output_tokens": 8, "background": True}


def submit(service: RunningService, number: int) -> list[str]:
    url = f"{service.base_url}/v1/responses"
    return [httpx.post(url, json=BACKGROUND, timeout=60).json()["id"] for _ in range(number)]


def state_of(service: RunningService, name: str) -> str:
    return str(httpx.get(f"{service.base_url}/v1/jobs/{name}").json()["status"])


def row_of(page: Page, name: str) -> Locator:
    return page.locator("#jobs tr").filter(has=page.get_by_text(name[-8:], exact=True))


@pytest.mark.promise(
    "Dashboard: jobs are found by filters that have an address, and cancelled together"
)
def test_jobs_that_match_a_filter_are_cancelled_together(tab: Tab, service: RunningService) -> None:
    page = tab.page
    ended = generated(service)["id"]
    service.park()
    names = submit(service, 4)
    page.goto("/dashboard#tab=jobs")
    expect(row_of(page, ended)).to_contain_text("finished")
    page.get_by_role("navigation", name="States").get_by_text("queued").click()
    expect(page).to_have_url(re.compile(r"#tab=jobs&state=queued$"))
    expect(page.locator("#jobs tr")).to_have_count(4)
    expect(row_of(page, ended)).to_have_count(0)
    expect(page.locator("[data-state=queued] b")).to_have_text("4")

    page.get_by_label("Id", exact=True).fill(names[0][-12:])
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("#jobs tr")).to_have_count(1)
    expect(page).to_have_url(re.compile(r"state=queued&id="))
    expect(row_of(page, names[0])).to_contain_text("s ago")
    page.get_by_label("Id", exact=True).fill("")
    page.get_by_label("Model", exact=True).fill(MODEL)
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("#jobs tr")).to_have_count(4)

    row_of(page, names[0]).get_by_role("checkbox").check()
    page.get_by_role("button", name="Cancel 1 selected").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel 1 job").click()
    expect(page.locator("#job-status")).to_have_text("1 cancelled.")
    expect(page.locator("#jobs tr")).to_have_count(3)

    page.get_by_role("button", name="Cancel all that match…").click()
    expect(page.get_by_role("dialog")).to_contain_text("Cancel 3 jobs?")
    expect_accessible(page)
    page.keyboard.press("Escape")
    assert state_of(service, names[1]) == "queued"
    page.get_by_role("button", name="Cancel all that match…").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").first.click()
    expect(page.locator("#job-status")).to_have_text("3 cancelled.")
    assert {state_of(service, name) for name in names} == {"cancelled"}
    expect(page.locator("#no-jobs")).to_be_visible()


def test_older_jobs_have_an_address_of_their_own(tab: Tab, service: RunningService) -> None:
    page = tab.page
    service.park()
    names = submit(service, 53)
    page.goto("/dashboard#tab=jobs&state=queued")
    expect(page.locator("#jobs tr")).to_have_count(50)
    page.get_by_role("link", name="Older jobs").click()
    expect(page).to_have_url(re.compile(r"state=queued&after=live\."))
    expect(page.locator("#jobs tr")).to_have_count(3)
    expect(page.get_by_role("link", name="Older jobs")).to_be_hidden()
    page.reload()
    expect(page.locator("#jobs tr")).to_have_count(3)
    expect(row_of(page, names[0])).to_have_count(1)
    page.get_by_role("link", name="Newest jobs").click()
    expect(page.locator("#jobs tr")).to_have_count(50)
    httpx.post(f"{service.base_url}/v1/jobs/cancel", json={"filter": {}}, timeout=60)


def test_a_running_job_shows_its_progress_and_the_whole_id_is_copied(
    tab: Tab, service: RunningService
) -> None:
    page = tab.page
    service.script.stop_after = 7
    try:
        name = begun(service)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.goto("/dashboard#tab=jobs")
        row = row_of(page, name)
        expect(row).to_contain_text("7 / 400")
        expect(row.get_by_role("progressbar")).to_have_attribute("max", "400")
        row.get_by_role("button", name="Copy the id").click()
        assert page.evaluate("navigator.clipboard.readText()") == name
        expect(row.get_by_role("button", name="Copy the id")).to_have_text("Copied")
        row.get_by_role("button", name="Cancel job").click()
        expect(row).to_contain_text("cancelled")
    finally:
        service.script.stop_after = None


def test_a_worker_is_drained_and_a_queue_is_paused(tab: Tab, service: RunningService) -> None:
    page = tab.page
    page.goto("/dashboard#tab=workers")
    worker = page.locator("#workers tr")
    page.get_by_role("button", name="Drain worker w-scripted").click()
    expect(worker).to_contain_text("drained")
    expect(page.locator("#worker-status")).to_have_text("w-scripted takes no new jobs.")
    page.get_by_role("button", name="Resume worker w-scripted").click()
    expect(page.locator("#worker-status")).to_have_text("w-scripted takes jobs again.")

    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name=f"Pause the queue of {MODEL}").click()
    expect(page.locator("#models tr .badge")).to_have_text("paused")
    expect(page.locator("#status")).to_have_text("Healthy. 1 queue paused.")
    (waiting,) = submit(service, 1)
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(row_of(page, waiting)).to_contain_text("queue paused")
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name=f"Resume the queue of {MODEL}").click()
    expect(page.locator("#models tr .badge")).to_have_text("served")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_lists_are_accessible_and_fit_a_phone(
    tab: Tab, service: RunningService, scheme: str, width: int
) -> None:
    page = tab.page
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 844})
    generated(service)
    for name, row in (
        ("jobs", "#jobs tr"),
        ("workers", "#workers tr"),
        ("models", "#models tr"),
        ("dead-letters", "#no-dead-letters"),
    ):
        page.goto(f"/dashboard#tab={name}")
        expect(page.locator(row).first).to_be_visible()
        expect_accessible(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
