"""The operator's tasks by the command lines of their pages, in the terminal and the browser.

`python -m tests.e2e.operator_tasks` also installs, upgrades, backs up and adds a machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.operator_walk import shell_in, walk_service
from tests.support.walk import Walk

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.mark.promise(
    "Command: an operator who copies the lines of docs/guides/operate secures and watches a "
    "service, drains a worker, changes keys without a restart, and sees in status and job what a "
    "killed worker left"
)
def test_a_service_is_secured_watched_drained_and_given_new_keys_by_the_pages() -> None:
    # Not in pytest's folder: the path of the server's socket would be too long.
    with tempfile.TemporaryDirectory(prefix="operator-") as directory:
        walk_service(Walk(), shell_in(Path(directory)))
