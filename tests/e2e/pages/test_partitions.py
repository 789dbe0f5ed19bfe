"""The table of Redis' partitions, which only a deployment with several has."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.support.browser import PATIENCE_MS, Tab
from tests.support.running_service import RunningService
from tests.support.service_fixtures import *  # noqa: F403
from tests.support.service_fixtures import module_service

pytestmark = pytest.mark.browser
shared_service = module_service(partitions="2")


def test_partitions_are_shown_with_the_one_that_is_away(
    tab: Tab, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tab.page
    page.goto("/dashboard#tab=workers")
    rows = page.locator("#partitions tr")
    expect(rows).to_have_count(2, timeout=PATIENCE_MS)
    expect(page.get_by_role("heading", name="Partitions of Redis")).to_be_visible()
    state = rows.nth(1).locator("td[data-label=State]")
    expect(state).to_have_text("up")
    expect(rows.nth(1).locator("td[data-label=Queued]")).to_have_text("0")
    lost = service.app.state.services.health._registry._partitions.all[1]
    with monkeypatch.context() as patched:
        patched.setattr(lost, "came_back", lambda: None)
        lost.left("a test")
        expect(state).to_have_text("away, its jobs wait", timeout=PATIENCE_MS)
        expect(rows.nth(0).locator("td[data-label=State]")).to_have_text("up")
    expect(state).to_have_text("up", timeout=PATIENCE_MS)
