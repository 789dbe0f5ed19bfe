"""Settings of the playground: sent only where they are set, checked in the page."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import Tab
from tests.support.playground import ask, expect_whole, last_answer, say, set_settings

pytestmark = pytest.mark.browser

CREATE = "**/v1/responses"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_empty_settings_show_what_holds_for_the_model(playground: Page) -> None:
    model = playground.request.get("/v1/models").json()["data"][0]
    playground.locator("#show-settings").click()
    temperature = str(model["default_sampling"].get("temperature", 1))
    expect(playground.locator("#temperature")).to_have_attribute("placeholder", temperature)
    expect(playground.locator("#temperature")).to_have_attribute("title", re.compile("From 0 to 2"))
    limit = f"up to {model['max_model_len']}"
    expect(playground.locator("#max-tokens")).to_have_attribute("placeholder", limit)


def test_a_title_has_no_marks_of_markdown(playground: Page) -> None:
    answer = ask(playground, "## What is **a [dam](http://x/)** `now`?\nAnd a wheel?")
    playground.keyboard.press("Escape")
    expect_whole(answer)
    expect(playground.locator("#chats .title").first).to_have_text("What is a dam now?")


def test_what_is_not_set_is_not_sent(playground: Page) -> None:
    with playground.expect_request(CREATE) as sent:
        answer = ask(playground, "Plain?")
    assert set(sent.value.post_data_json) == {"model", "input", "background"}
    playground.keyboard.press("Escape")
    expect_whole(answer)


def test_everything_that_is_set_is_sent(playground: Page) -> None:
    set_settings(
        playground,
        system="Be short.",
        max_tokens="3",
        stop_texts="END\n\\n\\n",
        temperature="0.5",
        top_p="0.9",
        top_k="20",
        min_p="0.05",
        presence_penalty="0.1",
        frequency_penalty="0.2",
        repetition_penalty="1.1",
        seed="7",
    )
    with playground.expect_request(CREATE) as sent:
        expect_whole(ask(playground, "All?"))
    body = sent.value.post_data_json
    assert {name: body[name] for name in body if name not in ("model", "input")} == {
        "background": True,
        "instructions": "Be short.",
        "max_output_tokens": 3,
        "stop": ["END", "\n\n"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "9"), ("seed", "1.5"), ("tools", "[{"), ("schema", "x")]
)
def test_what_is_not_valid_is_shown_and_not_sent(
    playground: Page, tab: Tab, field: str, value: str
) -> None:
    playground.locator("#show-settings").click()
    playground.locator("#" + field).fill(value)
    playground.keyboard.press("Escape")
    ask(playground, "Valid?")
    expect(playground.locator(f"#{field}:invalid")).to_be_focused()
    expect(playground.locator(".turn")).to_have_count(0)
    assert not [address for address in tab.addresses if address.endswith("/v1/responses")]


def test_calls_of_tools_are_shown_and_their_results_sent(playground: Page) -> None:
    set_settings(playground, tools=json.dumps([WEATHER]))
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    answer = say(playground, call)
    expect_whole(answer)
    shown = answer.locator(".call")
    expect(shown.locator("h4")).to_have_text("Call of weather")
    expect(shown.locator("pre")).to_contain_text('"city": "Ulm"')
    shown.get_by_label("Result of weather").fill("rain")
    with playground.expect_request(CREATE) as sent:
        answer.get_by_role("button", name="Send the results").click()
    body = sent.value.post_data_json
    assert body["tools"] == [{"type": "function", **WEATHER["function"]}]
    made, result = body["input"][1:]
    assert (made["type"], made["name"], json.loads(made["arguments"])) == (
        "function_call",
        "weather",
        {"city": "Ulm"},
    )
    assert result == {
        "type": "function_call_output",
        "call_id": made["call_id"],
        "output": "rain",
    }
    expect(playground.locator(".turn.assistant")).to_have_count(2)
    expect_whole(last_answer(playground))


def test_a_schema_is_sent_and_its_refusal_is_a_sentence(playground: Page, tab: Tab) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    set_settings(playground, schema=json.dumps(schema))
    with playground.expect_request(CREATE) as sent:
        answer = ask(playground, "As JSON?")
    assert sent.value.post_data_json["text"]["format"] == {
        "type": "json_schema",
        "name": "answer",
        "schema": schema,
    }
    expect(answer.get_by_role("alert")).to_have_text(re.compile(r"\.$"))
    tab.expect_complaint("status of 400")
