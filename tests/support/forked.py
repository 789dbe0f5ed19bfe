"""Processes under test that are forked from a process which has their imports: `ForkedPopen`."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from penstock.launcher.settings import setting_names
from shared.environment import PREFIX, value_of
from shared.process import die_with_parent, dying_with_this_process
from shared.text import chat_template
from tests.support import fork_server
from tests.support.document_check import CHECKED
from tests.support.fork_server import Start
from tests.support.throttle import THROTTLE

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("api.process", "worker.main", "worker.runtime.process")
OWN_ENGINE = "worker.engines.penstock"
MODEL = "worker.model.build"  # with torch
PROGRAM = "from tests.support.fork_server import main; main()"
RENDERING = "shared.text.rendering_process"
RENDERING_MODULES = ("shared.text.compiled_template", "shared.text.rendering")
STARTED = ("api", "worker", "penstock.launcher", RENDERING)
# What else may differ from the server's variables: it is read when it is used.
READ_LATE = {"PYTHONPATH", THROTTLE, CHECKED, "CHAOS_DEVICE", "CHAOS_STEP_TOKENS", "CHAOS_TRAP"}

_arguments_of = inspect.signature(subprocess.Popen._execute_child).bind  # type: ignore[attr-defined]


class ForkedPopen(subprocess.Popen[Any]):
    """A subprocess.Popen that forks `python -m api`, `worker`, `penstock.launcher` and rendering
    processes where an exec would make no difference: see tests.support.fork_server."""

    is_forked = False

    def _execute_child(self, *args: Any, **options: Any) -> None:
        given = _arguments_of(self, *args, **options).arguments
        start = _start_of(given)
        if start is None:
            super()._execute_child(*args, **options)  # type: ignore[misc]
            return
        pipes = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        standard = [fd if pipe == -1 else pipe for fd, pipe in enumerate(pipes)]
        self.pid = _server_of(start).fork(start, [*standard, *start.fds[3:]])
        self.is_forked = self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(given[end] for end in PIPE_ENDS),
        )


PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _start_of(given: Mapping[str, Any]) -> Start | None:
    """Returns what is to be forked; None where only an exec does the same."""
    env = dict(os.environ if given["env"] is None else given["env"])
    start = fork_server.start_of(
        given["args"],
        env=env,
        cwd=str(given["cwd"] or os.getcwd()),
        fds=(0, 1, 2, *given["pass_fds"]),
        own_session=given["start_new_session"],
        prepare=given["preexec_fn"],
    )
    if start is None or start.module not in STARTED or start.arguments:
        return None
    prepare = start.prepare
    is_plain = prepare is None or (isinstance(prepare, partial) and prepare.func is die_with_parent)
    if sys.platform != "linux" or not is_plain or not given["close_fds"]:
        return None
    server = _server_of(start)
    return None if server.trouble or not _is_as_in_server(env, server.env) else start


def _server_of(start: Start) -> _Server:
    """Returns one for engines with a model, whose imports are torch's, one for rendering processes,
    whose memory is bounded, or one for all else."""
    if start.module == RENDERING:
        return _server(*RENDERING_MODULES)
    has_model = start.module != "api" and value_of("runner", start.env) != "echo"
    return _server(*MODULES, OWN_ENGINE, *([MODEL] if has_model else []))


@contextmanager
def rendering_in_forks() -> Iterator[None]:
    """Templates of this process render in forks within the block, which the main thread enters."""
    _server(*RENDERING_MODULES)
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedPopen})
    with mock.patch.object(chat_template, "subprocess", forking):
        yield


def _is_as_in_server(env: Mapping[str, str], servers: Mapping[str, str]) -> bool:
    """Returns whether imports could not tell `env` from the server's variables. Those that it has
    not do not count: what leaves them out gives settings alone."""
    return all(
        servers.get(name) == value
        or name.removeprefix(PREFIX).lower() in setting_names()
        or name in READ_LATE
        or name.startswith("PYTEST_")
        for name, value in env.items()
    )


class _Server:
    """The fork server of this process, which ends with it."""

    def __init__(self, modules: Iterable[str]) -> None:
        # A child of a thread that ends would be told that its parent has died.
        assert threading.current_thread() is threading.main_thread()
        self.env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.env.pop("PYTHONPATH", None)
        self._lock = threading.Lock()
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                # Not by -m: a module that is __main__ is another one than the one that is imported.
                [sys.executable, "-c", PROGRAM, str(its.fileno()), *modules],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
                preexec_fn=dying_with_this_process(),
            )
        tried = self._control.recv(1000).decode()  # a fork that ended at once
        assert tried, "the fork server did not start"
        pid, _, self.trouble = tried.partition(" ")
        if not self.trouble:
            os.waitpid(int(pid), 0)

    def fork(self, start: Start, fds: list[int]) -> int:
        """Returns the id of the process, a child of this one."""
        with self._lock:  # templates render in threads
            start.send(self._control, fds)
            reply = self._control.recv(100)
        assert reply, "the fork server has ended"
        return int(reply)


@cache
def _server(*modules: str) -> _Server:
    return _Server(modules)
