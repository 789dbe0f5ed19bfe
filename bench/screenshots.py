"""Takes the pictures of the pages in docs/pages: light, dark, and on a phone.

    python -m bench.screenshots

Starts Penstock as `make run` does, with two workers and the demo model; kills the worker of an
answer (bench.rescue), asks a question in the playground, and opens each page in Chromium. The
pictures are WebP files of what is in sight; ids and times differ from run to run.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, expect

from bench.rescue import make_slower_demo, record
from tests.support.browser import headless_chromium
from tests.support.launched import REPOSITORY, Launched
from tests.support.playground import ask, expect_whole, ready, set_settings

PICTURES = REPOSITORY / "docs/pages"
MODEL = "penstock-demo"
QUALITY = 75
MOST_BYTES = 600_000  # of all pictures
VIEWS: Mapping[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1200, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1200, "height": 800}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 780}, "color_scheme": "light"},
}


def open_job(page: Page, job_id: str) -> None:
    page.goto(f"/dashboard#job={job_id}")
    expect(page.locator("#job-answer .markdown")).not_to_be_empty()
    expect(page.locator("#job-prompt pre")).to_be_visible()


def open_dashboard(page: Page) -> None:
    page.goto("/dashboard")
    expect(page.get_by_text("Healthy.")).to_be_visible()
    expect(page.locator("figure.plot svg").first).to_be_visible()


def open_playground(page: Page) -> None:
    set_settings(ready(page), temperature="0")
    expect_whole(ask(page, "What happens when a worker dies?"))
    expect_whole(ask(page, "How does a request travel?"))


def take(browser: Browser, base_url: str, name: str, show: Callable[[Page], None]) -> int:
    """Takes a page's picture in every view. Returns their bytes."""
    total = 0
    for view, options in VIEWS.items():
        context = browser.new_context(base_url=base_url, reduced_motion="reduce", **options)
        page = context.new_page()
        show(page)
        taken = context.new_cdp_session(page).send(
            "Page.captureScreenshot", {"format": "webp", "quality": QUALITY}
        )
        data = base64.b64decode(taken["data"])
        (PICTURES / f"{name}-{view}.webp").write_bytes(data)
        total += len(data)
        context.close()
    return total


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, headless_chromium() as browser:
        checkpoint = make_slower_demo(Path(name) / "demo")
        env = {"WORKERS": "2", "MODEL": str(checkpoint), "SERVED_MODEL_NAME": MODEL}
        with Launched(Path(name), env, is_forked=False) as penstock:
            url = penstock.base_url
            record(url, MODEL)
            jobs = httpx.get(f"{url}/v1/jobs").json()["data"]
            (rescued,) = [job["id"] for job in jobs if job["attempt"] == 2]
            total = take(browser, url, "job", lambda page: open_job(page, rescued))
            total += take(browser, url, "playground", open_playground)
            total += take(browser, url, "dashboard", open_dashboard)
    assert total < MOST_BYTES, f"{total} bytes of pictures"
    print(f"{total} bytes in {PICTURES}")


if __name__ == "__main__":
    main()
