"""The pages for readers of screens, on phones and in the dark: axe finds nothing to mend."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import Tab, expect_accessible
from tests.support.playground import ask, expect_whole, ready, say, text_of

pytestmark = pytest.mark.browser

ANSWER = (
    "<think>Hm.</think>A **gate**, `code`, [a link](https://example.org)\n\n```python\n"
    "# why\n@a\nclass B(C):\n    d = 1.5 if e else 'f'\n```\n\n$$\\frac{1}{2}$$\n\n- one"
)


@pytest.fixture(params=["light", "dark"])
def schemed(request: pytest.FixtureRequest, tab: Tab) -> Page:
    tab.page.emulate_media(color_scheme=request.param, reduced_motion="reduce")
    return tab.page


def test_the_playground_is_accessible_in_every_state(schemed: Page) -> None:
    page = ready(schemed)
    expect_accessible(page)
    page.locator("#show-settings").click()
    expect_accessible(page)
    page.get_by_role("button", name="Done").click()
    answer = say(page, ANSWER)
    expect_whole(answer)
    expect(answer.locator(".hljs-comment")).to_have_text("# why")
    expect(answer.locator("mfrac")).to_have_text("12")
    answer.locator("summary").first.click()
    expect_accessible(page)
    page.get_by_role("button", name="Share this answer").click()
    expect_accessible(page)


@pytest.mark.parametrize("path", ["/dashboard", "/docs"])
def test_the_other_pages_are_accessible(schemed: Page, path: str) -> None:
    schemed.goto(path)
    schemed.wait_for_load_state("networkidle" if path == "/docs" else "load")
    if path == "/docs":
        schemed.locator("#post-v1-messages > summary").click()
    expect_accessible(schemed)


def test_an_answer_is_announced_once_and_whole(playground: Page) -> None:
    """While it streams, the status alone speaks: what it does, not each token."""
    playground.evaluate(
        """() => {
          window.spoken = [];
          for (const node of document.querySelectorAll("[aria-live=polite], [role=status]")) {
            new MutationObserver(() => window.spoken.push(node.textContent)).observe(node, {
              childList: true, characterData: true, subtree: true,
            });
          }
        }"""
    )
    answer = say(playground, "A gate lets water in, and a wheel turns.")
    expect_whole(answer)
    expect(playground.locator("#spoken")).to_have_text("A gate lets water in, and a wheel turns.")
    spoken = playground.evaluate("window.spoken")
    assert spoken.count("A gate lets water in, and a wheel turns.") == 1
    assert spoken.count("Answering…") == 1
    assert not [text for text in spoken if text.startswith("A gate lets") and text[-1] != "."]


def test_a_phone_shows_everything_without_sideways_scrolling(tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 320, "height": 568})
    page = ready(tab.page)
    answer = say(page, ANSWER + "\n\n" + "long" * 40 + "\n\n|" + "cell|" * 12 + "\n|" + "-|" * 12)
    expect_whole(answer)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    box = text_of(answer).bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 320
    page.get_by_role("button", name="Chats").click()
    search = page.get_by_label("Search the chats")
    expect(search).to_be_visible()
    page.keyboard.press("Escape")
    expect(search).to_be_hidden()
    expect(page.get_by_role("button", name="Chats")).to_be_focused()
    page.locator("#show-settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    ask(page, "Still here?")
    page.keyboard.press("Escape")
    expect_whole(page.locator(".turn.assistant").last)
