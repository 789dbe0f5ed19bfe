"""Compilers of an engine process: their caches, and that one which runs is progress."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.logs import LogFormat, LogLevel
from tests.support.polling import until
from worker.engine_options import EngineOptions
from worker.runtime import supervisor as supervisor_module
from worker.runtime.compilers import compiler_caches, is_compiling
from worker.runtime.interpreter import environment_of
from worker.runtime.messages import Configure
from worker.runtime.supervisor import EngineSupervisor

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the name of a compiler, in a session of its own, as an engine's child."""
    program = tmp_path / "cc1plus"
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, program)
    process = subprocess.Popen([program, "600"], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class SilentLink:
    """An engine that sends nothing, and leads the session `pid`."""

    num_received = 0

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.was_killed = False

    def kill(self) -> None:
        self.was_killed = True


def test_a_compiler_of_the_session_is_found_until_it_ends(
    compiler: subprocess.Popen[bytes],
) -> None:
    assert is_compiling(compiler.pid)
    assert not is_compiling(os.getsid(0))
    compiler.send_signal(signal.SIGKILL)
    compiler.wait()
    assert not is_compiling(compiler.pid)


async def watched(monkeypatch: pytest.MonkeyPatch, pid: int, limit_s: float) -> SilentLink:
    """An engine that has a job and is silent, looked at until it is killed or seen to compile."""
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(supervisor_module, "COMPILE_LOOK_S", 0.02)
    monkeypatch.setattr(supervisor_module, "COMPILE_LIMIT_S", limit_s)
    configure = Configure(EngineOptions(checkpoint="/m"), LogLevel.INFO, LogFormat.TEXT)
    supervisor = EngineSupervisor(
        configure, lambda: True, load_timeout_s=5, stall_limit_s=0.1, max_restarts=0
    )
    link = SilentLink(pid)
    own: Any = supervisor
    own._link = link
    watching = asyncio.create_task(supervisor.watch())
    try:
        await until(lambda: link.was_killed or own._compile_s > 0.5)
        assert not (supervisor.stalled and not link.was_killed)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return link


async def test_an_engine_that_compiles_is_neither_stalled_nor_killed(
    monkeypatch: pytest.MonkeyPatch, compiler: subprocess.Popen[bytes]
) -> None:
    """Five times its stall limit without a message."""
    assert not (await watched(monkeypatch, compiler.pid, limit_s=60)).was_killed


async def test_a_silent_engine_without_a_compiler_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (await watched(monkeypatch, os.getsid(0), limit_s=60)).was_killed


async def test_a_compiler_that_never_ends_does_not_keep_its_engine(
    monkeypatch: pytest.MonkeyPatch, compiler: subprocess.Popen[bytes]
) -> None:
    assert (await watched(monkeypatch, compiler.pid, limit_s=0.2)).was_killed


def test_compiled_code_is_kept_by_release_for_the_next_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    env = environment_of(EngineOptions(checkpoint="/m", engine="vllm"), "1.2.3")
    assert env is not None
    assert env["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "penstock" / "vllm-1.2.3" / "inductor")
    assert env["TRITON_CACHE_DIR"] == str(tmp_path / "penstock" / "vllm-1.2.3" / "triton")
    assert env["VLLM_CACHE_ROOT"] == str(tmp_path / "penstock" / "vllm-1.2.3" / "vllm")
    assert compiler_caches("1.2.4", {})["VLLM_CACHE_ROOT"] != env["VLLM_CACHE_ROOT"]


def test_kernels_are_kept_where_the_user_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env = environment_of(EngineOptions(checkpoint="/m"))
    assert env["TRITON_CACHE_DIR"] == str(tmp_path / "penstock" / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/shared/triton")
    assert environment_of(EngineOptions(checkpoint="/m"))["TRITON_CACHE_DIR"] == "/shared/triton"


def test_a_cache_that_the_operator_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/shared/vllm")
    env = environment_of(EngineOptions(checkpoint="/m", engine="vllm"), "1.2.3")
    assert env is not None
    assert env["VLLM_CACHE_ROOT"] == "/shared/vllm"
