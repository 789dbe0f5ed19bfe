"""The dashboard in a real browser."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import expect

from tests.support.browser import PATIENCE_MS, Tab
from tests.support.launched import Launched

pytestmark = pytest.mark.browser


def test_the_dashboard_shows_workers_queue_and_jobs(tab: Tab, service: Launched) -> None:
    page = tab.page
    page.goto("/dashboard")
    model = httpx.get(f"{service.base_url}/v1/models").json()["data"][0]["id"]
    worker = httpx.get(f"{service.base_url}/health").json()["workers"][0]
    row = page.locator("#workers tr")
    expect(row).to_have_count(1, timeout=PATIENCE_MS)
    expect(row).to_contain_text(worker["id"])
    expect(row).to_contain_text(model)
    expect(row).to_contain_text(f"of {worker['total_blocks']:,}")
    expect(page.locator("#status")).to_have_text("All is well.")
    expect(page.locator("#no-workers")).to_be_hidden()

    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    answer = httpx.post(f"{service.base_url}/v1/chat/completions", json=body, timeout=30)
    done = page.locator("#jobs tr").filter(has=page.get_by_text("finished")).first
    expect(done).to_contain_text(answer.json()["id"].removeprefix("chatcmpl-"))
    expect(done.get_by_role("button")).to_be_hidden()
    expect(done.locator("td").nth(4)).to_have_text("4")


def test_a_job_is_cancelled_from_the_dashboard(tab: Tab, service: Launched) -> None:
    model = httpx.get(f"{service.base_url}/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Cancel me."}],
        "max_tokens": 1000,
        "stream": True,
    }
    url = f"{service.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=30) as answer:
        job_id = answer.headers["x-request-id"].removeprefix("chatcmpl-")
        tab.page.goto("/dashboard")
        row = tab.page.locator("#jobs tr").filter(has_text=job_id)
        expect(row).to_contain_text("running", timeout=PATIENCE_MS)
        row.get_by_role("button", name="Cancel").click()
        expect(row).to_contain_text("cancelled", timeout=PATIENCE_MS)
        expect(row.get_by_role("button", name="Cancel")).to_be_hidden()
        lines = list(answer.iter_lines())
    assert "data: [DONE]" in lines
    assert httpx.get(f"{service.base_url}/v1/jobs/{job_id}").json()["status"] == "cancelled"
    tab.page.get_by_label("State").select_option("cancelled")
    expect(row).to_have_count(1, timeout=PATIENCE_MS)
    tab.page.get_by_label("State").select_option("expired")
    expect(row).to_have_count(0, timeout=PATIENCE_MS)


def test_the_dashboard_says_when_the_service_is_away_and_comes_back(tab: Tab) -> None:
    page = tab.page
    page.goto("/dashboard")
    expect(page.locator("#status")).to_have_text("All is well.", timeout=PATIENCE_MS)
    page.route("**/health", lambda route: route.abort("connectionrefused"))
    expect(page.locator("#status")).to_have_text("The server cannot be reached.")
    expect(page.locator("#workers tr")).to_have_count(1)  # the last known stays in sight
    page.unroute("**/health")
    expect(page.locator("#status")).to_have_text("All is well.", timeout=PATIENCE_MS)
    tab.expect_complaint("ERR_CONNECTION_REFUSED")


@pytest.mark.parametrize(
    ("status", "shown"), [("stalled", "stalled"), ("draining", "draining"), ("ok", "idle")]
)
def test_the_dashboard_shows_a_worker_s_state(tab: Tab, status: str, shown: str) -> None:
    worker = {"id": "w1", "status": status, "models": ["m"], "step": 12_345, "running": 0}
    health = {"status": "stalled" if status == "stalled" else "ok", "running": 0, "waiting": 3}
    payload = {**health, "queued_tokens": 9, "redis": {"latency_ms": 0.2}, "workers": [worker]}
    tab.page.route("**/health", lambda route: route.fulfill(json=payload))
    tab.page.goto("/dashboard")
    expect(tab.page.locator("#workers .badge")).to_have_text(shown, timeout=PATIENCE_MS)
    expect(tab.page.locator("#workers tr")).to_contain_text("12,345")
    expect(tab.page.locator("#status.bad")).to_have_count(1 if status == "stalled" else 0)
