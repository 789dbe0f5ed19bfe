"""The one Redis of a deployment, with the things that happen to servers."""

from __future__ import annotations

from pathlib import Path

from penstock.launcher.redis_server import PrivateServer


class _Outliving(PrivateServer):
    """A server that is told by an error, and not by a signal, that its file may not grow."""

    def _command_of(self, path: str) -> list[str]:
        return ["env", "--ignore-signal=XFSZ", *super()._command_of(path)]


class Server:
    """A private server on a data directory; its address outlives its restarts."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._server = _Outliving(data_dir)
        self.url = self._server.start()

    @property
    def pid(self) -> int:
        process = self._server._process
        assert process is not None
        return process.pid

    def stop(self) -> None:
        """SIGTERM: it writes everything first."""
        self._server.stop()

    def kill(self) -> None:
        """kill -9."""
        process = self._server._process
        assert process is not None
        process.kill()
        process.wait()
        self._server.stop()

    def start(self) -> None:
        self._server = _Outliving(self._data_dir)
        assert self._server.start() == self.url, "a server's address is that of its directory"

    def file_size(self) -> int:
        """Bytes of its append-only file since the last rewrite."""
        return self._file().stat().st_size

    def _file(self) -> Path:
        (path,) = (self._data_dir / "appendonlydir").glob("*.incr.aof")
        return path

    def cut_tail(self, num_bytes: int) -> int:
        """Of the stopped server's append-only file, as a failover loses it. Returns the cut."""
        path = self._file()
        size = path.stat().st_size
        kept = max(0, size - num_bytes)
        with path.open("r+b") as file:
            file.truncate(kept)
        return size - kept
