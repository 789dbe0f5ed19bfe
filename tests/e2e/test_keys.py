"""Keys at the front door: what `make run` does with them, and without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from api.auth.keys import digest_of, new_key
from tests.support.browser import Tab, headless_chromium
from tests.support.launched import REPOSITORY, Launched, free_port

pytestmark = pytest.mark.timeout(240)

KEY = new_key()


@pytest.fixture(scope="module")
def penstock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    directory = tmp_path_factory.mktemp("keys")
    keys = directory / "keys.txt"
    keys.write_text(f"{digest_of(KEY)} tenant=acme\n")
    env = {"RUNNER": "echo", "API_KEYS_FILE": str(keys)}
    with Launched(directory, env) as service:
        yield service
    assert KEY not in service.output


def test_with_keys_the_printed_line_needs_one_and_works_with_it(penstock: Launched) -> None:
    line = penstock.curl_line()
    assert "$KEY" in line
    for held, is_answer in ((KEY, True), ("another", False)):
        answer = subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "KEY": held},
        )
        assert ("data: [DONE]" in answer.stdout) is is_answer
        assert ("invalid_api_key" in answer.stdout) is not is_answer
    assert httpx.get(f"{penstock.base_url}/health").json() == {"status": "ok"}


@pytest.mark.browser
def test_the_pages_ask_for_a_key_once(penstock: Launched) -> None:
    with headless_chromium() as browser:
        tab = Tab(browser, penstock.base_url)
        page = tab.page
        page.goto("/")
        field = page.get_by_label("API key")
        for wrong in ("wrong", KEY):
            field.fill(wrong)
            page.get_by_role("button", name="Use this key").click()
            expect(field).to_have_count(1 if wrong == "wrong" else 0)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        page.get_by_label("Message").fill("water and iron")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("log")).to_contain_text(re.compile(r"water and iron\s*assistant"))
        page.goto("/dashboard#tab=jobs")
        expect(page.get_by_text("Healthy.")).to_be_visible()
        expect(page.locator("#jobs").get_by_text("finished").first).to_be_visible()
        tab.expect_complaint("401")
        tab.close()


@pytest.mark.browser
def test_the_dashboard_asks_for_a_key_and_then_shows_the_workers(penstock: Launched) -> None:
    with headless_chromium() as browser:
        tab = Tab(browser, penstock.base_url)
        tab.page.goto("/dashboard#tab=workers")
        field = tab.page.get_by_label("API key")
        expect(field).to_be_visible()
        expect(tab.page.locator("#workers tr")).to_have_count(0)
        field.fill(KEY)
        tab.page.get_by_role("button", name="Use this key").click()
        expect(tab.page.locator("#workers tr")).to_have_count(1)
        tab.page.get_by_role("link", name="Tenants").click()
        expect(tab.page.locator("#tenants td").first).to_have_text("acme")
        expect(tab.page.get_by_text("Healthy.")).to_be_visible()
        tab.expect_complaint("401")
        tab.close()


@pytest.mark.browser
def test_a_link_and_a_job_open_in_the_page_with_the_key_alone(penstock: Launched) -> None:
    body = {"model": "penstock-demo", "input": "iron gates", "max_output_tokens": 8}
    response = httpx.post(
        f"{penstock.base_url}/v1/responses",
        json={**body, "background": True},
        headers={"authorization": f"Bearer {KEY}"},
    ).json()["id"]
    with headless_chromium() as browser:
        tab = Tab(browser, penstock.base_url)
        page = tab.page
        page.goto(f"/#job={response}")
        expect(page.get_by_label("API key")).to_be_visible()
        expect(page.locator(".turn")).to_have_count(0)
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator(".turn.user .text")).to_have_text("iron gates")
        expect(page.locator(".turn.assistant")).to_have_attribute("aria-busy", "false")
        assert KEY not in page.url
        page.get_by_role("button", name="Show the job").click()
        expect(page.locator("#job-badge")).to_have_text("finished")
        expect(page.locator("#job-prompt pre")).to_be_visible()
        tab.expect_complaint("401")
        tab.close()


@pytest.mark.promise("Dashboard: links to jobs ask for the key where one is needed, and hold none")
@pytest.mark.browser
def test_a_link_to_a_job_opens_in_the_dashboard_with_the_key_alone(penstock: Launched) -> None:
    response = httpx.post(
        f"{penstock.base_url}/v1/responses",
        json={"model": "penstock-demo", "input": "iron gates", "max_output_tokens": 8},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    ).json()["id"]
    with headless_chromium() as browser:
        tab = Tab(browser, penstock.base_url)
        page = tab.page
        page.goto(f"/dashboard#job={response}")
        expect(page.get_by_label("API key")).to_be_visible()
        expect(page.locator("#job-known")).to_be_hidden()
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#job-badge")).to_have_text("finished")
        expect(page.locator("#job-events li")).to_be_visible()
        expect(page.locator("#job-prompt pre")).to_contain_text("iron gates")
        page.get_by_role("link", name="All jobs").click()
        row = page.locator("#jobs tr", has_text=response[-8:])
        row.get_by_role("link").click()
        expect(page.locator("#job-badge")).to_have_text("finished")
        expect(page.get_by_label("API key")).to_have_count(0)
        assert not [address for address in [*tab.addresses, page.url] if KEY in address]
        tab.expect_complaint("401")
        tab.close()


@pytest.mark.promise("Access: without keys only this machine is served")
def test_an_open_address_without_keys_serves_no_other_machine(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.launcher"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PENSTOCK_HOST": "0.0.0.0",
            "PENSTOCK_PORT": str(free_port()),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "ALLOW_WITHOUT_KEYS" in ended.stderr
    assert "Traceback" not in ended.stderr
