"""What holds for every page, and the page of the API."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support.browser import Tab

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_api_page_lists_every_operation_and_fetches_from_the_service_alone(
    tab: Tab, path: str
) -> None:
    tab.page.goto(path)
    expect(tab.page.locator("#status")).to_have_text(re.compile(r"^\d+ operations$"))
    chat = tab.page.locator("#post-v1-chat-completions")
    chat.locator("> summary").click()
    temperature = chat.locator("dt", has_text=re.compile("^temperature"))
    expect(temperature).to_contain_text("number")
    expect(temperature).to_contain_text("0 to 2")
    expect(temperature.locator("+ dd")).to_contain_text("The randomness of sampling")
    stop = chat.locator("dt", has_text=re.compile("^stop(?!_)string"))
    expect(stop).to_contain_text("1 to 512 characters, at most 64 entries")
    chat.get_by_text("Members of ChatTool", exact=True).click()
    chat.get_by_text("Members of FunctionDefinition").click()
    expect(chat).to_contain_text("What the tool is for")
    document = tab.page.evaluate("fetch('openapi.json').then((response) => response.json())")
    count = sum(len(item) for item in document["paths"].values())
    expect(tab.page.locator("details.operation")).to_have_count(count)


def test_the_api_page_finds_and_sends(tab: Tab) -> None:
    """By parameters; the command has this server's address and model, and a stream is shown."""
    page = tab.page
    page.goto("/docs")
    page.get_by_label("Search paths and parameters").fill("guided_regex")
    found = page.locator(".operation:visible")
    expect(found).to_have_count(2)
    expect(page.locator("#index a:visible")).to_have_text(
        ["Create chat completion", "Create completion"]
    )
    chat = found.first
    chat.locator("> summary").click()
    chat.get_by_label("Example").select_option("Streamed")
    command = chat.locator(".try pre").first
    expect(command).to_contain_text(f"{tab.base_url}/v1/chat/completions")
    expect(command).to_contain_text('"model": "thinker"')
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".try [role=status]")).to_have_text("200 OK")
    expect(chat.get_by_role("group", name="Response")).to_contain_text("data: [DONE]")


def test_a_link_to_an_operation_opens_it(tab: Tab) -> None:
    tab.page.goto("/docs#get-v1-jobs-name")
    job = tab.page.locator("#get-v1-jobs-name")
    expect(job).to_have_attribute("open", "")
    job.get_by_label("name").fill("nowhere")
    expect(job.locator(".try pre").first).to_contain_text("/v1/jobs/nowhere'")


@pytest.mark.parametrize("path", ["/", "/dashboard", "/docs"])
def test_a_page_follows_the_reader_s_colour_scheme(tab: Tab, path: str) -> None:
    def shades() -> list[int]:
        colours = tab.page.evaluate(
            """() => {
              const style = getComputedStyle(document.documentElement);
              return [style.backgroundColor, style.color];
            }"""
        )
        return [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]

    tab.page.emulate_media(color_scheme="light")
    tab.page.goto(path)
    paper, ink = shades()
    assert paper > ink
    tab.page.emulate_media(color_scheme="dark")
    paper, ink = shades()
    assert paper < ink


@pytest.mark.parametrize("path", ["/", "/dashboard", "/docs"])
def test_a_page_fits_a_narrow_screen(tab: Tab, path: str) -> None:
    tab.page.set_viewport_size({"width": 320, "height": 640})
    tab.page.goto(path)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 320
