"""The playground in a real browser: questions, answers, what stops and what refuses them."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.browser import PATIENCE_MS, Tab
from tests.support.launched import Launched
from tests.support.playground import (
    ask,
    expect_whole,
    job_of,
    last_answer,
    output_of,
    poll,
    ready,
    response_of,
    say,
    set_settings,
    text_of,
)

pytestmark = pytest.mark.browser

CREATE = "**/v1/responses"
NOTE_STATUS = """() => {
  const status = document.getElementById("status");
  window.said = [];
  new MutationObserver(() => window.said.push(status.textContent)).observe(status, {
    childList: true,
  });
}"""


def said(page: Page) -> list[str]:
    texts: list[str] = page.evaluate("window.said")
    return texts


def test_a_suggested_question_is_answered_piece_by_piece(
    playground: Page, service: Launched
) -> None:
    set_settings(playground, max_tokens="160")
    playground.locator("#suggestions button").first.click()
    answer = last_answer(playground)
    text = text_of(answer)
    expect(text).not_to_be_empty(timeout=PATIENCE_MS)
    first = text.inner_text()
    expect(answer).to_have_attribute("aria-busy", "true")
    expect_whole(answer)
    assert text.inner_text().startswith(first.rstrip())
    assert len(text.inner_text()) > len(first)
    expect(answer.locator(".facts")).to_contain_text(
        re.compile(r"first token [\d.]+ m?s · 160 tokens · [\d.]+ tokens/s")
    )
    expect(playground.locator("#status")).to_have_text("Ended at the token limit.")
    job = job_of(service, answer)
    assert job["status"] == "finished"
    expect(answer.locator(".who")).to_have_text(job["model"])


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_an_answer_cancels_its_job(playground: Page, service: Launched, how: str) -> None:
    answer = ask(playground, "Please go on for a while.")
    expect(text_of(answer)).not_to_be_empty(timeout=PATIENCE_MS)
    if how == "button":
        playground.get_by_role("button", name="Stop").click()
    else:
        playground.keyboard.press("Escape")
    expect_whole(answer)
    expect(playground.locator("#status")).to_have_text(
        re.compile(r"Stopped: the job is cancelled after \d+ tokens?\.")
    )
    assert job_of(service, answer)["status"] == "cancelled"
    expect(playground.get_by_role("button", name="Send")).to_be_visible()
    expect(playground.get_by_label("Message", exact=True)).to_be_focused()


def test_enter_while_an_answer_runs_says_so_and_keeps_the_question(playground: Page) -> None:
    answer = ask(playground, "The first.")
    expect(text_of(answer)).not_to_be_empty(timeout=PATIENCE_MS)
    ask(playground, "The second.")
    expect(playground.locator("#status")).to_contain_text("An answer is running")
    expect(playground.get_by_label("Message", exact=True)).to_have_value("The second.")
    expect(playground.locator(".turn")).to_have_count(2)
    playground.keyboard.press("Escape")
    expect_whole(answer)


def test_a_thinking_model_shows_its_reasoning_folded_counted_and_out_of_the_history(
    playground: Page, service: Launched
) -> None:
    answer = say(playground, "<think>Gates first, then wheels.</think>A gate lets water in.")
    reasoning = answer.locator(".reasoning")
    expect(reasoning).to_be_visible(timeout=PATIENCE_MS)
    expect_whole(answer)
    output = output_of(service, answer)
    assert output["reasoning"] == "Gates first, then wheels."
    expect(text_of(answer)).to_have_text(output["message"])
    expect(reasoning.locator(".text")).to_be_hidden()
    num_tokens = re.fullmatch(
        r"Reasoning · (\d+) tokens", reasoning.locator("summary").inner_text()
    )
    assert num_tokens is not None
    expect(answer.locator(".facts")).to_contain_text(f"{num_tokens[1]} tokens of reasoning")
    reasoning.locator("summary").click()
    expect(reasoning.locator(".text")).to_have_text("Gates first, then wheels.")
    with playground.expect_request(CREATE) as sent:
        expect_whole(ask(playground, "And then?"))
    assert sent.value.post_data_json["input"] == [
        {"role": "user", "content": "Say it."},
        {"role": "assistant", "content": "A gate lets water in."},
        {"role": "user", "content": "And then?"},
    ]


def test_the_events_of_an_answer_can_be_read_as_they_came(playground: Page) -> None:
    set_settings(playground, max_tokens="4")
    answer = ask(playground, "How?")
    expect_whole(answer)
    events = answer.locator("details.events")
    expect(events.locator("pre")).to_be_hidden()
    summary = events.locator("summary")
    summary.click()
    expect(events.locator("pre")).not_to_be_empty()  # its text is made when it is opened
    shown = [json.loads(line) for line in events.locator("pre").inner_text().splitlines()]
    expect(summary).to_have_text(f"Events ({len(shown)})")
    assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
    assert (shown[0]["type"], shown[-1]["type"]) == ("response.created", "response.incomplete")
    deltas = [event["delta"] for event in shown if event["type"] == "response.output_text.delta"]
    assert "".join(deltas).split() == text_of(answer).inner_text().split()


def test_an_answer_that_is_all_reasoning_is_not_an_empty_bubble(playground: Page) -> None:
    answer = say(playground, "<think>I never come to an end.", max_tokens=6)
    expect_whole(answer)
    expect(answer.locator(".reasoning summary")).to_have_text(re.compile(r"Reasoning · \d tokens"))
    expect(playground.locator("#status")).to_have_text(
        "Ended at the token limit, while still thinking."
    )


def test_a_refusal_is_a_sentence_and_the_question_comes_back(playground: Page, tab: Tab) -> None:
    question = "word " * 20_000
    answer = ask(playground, question)
    alert = answer.get_by_role("alert")
    expect(alert).to_have_text(re.compile(r"^[A-Z].*\btokens\b.*\.$"))
    expect(alert).not_to_contain_text("new chat")  # it is one
    expect(playground.get_by_label("Message", exact=True)).to_have_value(question)
    expect(text_of(answer)).to_be_hidden()
    tab.expect_complaint("status of 400")


def test_a_chat_that_is_too_long_is_advised_to_begin_anew(playground: Page, tab: Tab) -> None:
    set_settings(playground, max_tokens="3")
    expect_whole(ask(playground, "First?"))
    answer = ask(playground, "word " * 20_000)
    expect(answer.get_by_role("alert")).to_contain_text("A new chat has room again.")
    tab.expect_complaint("status of 400")


def test_a_proxy_s_page_is_not_shown_as_an_answer(playground: Page, tab: Tab) -> None:
    def refuse(route: Route) -> None:
        headers = {"retry-after": "3"}
        route.fulfill(status=502, body="<html>", content_type="text/html", headers=headers)

    playground.route(CREATE, refuse)
    answer = ask(playground, "Anybody?")
    expect(answer.get_by_role("alert")).to_have_text(
        "The server answered with status 502. The server asks to wait 3 s."
    )
    tab.expect_complaint("status of 502")


def test_the_playground_waits_for_a_model_to_appear(tab: Tab) -> None:
    def no_models(route: Route) -> None:
        route.fulfill(json={"object": "list", "data": []})

    tab.page.route("**/v1/models", no_models)
    tab.page.goto("/")
    expect(tab.page.locator("#status")).to_have_text(re.compile("No worker serves a model yet"))
    expect(tab.page.get_by_role("button", name="Send")).to_be_disabled()
    tab.page.unroute("**/v1/models", no_models)
    expect(tab.page.get_by_role("button", name="Send")).to_be_enabled(timeout=PATIENCE_MS)


def test_the_chosen_model_stays_chosen(tab: Tab) -> None:
    models = [{"id": name, "is_served": True} for name in ("one", "two")]
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    tab.page.goto("/")
    tab.page.locator("#model").select_option("two")
    tab.page.reload()
    expect(tab.page.locator("#model")).to_have_value("two")


def test_suggested_questions_are_those_of_the_chosen_model(tab: Tab) -> None:
    own = {"id": "demo", "is_served": True, "suggestions": ["What is a weir?", "And a dam?"]}
    other = {"id": "other", "is_served": True, "suggestions": []}
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [own, other]}))
    tab.page.goto("/")
    suggested = tab.page.locator("#suggestions button")
    expect(suggested).to_have_text(["What is a weir?", "And a dam?"])
    tab.page.locator("#model").select_option("other")
    expect(suggested).to_have_count(4)
    assert "Penstock" not in tab.page.locator("#suggestions").inner_text()
    tab.page.locator("#model").select_option("demo")
    expect(suggested.first).to_have_text("What is a weir?")


def test_the_demo_model_comes_with_the_command_of_a_real_one(tab: Tab) -> None:
    models = [{"id": name, "is_served": True} for name in ("penstock-demo", "other")]
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    tab.page.goto("/")
    hint = tab.page.locator("#welcome").get_by_text("penstock up smollm2")
    expect(hint).to_be_visible()
    tab.page.locator("#model").select_option("other")
    expect(hint).to_be_hidden()


def test_a_waiting_job_shows_its_place_and_how_long_at_this_pace(playground: Page) -> None:
    places = iter([9, 6, 5, 4, 3, 2, 1])

    def job(route: Route) -> None:
        route.fulfill(json={"status": "queued", "queue_position": next(places, 0)})

    created = '{"type":"response.created","sequence_number":0,"response":{"model":"m"}}'
    queued = '{"type":"response.queued","sequence_number":1}'
    playground.route("**/v1/jobs/*", job)
    playground.route(
        "**/v1/responses/*?stream=true*",
        lambda route: route.fulfill(
            body=f"data: {created}\n\ndata: {queued}\n\n", content_type="text/event-stream"
        ),
    )
    playground.evaluate(NOTE_STATUS)
    set_settings(playground, max_tokens="3")
    ask(playground, "When?")
    poll(lambda: any("at this pace." in text for text in said(playground)))
    assert "Waiting: 9 jobs ahead in the queue." in said(playground)
    playground.unroute_all()
    expect_whole(last_answer(playground))


def test_the_choices_of_a_linked_job_are_kept_apart(tab: Tab, service: Launched) -> None:
    model = httpx.get(f"{service.base_url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "gates and wheels ", "max_tokens": 8, "n": 2}
    reply = httpx.post(f"{service.base_url}/v1/completions", json=body, timeout=60).json()
    tab.page.goto(f"/#job={reply['id']}")
    answer = last_answer(tab.page)
    expect_whole(answer)
    expect(answer.locator("strong")).to_have_text(["Choice 1", "Choice 2"])
    shown = text_of(answer).inner_text()
    for number, choice in enumerate(reply["choices"], 1):
        part = shown.split(f"Choice {number}")[1].split("Choice")[0]
        assert " ".join(part.split()) == " ".join(choice["text"].split())


def test_an_answer_under_way_can_be_stopped_in_a_chat_that_is_opened_again(
    playground: Page,
) -> None:
    expect(text_of(ask(playground, "Go on."))).not_to_be_empty(timeout=PATIENCE_MS)
    playground.get_by_role("button", name="New chat").click()
    expect(playground.get_by_role("button", name="Stop")).to_be_hidden()
    playground.locator("#chat-list button").click()
    playground.get_by_role("button", name="Stop").click()
    expect_whole(last_answer(playground))
    expect(playground.locator("#status")).to_contain_text("Stopped: the job is cancelled")


def test_the_meter_shows_how_much_of_the_context_is_used(
    playground: Page, service: Launched
) -> None:
    (model,) = httpx.get(f"{service.base_url}/v1/models").json()["data"]
    limit = model["max_model_len"]
    context = playground.locator("#context")
    expect(context).to_be_hidden()
    answer = say(playground, "A gate.")
    expect_whole(answer)
    response = httpx.get(f"{service.base_url}/v1/responses/{response_of(answer)}").json()
    used = response["usage"]["total_tokens"]
    expect(context).to_have_text(f"{used} of {limit:,} tokens")
    meter = playground.get_by_role("meter", name="Context")
    assert meter.evaluate("({ value, max }) => [value, max]") == [used, limit]
    ready(playground)  # a reload
    expect(context).to_have_text(f"{used} of {limit:,} tokens")
    set_settings(playground, system="x" * (limit - 300), max_tokens="4", stop_texts="")
    expect_whole(ask(playground, "More."))
    expect(context).to_have_text(re.compile(rf"[\d,]+ of {limit:,} tokens: nearly full"))
    expect(context).to_have_class("context full")
    playground.get_by_role("button", name="New chat").click()
    expect(context).to_be_hidden()


def test_buttons_have_icons_that_are_no_part_of_their_names(playground: Page) -> None:
    answer = say(playground, "A gate.")
    names = ["Chats", "New chat", "Send", "Settings · 3", "Copy the answer", "Share this answer"]
    expect_whole(answer)
    for name in names:
        button = playground.get_by_role("button", name=name, exact=True, include_hidden=True)
        expect(button.locator("svg.icon[aria-hidden=true] path")).to_have_attribute(
            "d", re.compile(r"\w")
        )
    playground.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copy = answer.get_by_role("button", name="Copy the answer")
    copy.click()
    expect(copy).to_have_text(re.compile("Copied"))
    expect(copy.locator("svg.icon")).to_have_count(1)


def test_the_playground_works_by_keyboard_alone(playground: Page) -> None:
    playground.keyboard.press("Tab")
    expect(playground.get_by_role("link", name="Skip to the message box")).to_be_focused()
    playground.keyboard.press("Enter")
    expect(playground.get_by_label("Message", exact=True)).to_be_focused()
    playground.keyboard.type("one")
    playground.keyboard.press("Shift+Enter")
    playground.keyboard.type("two")
    playground.keyboard.press("Enter")
    expect(playground.locator(".turn.user .text")).to_have_text("one\ntwo")
    expect(text_of(last_answer(playground))).not_to_be_empty(timeout=PATIENCE_MS)
    playground.keyboard.press("Escape")
    expect_whole(last_answer(playground))
