"""What a generated token costs on the wire: round trips, Redis CPU, bytes written.

    python bench/wire_cost.py --streams 1 32 256 --tokens 200 --step-ms 10

Starts a service of its own with the echo runner (a step of fixed length, no model), prints a JSON
line of what it costs Redis without a stream, then reads that many streams at once and prints a line
per number of streams: differences of the server's own counters (INFO), divided by the tokens that
were generated. Script calls are the round trips of
both sides that change something: submits, pulls, appends, heartbeats, reaps. Entries a token say
how much was late: 1 where no token waited for the write before it.
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
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import redis  # noqa: E402

from bench.stream_reader import read_stream  # noqa: E402
from tests.support.launched import Launched, descendants_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--frontends", type=int, default=1, help="processes, with equal streams")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--idle-s", type=float, default=10.0, help="without a stream, at first")
    arguments = parser.parse_args()
    env = {
        "RUNNER": "echo",
        "ECHO_STEP_MS": f"{arguments.step_ms:g}",
        "MAX_NUM_SEQS": str(max(128, *arguments.streams)),
        "MAX_NUM_BATCHED_TOKENS": "4096",
        "FRONTENDS": str(arguments.frontends),
        "WORKERS": str(arguments.workers),
        "LOG_LEVEL": "WARNING",
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        Launched(Path(directory), env, is_forked=False) as penstock,
    ):
        socket = Path(directory) / ".penstock/redis/redis.sock"
        with redis.Redis(unix_socket_path=str(socket)) as server:
            ports = range(penstock.port, penstock.port + arguments.frontends)
            asyncio.run(read_all(ports, 4 * len(ports), 20))  # warm
            print(json.dumps(idle(server, arguments.idle_s)), flush=True)
            for streams in arguments.streams:
                row = measure(penstock, server, ports, streams, arguments.tokens)
                print(json.dumps(conditions() | {"step_ms": arguments.step_ms} | row), flush=True)


def idle(server: Any, seconds: float) -> dict[str, Any]:
    """Returns what the service costs Redis without a stream."""
    before = counters(server)
    time.sleep(seconds)
    after = counters(server)
    return {
        "idle_redis_cpu_share": round((after["cpu_s"] - before["cpu_s"]) / seconds, 5),
        "redis_connections": server.info("clients")["connected_clients"] - 1,  # without this one
    }


def measure(
    penstock: Launched, server: Any, ports: Sequence[int], streams: int, tokens: int
) -> dict[str, Any]:
    before, cpu_before = counters(server), cpu_of(penstock)
    started = time.perf_counter()
    generated, chunks, sent_bytes = asyncio.run(read_all(ports, streams, tokens))
    wall_s = time.perf_counter() - started
    after, cpu_after = counters(server), cpu_of(penstock)
    cpu_s = {
        name: [cpu - cpu_before[name].get(pid, 0.0) for pid, cpu in found.items()]
        for name, found in cpu_after.items()
    }
    per = {name: (after[name] - before[name]) / generated for name in before}
    return {
        "streams": streams,
        "tokens": generated,
        "tok_s": round(generated / wall_s, 1),
        "chunks_per_token": round(chunks / generated, 3),
        "entries_per_token": round(per["entries"], 3),
        "script_calls_per_token": round(per["scripts"], 4),
        "redis_cpu_us_per_token": round(per["cpu_s"] * 1e6, 2),
        "aof_bytes_per_token": round(per["aof_bytes"], 1),
        "redis_in_bytes_per_token": round(per["net_in"], 1),
        "redis_out_bytes_per_token": round(per["net_out"], 1),
        "sse_bytes_per_token": round(sent_bytes / generated, 1),
        "cpu_us_per_token": {
            name: round(sum(used) / generated * 1e6, 1) for name, used in cpu_s.items()
        },
        "frontend_cores": [round(used / wall_s, 2) for used in cpu_s["frontend"]],
    }


def counters(server: Any) -> dict[str, float]:
    stats = server.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()}
    everything = server.info()
    return {
        "scripts": calls.get("evalsha", 0) + calls.get("eval", 0),
        "entries": calls.get("xadd", 0),
        "cpu_s": everything["used_cpu_sys"] + everything["used_cpu_user"],
        "aof_bytes": everything["aof_current_size"],
        "net_in": everything["total_net_input_bytes"],
        "net_out": everything["total_net_output_bytes"],
    }


def cpu_of(penstock: Launched) -> dict[str, dict[int, float]]:
    """CPU seconds so far of each side's processes, by their ids."""
    tick = os.sysconf("SC_CLK_TCK")
    found: dict[str, dict[int, float]] = {"frontend": {}, "service": {}, "engine": {}}
    for pid in descendants_of(penstock.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        module = command[command.index("-m") + 1] if "-m" in command else ""
        names = {"api": "frontend", "worker": "service", "worker.runtime": "engine"}
        if module in names:
            found[names[module]][pid] = (int(fields[11]) + int(fields[12])) / tick
    return found


async def read_all(ports: Sequence[int], streams: int, tokens: int) -> tuple[int, int, int]:
    """Reads that many streams at once, of the ports in turn; returns the tokens generated, the
    chunks they came in and the bytes of the responses."""
    bodies = [
        json.dumps({"prompt": f"stream {index} of the bench", "max_tokens": tokens}).encode()
        for index in range(streams)
    ]
    reads = await asyncio.gather(
        *(
            read_stream(port, "POST", "/generate", body)
            for port, body in zip(cycle(ports), bodies, strict=False)
        )
    )
    whole = f'"completion_tokens":{tokens},'.encode()
    if cut := [read.tail for read in reads if whole not in read.tail]:
        raise SystemExit(f"{len(cut)} streams were cut, one with {cut[0][-200:]!r}")
    chunks = sum(read.num_chunks - 2 for read in reads)  # without its end, and [DONE]
    return streams * tokens, chunks, sum(read.num_bytes for read in reads)


def conditions() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    return {"commit": commit, "machine": platform.machine(), "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2)}  # fmt: skip


if __name__ == "__main__":
    main()
