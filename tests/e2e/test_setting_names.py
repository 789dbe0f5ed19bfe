"""`make run` with earlier and with misspelt names of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched import Launched

pytestmark = pytest.mark.timeout(240)


@pytest.mark.promise(
    "Command: an unknown and a misspelt name of a setting is warned of once for all processes of a "
    "launcher; another program's `HOST` is not ours"
)
def test_each_name_is_warned_of_once_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER", "echo")
    env = {"PENSTOCK_ECHO_STEP_MS": "1", "PENSTOCK_MAX_NUM_SEQ": "4", "DTPYE": "float32"}
    with Launched(tmp_path, env) as penstock:
        said = penstock.output
    assert said.count("settings have the prefix PENSTOCK_ now") == 1
    assert said.count("PENSTOCK_RUNNER") == 1
    assert said.count("did you mean PENSTOCK_MAX_NUM_SEQS?") == 1
    assert said.count("did you mean PENSTOCK_DTYPE?") == 1
