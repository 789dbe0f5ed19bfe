"""A headless Chromium for tests, and tabs in it that notice what should not happen."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

# First the one without windows, toolbars and their processes: the same pages take a sixth of the
# processor time.
CHROMIUM_NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
CHROMIUM_ARGS = [
    "--no-sandbox",  # it shows loopback pages of ours only, and containers lack what it needs
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
PATIENCE_MS = 30_000
WITHOUT_NETLINK = Path(__file__).with_name("without_netlink.py")


def expect_accessible(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, f"{page.url}: {found.generate_report()}"


@contextmanager
def headless_chromium(*loopback_names: str) -> Iterator[Browser]:
    """Starts the Chromium on PATH with a new profile. Fails, never skips, where there is none.

    `loopback_names` resolve to 127.0.0.1. No other name resolves. Its requests outlive changes of
    the machine's addresses.
    """
    paths = [path for name in CHROMIUM_NAMES if (path := shutil.which(name))]
    assert paths, f"none of {', '.join(CHROMIUM_NAMES)} is on PATH: apt-get install chromium"
    expect.set_options(timeout=PATIENCE_MS)  # a busy machine shows things later, not others
    rules = [f"MAP {name} 127.0.0.1" for name in loopback_names]
    rules += ["MAP * ~NOTFOUND", "EXCLUDE 127.0.0.1"]
    arguments = [*CHROMIUM_ARGS, f"--host-resolver-rules={', '.join(rules)}"]
    with (
        tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as home,
        sync_playwright() as playwright,
    ):
        # Its crash reports and caches would otherwise stay in the user's home.
        env = {**os.environ, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
        command = shlex.join([sys.executable, "-IS", str(WITHOUT_NETLINK), paths[0]])
        program = Path(home) / "chromium"
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        browser = playwright.chromium.launch(executable_path=program, args=arguments, env=env)
        yield browser
        browser.close()


class Tab:
    """A page with a fresh profile that notes complaints and every address that it asked for."""

    def __init__(self, browser: Browser, base_url: str) -> None:
        self.base_url = base_url
        self.complaints: list[str] = []
        self.addresses: list[str] = []
        self._context = browser.new_context(base_url=base_url)
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def expect_complaint(self, pattern: str) -> None:
        """Takes out the browser's own note of an answer that was meant to be refused."""
        found: list[str] = []
        end_s = time.monotonic() + PATIENCE_MS / 1000
        while not found:  # the page may show an error before the browser's note of it has come
            found = [text for text in self.complaints if re.search(pattern, text)]
            assert found or time.monotonic() < end_s, self.complaints
            if not found:
                self.page.wait_for_timeout(20)
        self.complaints = [text for text in self.complaints if text not in found]

    def close(self) -> None:
        """Fails if anything was complained of, or asked of anybody but the service."""
        self._context.close()
        assert self.complaints == [], self.complaints
        assert self.addresses, "the page asked for nothing"
        strangers = [a for a in self.addresses if not a.startswith(self.base_url + "/")]
        assert strangers == [], strangers
