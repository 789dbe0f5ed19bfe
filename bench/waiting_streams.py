"""What streams cost that wait in the queue, while nothing happens.

    python -m bench.waiting_streams --streams 1500 --seconds 20

Starts a whole service with the echo runner and one seat, which a slow job holds. The other streams
wait behind it: nothing is said to them but keep-alive comments. Prints one JSON line: the CPU
seconds of each process (/proc) over that time as a share of one core, and the same of a service
without a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.machine import cpu_name
from bench.stream_reader import read_stream
from tests.support.launched import REPOSITORY, Launched, descendants_of

AT_ONCE = 64  # requests of which the first byte is waited for
SETTLE_S = 8.0  # after the last stream was opened
MODULES = {"api": "frontend", "worker": "service", "worker.runtime": "engine"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    env = {
        "RUNNER": "echo",
        "MAX_NUM_SEQS": "1",
        "ECHO_STEP_MS": "250",
        "STALL_LIMIT_S": "60",
        "MAX_QUEUED_JOBS": str(arguments.streams + 10),
        "MAX_QUEUE_SHARE_PER_TENANT": "1",
        "REQUEST_TIMEOUT_S": "3600",
        "LOG_LEVEL": "WARNING",
    }
    with (
        tempfile.TemporaryDirectory() as place,
        Launched(Path(place), env, is_forked=False) as penstock,
    ):
        row = asyncio.run(_measure(penstock, arguments))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    print(json.dumps({"commit": commit} | row))


async def _measure(penstock: Launched, arguments: argparse.Namespace) -> dict[str, Any]:
    without = await _shares(penstock, min(5.0, arguments.seconds))
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(_stream(penstock.port, 1900))]
        await asyncio.sleep(2)  # the seat is taken
        opening = asyncio.Semaphore(AT_ONCE)
        for _ in range(arguments.streams):
            await opening.acquire()
            streams.append(group.create_task(_stream(penstock.port, 1, opening)))
        await asyncio.sleep(SETTLE_S)
        waiting = await _num_queued(penstock.port)
        shares = await _shares(penstock, arguments.seconds)
        ended = sum(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
    if waiting < arguments.streams or ended:
        raise RuntimeError(f"{waiting} jobs wait and {ended} streams have ended")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "streams": arguments.streams,
        "seconds": arguments.seconds,
        "percent_of_a_core": shares,
        "without_streams": without,
    }


async def _stream(port: int, max_tokens: int, opening: asyncio.Semaphore | None = None) -> None:
    """Reads one stream to its end. `opening` is released at its first bytes."""
    body = json.dumps({"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    try:
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        first = await reader.read(4096)
        if not first.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {first[-300:]!r}")
        if opening is not None:
            opening.release()
        while await reader.read(4096):
            pass
    finally:
        writer.close()


async def _num_queued(port: int) -> int:
    answer = await read_stream(port, "GET", "/health")
    body = json.loads(answer.tail.partition(b"\r\n\r\n")[2])
    return int(body["waiting"])


async def _shares(penstock: Launched, seconds: float) -> dict[str, float]:
    """Percent of a core that each of the service's processes takes in the next `seconds`."""
    before, begin_s = _cpu_s(penstock), time.perf_counter()
    await asyncio.sleep(seconds)
    after, wall_s = _cpu_s(penstock), time.perf_counter() - begin_s
    return {name: round(100 * (after[name] - before[name]) / wall_s, 2) for name in before}


def _cpu_s(penstock: Launched) -> dict[str, float]:
    tick = os.sysconf("SC_CLK_TCK")
    return {
        name: sum(map(int, stat.rpartition(")")[2].split()[11:13])) / tick
        for name, stat in _processes(penstock)
    }


def _processes(penstock: Launched) -> Iterator[tuple[str, str]]:
    for pid in descendants_of(penstock.pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            module = command[command.index("-m") + 1] if "-m" in command else ""
            is_server = "-server" in command[0]  # with its socket: it names itself
            name = "redis" if is_server else MODULES.get(module)
            if name is not None:
                yield name, Path(f"/proc/{pid}/stat").read_text()


if __name__ == "__main__":
    main()
