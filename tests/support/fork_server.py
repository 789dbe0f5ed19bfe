"""A process that has imported what the processes under test import, and forks them.

A start of a frontend, a worker or an engine is mostly imports, and a run of the tests has hundreds
of starts. This process imports the modules once. A fork gets the variables, the folder, the
descriptors, the session and the arguments of a start, imports a sitecustomize of its PYTHONPATH,
and runs the same `python -m api`. It is a child of the process that asked for it, which waits for
it and learns how it ended.

One thing is not as after an exec: what reads a variable when it is imported has read it here.
`tests.support.forked` knows which starts that concerns.

A worker starts its engine, and a launcher its processes, when they have threads and cannot fork
any more. They get spares: forks that wait for what to become, one for each first start.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.collector import resting
from shared.environment import value_of

MAX_REQUEST_BYTES = 1 << 17
MAX_FDS = 32
ABOVE_FD = 512  # where descriptors are between their arrival and their place
OUTPUTS = (1, 2)
SAFE_PATH = "-P"  # the folder is not in the module path

_CLONE3 = 435
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_libc = ctypes.PyDLL(None, use_errno=True)  # does not let go of the interpreter, as os.fork


@dataclass(frozen=True)
class Start:
    """What `python -m <module>` is started with, after `options` of the interpreter. `fds` are the
    numbers that the descriptors which come with it get, `prepare` is a `preexec_fn`."""

    options: tuple[str, ...]
    module: str
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    fds: tuple[int, ...]
    own_session: bool
    prepare: Callable[[], None] | None

    def send(self, control: socket.socket, fds: Sequence[int]) -> None:
        """Sends it, and as many descriptors as it has numbers for."""
        socket.send_fds(control, [pickle.dumps(self)], list(fds))


def start_of(words: Sequence[object], **options: Any) -> Start | None:
    """Returns the start that a command line of this interpreter says, or None."""
    before = words.index("-m") if "-m" in words[:-1] else 0
    given = tuple(map(str, words[1:before]))
    if before == 0 or words[0] != sys.executable or given not in ((), (SAFE_PATH,)):
        return None
    module, *arguments = map(str, words[before + 1 :])
    return Start(given, module, tuple(arguments), **options)


def _receive(control: socket.socket) -> tuple[Start, list[int]] | None:
    """Returns a start and its descriptors, from ABOVE_FD on; None when the other end is closed."""
    content, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, MAX_FDS)
    if not content:
        return None
    places = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ABOVE_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    return pickle.loads(content), places


def _fork_sibling() -> int:
    """Forks a child of this process's parent. Returns its id; 0 in the child. Raises OSError.

    It does what glibc's fork does for a process of one thread, with CLONE_PARENT on top.
    """
    tid = ctypes.c_uint64()  # the address at which glibc keeps the thread's id
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no address of the thread's id")
    flags = _CLONE_PARENT | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID
    # flags, pidfd, child_tid, parent_tid, exit_signal (a sibling has ours), stack, stack_size, tls
    arguments = (ctypes.c_uint64 * 8)(flags, 0, tid.value, 0, 0, 0, 0, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc.syscall(_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, "no clone of this process")
    return pid


def _show(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Makes /proc show a command line and variables of this process. Raises OSError."""
    variables = [f"{name}={value}" for name, value in env.items()]
    texts = ["".join(f"{text}\0" for text in given).encode() for given in (words, variables)]
    area = ctypes.create_string_buffer(b"".join(texts))
    _shown.append(area)
    begin = ctypes.addressof(area)
    middle, end = begin + len(texts[0]), begin + sum(map(len, texts))
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    (code, end_code, stack), (data, end_data, heap) = (
        map(int, fields[first : first + 3]) for first in (23, 42)
    )
    _libc.sbrk.restype = ctypes.c_uint64
    # struct prctl_mm_map: all addresses of the kind, of which four are new.
    addresses = (code, end_code, data, end_data, heap, _libc.sbrk(0), stack, begin, middle)
    no_file = 0xFFFFFFFF
    new = (ctypes.c_uint64 * 13)(*addresses, middle, end, 0, no_file << 32)
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(new), ctypes.sizeof(new), 0) != 0:
        raise OSError(ctypes.get_errno(), "no new command line for this process")


_shown: list[object] = []  # stays where it is


def _serve(control: socket.socket) -> tuple[Start, list[int]] | None:
    """Forks for each start, and replies with the process's id, until the other end is closed.

    Returns None then; in a fork, its start and descriptors.
    """
    while (received := _receive(control)) is not None:
        pid = _fork_sibling()
        if pid == 0:
            return received
        control.send(str(pid).encode())
        for fd in received[1]:
            os.close(fd)
    return None


def _become(start: Start, fds: Sequence[int]) -> None:
    """Runs a start in this process, which was forked for it. Raises what ends it."""
    os.closerange(0, ABOVE_FD)
    for number, fd in zip(start.fds, fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if start.own_session:
        os.setsid()
    os.chdir(start.cwd)
    if start.prepare is not None:
        start.prepare()
    os.environ.clear()
    os.environ.update(start.env)
    tempfile.tempdir = None
    sys.argv = [start.module, *start.arguments]
    sys.orig_argv = [sys.executable, *start.options, "-m", *sys.argv]
    _show(sys.orig_argv, start.env)
    given = [entry for entry in start.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:1] = given if SAFE_PATH in start.options else [start.cwd, *given]
    if any((Path(entry) / "sitecustomize.py").exists() for entry in given):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if spares := [_Spare(start.fds) for _ in range(_num_spares(start))]:
        asyncio.create_subprocess_exec = _StartsOfSpares(spares)
    runpy.run_module(start.module, run_name="__main__", alter_sys=True)


def _num_spares(start: Start) -> int:
    """Returns how many processes it starts that could be forked."""
    if start.module == "penstock.launcher":
        return sum(int(value_of(name, start.env) or 1) for name in ("workers", "frontends"))
    return 1 if start.module == "worker" else 0


class _Spare:
    """A fork of this process, which has no threads yet, that waits for what to become."""

    def __init__(self, fds: Sequence[int]) -> None:
        """`fds` are those of this process that an exec would not hand on, and OUTPUTS."""
        self.control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self.control.close()
            for fd in fds:
                if fd not in OUTPUTS:
                    os.close(fd)
            _show(["spare"], {})
            received = _receive(its)
            if received is None:  # the one that would have started it has ended
                os._exit(0)
            _become(*received)
            sys.exit(0)
        its.close()


class _StartsOfSpares:
    """asyncio.create_subprocess_exec, by a spare while there are some."""

    def __init__(self, spares: list[_Spare]) -> None:
        self._spares = spares
        self._exec: Any = asyncio.create_subprocess_exec

    async def __call__(self, *words: Any, **options: Any) -> Any:
        start = self._start_of(words, **options) if self._spares else None
        if start is None:
            return await self._exec(*words, **options)
        spare = self._spares.pop()
        nothing = os.open(os.devnull, os.O_RDONLY)
        start.send(spare.control, [nothing, *OUTPUTS, *start.fds[3:]])
        os.close(nothing)
        spare.control.close()
        return _Forked(spare.pid)

    def _start_of(
        self,
        words: Sequence[object],
        *,
        stdin: int | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
        **others: Any,  # what a spare cannot be given
    ) -> Start | None:
        env = dict(os.environ if env is None else env)
        if others or stdin != DEVNULL or env.get("OMP_NUM_THREADS", "1") != "1":
            return None
        return start_of(
            words,
            env=env,
            cwd=os.getcwd(),
            fds=(0, *OUTPUTS, *pass_fds),
            own_session=start_new_session,
            prepare=preexec_fn,
        )


class _Forked:
    """A spare that became a process, as an asyncio.subprocess.Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._fd, self._take_status)

    def _take_status(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    """`sys.argv` has the number of a socket, and the modules to import."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with resting():
        for module in sys.argv[2:]:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    try:
        _show(["fork-server"], os.environ)
        pid = _fork_sibling()
    except OSError as error:
        control.send(f"0 {error}".encode())
        return
    if pid == 0:
        os._exit(0)
    control.send(str(pid).encode())
    received = _serve(control)
    if received is not None:
        _become(*received)
