"""`make bench`: the workloads against a running service, one JSON line a run, and a plot.

    python -m bench.service --shape qwen3-0.6b -w w1 w2 w3 w4 sweep --runs 3
    python -m bench.service --shape smollm2-135m --env QUANTIZATION=int8
    python -m bench.service --shape qwen3-0.6b --base-url http://127.0.0.1:8101 --label peer
    python -m bench.service -w w1 --peer vllm=http://127.0.0.1:8101@4711 --neighbours 1

Without --base-url it starts Penstock as `make run` does, with random weights of the shape, and goes
through all of it: HTTP, Redis, worker, SSE. With it, any server of the same model that speaks
/v1/completions. Lines are appended to --out; "foreign" is the CPU, in cores, that processes other
than the bench's own and the asked server's took meanwhile: quote no run where it is high. Of a
server that was not started here it needs the process id, behind an @. Peers are asked in turns with
the first server, every second turn in reverse, so that all see the same machine. A neighbour is a
process that loops, bound to no core, while a run lasts. --vllm-pipe measures vLLM's engine without
any service beside the servers: see bench.vllm_pipe.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load_client import completions, new_session
from bench.machine import busy_process, busy_s, conditions
from bench.plot import plot_sweep
from bench.shapes import SHAPES, make_shape, word_ids
from bench.vllm_pipe import KINDS, vllm_pipe
from bench.workloads import WORKLOADS, Prompts, Row, Work, median_row, run_all
from shared.cores import available_cores
from tests.support.launched import REPOSITORY, Launched, descendants_of

SETTLE_S = 1.0  # until the threads of the server before have gone to sleep; OpenMP's spin
RATIOS = ("out_tok_s", "in_tok_s", "ttft_p50_ms", "tpot_p50_ms", "stall_max_ms", "long_ttft_ms")
# Options of a piped vLLM, beside which Penstock runs with the settings of the same names.
PIPED = {
    "engine": "vllm",
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_gb": 2,
}
SHOWN = (
    "concurrency",
    "out_tok_s",
    "in_tok_s",
    "wall_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "gap_p99_ms",
    "base_gap_p50_ms",
    "stall_max_ms",
    "long_ttft_ms",
    "foreign",
    "failed",
)


@dataclass(frozen=True, slots=True)
class Server:
    """One that is measured; `pid` where it is known."""

    label: str
    base_url: str
    pid: int | None = None

    @classmethod
    def at(cls, label: str, place: str) -> Server:
        """Returns the one at `place`, which is URL or URL@PID."""
        base_url, _, pid = place.partition("@")
        return cls(label, base_url, int(pid) if pid else None)


def main() -> None:
    arguments = _arguments()
    directory = make_shape(arguments.models, arguments.shape)
    token_ids = word_ids(directory)
    with _service(arguments, directory) as first:
        servers = [first, *(Server.at(*text.split("=", 1)) for text in arguments.peer)]
        rows = asyncio.run(_run(arguments, servers, token_ids))
    swept = [row for row in rows if row["workload"] == "sweep" and row["label"] == first.label]
    if swept:
        picture = arguments.out.with_suffix(".png")
        plot_sweep([median for _, median in sorted(_medians(swept).items())], picture)
        print(f"plot: {picture}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("-w", "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--base-url", metavar="URL[@PID]", help="of a running server; default: start Penstock"
    )
    parser.add_argument("--model", help="its name there; default: the shape's")
    parser.add_argument("--label", default="penstock")
    parser.add_argument("--peer", nargs="*", default=[], metavar="LABEL=URL[@PID]")
    parser.add_argument(
        "--vllm-pipe", nargs="*", default=[], choices=KINDS, help="vLLM's engine without a service"
    )
    parser.add_argument("--neighbours", type=int, default=0)
    parser.add_argument(
        "--by-blank-lines", action="store_true", help="read streams as `vllm bench serve` does"
    )
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="for Penstock")
    parser.add_argument("--models", type=Path, default=REPOSITORY / ".penstock" / "shapes")
    parser.add_argument("--out", type=Path, default=REPOSITORY / ".penstock" / "bench.jsonl")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    return arguments


@contextlib.contextmanager
def _service(arguments: argparse.Namespace, directory: Path) -> Iterator[Server]:
    if arguments.base_url is not None:
        yield Server.at(arguments.label, arguments.base_url)
        return
    env = {
        "MODEL": str(directory),
        "LOAD_FORMAT": "dummy",
        "MAX_MODEL_LEN": "4096",
        "MAX_NUM_SEQS": "64",
        "LOG_LEVEL": "WARNING",
        "OMP_NUM_THREADS": str(available_cores()),
    }
    env |= dict(pair.split("=", 1) for pair in arguments.env)
    with (
        tempfile.TemporaryDirectory() as place,
        Launched(Path(place), env, is_forked=False) as penstock,
    ):
        yield Server(arguments.label, penstock.base_url, penstock.pid)


async def _run(
    arguments: argparse.Namespace, servers: Sequence[Server], token_ids: list[int]
) -> list[Row]:
    facts = conditions() | {"shape": arguments.shape, "neighbours": arguments.neighbours}
    facts["env"] = sorted(arguments.env)
    rows: list[Row] = []
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(new_session())
        senders = {
            server: completions(
                session,
                server.base_url,
                arguments.model or arguments.shape,
                by_blank_lines=arguments.by_blank_lines,
            )
            for server in servers
        }
        for kind in arguments.vllm_pipe:
            values = PIPED | {"checkpoint": str(arguments.models / arguments.shape)}
            send, pid = await stack.enter_async_context(vllm_pipe(kind, values))
            server = Server(kind, "", pid)
            servers = [*servers, server]
            senders[server] = send
        for send in senders.values():
            warm = Prompts(token_ids, arguments.seed - 1)
            await run_all(send, [Work(warm.take(300), 16) for _ in range(4)], 4)
        for name in arguments.workloads:
            for run in range(arguments.runs):
                for server in servers[:: -1 if run % 2 else 1]:
                    work = WORKLOADS[name](
                        senders[server], Prompts(token_ids, arguments.seed + run)
                    )
                    made, foreign = await _beside(arguments.neighbours, server.pid, work)
                    for row in made:
                        row = {"workload": name, "run": run, "foreign": foreign} | row
                        rows.append(facts | {"label": server.label} | row)
                        _show(rows[-1])
            if arguments.runs > 1:
                _show_medians([row for row in rows if row["workload"] == name], servers)
    with arguments.out.open("a") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")
    return rows


async def _beside(
    neighbours: int, pid: int | None, work: Awaitable[list[Row]]
) -> tuple[list[Row], float | None]:
    """Returns the rows, and the cores that others used meanwhile where `pid` is ours."""
    with contextlib.ExitStack() as stack:
        for _ in range(neighbours):
            stack.enter_context(busy_process())
        await asyncio.sleep(SETTLE_S)
        before = _cpu(pid)
        made = await work
        return made, _foreign(before, _cpu(pid)) if pid is not None else None


def _show_medians(rows: Sequence[Row], servers: Sequence[Server]) -> None:
    """Prints each server's medians, and how many times a peer's are the first server's."""
    first: dict[int, Row] = {}
    for server in servers:
        medians = _medians(row for row in rows if row["label"] == server.label)
        first = first or medians
        for concurrency, median in sorted(medians.items()):
            _show({**median, "run": "median"})
            if server is not servers[0]:
                own = first[concurrency]
                _show(
                    {name: own[name] / median[name] for name in RATIOS if median.get(name)}
                    | {"workload": median["workload"], "run": "times", "label": server.label}
                )


def _medians(rows: Any) -> dict[int, Row]:
    """By concurrency; 0 for workloads that have just one."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("concurrency", 0), []).append(row)
    return {key: median_row(group) for key, group in groups.items()}


def _show(row: Row) -> None:
    cells = [f"{name}={row[name]:.4g}" for name in SHOWN if row.get(name) is not None]
    head = f"{row['workload']} {row['label']} {row['run']}:"
    print(head, *cells, *row.get("errors", ()), flush=True)


def _cpu(pid: int | None) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds of the machine, CPU seconds of ours)."""
    own = 0
    started = () if pid is None else (pid, *descendants_of(pid))
    for process in (os.getpid(), *started):
        with contextlib.suppress(OSError):
            cells = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            own += int(cells[11]) + int(cells[12])
    return time.monotonic(), busy_s(), own / os.sysconf("SC_CLK_TCK")


def _foreign(before: tuple[float, ...], after: tuple[float, ...]) -> float:
    """Cores that others used between two looks."""
    wall, busy, own = (late - early for early, late in zip(before, after, strict=True))
    return max(0.0, (busy - own) / wall)


if __name__ == "__main__":
    main()
