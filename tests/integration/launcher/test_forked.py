"""What tests fork is what others execute: tests.support.fork_server."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.process import dying_with_this_process
from shared.text.rendering import RenderRequest, TemplateSource, receive, send
from tests.support.forked import RENDERING, ForkedPopen
from tests.support.launched import REPOSITORY

FRONTEND = [sys.executable, "-m", "api"]
MESSAGE = {"role": "user", "content": "a"}
NOBODY = "redis://127.0.0.1:1/0"
BOTH = pytest.mark.parametrize("popen", [subprocess.Popen, ForkedPopen])


@contextmanager
def frontend(popen: Any, cwd: Path, **env: str) -> Iterator[Any]:
    """A frontend that serves, without a store."""
    process = popen(
        FRONTEND,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "PENSTOCK_PORT": "0"}
        | {"PENSTOCK_REDIS_URL": NOBODY, **env},
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=dying_with_this_process(signal.SIGKILL),
        text=True,
    )
    try:
        assert any("running on" in line for line in process.stderr)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def seen_in_proc(pid: int) -> dict[str, object]:
    proc = Path(f"/proc/{pid}")
    parent, _, session = proc.joinpath("stat").read_text().rpartition(") ")[2].split()[1:4]
    kinds = [re.sub(r"\d+|-.*", "", os.readlink(fd)) for fd in proc.joinpath("fd").iterdir()]
    return {
        "command line": proc.joinpath("cmdline").read_bytes(),
        "variables": sorted(proc.joinpath("environ").read_bytes().split(b"\0")),
        "folder": os.readlink(proc / "cwd"),
        "descriptors": sorted(kinds),
        "parent": int(parent),
        "is of its own session": session == str(pid),
        "ignores": re.findall(r"Sig(?:Ign|Blk):.*", proc.joinpath("status").read_text()),
    }


def test_a_forked_process_looks_as_an_executed_one(tmp_path: Path) -> None:
    seen = []
    for popen in (subprocess.Popen, ForkedPopen):
        with frontend(popen, tmp_path) as process:
            assert isinstance(process, ForkedPopen) == getattr(process, "is_forked", False)
            seen.append(seen_in_proc(process.pid))
    assert seen[0] == seen[1]
    assert seen[0]["parent"] == os.getpid()


def test_a_forked_rendering_process_looks_as_an_executed_one(tmp_path: Path) -> None:
    template = TemplateSource(1, {"default": "{{ messages[0].content }}"}, {}, max_chars=100)
    seen = []
    for popen in (subprocess.Popen, ForkedPopen):
        connection, theirs = socket.socketpair()
        with connection:
            with theirs:
                process: Any = popen(
                    [sys.executable, "-P", "-m", RENDERING],
                    cwd=tmp_path,
                    env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            for request in (RenderRequest(1, template), RenderRequest(1, messages=[MESSAGE])):
                send(connection, msgspec.json.encode(request))
                answer = receive(connection)
                assert answer is not None
            seen.append((seen_in_proc(process.pid), answer.partition(b',"cpu_s"')[0]))
        assert process.wait(60) == 0
    assert process.is_forked
    assert seen[0] == seen[1]
    assert b'"text":"a"' in seen[0][1]


@BOTH
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_it_ends_by_a_signal(popen: Any, signum: int, code: int, tmp_path: Path) -> None:
    with frontend(popen, tmp_path) as process:
        process.send_signal(signum)
        assert process.wait(60) == code


@BOTH
def test_it_says_why_it_does_not_start(popen: Any, tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    process = popen(FRONTEND, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert said == "penstock: PENSTOCK_REDIS_URL is not set, and it has no default.\n"


def test_a_variable_that_imports_read_is_for_an_executed_one(tmp_path: Path) -> None:
    with frontend(ForkedPopen, tmp_path, PYTHONHASHSEED="1") as process:
        assert not process.is_forked
