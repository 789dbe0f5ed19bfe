"""The dashboard's overview in a real browser: numbers, what needs attention, plots."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.pages.test_dashboard import SERVICE_STATE, STREAM
from tests.support.browser import PATIENCE_MS, Tab, expect_accessible
from tests.support.launched import Launched

pytestmark = pytest.mark.browser

SLOT = 58_000_000  # some half minute
PLOTS = [
    "Tokens per second",
    "Time to first token",
    "Requests per second",
    "Failures per minute",
    "Jobs",
    "Age of the queue",
    "KV cache",
    "Redis memory",
]


def slot(number: int, **known: Any) -> dict[str, Any]:
    """Returns a row of the history; what is not `known` is null."""
    names = "queued running queue_age_s requests_per_s tokens_in_per_s tokens_out_per_s kv failed "
    names += "ttft_p50_ms ttft_p95_ms expired unavailable errors store_used store_limit"
    return {"at": 30 * number, **dict.fromkeys(names.split()), **known}


def show(page: Page, rows: list[dict[str, Any]], address: str = "/dashboard", **more: Any) -> None:
    """Opens the overview of a service that says this."""
    listed = {str(row["at"]): row for row in rows}
    lists = {"history": {"ids": list(listed), "rows": listed}, **more.pop("lists", {})}
    data = json.dumps({"service": {**SERVICE_STATE, "status": "ok", **more}, "lists": lists})
    told = f"event: snapshot\ndata: {data}\n\n"
    page.route(STREAM, lambda route: route.fulfill(body=told, content_type="text/event-stream"))
    page.goto(address)


def plot(page: Page, title: str) -> Locator:
    return page.locator("figure.plot", has=page.get_by_role("heading", name=title, exact=True))


def legend(page: Page, title: str) -> Locator:
    return plot(page, title).locator(".legend li")


@pytest.mark.promise(
    "Dashboard: the overview fits one screen: the state, three numbers, and plots with axes, "
    "legends and a range of 15 minutes, an hour or a day"
)
def test_the_overview_of_a_real_service_fits_one_screen(tab: Tab, service: Launched) -> None:
    page = tab.page
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto("/dashboard")
    model = httpx.get(f"{service.base_url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "Hello.", "max_tokens": 4}
    httpx.post(f"{service.base_url}/v1/completions", json=body, timeout=30)
    expect(page.locator("figure.plot h3")).to_have_text(PLOTS, timeout=PATIENCE_MS)
    expect(legend(page, "Time to first token").first).to_have_text(re.compile(r"p50\d.* ms"))
    expect(legend(page, "Tokens per second").nth(1)).to_have_text(re.compile(r"output\d"))
    expect(legend(page, "KV cache")).to_have_text(re.compile(r"in use\d+ %"))
    expect(legend(page, "Redis memory").first).to_have_text(re.compile(r"used\d.* MiB"))
    expect(page.locator("#numbers dt")).to_have_text(["Tokens per second", "Running", "Waiting"])
    expect(page.locator("#status")).to_have_text("Healthy.")
    assert page.evaluate("document.documentElement.scrollHeight") <= 900


def test_a_plot_has_axes_and_lines_with_gaps(tab: Tab) -> None:
    rows = [slot(SLOT + number) for number in range(120)]
    for at, queued in ((10, 7), (11, 3), (60, 4), (119, 1)):
        rows[at] |= {"queued": queued, "running": 2}
    show(tab.page, rows)
    jobs = plot(tab.page, "Jobs")
    expect(jobs.locator(".axis span")).to_have_text(["10", "5", "0"], timeout=PATIENCE_MS)
    expect(legend(tab.page, "Jobs")).to_have_text(["waiting1", "running2"])
    expect(jobs.locator(".ticks span")).to_have_text([re.compile(r"^\d\d:(00|15|30|45)$")] * 3)
    waiting, running = (path.get_attribute("d") or "" for path in jobs.locator("path").all())
    assert waiting.count("M") == running.count("M") == 3  # what is not known is not drawn
    assert waiting.startswith("M87.5 30.0")  # 7 of 10 in the eleventh of 120 slots


def test_the_cursor_shows_the_values_of_a_time_by_pointer_and_by_keys(tab: Tab) -> None:
    rows = [slot(SLOT + number, queue_age_s=number) for number in range(120)]
    show(tab.page, rows)
    age = plot(tab.page, "Age of the queue")
    cursor = age.get_by_role("slider", name="Age of the queue")
    expect(cursor).to_have_attribute("aria-valuetext", "latest: longest wait 1 min 59 s")
    cursor.focus()
    tab.page.keyboard.press("ArrowLeft")
    expect(cursor).to_have_attribute("aria-valuetext", re.compile(": longest wait 1 min 58 s$"))
    expect(age.locator(".marker")).to_be_visible()
    tab.page.keyboard.press("Home")
    expect(age.locator(".legend strong")).to_have_text("0 ms")
    expect(age.locator(".readout")).not_to_have_text("latest")
    box = cursor.bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + box["width"] * 30.5 / 120, box["y"] + 9)
    expect(age.locator(".legend strong")).to_have_text("30.0 s")
    tab.page.mouse.move(1, 1)
    expect(age.locator(".legend strong")).to_have_text("1 min 59 s")
    expect(age.locator(".readout")).to_have_text("latest")


@pytest.mark.parametrize(
    ("name", "history", "num_slots"),
    [("15 minutes", "hour", 30), ("Hour", "hour", 120), ("Day", "day", 144)],
)
def test_a_range_has_an_address_and_so_many_slots(
    tab: Tab, service: Launched, name: str, history: str, num_slots: int
) -> None:
    page = tab.page
    page.goto("/dashboard#tab=overview&range=15m" if name == "Hour" else "/dashboard")
    page.get_by_role("link", name=name).click()
    expect(page.locator("#ranges [aria-current]")).to_have_text(name)
    cursor = page.get_by_role("slider", name="Jobs")
    expect(cursor).to_have_attribute("aria-valuemax", str(num_slots - 1), timeout=PATIENCE_MS)
    expect(legend(page, "Jobs").first).to_have_text(re.compile(r"waiting\d"))  # the latest
    asked = [address for address in tab.addresses if "/stream" in address]
    assert asked[-1].endswith(f"history={history}")
    page.reload()
    expect(page.locator("#ranges [aria-current]")).to_have_text(name)


def test_what_needs_attention_is_said_with_a_link(tab: Tab) -> None:
    model = {"model": "m", "workers": 0, "is_served": False, "queued": 3, "queue_age_s": 95}
    worker = {"id": "w1", "status": "stalled", "models": []}
    lists = {
        "models": {"ids": ["m"], "rows": {"m": model}},
        "workers": {"ids": ["w1"], "rows": {"w1": worker}},
    }
    redis = {"memory": "nearly_full", "used_bytes": 95, "max_bytes": 100, "latency_ms": 0.2}
    show(tab.page, [], lists=lists, redis=redis)
    concerns = tab.page.get_by_role("list", name="Needs attention").get_by_role("link")
    expect(concerns).to_have_text(
        [
            "Redis has used 95 % of maxmemory",
            "m: 3 jobs waiting and no worker",
            "w1 makes no progress",
        ]
    )
    expect(tab.page.locator("#numbers")).to_contain_text("longest 1 min 35 s")
    concerns.nth(1).click()
    expect(tab.page.locator("#models .badge")).to_have_text("no worker")


def test_failures_are_rates_and_the_table_has_what_the_plots_show(tab: Tab) -> None:
    rows = [slot(SLOT + number, failed=2, expired=0, unavailable=1, errors=0) for number in (0, 1)]
    show(tab.page, rows)
    failures = legend(tab.page, "Failures per minute")
    expect(failures).to_have_text(["failed4.0", "expired0.0", "5032.0", "other 5xx0.0"])
    tab.page.get_by_text("Show as a table").click()
    expect(tab.page.locator("#history-rows tr")).to_have_count(2)
    heads = tab.page.locator("#history-table th").all_inner_texts()
    cells = tab.page.locator("#history-rows tr").first.locator("td").all_inner_texts()
    assert dict(zip(heads, cells, strict=True))["Failures per minute: failed"] == "4.0"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 1400), ("light", 390)])
def test_every_tab_is_accessible(tab: Tab, service: Launched, scheme: Any, width: int) -> None:
    page = tab.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    names = "overview jobs workers models batches dead-letters tenants"
    for name in names.split():
        page.goto(f"/dashboard#tab={name}")
        expect(page.locator("#status")).to_have_text("Healthy.", timeout=PATIENCE_MS)
        if name == "overview":
            expect(page.locator("figure.plot")).to_have_count(len(PLOTS))
            page.get_by_text("Show as a table").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        expect_accessible(page)


def test_the_header_of_a_phone_is_one_line(tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 390, "height": 844})
    tab.page.goto("/dashboard")
    boxes = [
        part.bounding_box()
        for part in (tab.page.locator(".bar h1"), *tab.page.locator(".bar nav a").all())
    ]
    middles = [box["y"] + box["height"] / 2 for box in boxes if box is not None]
    assert len(middles) == 4
    assert max(middles) - min(middles) < 4
