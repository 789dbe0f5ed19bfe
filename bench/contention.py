"""What a busy core costs: one stream quiet and beside a busy process, and two workers beside one.

    python -m bench.contention --shape smollm2-135m --quantization none int8 --turns 5
    python -m bench.contention --shape smollm2-135m --streams 4 16 64
    python -m bench.contention --shape smollm2-135m --peer vllm=http://127.0.0.1:8101

Starts Penstock as `make run` does, with random weights of the shape, once for each quantization,
and again with WORKERS=2. All of them and the peers, servers of the same model that speak
/v1/completions, stay up; each turn asks one after the other, every second turn in reverse, so that
all see the same machine. A stream is 128 tokens in and --tokens out; one alone is asked for quiet
and beside a busy process, which loops and is bound to no core, several begin at once. Prints a JSON
line for each run, with how many streams each worker ran, and at the end medians side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.load_client import completions, new_session
from bench.machine import busy_process, cpu_name
from bench.shapes import SHAPES, make_shape, word_ids
from bench.workloads import Prompts, Row, Seen, Send, Work, run_all, summary
from tests.support.launched import REPOSITORY, Launched

WARM_STREAMS = 4


@dataclass(frozen=True, slots=True)
class Server:
    """One that is measured; `workers` 0: a peer, of which that is not known."""

    label: str
    base_url: str
    model: str
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Plight:
    """What a server is asked for, and beside what."""

    streams: int
    neighbours: int = 0  # busy processes

    @property
    def name(self) -> str:
        if self.streams > 1:
            return f"{self.streams} streams"
        return "busy" if self.neighbours else "quiet"


def main() -> None:
    arguments = _arguments()
    directory = make_shape(arguments.models, arguments.shape)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(_penstock(arguments, directory, source, quantization, workers))
            for source in arguments.source
            for quantization in arguments.quantization
            for workers in arguments.workers
        ]
        servers += [_peer(text, arguments.model or arguments.shape) for text in arguments.peer]
        rows = asyncio.run(_measure(arguments, servers, word_ids(directory)))
    _show_medians(rows, servers)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--quantization", nargs="*", default=["none"])
    parser.add_argument("--workers", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--peer", nargs="*", default=[], metavar="LABEL=URL")
    parser.add_argument("--model", help="its name at the peers; default: the shape's")
    parser.add_argument(
        "--streams", nargs="+", type=int, default=[1, 4], help="at once; 1: quiet and busy"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of a stream")
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="for Penstock")
    parser.add_argument("--models", type=Path, default=REPOSITORY / ".penstock" / "shapes")
    parser.add_argument(
        "--source", nargs="+", type=Path, default=[REPOSITORY], help="checkouts to start it from"
    )
    return parser.parse_args()


@contextlib.contextmanager
def _penstock(
    arguments: argparse.Namespace,
    directory: Path,
    source: Path,
    quantization: str,
    workers: int,
) -> Iterator[Server]:
    env = {
        "MODEL": str(directory),
        "LOAD_FORMAT": "dummy",
        "MAX_MODEL_LEN": "2048",
        "KV_CACHE_MEMORY_GB": "0.5",
        "LOG_LEVEL": "WARNING",
        "QUANTIZATION": quantization,
        "WORKERS": str(workers),
        "OMP_NUM_THREADS": "",
        "PYTHONPATH": str(source.resolve()),
    }
    env |= dict(pair.split("=", 1) for pair in arguments.env)
    with (
        tempfile.TemporaryDirectory() as place,
        Launched(Path(place), env, is_forked=False) as penstock,
    ):
        label = f"penstock {quantization} workers={workers}"
        if len(arguments.source) > 1:
            label = f"{source.resolve().name}: {label}"
        yield Server(label, penstock.base_url, arguments.shape, workers)


def _peer(text: str, model: str) -> Server:
    label, _, url = text.partition("=")
    return Server(label, url, model)


async def _measure(
    arguments: argparse.Namespace, servers: Sequence[Server], token_ids: list[int]
) -> list[Row]:
    facts = {"cpu": cpu_name(), "cores": os.cpu_count(), "shape": arguments.shape}
    rows: list[Row] = []
    async with new_session() as session:
        senders = [completions(session, server.base_url, server.model) for server in servers]
        for send in senders:
            warm = Prompts(token_ids, 0)
            works = [Work(warm.take(128), 16) for _ in range(WARM_STREAMS)]
            await run_all(send, works, WARM_STREAMS)
        for turn in range(arguments.turns):
            order = list(zip(servers, senders, strict=True))[:: -1 if turn % 2 else 1]
            plights = _plights(arguments.streams)
            for at, plight in enumerate(plights):
                for server, send in order:
                    if plight.streams == 1 and server.workers > 1:
                        continue  # one stream is computed by one worker
                    prompts = Prompts(token_ids, turn * len(plights) + at + 1)
                    seen = await _run(send, prompts, plight, arguments.tokens)
                    row = {"label": server.label, "plight": plight.name, "turn": turn}
                    row |= _shown(summary(seen))
                    if server.workers:
                        row["division"] = await _division(session, server, seen)
                    rows.append(row)
                    print(json.dumps(facts | row), flush=True)
    return rows


def _plights(streams: Sequence[int]) -> list[Plight]:
    plights = [Plight(1), Plight(1, neighbours=1)] if 1 in streams else []
    return plights + [Plight(count) for count in streams if count > 1]


async def _run(send: Send, prompts: Prompts, plight: Plight, tokens: int) -> list[Seen]:
    works = [Work(prompts.take(128), tokens) for _ in range(plight.streams)]
    with contextlib.ExitStack() as stack:
        for _ in range(plight.neighbours):
            stack.enter_context(busy_process())
        return await run_all(send, works, plight.streams)


def _shown(row: Row) -> Row:
    wanted = ("ok", "failed", "errors", "out_tok_s", "tpot_p50_ms", "ttft_p50_ms", "gap_max_ms")
    return {
        name: round(row[name], 2) if isinstance(row[name], float) else row[name]
        for name in wanted
        if name in row
    }


async def _division(
    session: aiohttp.ClientSession, server: Server, seen: Sequence[Seen]
) -> list[int]:
    """How many of the streams each worker ended, most first; 0 for one that had none."""
    ended = Counter[str]()
    for one in seen:
        if one.answer_id:
            async with session.get(f"{server.base_url}/v1/jobs/{one.answer_id}") as answer:
                ended[(await answer.json())["worker"]] += 1
    counts = sorted(ended.values(), reverse=True)
    return counts + [0] * (server.workers - len(counts))


def _show_medians(rows: Sequence[Row], servers: Sequence[Server]) -> None:
    """Output tokens a second, and of several workers how they divided the streams, turn by turn."""
    names = list(dict.fromkeys(row["plight"] for row in rows))
    print(f"{'':34}" + "".join(f" {name:>11}" for name in names))
    for server in servers:
        mine = [row for row in rows if row["label"] == server.label]
        cells = []
        for name in names:
            found = [r["out_tok_s"] for r in mine if r["plight"] == name and "out_tok_s" in r]
            cells.append(f"{statistics.median(found) if found else float('nan'):11.1f}")
        print(f"{server.label:34} " + " ".join(cells))
        if server.workers > 1:
            for name in names:
                divisions = [r["division"] for r in mine if r["plight"] == name]
                if divisions:
                    output = ", ".join("+".join(map(str, division)) for division in divisions)
                    print(f"{'':6}{name} were divided as {output}")


if __name__ == "__main__":
    main()
