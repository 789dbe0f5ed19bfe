"""A service whose model repeats its prompt at a fixed pace, and a browser that looks at it.

The model's template puts the system prompt first and bare, so that a test writes down what the
model says; and it knows reasoning and tools.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import Tab, headless_chromium
from tests.support.launched import Launched
from tests.support.playground import ready
from tests.support.tool_models import make_hermes_checkpoint

ECHO_STEP_MS = 25


@pytest.fixture(scope="module")
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launched]:
    directory = tmp_path_factory.mktemp("pages")
    checkpoint = make_hermes_checkpoint(directory / "thinker")
    env = {
        "RUNNER": "echo",
        "ECHO_STEP_MS": str(ECHO_STEP_MS),
        "MODEL": str(checkpoint),
        **getattr(request.module, "SERVICE", {}),  # what else a module wants of it
    }
    with Launched(directory, env) as service:
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, service: Launched) -> Iterator[Tab]:
    """Whatever a test does: no complaint on the console, no request that leaves the origin."""
    tab = Tab(browser, service.base_url)
    yield tab
    tab.close()


@pytest.fixture
def playground(tab: Tab) -> Page:
    return ready(tab.page)
