"""The capacity model of `penstock capacity` and docs/SCALING.md: what a load needs of workers,
frontends and Redis.

It multiplies a load by measured costs and adds nothing else. The costs are in this file alone, each
with the section that has its measurement; tests/unit/cli/test_capacity.py compares them with these
pages, and the model with a simulated queue. Rows in which tokens were late and shared entries are
left out: they make a token look cheaper than it is for a deployment with room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

WORKERS = (10, 100, 1000)  # for which the first bottleneck is shown
MIN_FRONTENDS = 2  # in case one fails
TOKENS = "BENCHMARKS.md#what-a-token-costs"
MEMORY = "guides/operate/size.md#memory"


@dataclass(frozen=True, slots=True)
class Cost:
    """A measured cost, and the section of docs/ that has it."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class TokenCost:
    """A measured cost of a token, by the streams that a worker runs at once, which share script
    calls and writes."""

    by_streams: Mapping[int, float]
    unit: str
    source: str = TOKENS

    def at(self, streams: float) -> float:
        """Returns the cost, between two measurements on the straight line through their logarithms;
        outside of them the nearest one."""
        places = sorted(self.by_streams)
        streams = min(max(streams, places[0]), places[-1])
        high = next(index for index, place in enumerate(places) if streams <= place)
        few, many = places[max(0, high - 1)], places[high]
        if streams == many:
            return self.by_streams[many]
        share = math.log(streams / few) / math.log(many / few)
        low, end = math.log(self.by_streams[few]), math.log(self.by_streams[many])
        return math.exp(low + share * (end - low))


TOKEN_COSTS: Mapping[str, TokenCost] = {
    "frontend": TokenCost({1: 500, 32: 102, 128: 65, 256: 42.8}, "µs of a core"),
    "Redis": TokenCost({1: 310, 32: 39, 128: 21, 256: 25.7}, "µs of a core"),
    "worker's service": TokenCost({1: 700, 32: 63, 128: 33, 256: 21.9}, "µs of a core"),
    "append-only file": TokenCost({1: 562, 32: 327}, "bytes"),
    "to Redis": TokenCost({1: 458, 32: 163}, "bytes"),
    "from Redis": TokenCost({1: 285, 32: 119}, "bytes"),
    "to clients": TokenCost({1: 52.5, 32: 52.5}, "bytes"),
}
COSTS: Mapping[str, Cost] = {
    "idle worker": Cost(0.0017, "share of Redis' core", TOKENS),
    "idle frontend": Cost(0.0029, "share of Redis' core", TOKENS),
    "worker's connections": Cost(5.5, "connections to Redis", TOKENS),
    "frontend's connections": Cost(12.5, "connections to Redis", TOKENS),
    "running job": Cost(3300, "bytes of Redis", MEMORY),
    "prompt token of a running job": Cost(7, "bytes of Redis", MEMORY),
    "output token of a running job": Cost(34, "bytes of Redis", MEMORY),
    "ended job": Cost(5600, "bytes of Redis", MEMORY),
    "output token of an ended job": Cost(23, "bytes of Redis", MEMORY),
    "least log of an ended job": Cost(4400, "bytes of Redis", MEMORY),
    "prompt token": Cost(6, "bytes of the append-only file", MEMORY),
}
LIMITS = {  # of Redis, with their names in tables
    "redis_cpu": "CPU",
    "redis_memory": "memory",
    "redis_network": "network",
    "redis_connections": "connections",
}
# Settings' and servers' defaults.
MAX_OPEN_REQUESTS = 4096  # PENSTOCK_MAX_OPEN_REQUESTS of a frontend
MAX_CLIENTS = 10_000  # `maxclients` of Redis
LEAST_KEPT_S = 600  # no ended job is evicted before


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the service that serves them.

    `worker_tokens_per_s`: output tokens a second of one worker with `streams` requests of these
    lengths at once. `busy`: the share of it that is planned with. `kept_s`: how long ended jobs are
    kept. `request_bytes`: of a stored request of the Responses API, 0 for other dialects. `shards`:
    of a Redis Cluster, each with a partition.
    """

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    worker_tokens_per_s: float
    streams: int
    kept_s: float = 3600
    request_bytes: int = 0
    busy: float = 0.7
    shards: int = 1


@dataclass(frozen=True, slots=True)
class Server:
    """Redis, or each shard: memory in bytes, and its network in bytes a second, in one
    direction."""

    memory_bytes: float
    network_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Need:
    """What a load needs. Rates are per second, memory and rates of data in bytes, CPU in cores.

    `memory_least`: with ended jobs that are evicted as early as Redis may, `memory`: all that are
    to be kept. Figures of Redis are those of all `shards`, but for each one's cores and
    connections.
    """

    requests_per_s: float
    workers: int
    running: float
    streams_of_a_worker: float
    tokens_per_s: float
    frontends: int
    frontend_cores: float
    service_cores: float  # of each worker
    shards: int
    redis_cores: float  # of each shard
    redis_connections: int  # likewise
    memory: float
    memory_least: float
    aof_per_s: float
    to_redis_per_s: float
    from_redis_per_s: float
    to_clients_per_s: float

    def shares(self, server: Server) -> dict[str, float]:
        """Returns by limit the share of it that is used: 1 is all of it."""
        network = max(self.to_redis_per_s, self.from_redis_per_s) / self.shards
        return {
            "redis_cpu": self.redis_cores,
            "redis_memory": self.memory_least / self.shards / server.memory_bytes,
            "redis_network": network / server.network_bytes_per_s,
            "redis_connections": self.redis_connections / MAX_CLIENTS,
        }


def need(load: Load, workers: int | None = None) -> Need:
    """Returns what the load needs, with as few workers as are `busy` at most, or with `workers`."""
    tokens_per_s = load.requests_per_s * load.output_tokens
    if workers is None:
        workers = max(1, math.ceil(tokens_per_s / (load.worker_tokens_per_s * load.busy) - 1e-9))
    # A step takes as long with few streams as with `streams`: decoding reads the same weights.
    running = load.requests_per_s * load.output_tokens * load.streams / load.worker_tokens_per_s
    streams = running / workers
    # A worker's step is a call to each shard, with the streams that it has there.
    token = {name: cost.at(streams / load.shards) for name, cost in TOKEN_COSTS.items()}
    cost = {name: cost.value for name, cost in COSTS.items()}
    prompt_tokens_per_s = load.requests_per_s * load.prompt_tokens
    frontend_cores = tokens_per_s * TOKEN_COSTS["frontend"].at(streams) / 1e6
    frontends = max(
        MIN_FRONTENDS,
        math.ceil(frontend_cores / load.busy),
        math.ceil(running / MAX_OPEN_REQUESTS),
    )
    live = running * (
        cost["running job"]
        + cost["prompt token of a running job"] * load.prompt_tokens
        + cost["output token of a running job"] * load.output_tokens
    )
    log = max(
        cost["least log of an ended job"],
        cost["output token of an ended job"] * load.output_tokens,
    )
    ended = load.requests_per_s * (cost["ended job"] + log + load.request_bytes)
    prompts = prompt_tokens_per_s * cost["prompt token"]
    return Need(
        requests_per_s=load.requests_per_s,
        workers=workers,
        running=running,
        streams_of_a_worker=streams,
        tokens_per_s=tokens_per_s,
        frontends=frontends,
        frontend_cores=frontend_cores,
        service_cores=tokens_per_s / workers * token["worker's service"] / 1e6,
        shards=load.shards,
        redis_cores=tokens_per_s / load.shards * token["Redis"] / 1e6
        + workers * cost["idle worker"]
        + frontends * cost["idle frontend"],
        redis_connections=math.ceil(
            workers * cost["worker's connections"] + frontends * cost["frontend's connections"]
        ),
        memory=live + ended * load.kept_s,
        memory_least=live + ended * min(load.kept_s, LEAST_KEPT_S),
        aof_per_s=tokens_per_s * token["append-only file"] + prompts,
        to_redis_per_s=tokens_per_s * token["to Redis"] + prompts,
        from_redis_per_s=tokens_per_s * token["from Redis"] + prompts,
        to_clients_per_s=tokens_per_s * TOKEN_COSTS["to clients"].at(streams),
    )


def with_workers(load: Load, workers: int) -> Need:
    """Returns what that many workers need that are `busy` with requests like the load's."""
    requests_per_s = workers * load.worker_tokens_per_s * load.busy / load.output_tokens
    return need(replace(load, requests_per_s=requests_per_s), workers)


def bottleneck(shares: Mapping[str, float]) -> str:
    """Returns the limit that is reached first while the load grows."""
    return max(shares, key=lambda name: shares[name])
