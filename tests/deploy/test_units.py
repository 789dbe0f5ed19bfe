"""The systemd units, as far as they can be checked where systemd does not run: systemd's own
reading of them, its judgement of what a process could reach, what they rely on in the settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from api.settings import ApiSettings
from shared.environment import variable_of
from worker.settings import WorkerSettings

FOLDER = Path(__file__).parents[2] / "deploy/systemd"
UNITS = {
    "penstock-frontend@.service": (ApiSettings, "api", "shutdown_timeout_s"),
    "penstock-worker@.service": (WorkerSettings, "worker", "drain_timeout_s"),
}
BESIDE = {"HOME", "XDG_CACHE_HOME", "HF_HOME"}
WORST_EXPOSURE = 25  # of 100, as systemd-analyze counts it
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def test_there_is_no_other_unit() -> None:
    assert {path.name for path in FOLDER.glob("*.service")} == set(UNITS)


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_reads_a_unit_without_complaint(name: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text().replace("/opt/penstock/.venv/bin/python", sys.executable)
    (tmp_path / name).write_text(text)
    verified = _analyze("verify", str(tmp_path / name))
    assert (verified.returncode, verified.stderr) == (0, "")
    (tmp_path / name).write_text(text.replace("KillMode=mixed", "KillMod=mixed"))
    assert "KillMod" in _analyze("verify", str(tmp_path / name)).stderr
    offline = ("security", "--offline=true", "--no-pager", f"--threshold={WORST_EXPOSURE}")
    (tmp_path / name).write_text(text)
    judged = _analyze(*offline, str(tmp_path / name))
    assert judged.returncode == 0, judged.stdout
    (tmp_path / name).write_text(re.sub(r"(?m)^(Protect|Restrict|Capab|System).*\n", "", text))
    assert _analyze(*offline, str(tmp_path / name)).returncode != 0


def _analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_sets_settings_and_waits_for_longer_than_its_process_drains(name: str) -> None:
    text = (FOLDER / name).read_text()
    settings, package, drain = UNITS[name]
    (words,) = re.findall(r"^Environment=(.*)$", text, re.M)
    variables = {word.partition("=")[0] for word in words.split()}
    assert variables - BESIDE <= set(map(variable_of, settings.model_fields))
    assert f" -m penstock {package}\n" in text
    (limit,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert int(limit) > settings.model_fields[drain].default + 10
    assert "RestartPreventExitStatus=2\n" in text
