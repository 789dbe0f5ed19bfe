"""A child of the launcher that never serves is given up, however long each of its starts takes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from penstock.launcher import main as launching
from penstock.launcher import processes
from penstock.launcher.main import Launcher
from penstock.launcher.processes import MAX_QUICK_DEATHS, Child, GaveUp
from penstock.launcher.settings import LauncherSettings
from penstock.launcher.worker_specs import WorkerSpec
from shared.process import EarlySignals
from shared.settings import EXIT_BAD_SETTINGS
from tests.support.launched import free_port

STARTS = """
import pathlib, sys
from shared.process import report_ready, report_refusal
log = pathlib.Path(sys.argv[1])
number = len(log.read_text()) + 1 if log.exists() else 1
log.write_text("x" * number)
"""
REFUSES = STARTS + "report_refusal(f'the device was lost, {number}'); sys.exit(70)"
SERVES_ONCE = STARTS + "report_ready() if number == 1 else None; sys.exit(70)"


@pytest.fixture(autouse=True)
def _every_life_is_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HEALTHY_AFTER_S", 1e-9)
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 0.0)


def child(code: str, log: Path, output: list[str], *, reports_ready: bool = True) -> Child:
    return Child(
        "worker 1",
        [sys.executable, "-c", code, str(log)],
        dict(os.environ),
        output.append,
        reports_ready=reports_ready,
    )


def num_starts(log: Path) -> int:
    return len(log.read_text()) if log.exists() else 0


async def test_one_that_was_never_ready_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    log, output = tmp_path / "starts", list[str]()
    with pytest.raises(GaveUp) as gave_up:
        async with asyncio.timeout(60):
            await child(REFUSES, log, output).supervise()
    assert str(gave_up.value) == (
        "worker 1: died 6 times in a row and was never ready: the device was lost, 6"
    )
    assert gave_up.value.exit_code == 1
    assert num_starts(log) == MAX_QUICK_DEATHS + 1
    assert output == ["worker 1 ended (exit code 70); starting it again"] * MAX_QUICK_DEATHS


async def test_the_ending_signal_is_named_if_the_child_reported_nothing(tmp_path: Path) -> None:
    code = STARTS + "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(GaveUp, match="was never ready: SIGKILL"):
        async with asyncio.timeout(60):
            await child(code, tmp_path / "starts", []).supervise()


@pytest.mark.parametrize(("code", "reports_ready"), [(SERVES_ONCE, True), (REFUSES, False)])
async def test_one_that_was_ready_once_is_started_again_and_again(
    code: str, reports_ready: bool, tmp_path: Path
) -> None:
    log = tmp_path / "starts"
    worker = child(code, log, [], reports_ready=reports_ready)
    supervising = asyncio.create_task(worker.supervise())
    async with asyncio.timeout(60):
        while num_starts(log) < MAX_QUICK_DEATHS + 3:
            assert not supervising.done()
            await asyncio.sleep(0.01)
    worker.stop()
    await asyncio.wait_for(supervising, 60)


async def test_a_stop_does_not_wait_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 3600.0)
    monkeypatch.setattr(processes, "MAX_BACKOFF_S", 3600.0)
    log, output = tmp_path / "starts", list[str]()
    worker = child(REFUSES, log, output)
    supervising = asyncio.create_task(worker.supervise())
    deadline = time.monotonic() + 60
    while not output and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    worker.stop()
    await asyncio.wait_for(supervising, 60)
    assert num_starts(log) == 1


def test_a_worker_that_was_ordered_to_exit_is_none_to_go_on_with(tmp_path: Path) -> None:
    settings = LauncherSettings(data_dir=tmp_path)
    specs = [WorkerSpec("worker 0", "a"), WorkerSpec("worker 1", "b")]
    launcher = Launcher(settings, specs, "redis://x")
    refused = GaveUp("worker 1", "no memory", 1)
    assert launcher._can_go_on(refused)
    launcher._workers[0].was_dismissed = True
    assert not launcher._can_go_on(refused)


def test_a_server_for_other_machines_needs_its_binary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(launching, "find_server_binary", lambda: None)
    settings = LauncherSettings(listen_redis="127.0.0.1:6399", port=free_port(), data_dir=tmp_path)
    assert launching._launch(settings, [], EarlySignals()) == EXIT_BAD_SETTINGS
    assert "none was found: install one" in capsys.readouterr().err


async def test_one_that_was_ordered_to_exit_is_not_started_again(tmp_path: Path) -> None:
    code = STARTS + "report_ready(); report_refusal('an operator ordered it to exit')"
    log, output = tmp_path / "starts", list[str]()
    async with asyncio.timeout(60):
        worker = child(code, log, output)
        await worker.supervise()
    assert output == [
        "worker 1 ended: an operator ordered it to exit; it is not started again",
    ]
    assert worker.was_dismissed
    assert num_starts(log) == 1
