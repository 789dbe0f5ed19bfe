"""`make run` with misspelt names of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched import Launched

pytestmark = pytest.mark.timeout(240)


@pytest.mark.promise(
    "Command: the launcher warns once of each unknown or misspelt name of a setting; another "
    "program's `HOST` is not read"
)
def test_each_name_is_warned_of_once_for_all_processes(tmp_path: Path) -> None:
    env = {"RUNNER": "echo", "ECHO_STEP_MS": "1", "PENSTOCK_MAX_NUM_SEQ": "4"}
    with Launched(tmp_path, env) as penstock:
        said = penstock.output
    assert said.count("is not a setting") == 1
    assert said.count("did you mean PENSTOCK_MAX_NUM_SEQS?") == 1
