"""nginx as people put it in front: its defaults, and a short patience with silence."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.process import dying_with_this_process
from tests.support.launched import free_port

START_TIMEOUT_S = 20.0

# `proxy_pass` alone: HTTP/1.0 to the service, answers buffered unless they ask not to be.
_CONFIG = """
{user}
daemon off;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
worker_processes 1;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    gzip on;
    gzip_types application/json text/event-stream;
    proxy_read_timeout {read_timeout_s}s;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass {upstream}; }}
    }}
    server {{
        listen 127.0.0.1:{http2_port} http2;
        location / {{ proxy_pass {upstream}; }}
    }}
}}
"""


@dataclass(frozen=True)
class Proxy:
    """Where it listens: for HTTP/1.1, and for HTTP/2 without TLS."""

    base_url: str
    http2_url: str


def nginx_path() -> str:
    path = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert path is not None, "no nginx: apt-get install nginx-light"
    return path


@contextmanager
def nginx(directory: Path, upstream: str, read_timeout_s: int) -> Iterator[Proxy]:
    """A running proxy in front of `upstream`, that gives up after so much silence."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port(2)
    config = directory / "nginx.conf"
    config.write_text(
        _CONFIG.format(
            # Its own choice could not reach a directory that only root may enter.
            user="user root;" if os.geteuid() == 0 else "",
            directory=directory,
            port=port,
            http2_port=port + 1,
            upstream=upstream,
            read_timeout_s=read_timeout_s,
        )
    )
    process = subprocess.Popen(
        [nginx_path(), "-p", str(directory), "-c", str(config), "-e", str(directory / "error.log")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=dying_with_this_process(),
    )
    try:
        _wait_for(port + 1, process, directory)
        yield Proxy(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait_for(port: int, process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            output = directory / "error.log"
            assert process.poll() is None, output.read_text() if output.exists() else "nginx ended"
            assert time.monotonic() < deadline_s, "nginx did not start"
            time.sleep(0.02)
