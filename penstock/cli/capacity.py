"""`penstock capacity`: what a load needs of workers, frontends and Redis."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.options import Json
from penstock.cli.output import print_facts, print_json, print_table

GB = 1e9
MAX_SHARDS = 32  # shared.keys.MAX_PARTITIONS, which this command does without


def capacity(
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second.")],
    worker_tokens_per_s: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Output tokens a second of one worker with these lengths: `penstock bench`.",
        ),
    ],
    streams: Annotated[
        int, typer.Option(min=1, help="Its `--at-once`: streams of the worker in that measurement.")
    ] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 300,
    kept_s: Annotated[
        float, typer.Option(min=0, help="Seconds for which jobs and their texts are kept.")
    ] = 3600,
    request_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes of a request that is kept: Responses with `store`.")
    ] = 0,
    busy: Annotated[
        float,
        typer.Option(
            min=0.01, max=1, help="Part of each worker's speed and frontend's core to plan with."
        ),
    ] = 0.7,
    shards: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_SHARDS,
            help="Shards of a Redis Cluster, each with one of PENSTOCK_PARTITIONS.",
        ),
    ] = 1,
    redis_memory_gb: Annotated[
        float, typer.Option(min=0.01, help="`maxmemory` of Redis, or of each shard.")
    ] = 16,
    network_gbit: Annotated[
        float, typer.Option(min=0.01, help="Network of Redis' machine, or of each shard's.")
    ] = 10,
    json: Json = False,
) -> None:
    """Computes what a load needs of workers, frontends and Redis, and the first bottleneck at 10,
    100 and 1,000 such workers. It asks no service.

    It multiplies the load by the measured costs of docs/SCALING.md. Between the measurements, and
    above two cores, it is an estimate. The last table has the parts that are used of the core,
    memory (with ended jobs evicted as early as Redis may), network and connections of Redis, or of
    each shard.
    """
    # Imported here: no other command needs the model.
    from penstock.capacity import LIMITS, WORKERS, Load, Server, bottleneck, need, with_workers

    load = Load(
        requests_per_s=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        worker_tokens_per_s=worker_tokens_per_s,
        streams=streams,
        kept_s=kept_s,
        request_bytes=request_bytes,
        busy=busy,
        shards=shards,
    )
    server = Server(redis_memory_gb * GB, network_gbit * GB / 8)
    asked, others = need(load), [with_workers(load, workers) for workers in WORKERS]
    if json:
        for one in (asked, *others):
            shares = one.shares(server)
            print_json({**asdict(one), "shares": shares, "bottleneck": bottleneck(shares)})
        return
    each = "" if shards == 1 else f" of each of {shards} shards"
    print_facts(
        [
            ("workers", f"{asked.workers}, {asked.streams_of_a_worker:.0f} streams each"),
            ("running streams", f"{asked.running:.0f}"),
            ("output", f"{asked.tokens_per_s:,.0f} tokens/s"),
            ("frontends", f"{asked.frontends}, {asked.frontend_cores:.2f} cores together"),
            ("service of each worker", f"{asked.service_cores:.2f} cores"),
            ("Redis CPU", f"{asked.redis_cores:.2f} of the one core{each}"),
            (
                "Redis memory",
                f"{asked.memory / GB:.2f} GB; with less it evicts ended jobs, the least is "
                f"{asked.memory_least / GB:.2f} GB",
            ),
            ("Redis connections", f"{asked.redis_connections}{each}"),
            ("append-only file", f"{asked.aof_per_s / 1e6:.1f} MB/s"),
            ("network to Redis", f"{asked.to_redis_per_s / 1e6:.1f} MB/s"),
            ("network from Redis", f"{asked.from_redis_per_s / 1e6:.1f} MB/s"),
            ("network to clients", f"{asked.to_clients_per_s / 1e6:.1f} MB/s"),
        ]
    )
    rows = []
    for one in others:
        shares = one.shares(server)
        first = bottleneck(shares)
        verdict = f"{LIMITS[first]}, full at {one.workers / shares[first]:,.0f} workers"
        used = (f"{100 * share:.0f} %" for share in shares.values())
        rows.append((one.workers, f"{one.requests_per_s:,.0f}", one.frontends, *used, verdict))
    print_table(
        ("workers", "requests/s", "frontends", *LIMITS.values(), "first limit"), rows, "no workers."
    )
