"""The whole service on a GPU, or a peer under the same loads; the table comes last.

    python3 -m bench.gpu_service --shape qwen3-0.6b --out results
    python3 -m bench.gpu_service --shape qwen3-0.6b --peer vllm --out results
    python3 -m bench.gpu_service --shape tiny --device cpu --quick --out results

Starts Redis, a worker and frontends as `make run` does, with random weights of the shape made on
the device, and the same once more with the echo engine, whose times are those of HTTP, queue and
Redis alone. Clients are processes of their own, each at one frontend. The loads:

    together   256 requests at once, prompts and outputs of 100 to 1024 tokens, greedy
    mixed      512 requests, 128 at a time, lengths like ShareGPT's, temperature 0.7, top-p 0.8,
               top-k 20
    turns      32 requests, one after the other, 128 tokens in, 32 out
    long       32 streams decode while four prompts of 8192 tokens come in, one after the other

Outputs run to their length. JSON lines are written as they come: `floor` is the part of the time
that bytes and operations take at ceilings measured before, see bench.floor. With --peer the
server is vLLM's own, of this interpreter; where it cannot be imported the table says so, and the
exit status is 3.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.floor import Ceilings, ModelCost, floor_s, measured_ceilings
from bench.load_client import completions, new_session
from bench.machine import conditions
from bench.shapes import SHAPES, make_shape, word_ids
from bench.workloads import (
    Prompts,
    Row,
    Seen,
    Send,
    Work,
    clock,
    run_all,
    streams_beside,
    summary,
)
from shared.process import dying_with_this_process
from tests.support.launched import REPOSITORY, Launched, free_port

NOT_THERE = 3
SEATS = 256
READY_TIMEOUT_S = 240.0
START_S = 1.0  # until all clients have begun
QWEN_DEFAULTS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is of everything."""

    together: int = 256
    shortest: int = 100
    longest: int = 1024
    mixed: int = 512
    mixed_at_once: int = 128
    turns: int = 32
    streams: int = 32
    stream_tokens: int = 1024
    long_prompts: int = 4
    long_prompt: int = 8192

    @property
    def max_model_len(self) -> int:
        return max(2 * self.longest, self.long_prompt + 64, 2048 + 1024)


QUICK = Sizes(
    together=8,
    shortest=4,
    longest=24,
    mixed=6,
    mixed_at_once=3,
    turns=3,
    streams=3,
    stream_tokens=512,  # they outlast the prompts also where the clients get no processor
    long_prompts=2,
    long_prompt=200,
)


@dataclass(frozen=True, slots=True)
class Server:
    """What is measured: the addresses of one service, and the model's name there."""

    label: str
    base_urls: tuple[str, ...]
    model: str


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind, at most so many at once."""

    name: str
    works: tuple[Work, ...]
    at_once: int
    sampling: Mapping[str, object] = field(default_factory=dict)


def main() -> int:
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.peer and importlib.util.find_spec(arguments.peer) is None:
        _write(arguments.out, {"label": arguments.peer, "shape": arguments.shape, "there": False})
        print(f"{arguments.peer}: not there: {sys.executable} cannot import it; nothing measured")
        return NOT_THERE
    sizes = QUICK if arguments.quick else Sizes()
    ceilings = measured_ceilings() if arguments.device == "cuda" else None
    directory = make_shape(REPOSITORY / ".penstock" / "shapes", arguments.shape)
    token_ids = word_ids(directory)
    facts: Row = conditions() | {"shape": arguments.shape, "quick": arguments.quick}
    facts["device"] = ceilings.device if ceilings else arguments.device
    rows: list[Row] = []

    def measure(server: Server, names: Sequence[str]) -> None:
        for name in names:
            prompts = Prompts(token_ids, arguments.seed)
            row: Row = {"label": server.label, "load": name}
            if name == "long":
                row |= asyncio.run(_beside_long_prompts(server, sizes, prompts))
            else:
                load = load_of(name, sizes, prompts)
                _send_all(server, load_of(name, QUICK, prompts), 1)  # the last kernels are compiled
                row |= summary(_send_all(server, load, min(arguments.clients, load.at_once)))
                if ceilings is not None and server.label != "echo" and not row["failed"]:
                    cost = ModelCost.of(SHAPES[arguments.shape])
                    row["floor"] = floor_s(cost, load.works, load.at_once, ceilings) / row["wall_s"]
            rows.append(facts | row)
            _write(arguments.out, rows[-1])
            print(_line(row), flush=True)

    every = ("turns", "together", "mixed", "long")
    if arguments.peer:
        with _vllm(directory, arguments, sizes) as server:
            measure(server, every)
    else:
        with _penstock(directory, arguments, sizes, {"RUNNER": "echo"}) as server:
            measure(server, ("turns", "together"))
        with _penstock(directory, arguments, sizes, {}) as server:
            measure(server, every)
    _print_table(rows, ceilings)
    return 1 if any(row["failed"] for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--peer", choices=("vllm",), help="its own server, in place of Penstock")
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4, help="processes that send and read")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument("--out", type=Path, default=REPOSITORY / ".penstock" / "gpu-bench")
    return parser.parse_args()


@contextlib.contextmanager
def _penstock(
    directory: Path, arguments: argparse.Namespace, sizes: Sizes, more: Mapping[str, str]
) -> Iterator[Server]:
    label = "echo" if more.get("RUNNER") == "echo" else "penstock"
    env = {
        "MODEL": str(directory),
        "SERVED_MODEL_NAME": arguments.shape,
        "DEVICE": arguments.device,
        "MAX_MODEL_LEN": str(sizes.max_model_len),
        "MAX_NUM_SEQS": str(SEATS),
        "FRONTENDS": str(arguments.frontends),
        "LOG_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "2" if arguments.quick else "4",
        # What stands beside this program on a bare machine stands beside its children.
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
        ),
    }
    if label == "echo":  # the tokens of all sequences find a place
        env["NUM_KV_BLOCKS"] = str(SEATS * sizes.max_model_len // 16)
    else:
        env["LOAD_FORMAT"] = "dummy"
    with (
        tempfile.TemporaryDirectory() as place,
        Launched(Path(place), env | dict(more), READY_TIMEOUT_S) as penstock,
    ):
        ports = range(penstock.port, penstock.port + arguments.frontends)
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        yield Server(label, urls, arguments.shape)


@contextlib.contextmanager
def _vllm(directory: Path, arguments: argparse.Namespace, sizes: Sizes) -> Iterator[Server]:
    """vLLM as it serves by itself, with the same seats and budget."""
    port = free_port()
    words = {
        "--model": str(directory),
        "--served-model-name": arguments.shape,
        "--load-format": "dummy",
        "--dtype": "bfloat16",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(sizes.max_model_len),
        "--max-num-seqs": str(SEATS),
        "--max-num-batched-tokens": "8192",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [word for pair in words.items() for word in pair]
    with (arguments.out / "vllm.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, preexec_fn=dying_with_this_process()
        )
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}/health", server)
            yield Server("vllm", (f"http://127.0.0.1:{port}",), arguments.shape)
        finally:
            server.terminate()
            server.wait(60)


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}; see its log")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {READY_TIMEOUT_S:g} s")


def load_of(name: str, sizes: Sizes, prompts: Prompts) -> Load:
    """Returns the requests of a load but `long`."""
    draw = prompts.random
    if name == "turns":
        works = [Work(prompts.take(128), 32) for _ in range(sizes.turns)]
        return Load(name, tuple(works), 1)
    if name == "together":
        bounds = (sizes.shortest, sizes.longest)
        works = [
            Work(prompts.take(draw.randint(*bounds)), draw.randint(*bounds))
            for _ in range(sizes.together)
        ]
        return Load(name, tuple(works), len(works))
    # Of ShareGPT's first turns that are neither tiny nor huge: means of some 220 tokens in and 200
    # out, with long tails.
    works = []
    for _ in range(sizes.mixed):
        num_in = min(1024, max(4, round(draw.lognormvariate(4.6, 1.2))))
        num_out = min(1024, max(4, round(draw.lognormvariate(4.9, 0.9))))
        works.append(Work(prompts.take(num_in), num_out))
    return Load(name, tuple(works), min(sizes.mixed_at_once, len(works)), QWEN_DEFAULTS)


def _send_all(server: Server, load: Load, num_clients: int) -> list[Seen]:
    """Sends a load by so many processes that begin at one instant."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_clients, mp_context=context) as pool:
        list(pool.map(_imported, range(num_clients)))
        begin_s = clock() + START_S
        found = [
            pool.submit(
                _client,
                server.base_urls[number % len(server.base_urls)],
                server.model,
                load.works[number::num_clients],
                -(-load.at_once // num_clients),
                dict(load.sampling),
                begin_s,
            )
            for number in range(num_clients)
        ]
        return [seen for one in found for seen in one.result()]


def _imported(number: int) -> int:
    """Has a process started, with what it imports, before the time is taken."""
    time.sleep(0.1)
    return number


def _client(
    base_url: str,
    model: str,
    works: Sequence[Work],
    at_once: int,
    sampling: dict[str, object],
    begin_s: float,
) -> list[Seen]:
    async def run() -> list[Seen]:
        async with new_session() as session:
            send = completions(session, base_url, model, sampling=sampling)
            await asyncio.sleep(max(0.0, begin_s - clock()))  # one clock for all processes
            return await run_all(send, works, at_once)

    return asyncio.run(run())


async def _beside_long_prompts(server: Server, sizes: Sizes, prompts: Prompts) -> Row:
    streams = [Work(prompts.take(64), sizes.stream_tokens) for _ in range(sizes.streams)]
    long = [Work(prompts.take(sizes.long_prompt), 16) for _ in range(sizes.long_prompts)]
    async with new_session() as session:
        senders: list[Send] = [completions(session, url, server.model) for url in server.base_urls]
        return await streams_beside(senders[-1], streams, senders[0], long)


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("out_tok_s", "out tok/s", lambda value: f"{value:,.0f}"),
    ("ttft_p50_ms", "TTFT p50 ms", lambda value: f"{value:,.1f}"),
    ("ttft_p99_ms", "p99", lambda value: f"{value:,.1f}"),
    ("tpot_p50_ms", "TPOT p50 ms", lambda value: f"{value:.2f}"),
    ("stall_max_ms", "worst gap ms", lambda value: f"{value:,.0f}"),
    ("long_ttft_ms", "its prompts' TTFT", lambda value: f"{value:,.0f}"),
    ("floor", "of the floor", lambda value: f"{value:.2f}"),
    ("failed", "failed", lambda value: f"{value:.0f}"),
)


def _line(row: Row) -> str:
    cells = [f"{title} {form(row[name])}" for name, title, form in COLUMNS if name in row]
    return f"{row['label']} {row['load']}: " + ", ".join([*cells, *row.get("errors", ())])


def _print_table(rows: Sequence[Row], ceilings: Ceilings | None) -> None:
    if ceilings is not None:
        print(
            f"\n{ceilings.device}: copy {ceilings.copy_bytes_s / 1e12:.2f} TB/s, product "
            f"{ceilings.product_flops_s / 1e12:.0f} TFLOP/s"
        )
    print("\n| " + " | ".join(["", *(title for _, title, _ in COLUMNS)]) + " |")
    print("| --- |" + " ---: |" * len(COLUMNS))
    for row in rows:
        cells = [form(row[name]) if name in row else "" for name, _, form in COLUMNS]
        print("| " + " | ".join([f"{row['label']}, {row['load']}", *cells]) + " |")


def _write(directory: Path, row: Row) -> None:
    with (directory / "service.jsonl").open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
