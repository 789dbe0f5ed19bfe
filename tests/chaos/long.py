"""A long round: streams under load while everything is broken at random.

    python -m tests.chaos.long --streams 10000 --seed 1
    python -m tests.chaos.long --streams 400 --partitions 3
    python -m tests.chaos.long --streams 400 --engines vllm,penstock

With `--engines` a tiny model answers in place of the echo, in float32, on two workers of each
engine, which take from one queue. With `--partitions` the jobs are spread over several.

A hostile tenant fills one pot after the other meanwhile, of which nobody else may notice a refusal.
Every stream is checked as in the scenarios, and beside the streams whole answers, background
responses, Messages and batches; at the end the store must be at rest and true, and every job's
history, as its readers and its workers recorded it, linearizable. The last line is a summary; the
exit status is 1 when anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from api.auth.keys import digest_of, new_key
from tests.chaos.harness.api_clients import ApiClients
from tests.chaos.harness.clients import Client
from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.expected import Answers, EchoText, ModelText, never_end
from tests.chaos.harness.faults_at_random import RandomFaults
from tests.chaos.harness.hostile_tenant import SMALL_POTS, HostileTenant
from tests.chaos.harness.oracle import StoreOracle, check_reading
from tests.chaos.harness.proxy import Proxy
from tests.support.checkpoints import make_checkpoint
from tests.support.faults.sitecustomize import POISON_TOKEN, TRAP
from tests.support.job_history import END, HISTORY, HistoryWriter, read_histories
from tests.support.linearizability import check_history
from tests.support.settable_clock import SettableClock
from tests.support.vllm_worker import own_settings, vllm_settings, with_faults

READERS = 48  # streams open at once
MIN_TOKENS, MAX_TOKENS = 20, 60
KINDS = {
    "resuming": 850.0,  # go on at another frontend when their connection breaks
    "plain": 100.0,  # do not
    "leaving": 50.0,  # go away in the middle
    "poison": 0.5,  # kill the engine that they run on
    "chat": 60.0,  # whole answers, sent again under their keys
    "message": 40.0,  # streams of the Messages API
    "response": 60.0,  # in the background, read at any frontend
    "batch": 1.5,
}
KEYS = {tenant: new_key() for tenant in ("readers", "askers", "hostile")}
OF_OTHERS = ("store_full", "server_overloaded")  # codes that no fault of a round explains
STREAM_TIMEOUT_S = 300.0  # all workers may have to load a model first
JOBS_KEPT_S = 50.0  # rows of a batch can be looked at for a minute after they were saved
REPORT_EVERY_S = 15.0
MAX_SHOWN = 20
ECHO_WORKERS: dict[str, Any] = {
    "num_workers": 3,
    "ECHO_STEP_MS": 5,
    "MAX_NUM_SEQS": 32,
    "LEASE_MS": 2000,
    "STALL_LIMIT_S": 2,
}


class Round:
    """One round's load and what became of it."""

    def __init__(
        self,
        deployment: Deployment,
        answers: Answers,
        apis: ApiClients,
        history: HistoryWriter,
        num_streams: int,
        seed: int,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.num_tokens = 0
        self.num_connections = 0
        self.waits_s: list[float] = []
        self._deployment = deployment
        self._answers = answers
        self._apis = apis
        self.refusals: Counter[str] = Counter()  # of the readers
        self._history = history
        self._rng = random.Random(seed)
        self._num_streams = num_streams
        self._num_begun = 0

    @property
    def num_done(self) -> int:
        return self.outcomes.total()

    async def run(self) -> None:
        await asyncio.gather(*(self._read_streams() for _ in range(READERS)))

    async def _read_streams(self) -> None:
        while self._num_begun < self._num_streams:
            self._num_begun += 1
            try:
                self.outcomes[await self._stream()] += 1
            except Exception as error:  # all of them belong into the report
                self.outcomes["WRONG"] += 1
                self.failures.append(f"{type(error).__name__}: {error}")
                print(f"  WRONG {self.failures[-1]}", flush=True)

    async def _stream(self) -> str:
        rng = self._rng
        prompt = self._answers.draw(rng)
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        if kind in ("chat", "message", "response", "batch"):
            return await self._ask(kind)
        if kind == "poison":
            prompt = [POISON_TOKEN, *prompt]
        client = Client(
            self._deployment.urls,
            prompt,
            rng.randint(MIN_TOKENS, MAX_TOKENS),
            first_url=rng.randrange(2),
            resumes=kind in ("resuming", "poison"),
            api_key=KEYS["readers"],
            **self._answers.request(prompt),
        ).start()
        if kind == "leaving":
            return await self._leave(client, rng.randint(0, 15))
        try:
            reading = await client.ended(STREAM_TIMEOUT_S)
        finally:
            await client.close()
            self.refusals += client.reading.refusals
        self.num_tokens += reading.num_tokens
        self.num_connections += reading.num_connections
        self.waits_s.append(reading.longest_wait_s)
        if not reading.has_ended and kind == "plain":
            return "plain, broken off" if reading.job_id else "plain, refused"
        check_reading(reading, self._answers)
        if reading.finished:
            num_tokens = reading.num_tokens
            self._history.record(
                reading.job_id, END, time.monotonic(), state="finished", num_tokens=num_tokens
            )
        if kind == "poison":
            assert reading.error_code == "poison", f"a poison job ended as {reading.ends}"
        elif kind == "resuming":
            assert reading.finished, f"{reading.job_id} ended as {reading.ends}"
        return f"{kind}, {'finished' if reading.finished else reading.error_code}"

    async def _ask(self, kind: str) -> str:
        ask: Callable[[], Awaitable[str]] = getattr(self._apis, kind)
        return await ask()

    async def _leave(self, client: Client, after_tokens: int) -> str:
        deadline_s = time.monotonic() + STREAM_TIMEOUT_S
        while client.reading.num_tokens < after_tokens and not client.has_ended:
            assert time.monotonic() < deadline_s, "no tokens to leave after"
            await asyncio.sleep(0.01)
        await client.close()
        self.num_tokens += client.reading.num_tokens
        return "leaving, left"


async def long_round(
    directory: Path,
    num_streams: int,
    seed: int,
    engines: Sequence[str] = (),
    num_partitions: int = 1,
) -> int:
    """Runs a round on the echo runner, or on a model and workers of these engines."""
    checkpoint = make_checkpoint(directory / "tiny")
    answers: Answers = EchoText(checkpoint)
    if engines:
        never_end(checkpoint)
        answers = ModelText(checkpoint, MAX_TOKENS, random.Random(seed + 3))
    clock = SettableClock(directory / "clock")
    with clock.governs():
        deployment = Deployment(directory, checkpoint)
        deployment.change_usual(
            **(_workers_of(engines, directory) if engines else ECHO_WORKERS),
            **{HISTORY: str(directory / "history")},
            PARTITIONS=num_partitions,
        )
        return await _round(
            directory, deployment, clock, answers, num_streams, seed, num_partitions
        )


def _workers_of(engines: Sequence[str], directory: Path) -> dict[str, Any]:
    """Returns arguments of Deployment.change_usual: two workers of each engine."""
    kinds: dict[str, dict[str, str]] = {"penstock": own_settings(MAX_MODEL_LEN="512")}
    if "vllm" in engines:
        kinds["vllm"] = vllm_settings(ENGINE_PYTHON=with_faults(directory), MAX_MODEL_LEN="512")
    return {
        "num_workers": 2 * len(engines),
        "kinds": [kinds[engine] for engine in engines],
        "RUNNER": "model",
        "LEASE_MS": 3000,
        "STALL_LIMIT_S": 10,
        TRAP: 1,
    }


async def _round(
    directory: Path,
    deployment: Deployment,
    clock: SettableClock,
    answers: Answers,
    num_streams: int,
    seed: int,
    num_partitions: int,
) -> int:
    _end_orderly_on_sigterm()
    try:
        lines = [f"{digest_of(key)} tenant={tenant}" for tenant, key in KEYS.items()]
        deployment.change_frontends(
            FILES_DIR=str(directory / "files"),
            API_KEYS=";".join(lines),
            MONITORING_WITHOUT_KEYS="true",
            PARTITIONS=num_partitions,
            **SMALL_POTS,
        )
        (directory / "history").mkdir()
        async with Proxy(deployment.server.url) as proxy:
            deployment.redis_url = proxy.url
            await deployment.heal()
            rng = random.Random(seed + 2)
            apis = ApiClients(deployment.urls, deployment.model, rng, KEYS["askers"])
            await apis.learn()
            history = HistoryWriter(directory / "history", "readers")
            load = Round(deployment, answers, apis, history, num_streams, seed)
            faults = RandomFaults(deployment, proxy, clock, random.Random(seed + 1))
            hostile = HostileTenant(
                deployment.urls, KEYS["hostile"], deployment.model, history, random.Random(seed + 4)
            )
            begin_s = time.monotonic()
            await _run(load, faults, hostile, begin_s)
            took_s = time.monotonic() - begin_s
            await apis.aclose()
            _check_refusals(load, apis, hostile)
            history.close()
            num_jobs = await _check_store(deployment, load, took_s, num_partitions)
            _check_histories(directory / "history", load)
            _summarize(load, faults, num_streams, seed, took_s, num_jobs)
            return 1 if load.failures else 0
    finally:
        deployment.close()


def _end_orderly_on_sigterm() -> None:
    """Else the processes under test would outlive this one."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _run(load: Round, faults: RandomFaults, hostile: HostileTenant, begin_s: float) -> None:
    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            print(
                f"{time.monotonic() - begin_s:6.0f} s  {load.num_done} streams, "
                f"{faults.done.total()} faults, {len(load.failures)} wrong",
                flush=True,
            )

    breaking, reporting = asyncio.create_task(faults.run()), asyncio.create_task(report())
    filling = asyncio.create_task(hostile.run())
    reading = asyncio.create_task(load.run())
    try:
        await asyncio.wait((reading, breaking, filling), return_when=asyncio.FIRST_COMPLETED)
        for endless in (breaking, filling):
            if endless.done():
                endless.result()  # they end by an error of the harness alone
        await reading
    finally:
        for task in (breaking, reporting, reading, filling):
            task.cancel()
        await asyncio.wait((breaking, reporting, reading, filling))


def _check_refusals(load: Round, apis: ApiClients, hostile: HostileTenant) -> None:
    """The hostile tenant is refused, and nobody else is for what it holds."""
    for name, count in sorted(hostile.refusals.items()):
        print(f"  {count:6} x hostile, {name}")
    for name, count in sorted((load.refusals + apis.refusals).items()):
        print(f"  {count:6} x refused: {name}")
        if name.startswith("429") or name.endswith(OF_OTHERS):
            load.failures.append(f"{count} requests were refused: {name}")


async def _check_store(
    deployment: Deployment, load: Round, took_s: float, num_partitions: int
) -> int:
    await deployment.heal()
    num_jobs, is_short = 0, took_s < JOBS_KEPT_S
    for number in range(num_partitions):
        async with deployment.transport(number) as transport:
            oracle = StoreOracle(transport, deployment.model)
            try:
                num_jobs += await oracle.settled(
                    deployment.worker_ids(), timeout_s=60, all_kept=is_short
                )
            except AssertionError as error:
                load.failures.append(f"partition {number} of the store: {error}")
    return num_jobs


def _check_histories(directory: Path, load: Round) -> None:
    histories = read_histories(directory)
    for job_id, operations in histories.items():
        try:
            check_history(job_id, operations)
        except AssertionError as error:
            load.failures.append(str(error))
    num_operations = sum(map(len, histories.values()))
    print(f"  {num_operations} operations on {len(histories)} jobs checked", flush=True)


def _summarize(
    load: Round, faults: RandomFaults, num_streams: int, seed: int, took_s: float, num_jobs: int
) -> None:
    for name, count in sorted(load.outcomes.items()):
        print(f"  {count:6} {name}")
    for name, count in sorted(faults.done.items()):
        print(f"  {count:6} x {name}")
    for failure in load.failures[:MAX_SHOWN]:
        print(f"  WRONG {failure}")
    waits_s = sorted(load.waits_s) or [0.0]
    shares = {f"p{p}": waits_s[min(len(waits_s) - 1, len(waits_s) * p // 100)] for p in (50, 99)}
    print(
        f"{'FAILED' if load.failures else 'ok'}: seed {seed}, {load.num_done} of {num_streams} "
        f"streams in {took_s:.0f} s, {load.num_tokens} tokens, {load.num_connections} connections, "
        f"{faults.done.total()} faults, {num_jobs} jobs checked in the store, longest pause in a "
        f"stream p50 {shares['p50']:.2f} s p99 {shares['p99']:.2f} s max {waits_s[-1]:.2f} s, "
        f"{len(load.failures)} wrong",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--engines",
        type=lambda names: names.split(","),
        default=[],
        metavar="vllm,penstock",
        help="workers with a model, two of each of these engines",
    )
    parser.add_argument("--partitions", type=int, default=1, help="of one Redis")
    parser.add_argument("--keep", type=Path, help="directory for logs and data, kept afterwards")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    if unknown := set(arguments.engines) - {"vllm", "penstock"}:
        parser.error(f"--engines: there is no engine {', '.join(sorted(unknown))}")
    print(f"seed {seed}", flush=True)
    options = (arguments.streams, seed, arguments.engines, arguments.partitions)
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return asyncio.run(long_round(arguments.keep.resolve(), *options))
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
        return asyncio.run(long_round(Path(name), *options))


if __name__ == "__main__":
    sys.exit(main())
