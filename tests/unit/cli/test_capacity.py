"""`penstock capacity`: its constants are those of the pages with their measurements, its figures
those of a simulated queue of requests, steps and Redis."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from api.limit_settings import LimitSettings
from penstock import capacity
from penstock.capacity import COSTS, TOKEN_COSTS, Load, Server, bottleneck, need, with_workers
from penstock.cli.application import main
from penstock.cli.capacity import MAX_SHARDS
from shared.keys import MAX_PARTITIONS

DOCS = Path(__file__).resolve().parents[3] / "docs"
LOAD = Load(
    requests_per_s=30, prompt_tokens=1000, output_tokens=100, worker_tokens_per_s=800, streams=32
)


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table of a page whose first line begins with `heading`."""
    text = (DOCS / page).read_text()
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_costs_of_a_token_are_those_of_the_measurements() -> None:
    cpu = {}
    for streams, commit, *_, frontend, redis, service, _, _ in rows_of(
        "BENCHMARKS.md", "| streams | commit | tok/s |"
    ):
        cpu[streams, commit] = (float(frontend), float(redis), float(service))
    of_rows = {
        1: cpu["1", "a5ee8f2"],
        32: cpu["32", "a5ee8f2"],
        128: cpu["128", "a5ee8f2"],
        256: cpu["256, 60 ms", "c3a9298"],
    }
    for column, name in enumerate(("frontend", "Redis", "worker's service")):
        measured = {streams: row[column] for streams, row in of_rows.items()}
        assert TOKEN_COSTS[name].by_streams == measured
    sent = rows_of("BENCHMARKS.md", "| streams | append-only file |")
    names = ("append-only file", "to Redis", "from Redis", "to clients")
    for column, name in enumerate(names, 1):
        measured = {int(row[0]): float(row[column]) for row in sent}
        del measured[256]  # tokens were late and shared entries
        assert TOKEN_COSTS[name].by_streams == measured


def test_the_other_costs_are_those_of_the_measurements() -> None:
    _, worker, frontend = rows_of("BENCHMARKS.md", "| without a stream |")
    for row, name in ((worker, "worker"), (frontend, "frontend")):
        assert COSTS[f"idle {name}"].value == float(row[1])
        assert COSTS[f"{name}'s connections"].value == float(row[2])
    page = (DOCS / "guides/operate/size.md").read_text()
    for name, sentence in {
        "running job": "3.3 KB (Valkey 2.6), and 6 to 7 bytes for each token of the prompt",
        "output token of a running job": "as above, and 34 bytes for each token of the output",
        "ended job": "5.6 KB for its record with tombstone and indexes",
        "output token of an ended job": "23 KB for each 1,000 tokens of its log",
        "least log of an ended job": "(4.4 KB at\nleast, a node of a stream)",
        "prompt token": "2.5 KB, 6 bytes for each token of the prompt, 280 for each of the output",
    }.items():
        assert sentence in page, name
    assert [COSTS[name].value for name in COSTS if "job" in name] == [3300, 7, 34, 5600, 23, 4400]
    assert COSTS["prompt token"].value == 6
    assert LimitSettings.model_fields["max_open_requests"].default == capacity.MAX_OPEN_REQUESTS


def test_a_cost_between_two_measurements_lies_between_them() -> None:
    for cost in TOKEN_COSTS.values():
        measured = cost.by_streams
        assert [cost.at(streams) for streams in measured] == list(measured.values())
        for few, many in itertools.pairwise(measured):
            ends = sorted((measured[few], measured[many]))
            for share in (0.1, 0.5, 0.9):
                found = cost.at(few + share * (many - few))
                assert ends[0] <= found <= ends[1]
                assert ends[0] == ends[1] or ends[0] < found < ends[1]
        fewest, most = min(measured), max(measured)
        assert (cost.at(fewest / 10), cost.at(10 * most)) == (measured[fewest], measured[most])


def test_the_cost_of_a_token_on_a_shard_is_near_the_measured_one() -> None:
    rows = rows_of("BENCHMARKS.md", "| jobs a worker | shards, partitions |")
    measured = {
        int(row[0]): [float(number) for number in re.findall(r"\d+\.\d+", row[4])]
        for row in rows
        if row[1] == "3, 3"
    }
    shares = {}
    for streams, costs in measured.items():
        load = replace(LOAD, streams=streams, worker_tokens_per_s=1e5, busy=1.0, shards=3)
        of_model = with_workers(load, 2)
        idle = of_model.workers * COSTS["idle worker"].value
        idle += of_model.frontends * COSTS["idle frontend"].value
        us = 1e6 * (of_model.redis_cores - idle) / of_model.tokens_per_s
        shares[streams] = [us / max(costs), us / min(costs)]
    page = (DOCS / "SCALING.md").read_text()
    assert (
        "0.80 times the measured cost with 256 jobs a worker, and 1.1 to 1.5 times with 64" in page
    )
    assert statistics.mean(shares[256]) == pytest.approx(0.80, abs=0.01)
    assert shares[64] == pytest.approx([1.1, 1.5], abs=0.05)


def test_shards_divide_memory_network_and_tokens_but_no_connections() -> None:
    one, three = (with_workers(replace(LOAD, shards=shards), 10) for shards in (1, 3))
    server = Server(memory_bytes=1e9, network_bytes_per_s=1e8)
    before, after = one.shares(server), three.shares(server)
    assert after["redis_memory"] == pytest.approx(before["redis_memory"] / 3)
    assert after["redis_connections"] == before["redis_connections"]
    assert before["redis_network"] / 3 < after["redis_network"] < before["redis_network"]
    assert before["redis_cpu"] / 3 < after["redis_cpu"] < before["redis_cpu"]
    assert (one.frontends, one.workers) == (three.frontends, three.workers)
    assert one.to_clients_per_s == three.to_clients_per_s


@dataclass
class Outcome:
    """What a simulated deployment did, after its start."""

    running: float  # on average
    tokens_per_s: float
    redis_share: float  # busy time
    wait_s: float  # of a request for a slot, on average
    ended_kept: int  # jobs that ended in the last `kept_s`
    waiting: int  # at the end


def simulate(load: Load, workers: int, seconds: float, kept_s: float) -> Outcome:
    """Runs Poisson arrivals against workers with `streams` slots each, whose steps have the length
    of the measurement, and a Redis that takes each step's append by its measured cost.

    The event queue has arrivals (worker -1) and steps of each worker.
    """
    random_ = random.Random(7)
    step_s = load.streams / load.worker_tokens_per_s
    left: list[list[int]] = [[] for _ in range(workers)]  # tokens to come of each stream
    waiting: list[float] = []
    waits: list[float] = []
    ends: list[float] = []
    running_s = redis_s = 0.0
    tokens, since = 0, seconds / 4
    events = [(random_.uniform(0, step_s), worker) for worker in range(workers)]
    events.append((0.0, -1))
    heapq.heapify(events)
    while events[0][0] < seconds:
        now, worker = heapq.heappop(events)
        if worker < 0:
            waiting.append(now)
            heapq.heappush(events, (now + random_.expovariate(load.requests_per_s), -1))
            continue
        streams = left[worker]
        # The queue divides what waits evenly over the workers.
        share = -(-sum(map(len, left)) // workers) + 1
        while waiting and len(streams) < min(load.streams, share):
            waits.append(now - waiting.pop(0))
            streams.append(load.output_tokens)
        if now >= since and streams:
            tokens += len(streams)
            running_s += len(streams) * step_s
            redis_s += len(streams) * TOKEN_COSTS["Redis"].at(len(streams)) / 1e6
        left[worker] = [tokens_left - 1 for tokens_left in streams if tokens_left > 1]
        ends += [now] * (len(streams) - len(left[worker]))
        heapq.heappush(events, (now + step_s, worker))
    measured_s = seconds - since
    return Outcome(
        running_s / measured_s,
        tokens / measured_s,
        redis_s / measured_s,
        sum(waits) / len(waits),
        sum(end > seconds - kept_s for end in ends),
        len(waiting),
    )


@pytest.mark.parametrize("load", [LOAD, replace(LOAD, output_tokens=40, streams=8, busy=0.8)])
def test_the_model_has_the_figures_of_a_simulated_deployment(load: Load) -> None:
    planned = need(load)
    ran = simulate(load, planned.workers, 120, kept_s=60)
    assert ran.running == pytest.approx(planned.running, rel=0.05)
    assert ran.tokens_per_s == pytest.approx(planned.tokens_per_s, rel=0.05)
    idle = planned.workers * COSTS["idle worker"].value
    idle += planned.frontends * COSTS["idle frontend"].value
    assert ran.redis_share + idle == pytest.approx(planned.redis_cores, rel=0.08)
    assert ran.wait_s < 2 * load.streams / load.worker_tokens_per_s, "no more than to the next step"
    jobs = load.requests_per_s * 60
    assert ran.ended_kept == pytest.approx(jobs, rel=0.1)


def test_fewer_workers_than_the_model_plans_at_full_use_never_catch_up() -> None:
    full = replace(LOAD, busy=1)
    ran = simulate(LOAD, need(full).workers - 1, 120, kept_s=60)
    assert ran.waiting > LOAD.requests_per_s * 5


def test_the_first_limit_is_the_one_that_a_change_removes() -> None:
    server = Server(memory_bytes=64e9, network_bytes_per_s=1.25e9)
    needed = with_workers(LOAD, 100)
    assert bottleneck(needed.shares(server)) == "redis_cpu"
    assert bottleneck(needed.shares(replace(server, memory_bytes=1e9))) == "redis_memory"
    assert bottleneck(needed.shares(replace(server, network_bytes_per_s=1e6))) == "redis_network"
    # An evicted job takes nothing, a kept request takes its bytes.
    kept = [need(replace(LOAD, kept_s=kept_s)) for kept_s in (0, 600, 7200)]
    assert kept[0].memory < kept[1].memory == kept[1].memory_least == kept[2].memory_least
    stored = need(replace(LOAD, kept_s=100, request_bytes=5000))
    assert stored.memory - need(replace(LOAD, kept_s=100)).memory == pytest.approx(30 * 100 * 5000)


def ran(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["capacity", "--rate", "50", "--worker-tokens-per-s", "2500", *words]) == 0
    return capsys.readouterr().out


def test_the_command_has_the_load_and_three_numbers_of_workers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked, *others = map(json.loads, ran(["--json"], capsys).splitlines())
    assert asked["workers"] == need(Load(50, 1000, 300, 2500, 64)).workers
    assert [one["workers"] for one in others] == list(capacity.WORKERS)
    assert {one["bottleneck"] for one in others} <= set(capacity.LIMITS)
    shown = ran([], capsys)
    assert re.search(r"workers +9, 43 streams each", shown)
    assert re.search(r"1000 .* CPU, full at 16 workers", shown)
    sharded = ran(["--shards", "3"], capsys)
    assert re.search(r"Redis CPU +\d\.\d\d of the one core of each of 3 shards", sharded)
    assert re.search(r"1000 .* CPU, full at 26 workers", sharded)
    assert main(["capacity", "--rate", "0", "--worker-tokens-per-s", "1"]) == 2


def test_no_other_command_loads_the_model() -> None:
    source = "import sys; from penstock.cli.application import application; application()"
    source += "; sys.exit('penstock.capacity' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], timeout=60).returncode == 0


def test_as_many_shards_as_partitions_can_be_planned() -> None:
    assert MAX_SHARDS == MAX_PARTITIONS
