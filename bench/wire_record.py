"""Records what a service sends on the wire, and compares another tree's service with a recording.

    python -m bench.wire_record record FILE [--tree DIRECTORY]
    python -m bench.wire_record replay FILE [--tree DIRECTORY]

Starts services of the tree, in this interpreter's environment, with the echo engine and with the
demo model, sends the requests of bench.wire_requests one after another, and keeps status, headers
and body of each response. Ids, seeds, times and durations are replaced, nothing else. `replay`
prints every difference; responses that differ in prose alone (texts of errors, descriptions of the
OpenAPI document, pages) are counted apart. The exit status is 1 where anything else differs. Needs
httpx and websockets.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
from bench import wire_requests  # noqa: E402 - needs the line above

READY_TIMEOUT_S = 180.0
VOLATILE_HEADERS = {"date", "content-length", "server", "connection"}
SHOWN_LINES = 40  # of one difference

ID = re.compile(
    r"(?<![0-9A-Za-z])(?P<id>(?=[A-Za-z]*[0-9])[0-9A-Za-z]{20,40}|"
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?![0-9A-Za-z])"
)
VOLATILE = re.compile(
    r'(?P<name>"(?:created|updated|seed|[a-z_]*(?:_at|_at_ms|_ms|_s|_seconds|per_second))": ?)'
    r"(?P<value>-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)"
)
TOKEN = re.compile(r"\b[0-9]{10}\.[0-9A-Za-z_-]{40,}")
CHOICE = re.compile(r'"choices":\[\{"index":([0-9]+)')
WORKER = re.compile(r'"worker": ?"[^"]*"')
DATES = re.compile(r"\b20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:.]+(?:Z|\+00:00)")
WAITS = re.compile(r"(?<=^retry-after: ).*|(?<=-reset-requests: ).*|(?<=-tokens: ).*")
# What is written for people and may be written better.
PROSE = re.compile(r'"(message|description|summary|title)": ?"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Exchange:
    """One response; `body` is text, with bytes that are not UTF-8 escaped."""

    name: str
    status: int
    headers: list[str]
    body: str

    def lines(self) -> list[str]:
        """Returns what is compared, one fact to a line."""
        return [f"status {self.status}", *self.headers, *self.body.split("\n")]

    def without_prose(self) -> Exchange:
        body = "" if self.body.lstrip().startswith("<") else PROSE.sub(r'"\1":"..."', self.body)
        return Exchange(self.name, self.status, self.headers, body)


def normalized(text: str) -> str:
    """Replaces ids by their number in this text, times and durations by 0."""
    ids: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"<{ids.setdefault(match['id'], len(ids) + 1)}>"

    text = VOLATILE.sub(r"\g<name>0", ID.sub(numbered, TOKEN.sub("<token>", text)))
    return DATES.sub("<date>", WORKER.sub('"worker":"..."', text))


def by_choice(body: str) -> str:
    """Returns a stream's events choice after choice: those of one moment may come in any order."""

    def choice(event: str) -> float:
        found = CHOICE.search(event)
        return float(found[1]) if found else float("inf")

    return "\n\n".join(sorted(body.split("\n\n"), key=choice))


class Recorder:
    """Sends requests to one service and keeps the responses, by names that begin with `prefix`."""

    def __init__(self, prefix: str, base_url: str, exchanges: list[Exchange]) -> None:
        self.base_url = base_url
        self._prefix = prefix
        self._exchanges = exchanges
        self._http = httpx.Client(base_url=base_url, timeout=120)

    def send(self, name: str, method: str, path: str, **given: Any) -> httpx.Response:
        """Sends a request, with httpx's arguments, and keeps its response."""
        response = self._http.request(method, path, **given)
        headers = [
            WAITS.sub("...", normalized(f"{key}: {value}"))
            for key, value in sorted(response.headers.items())
            if key not in VOLATILE_HEADERS
        ]
        text = response.content.decode("utf-8", "backslashreplace")
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            text = by_choice(text)
        self.keep(name, response.status_code, headers, text)
        return response

    def fetch(self, method: str, path: str, **given: Any) -> httpx.Response:
        """Sends a request whose response is not kept."""
        return self._http.request(method, path, **given)

    def keep(self, name: str, status: int, headers: list[str], text: str) -> None:
        self._exchanges.append(
            Exchange(f"{self._prefix} {name}", status, headers, normalized(text))
        )

    def socket(self, name: str, messages: list[dict[str, Any]], last: set[str]) -> None:
        """Sends each message to the WebSocket of Responses; keeps events up to one of `last`."""
        frames: list[str] = []
        url = self.base_url.replace("http", "ws", 1) + "/v1/responses"
        with connect(url, open_timeout=30) as stream:
            for message in messages:
                stream.send(json.dumps(message))
                while True:
                    frame = stream.recv(timeout=60)
                    frames.append(str(frame))
                    if json.loads(frame)["type"] in last:
                        break
        self.keep(name, 101, [], "\n".join(frames))


@contextmanager
def service(tree: Path, directory: Path, settings: dict[str, str]) -> Iterator[str]:
    """Yields the base URL of a service of this tree once it is ready. Raises RuntimeError with its
    output where it does not become ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = "penstock.launcher" if (tree / "penstock/launcher").is_dir() else "shared.launcher"
    environment = {
        **{name: value for name, value in os.environ.items() if "PENSTOCK" not in name},
        **{f"PENSTOCK_{name}": value for name, value in settings.items()},
        "PENSTOCK_PORT": str(port),
        "PENSTOCK_DATA_DIR": str(directory / "data"),
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
    }
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    base_url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while "Stop: Ctrl-C" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the service is not ready:\n{log.read_text()}")
            time.sleep(0.1)
        while not _are_served(base_url, environment.get("PENSTOCK_MODELS_FILE")):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"a model is not served:\n{log.read_text()}")
            time.sleep(0.1)
        yield base_url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _are_served(base_url: str, models_file: str | None) -> bool:
    """Returns whether a worker serves each model of the file."""
    if models_file is None:
        return True
    listed = httpx.get(f"{base_url}/v1/models").json()["data"]
    served = sum(model["is_served"] for model in listed)
    return bool(served == Path(models_file).read_text().count("[[models]]"))


def recorded(tree: Path) -> list[Exchange]:
    """Returns what the services of this tree respond."""
    exchanges: list[Exchange] = []
    for name, settings, requests in wire_requests.SERVICES:
        with tempfile.TemporaryDirectory(prefix="wire-") as folder:
            directory = Path(folder)
            with service(tree, directory, settings(tree, directory)) as base_url:
                requests(Recorder(name, base_url, exchanges))
        print(f"{name}: {len(exchanges)} responses so far", file=sys.stderr, flush=True)
    return exchanges


def compare(old: list[Exchange], new: list[Exchange]) -> int:
    """Prints the differences. Returns the number of responses that differ in more than prose."""
    before = {one.name: one for one in old}
    after = {one.name: one for one in new}
    num_prose, different = 0, 0
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if one == other:
            continue
        is_prose = bool(one and other and one.without_prose() == other.without_prose())
        num_prose += is_prose
        different += not is_prose
        print(f"{'--- prose' if is_prose else '=== DIFFERENT'}: {name}")
        lines = difflib.unified_diff(
            one.lines() if one else [], other.lines() if other else [], lineterm="", n=0
        )
        print("\n".join(line[:1500] for line in list(lines)[2 : 2 + SHOWN_LINES]))
    print(
        f"{len(before)} responses recorded, {len(after)} now: {different} different, "
        f"{num_prose} in prose alone (texts of errors, descriptions, pages)"
    )
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["record", "replay"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tree", type=Path, default=REPOSITORY)
    parser.add_argument("--save", type=Path, help="replay: keep the new recording, too")
    args = parser.parse_args()
    new = recorded(args.tree.resolve())
    path = args.file if args.action == "record" else args.save
    if path is not None:
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in new)
    if args.action == "record":
        print(f"{len(new)} responses, {path.stat().st_size} bytes")
        return 0
    with gzip.open(args.file, "rt") as file:
        old = [Exchange(**json.loads(line)) for line in file]
    return 1 if compare(old, new) else 0


if __name__ == "__main__":
    sys.exit(main())
