"""The dashboard in a real browser."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.support.batches import begin_batch
from tests.support.browser import PATIENCE_MS, Tab
from tests.support.launched import Launched

pytestmark = pytest.mark.browser


def test_the_dashboard_shows_workers_queue_and_jobs(tab: Tab, service: Launched) -> None:
    page = tab.page
    page.goto("/dashboard#tab=workers")
    model = httpx.get(f"{service.base_url}/v1/models").json()["data"][0]["id"]
    worker = httpx.get(f"{service.base_url}/health").json()["workers"][0]
    row = page.locator("#workers tr")
    expect(row).to_have_count(1, timeout=PATIENCE_MS)
    expect(row).to_contain_text(worker["id"])
    expect(row).to_contain_text(model)
    expect(row).to_contain_text(f"of {worker['total_blocks']:,}")
    expect(page.locator("#status")).to_have_text("Healthy.")
    expect(page.locator("#no-workers")).to_be_hidden()

    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    answer = httpx.post(f"{service.base_url}/v1/chat/completions", json=body, timeout=30)
    page.get_by_role("link", name="Jobs", exact=True).click()
    done = page.locator("#jobs tr").filter(has=page.get_by_text("finished")).first
    name = answer.json()["id"]
    expect(done.get_by_role("link")).to_have_text(name[-8:])
    expect(done.get_by_role("link")).to_have_attribute("title", name.removeprefix("chatcmpl-"))
    expect(done.get_by_role("button", name="Cancel")).to_be_hidden()
    expect(done.locator("td[data-label=Output]")).to_have_text("4")
    expect(done.locator("td[data-label=Tenant]")).to_have_text("default")
    expect(done.locator("td[data-label=Kind]")).to_have_text("chat")


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
        tab.page.goto("/dashboard#tab=jobs")
        row = tab.page.locator("#jobs tr").filter(has_text=job_id[-8:])
        expect(row).to_contain_text("running", timeout=PATIENCE_MS)
        row.get_by_role("button", name="Cancel").click()
        expect(row).to_contain_text("cancelled", timeout=PATIENCE_MS)
        expect(row.get_by_role("button", name="Cancel")).to_be_hidden()
        lines = list(answer.iter_lines())
    assert "data: [DONE]" in lines
    assert httpx.get(f"{service.base_url}/v1/jobs/{job_id}").json()["status"] == "cancelled"
    states = tab.page.get_by_role("navigation", name="States")
    states.get_by_role("link", name="cancelled").click()
    expect(row).to_have_count(1, timeout=PATIENCE_MS)
    states.get_by_role("link", name="expired").click()
    expect(row).to_have_count(0, timeout=PATIENCE_MS)


def test_the_dashboard_shows_who_serves_whom(tab: Tab, service: Launched) -> None:
    page = tab.page
    page.goto("/dashboard#tab=workers")
    frontend = page.locator("#frontends tr")
    expect(frontend).to_have_count(1, timeout=PATIENCE_MS)
    expect(frontend).to_contain_text(f":{service.port}")
    expect(page.locator("#partitions-part")).to_be_hidden()
    blocks = page.locator("#workers svg")
    expect(blocks).to_have_attribute("aria-label", re.compile(r"^KV blocks: \d+ in use, .* free$"))
    page.get_by_role("link", name="Tenants").click()
    tenant = page.locator("#tenants tr")
    expect(tenant).to_have_count(1)
    expect(tenant.locator("td").first).to_have_text("default")
    expect(tenant.locator("td").nth(3)).to_have_text(re.compile(r"^\d.* s? ?\((100|0) %\)$"))
    expect(tenant.locator("td").nth(4)).to_have_text(re.compile(r"^\d+(\.\d)? (B|KiB)$"))
    pot = page.locator("#pots tr").filter(has_text="dashboards")
    expect(pot).to_contain_text("everyone 1")
    page.get_by_role("link", name="Dead letters").click()
    expect(page.locator("#no-dead-letters")).to_be_visible()
    page.get_by_role("link", name="Batches").click()
    expect(page.locator("#no-batches")).to_be_visible()


def test_a_page_has_one_stream_and_asks_for_no_list(tab: Tab, service: Launched) -> None:
    page = tab.page
    page.goto("/dashboard#tab=workers")
    expect(page.locator("#workers tr")).to_have_count(1, timeout=PATIENCE_MS)
    beat = page.locator("#workers td[data-label='Last heartbeat']")
    for _ in range(3):
        shown = beat.inner_text()
        expect(beat).not_to_have_text(shown, timeout=PATIENCE_MS)
    asked = [address for address in tab.addresses if "/static/" not in address]
    assert [address.removeprefix(service.base_url) for address in asked] == [
        "/dashboard",
        "/v1/deployment/stream?history=none",
    ]


TABS = ["Overview", "Jobs", "Workers", "Models", "Batches", "Dead letters", "Tenants"]


def test_each_tab_has_an_address_and_only_the_shown_one_is_in_the_page(
    tab: Tab, service: Launched
) -> None:
    page = tab.page
    page.goto("/dashboard")
    links = page.get_by_role("navigation", name="Dashboard").get_by_role("link")
    expect(links).to_have_text(TABS)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    for name in TABS:
        link = page.get_by_role("link", name=name, exact=True)
        link.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=2).first).to_have_text(name)
        expect(page.locator("#tabs [aria-current=page]")).to_have_text(name)
        expect(link).to_be_focused()
        # What belongs to it, and no other tab.
        assert page.locator("#tab > section:visible").count() <= 2
        page.reload()
        expect(page.get_by_role("heading", level=2).first).to_have_text(name)
    page.go_back()
    expect(page.get_by_role("heading", level=2).first).to_have_text(TABS[-2])
    page.goto("/dashboard#tab=nothing")
    expect(page.get_by_role("heading", level=2).first).to_have_text("Overview")


def test_a_link_to_jobs_of_one_state_can_be_shared(tab: Tab) -> None:
    tab.page.goto("/dashboard#tab=jobs&state=failed")
    states = tab.page.get_by_role("navigation", name="States")
    expect(states.locator("[aria-current]")).to_contain_text("failed")
    states.get_by_role("link", name="expired").click()
    expect(tab.page).to_have_url(re.compile(r"#tab=jobs&state=expired$"))

    def asked() -> list[str]:
        return [each.partition("?")[2] for each in tab.addresses if "/stream" in each]

    queries = ["history=none&state=failed", "history=none&state=expired"]
    for _ in range(200):  # it is asked for after the address has changed
        if asked() == queries:
            break
        tab.page.wait_for_timeout(50)
    assert asked() == queries


def test_a_model_is_shown_with_its_workers_and_its_queue(tab: Tab, service: Launched) -> None:
    tab.page.goto("/dashboard#tab=models")
    row = tab.page.locator("#models tr")
    expect(row).to_have_count(1, timeout=PATIENCE_MS)
    expect(row.locator(".badge")).to_have_text("served")
    figures = row.locator("td.number")
    expect(figures).to_have_text(["1", "0", "0", "0 ms", re.compile(r"^\d+\.\d$")])


STREAM = "**/v1/deployment/stream*"
SERVICE_STATE = {
    "now": 1,
    "running": 0,
    "waiting": 3,
    "queued_tokens": 9,
    "tokens_per_s": 1.5,
    "workers": 1,
    "dead_letters": 0,
    "redis": {"reachable": True, "latency_ms": 0.2},
}


def snapshot_of(worker: dict[str, object], status: str, **others: object) -> str:
    """A stream that says this once, and ends. `others`: further lists."""
    lists = {"workers": {"ids": ["w1"], "rows": {"w1": worker}}, **others}
    data = json.dumps({"service": {**SERVICE_STATE, "status": status}, "lists": lists})
    return f"event: snapshot\ndata: {data}\n\n"


def test_the_dashboard_says_when_the_service_is_away_and_comes_back(
    tab: Tab, service: Launched
) -> None:
    page = tab.page
    worker = httpx.get(f"{service.base_url}/health").json()["workers"][0]
    told = snapshot_of(worker, "ok")
    is_first = [True]

    def once(route: Route) -> None:
        if is_first.pop() if is_first else False:
            route.fulfill(body=told, content_type="text/event-stream")
        else:
            route.abort("connectionrefused")

    page.route(STREAM, once)
    page.goto("/dashboard#tab=workers")
    expect(page.locator("#status")).to_have_text("The server cannot be reached.")
    expect(page.locator("#workers tr")).to_have_count(1)  # the last known stays in sight
    page.unroute(STREAM)
    expect(page.locator("#status")).to_have_text("Healthy.", timeout=PATIENCE_MS)
    tab.expect_complaint("ERR_CONNECTION_REFUSED")


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ("stalled", "stalled"),
        ("draining", "draining"),
        ("ok", "idle"),
        ("loading", "loading, 43 %"),
    ],
)
def test_the_dashboard_shows_a_worker_s_state(tab: Tab, status: str, shown: str) -> None:
    worker = {"id": "w1", "status": status, "models": ["m"], "step": 12_345, "running": 0}
    if status == "loading":
        worker |= {"percent": 43, "stage": "loading weights"}
    told = snapshot_of(worker, "stalled" if status == "stalled" else "ok")
    tab.page.route(STREAM, lambda route: route.fulfill(body=told, content_type="text/event-stream"))
    tab.page.goto("/dashboard#tab=workers")
    expect(tab.page.locator("#workers .badge")).to_have_text(shown, timeout=PATIENCE_MS)
    expect(tab.page.locator("#workers tr")).to_contain_text("12,345")
    expect(tab.page.locator("#workers tr")).to_contain_text("m")
    expect(tab.page.locator("#status.bad")).to_have_count(1 if status == "stalled" else 0)


def test_a_batch_is_shown_with_its_rows(tab: Tab, service: Launched) -> None:
    model = httpx.get(f"{service.base_url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "Hello.", "max_tokens": 2}
    with httpx.Client(base_url=service.base_url) as client:
        batch = begin_batch(client, body, body).json()
    tab.page.goto("/dashboard#tab=batches")
    row = tab.page.locator("#batches tr", has_text=batch["id"])
    expect(row.locator(".badge")).to_have_text("completed", timeout=PATIENCE_MS)
    expect(row).to_contain_text("2 of 2")
    expect(row).to_contain_text("/v1/completions")
    expect(row.get_by_role("progressbar", name="Rows completed")).to_have_attribute("value", "2")
    expect(tab.page.locator("#no-batches")).to_be_hidden()


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({"prefix_query_tokens": 400, "prefix_hit_tokens": 300}, {"Prefix hits": "75 %"}),
        ({"lane_preemptions": "5:3 7:1"}, {"Preempted": "lane 5: 3, lane 7: 1"}),
        ({"lane_preemptions": ""}, {"Preempted": "–", "Prefix hits": "–"}),
        ({}, {"Preempted": "–", "Prefix hits": "–"}),
    ],
)
def test_a_worker_has_its_prefix_hits_and_its_preemptions_by_lane(
    tab: Tab, counts: dict[str, object], shown: dict[str, str]
) -> None:
    worker = {"id": "w1", "status": "ok", "models": ["m"], "step": 1, "running": 0, **counts}
    told = snapshot_of(worker, "ok")
    tab.page.route(STREAM, lambda route: route.fulfill(body=told, content_type="text/event-stream"))
    tab.page.goto("/dashboard#tab=workers")
    for label, text in shown.items():
        expect(tab.page.locator(f"#workers td[data-label='{label}']")).to_have_text(text)


def test_a_worker_has_its_swaps_and_the_model_that_it_cannot_load(tab: Tab) -> None:
    worker = {"id": "w1", "status": "ok", "models": ["m"], "step": 1, "running": 0}
    worker |= {"model_swaps": 3, "model_load_error": "b: no weights"}
    told = snapshot_of(worker, "ok")
    tab.page.route(STREAM, lambda route: route.fulfill(body=told, content_type="text/event-stream"))
    tab.page.goto("/dashboard#tab=workers")
    shown = tab.page.locator("#workers td[data-label='Models']")
    expect(shown).to_have_text("m, 3 swaps. Not loaded: b: no weights", timeout=PATIENCE_MS)
    tab.page.goto("/dashboard#tab=overview")
    expect(tab.page.locator("body")).to_contain_text("w1 cannot load a model: b: no weights")


@pytest.mark.parametrize(("used", "cached", "free"), [(1, 1, 998), (500, 250, 250), (1000, 0, 0)])
def test_the_picture_of_the_blocks_has_their_shares(
    tab: Tab, used: int, cached: int, free: int
) -> None:
    """Of 96 cells; what there is any of has one."""
    worker = {"id": "w1", "status": "ok", "models": ["m"], "step": 1, "running": 0}
    worker |= {"total_blocks": 1000, "free_blocks": free + cached, "cached_blocks": cached}
    told = snapshot_of(worker, "ok")
    tab.page.route(STREAM, lambda route: route.fulfill(body=told, content_type="text/event-stream"))
    tab.page.goto("/dashboard#tab=workers")
    field = tab.page.locator("#workers svg")
    expect(field).to_have_attribute(
        "aria-label", f"KV blocks: {used} in use, {cached} cached prefixes, {free} free"
    )
    cells = [
        (field.locator(f"path.{kind}").get_attribute("d") or "").count("M")
        for kind in ("used", "cached", "free")
    ]
    assert sum(cells) == 96
    for num_cells, blocks in zip(cells, (used, cached, free), strict=True):
        assert (num_cells > 0) == (blocks > 0)
        assert abs(num_cells - 96 * blocks / 1000) <= 2
