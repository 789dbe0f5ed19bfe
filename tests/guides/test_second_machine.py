"""The page that adds a machine, by its command lines: two network namespaces, with a cable between
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.operator_walk import walk_machines
from tests.support.two_machines import NO_MACHINES, can_make_machines
from tests.support.walk import Walk


@pytest.mark.alone  # browsers end their requests where the machine's networks change
def test_a_worker_of_another_machine_joins_with_a_password_and_by_tls(tmp_path: Path) -> None:
    if not can_make_machines():
        pytest.skip(NO_MACHINES)
    walk_machines(Walk(), tmp_path)
