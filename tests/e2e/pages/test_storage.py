"""A browser that keeps nothing for the page: the page works for the visit, and says so once."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.support.browser import Tab
from tests.support.playground import ask, expect_whole, last_answer, ready, set_settings

pytestmark = pytest.mark.browser

SENTENCE = "This browser stores nothing for this page: chats are lost when you close this tab."
# As Chromium does where cookies and site data are blocked; as a web view without DOM storage does.
BLOCKED = {
    "throws": "get() { throw new DOMException('Access is denied', 'SecurityError'); }",
    "null": "value: null",
}
BLOCK = """for (const name of ["localStorage", "sessionStorage"]) {{
  Object.defineProperty(window, name, {{ {} }});
}}"""
# As a private window of older browsers does, or a disk that is full.
NO_ROOM = """Storage.prototype.setItem = () => {
  throw new DOMException("There is no room", "QuotaExceededError");
};"""


@pytest.mark.parametrize("how", BLOCKED)
def test_blocked_storage_is_said_once_and_the_visit_goes_on(tab: Tab, how: str) -> None:
    tab.page.add_init_script(BLOCK.format(BLOCKED[how]))
    page = ready(tab.page)
    warning = page.locator("#warning")
    expect(warning).to_have_text(SENTENCE)
    set_settings(page, max_tokens="3")
    expect_whole(ask(page, "Of gates"))
    expect(warning).to_be_hidden()
    page.get_by_role("button", name="New chat").click()
    expect_whole(ask(page, "Of wheels"))
    titles = page.locator("#chat-list .title")
    expect(titles).to_have_text(["Of wheels", "Of gates"])
    titles.nth(1).click()
    expect(page.locator(".turn.user .text")).to_have_text("Of gates")
    page.get_by_label("Search the chats").fill("wheels")
    expect(titles).to_have_text(["Of wheels"])
    expect(page.locator("#kept")).to_have_text(SENTENCE)  # for who looks for it
    page.reload()
    expect(warning).to_have_text(SENTENCE)
    expect(titles).to_have_count(0)
    page.goto("/dashboard#tab=workers")
    expect(page.locator("#workers tr")).to_have_count(1)


def test_a_storage_without_room_for_anything_holds_for_the_visit(tab: Tab) -> None:
    tab.page.add_init_script(NO_ROOM)
    page = ready(tab.page)
    set_settings(page, max_tokens="3", temperature="0.5")
    expect(page.locator("#show-settings")).to_have_text("Settings · 2")
    expect_whole(ask(page, "Of gates"))
    expect(page.locator("#warning")).to_contain_text("is lost when you close this tab")
    expect_whole(ask(page, "Of wheels"))
    expect(page.locator(".turn")).to_have_count(4)
    expect(last_answer(page).get_by_role("alert")).to_be_hidden()
