"""A proxy that cuts each connection after so many bytes of its answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class CuttingProxy:
    """Forwards each connection to a server. `cuts` is how many bytes of each next answer pass;
    then, all of it.

    `upstream()`: the host and port for the next connection.
    """

    def __init__(self, upstream: Callable[[], tuple[str, int]]) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts: list[int] = []
        self.num_cut = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            left = self.cuts.pop(0) if self.cuts else None
            threading.Thread(target=self._serve, args=(client, left), daemon=True).start()

    def _serve(self, client: socket.socket, left: int | None) -> None:
        with client, socket.create_connection(self._upstream()) as server:
            threading.Thread(target=_forward, args=(client, server), daemon=True).start()
            with contextlib.suppress(OSError):
                while data := server.recv(256):
                    if left is not None:
                        data, left = data[:left], left - len(data)
                    client.sendall(data)
                    if left is not None and left <= 0:
                        self.num_cut += 1
                        client.shutdown(socket.SHUT_RDWR)
                        server.shutdown(socket.SHUT_RDWR)
                        return


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)


@contextmanager
def cutting_proxy(upstream: str) -> Iterator[CuttingProxy]:
    """A running proxy in front of `upstream`, a URL."""
    parts = urlsplit(upstream)
    assert parts.hostname is not None
    assert parts.port is not None
    address = (parts.hostname, parts.port)
    proxy = CuttingProxy(lambda: address)
    try:
        yield proxy
    finally:
        proxy.close()
