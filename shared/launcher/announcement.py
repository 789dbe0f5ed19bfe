"""What a person is told once the first token can be served: URL, a line to paste, a look inside."""

from __future__ import annotations

import json
import time
import urllib.request
from threading import Event
from typing import Any

from shared.launcher.settings import LauncherSettings
from shared.transport.private_server import inspect_command

POLL_S = 0.1


def announce_when_ready(settings: LauncherSettings, redis_url: str, over: Event) -> bool:
    """Blocks until every frontend is ready and sees a worker, then prints.

    False: `ready_timeout_s` passed first, or `over` was set.
    """
    deadline_s = time.monotonic() + settings.ready_timeout_s
    urls = [base_url(settings, index) for index in range(settings.frontends)]
    for url in urls:
        while not _served_models(url):
            if time.monotonic() > deadline_s or over.wait(POLL_S):
                return False
    body = {
        "model": _served_models(urls[0])[0],
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is Penstock?"}],
    }
    # Where keys are configured the line needs one; what it is only its owner knows.
    asks_for_key = not _answers_ok(f"{urls[0]}/v1/models")
    key = ' -H "authorization: Bearer $KEY"' if asks_for_key else ""
    print(
        f"\nPenstock is ready: {' '.join(urls)}\n\n"
        f"  curl -N {urls[0]}/v1/chat/completions{key} -H 'content-type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        f"Look inside: {inspect_command(redis_url)}\n"
        "Stop: Ctrl-C\n",
        flush=True,
    )
    return True


def base_url(settings: LauncherSettings, index: int) -> str:
    """Where a client on this machine reaches a frontend."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port + index}"


def _served_models(url: str) -> list[str]:
    """Those that a live worker serves: a frontend accepts requests for others too, which wait."""
    try:
        ready = _get_json(f"{url}/ready")
    except OSError:  # not listening yet, or not ready
        return []
    return [name for name in ready["models"] if name not in ready["unserved"]]


def _answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:  # not listening yet, or an HTTP error: URLError is one
        return False


def _get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)
