"""What a newcomer looks at while a model loads: how far it is, in the playground and dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from api.auth.keys import digest_of, new_key
from tests.support.browser import PATIENCE_MS, Tab, expect_accessible
from tests.support.playground import poll
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import RunningService, running_frontend
from worker.loading import report_loading

pytestmark = pytest.mark.browser

KEY = new_key()


class Loading:
    """Workers of a frontend, as they tell how far they are: (stage, share) by worker."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.stages: dict[str, tuple[str, float]] = {}
        self._telling: list[Any] = []

    def begin(self, worker_id: str, model: str, stage: str, share: float) -> None:
        self.stages[worker_id] = (stage, share)
        told = report_loading(
            self.service.transport.deployment, worker_id, model, lambda: self.stages[worker_id]
        )
        self._telling.append(asyncio.run_coroutine_threadsafe(told, self.service.loop))

    def end(self) -> None:
        for told in self._telling:
            told.cancel()


@contextmanager
def loading_at(url: str, **settings: str) -> Iterator[Loading]:
    with running_frontend(url, new_namespace(), **settings) as frontend:
        loading = Loading(frontend)
        yield loading
        loading.end()


@pytest.fixture
def loading(redis_url: str) -> Iterator[Loading]:  # noqa: F811
    with loading_at(redis_url) as made:
        yield made


@pytest.fixture
def page(browser: Browser, loading: Loading) -> Iterator[Page]:
    tab = Tab(browser, loading.service.base_url)
    yield tab.page
    tab.close()


def test_the_playground_says_how_far_a_model_is(page: Page, loading: Loading) -> None:
    page.goto("/")
    expect(page.locator("#status")).to_have_text("No worker serves a model yet. Waiting…")
    expect(page.locator("#loading")).to_be_hidden()
    loading.begin("w1", "Qwen3-0.6B", "loading weights", 0.43)
    lines = page.locator("#loading li")
    expect(lines).to_have_text(["Qwen3-0.6B: loading weights, 43 %"])
    expect(page.locator("#status")).to_have_text(
        "A model is loading. You can ask once it is ready."
    )
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "43")
    expect_accessible(page)
    loading.stages["w1"] = ("warming up", 0.0)
    expect(lines).to_have_text(["Qwen3-0.6B: warming up"])
    loading.begin("w2", "other", "downloading", 0.07)
    expect(lines).to_have_count(2)
    page.set_viewport_size({"width": 320, "height": 568})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    expect(page.get_by_role("button", name="Send")).to_be_disabled()


def test_a_known_model_takes_questions_while_its_worker_loads(page: Page, loading: Loading) -> None:
    models = [{"id": "m", "is_served": False}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    loading.begin("w1", "m", "compiling kernels", 0.0)
    page.goto("/")
    status = page.locator("#status")
    expect(status).to_have_text("A worker is loading. Questions wait until it is ready.")
    expect(page.locator("#loading li")).to_have_text(["m: compiling kernels"])
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    created = '{"type":"response.created","sequence_number":0,"response":{"model":"m"}}'
    queued = '{"type":"response.queued","sequence_number":1}'

    def events(route: Route) -> None:
        body = f"data: {created}\n\ndata: {queued}\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/responses", lambda route: route.fulfill(json={"id": "resp_x"}))
    page.route("**/v1/responses/*?stream=true*", events)
    page.route(
        "**/v1/jobs/*", lambda route: route.fulfill(json={"status": "queued", "queue_position": 0})
    )
    page.evaluate(
        """() => {
          const status = document.getElementById("status");
          window.said = [];
          new MutationObserver(() => window.said.push(status.textContent)).observe(status, {
            childList: true,
          });
        }"""
    )
    page.get_by_label("Message", exact=True).fill("When?")
    page.keyboard.press("Enter")
    told = "Waiting for a worker. m: compiling kernels."
    poll(lambda: told in page.evaluate("window.said"))
    models[0]["is_served"] = True
    expect(page.locator("#loading")).to_be_hidden(timeout=PATIENCE_MS)


def test_the_dashboard_shows_it_beside_the_workers(page: Page, loading: Loading) -> None:
    loading.begin("w1", "Qwen3-0.6B", "loading weights", 0.43)
    page.goto("/dashboard#tab=workers")
    row = page.locator("#workers tr")
    expect(row).to_contain_text("Qwen3-0.6B: loading weights", timeout=PATIENCE_MS)
    expect(row.locator(".badge")).to_have_text("loading, 43 %")
    expect(page.locator("#status")).to_have_text("No worker serves yet: one is loading.")


def test_with_keys_it_is_told_to_those_who_have_one(
    browser: Browser,
    redis_url: str,  # noqa: F811
) -> None:
    keys = f"{digest_of(KEY)} tenant=acme"
    with loading_at(redis_url, api_keys=keys) as loading:
        loading.begin("w1", "Qwen3-0.6B", "loading weights", 0.43)
        tab = Tab(browser, loading.service.base_url)
        tab.page.goto("/")
        field = tab.page.get_by_label("API key")
        expect(field).to_be_visible(timeout=PATIENCE_MS)
        expect(tab.page.locator("#loading")).to_be_hidden()
        field.fill(KEY)
        tab.page.keyboard.press("Enter")
        expect(tab.page.locator("#loading li")).to_have_text(["Qwen3-0.6B: loading weights, 43 %"])
        tab.expect_complaint("401")
        tab.close()
