"""A hub with one model, on loopback."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

MODEL = "acme/tiny"
SHA = "a" * 40


class TinyHub(http.server.ThreadingHTTPServer):
    """`files`: by name. Half of a file in `held` is sent at once, the rest once `release` is set;
    `close` sets it."""

    def __init__(self, files: Mapping[str, bytes], held: frozenset[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.held = held
        self.release = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: TinyHub

    def do_GET(self) -> None:
        files = self.server.files
        name = self.path.partition(f"/resolve/{SHA}/")[2]
        content = files.get(name, b"")
        if self.path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in files]
            found: object = {"id": MODEL, "modelId": MODEL, "sha": SHA, "siblings": siblings}
            if "/tree/" in self.path:
                found = [
                    {"type": "file", "size": len(files[name]), "oid": SHA, "path": name}
                    for name in files
                ]
            content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.send_header("etag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("x-repo-commit", SHA)
        self.end_headers()
        if self.command != "GET":
            return
        half = len(content) // 2 if name in self.server.held else 0
        self.wfile.write(content[:half])
        if half:
            self.wfile.flush()
            self.server.release.wait()
        self.wfile.write(content[half:])

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        return


@contextmanager
def tiny_hub(files: Mapping[str, bytes], held: frozenset[str] = frozenset()) -> Iterator[TinyHub]:
    """Serves a hub until the end of the block."""
    with TinyHub(files, held) as hub:
        threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield hub
        finally:
            hub.release.set()
            hub.shutdown()
