"""Chats that the browser keeps: found, renamed, exported, imported, deleted, edited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import Tab
from tests.support.playground import ask, expect_whole, last_answer, ready, set_settings

pytestmark = pytest.mark.browser

CREATE = "**/v1/responses"


def menu(page: Page, name: str) -> None:
    page.get_by_label("This chat").click()
    page.get_by_role("button", name=name).click()


def asked(page: Page, *questions: str) -> None:
    set_settings(page, max_tokens="3")
    for question in questions:
        expect_whole(ask(page, question))


def test_a_chat_is_found_renamed_and_deleted(playground: Page) -> None:
    asked(playground, "Of gates")
    playground.get_by_role("button", name="New chat").click()
    expect(playground.locator(".turn")).to_have_count(0)
    asked(playground, "Of wheels")
    chats = playground.locator("#chat-list button")
    expect(chats.locator(".title")).to_have_text(["Of wheels", "Of gates"])
    playground.get_by_label("Search the chats").fill("GATES")
    expect(chats.locator(".title")).to_have_text(["Of gates"])
    chats.click()
    expect(playground.locator(".turn.user .text")).to_have_text("Of gates")
    menu(playground, "Rename")
    playground.get_by_role("dialog").get_by_role("textbox").fill("Sluices")
    playground.keyboard.press("Enter")
    expect(playground.locator("#chat-title")).to_have_text("Sluices")
    playground.get_by_label("Search the chats").fill("")
    playground.reload()
    expect(playground.locator("#chat-title")).to_have_text("Sluices")
    menu(playground, "Delete")
    playground.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(chats.locator(".title")).to_have_text(["Of wheels"])
    playground.reload()
    expect(chats.locator(".title")).to_have_text(["Of wheels"])


def test_an_exported_chat_is_brought_in_again(playground: Page, tmp_path: Path) -> None:
    asked(playground, "Of gates")
    text = last_answer(playground).locator("> .text").inner_text()
    with playground.expect_download() as download:
        menu(playground, "Export as JSON")
    file = tmp_path / "chat.json"
    download.value.save_as(file)
    assert download.value.suggested_filename == "Of-gates.json"
    assert json.loads(file.read_text())["chats"][0]["turns"][0] == {
        "role": "user",
        "text": "Of gates",
    }
    with playground.expect_download() as download:
        menu(playground, "Export as Markdown")
    download.value.save_as(tmp_path / "chat.md")
    assert "**You**\n\nOf gates" in (tmp_path / "chat.md").read_text()
    menu(playground, "Delete")
    playground.get_by_role("dialog").get_by_role("button", name="Delete").click()
    playground.locator("#import").set_input_files(file)
    expect(playground.locator("#status")).to_have_text("1 chat imported.")
    playground.locator("#chat-list button").click()
    assert last_answer(playground).locator("> .text").inner_text() == text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("not JSON", "The file is not JSON."),
        ('{"penstock_chats": 1, "chats": [{"id": 7}]}', "The file has no chats of this page."),
    ],
)
def test_another_file_is_refused(
    playground: Page, tmp_path: Path, content: str, sentence: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    playground.locator("#import").set_input_files(file)
    expect(playground.locator("#status")).to_have_text(sentence)


def test_an_edited_question_replaces_what_follows(playground: Page) -> None:
    asked(playground, "First?", "Second?")
    first = playground.locator(".turn.user").first
    first.get_by_role("button", name="Edit the question").click()
    first.get_by_role("textbox").fill("Another?")
    with playground.expect_request(CREATE) as sent:
        first.get_by_role("button", name="Send again").click()
    assert sent.value.post_data_json["input"] == [{"role": "user", "content": "Another?"}]
    expect(playground.locator(".turn")).to_have_count(2)
    expect_whole(last_answer(playground))


def test_an_answer_is_regenerated_from_the_same_history(playground: Page) -> None:
    asked(playground, "First?", "Second?")
    with playground.expect_request(CREATE) as sent:
        last_answer(playground).get_by_role("button", name="Answer the question again").click()
    contents = [item["content"] for item in sent.value.post_data_json["input"]]
    assert [contents[0], contents[-1], len(contents)] == ["First?", "Second?", 3]
    expect(playground.locator(".turn")).to_have_count(4)
    expect_whole(last_answer(playground))


def test_a_full_storage_is_told_and_the_chat_goes_on(playground: Page) -> None:
    playground.evaluate(
        """() => {
          for (let size = 1 << 20; size > 0; size >>= 1) {
            for (let more = true; more; ) {
              try {
                localStorage.setItem("fill" + Math.random(), "x".repeat(size));
              } catch {
                more = false;
              }
            }
          }
        }"""
    )
    answer = ask(playground, "Is there room?")
    warning = playground.locator("#warning")
    expect(warning).to_contain_text("This browser's storage is full: delete a chat")
    playground.keyboard.press("Escape")
    expect_whole(answer)
    playground.evaluate(
        "Object.keys(localStorage).filter((k) => k.startsWith('fill'))"
        ".forEach((k) => localStorage.removeItem(k))"
    )
    set_settings(playground, max_tokens="3")
    expect_whole(ask(playground, "And now?"))
    expect(warning).to_be_hidden()


def test_a_draft_and_the_settings_survive_a_reload(tab: Tab) -> None:
    page = ready(tab.page)
    set_settings(page, temperature="0.5")
    page.get_by_label("Message", exact=True).fill("Half a quest")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Half a quest")
    expect(page.locator("#show-settings")).to_have_text("Settings · 1")
