"""What a generated token costs on the wire: round trips, Redis CPU, bytes written.

    python tests/bench/wire_cost.py --streams 1 32 128 --tokens 200 --step-ms 10

Starts a service of its own with the echo runner (a step of fixed length, no model), reads that many
streams at once and prints one JSON line per number of streams: differences of the server's own
counters (INFO), divided by the tokens that were generated. Script calls are the round trips of
both sides that change something: submits, pulls, appends, heartbeats, reaps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import redis  # noqa: E402

from tests.bench.stream_reader import read_stream  # noqa: E402
from tests.support.launched import Launched, descendants_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=10.0)
    arguments = parser.parse_args()
    env = {
        "RUNNER": "echo",
        "ECHO_STEP_MS": f"{arguments.step_ms:g}",
        "MAX_NUM_SEQS": "128",
        "MAX_NUM_BATCHED_TOKENS": "4096",
        "LOG_LEVEL": "WARNING",
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        Launched(Path(directory), env, is_forked=False) as penstock,
    ):
        socket = Path(directory) / ".penstock/redis/redis.sock"
        with redis.Redis(unix_socket_path=str(socket)) as server:
            asyncio.run(read_all(penstock.port, 4, 20))  # warm
            for streams in arguments.streams:
                row = measure(penstock, server, streams, arguments.tokens)
                print(json.dumps(conditions() | {"step_ms": arguments.step_ms} | row), flush=True)


def measure(penstock: Launched, server: Any, streams: int, tokens: int) -> dict[str, Any]:
    before, cpu_before = counters(server), cpu_of(penstock)
    started = time.perf_counter()
    generated, chunks = asyncio.run(read_all(penstock.port, streams, tokens))
    wall_s = time.perf_counter() - started
    after, cpu_after = counters(server), cpu_of(penstock)
    per = {name: (after[name] - before[name]) / generated for name in before}
    return {
        "streams": streams,
        "tokens": generated,
        "tok_s": round(generated / wall_s, 1),
        "chunks_per_token": round(chunks / generated, 3),
        "script_calls_per_token": round(per["scripts"], 4),
        "redis_cpu_us_per_token": round(per["cpu_s"] * 1e6, 2),
        "aof_bytes_per_token": round(per["aof_bytes"], 1),
        "cpu_us_per_token": {
            name: round((cpu_after[name] - cpu_before[name]) / generated * 1e6, 1)
            for name in cpu_before
        },
    }


def counters(server: Any) -> dict[str, float]:
    stats = server.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()}
    everything = server.info()
    return {
        "scripts": calls.get("evalsha", 0) + calls.get("eval", 0),
        "cpu_s": everything["used_cpu_sys"] + everything["used_cpu_user"],
        "aof_bytes": everything["aof_current_size"],
    }


def cpu_of(penstock: Launched) -> dict[str, float]:
    """CPU seconds so far of each side's processes."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {"frontend": 0.0, "service": 0.0, "engine": 0.0}
    for pid in descendants_of(penstock.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        module = command[command.index("-m") + 1] if "-m" in command else ""
        names = {"api": "frontend", "worker": "service", "worker.engine_process": "engine"}
        if module in names:
            found[names[module]] += (int(fields[11]) + int(fields[12])) / tick
    return found


async def read_all(port: int, streams: int, tokens: int) -> tuple[int, int]:
    """Reads that many streams at once; returns the tokens generated and the chunks they came in."""
    bodies = [
        json.dumps({"prompt": f"stream {index} of the bench", "max_tokens": tokens}).encode()
        for index in range(streams)
    ]
    reads = await asyncio.gather(*(read_stream(port, "POST", "/generate", body) for body in bodies))
    whole = f'"completion_tokens":{tokens},'.encode()
    if cut := [read.tail for read in reads if whole not in read.tail]:
        raise SystemExit(f"{len(cut)} streams were cut, one with {cut[0][-200:]!r}")
    return streams * tokens, sum(read.num_chunks - 2 for read in reads)  # its end, and [DONE]


def conditions() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    return {"commit": commit, "machine": platform.machine(), "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2)}  # fmt: skip


if __name__ == "__main__":
    main()
