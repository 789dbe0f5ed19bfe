"""WorkerRegistry: which workers live, which models they announced, how much is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

CARD_LIFE_MS = 24 * 3_600_000  # of cards, blobs and idle queues after the last announcement
# Fields of a worker's hash that are not its statistics, and so no names for one.
RESERVED_STATS = frozenset(
    {
        "beat_ms",
        "lease_ms",
        "pull_ms",
        "taken",
        "models",
        "draining",
        "stalled",
        "prompt_digest",
        "weights_digest",
        "adapters",
        "order",
    }
)


class Order(StrEnum):
    """What an operator orders a worker to do."""

    SERVE = "serve"
    DRAIN = "drain"  # end what runs, take nothing new, stay
    EXIT = "exit"  # the same, and end the process after the last job


class Ordered(StrEnum):
    """What became of an order."""

    OK = "OK"
    GONE = "GONE"  # no such worker lives
    OLD = "OLD"  # the worker's release does not read orders


class TooManyPaused(Exception):
    """As many queues are paused as may be."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A model's queue that no worker takes jobs from."""

    since_ms: int = field(compare=False)
    by: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A live worker's last heartbeat."""

    worker_id: str
    models: tuple[str, ...]
    heartbeat_age_s: float
    draining: bool
    stalled: bool
    stats: Mapping[str, float | str]  # step, waiting, prefilling, active, pending, running, ...
    order: Order | None = None  # that it follows; None: its release reads none


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that a live worker serves when its jobs have waited."""

    wait_s: float  # about so long until it is served
    is_loading: bool = False  # a worker drains for it, or loads it


@dataclass(frozen=True, slots=True)
class AnnouncedModel:
    """A model whose card is stored."""

    card: bytes  # JSON
    unserved_s: float  # since its last announcement; 0.0 while a live worker serves it
    engines: tuple[str, ...] = ()  # of the live workers that serve it, each once
    # What all these workers keep: any of them may get a job, or continue it.
    exact_resume: bool = True
    structured_output: bool = True
    max_model_len: int | None = None  # the least of them; None: none has reported it
    kv_capacity_tokens: int | None = None
    is_paused: bool = False  # an operator has paused its queue
    offer: Offer | None = None  # of workers that load it when its jobs wait; None: no worker does
    load_failed: bool = False  # a worker that loads models when wanted could not load it


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Totals of a deployment, from counters that the transitions keep."""

    queued: int
    running: int
    queued_tokens: int
    totals: Mapping[str, int]  # state -> jobs that ended so
    queued_by_model: Mapping[str, int] = field(default_factory=dict)  # of announced models
    # By model: seconds since the submit of the queued job that is due next. Measured: not compared.
    queue_age_s: Mapping[str, float] = field(default_factory=dict, compare=False)
    dead_letters: int = 0
    # Bytes that Redis uses, and may use (maxmemory); both 0 if it has no limit or hides it.
    store_used: int = field(default=0, compare=False)
    store_limit: int = field(default=0, compare=False)
    # Redis' files: `aof` 1 if it has an append-only file, `aof_bytes` its size; `ok_aof_write`,
    # `ok_aof_rewrite`, `ok_rdb_save` 1 if the last one succeeded, or none was due. Empty: hidden.
    disk: Mapping[str, int] = field(default_factory=dict, compare=False)
    held_by_tenant: Mapping[str, int] = field(default_factory=dict)  # estimated bytes, most first
    # Accounts of all tenants, the largest first: processor microseconds, and refused requests.
    cpu_us_by_tenant: Mapping[str, int] = field(default_factory=dict, compare=False)
    refused_by_tenant: Mapping[str, int] = field(default_factory=dict, compare=False)
    paused: Mapping[str, Pause] = field(default_factory=dict)  # by model
    store_commands: int = field(default=0, compare=False)  # since Redis' start; 0: hidden
    partitions: Mapping[int, QueueStats] = field(default_factory=dict, compare=False)  # of several
    away: frozenset[int] = frozenset()  # partitions that do not answer, which count as they were


class WorkerRegistry(Protocol):
    """Every call may raise TransportError."""

    async def workers(self) -> Sequence[WorkerStatus]:
        """Returns the live workers, sorted by id."""
        ...

    async def queue_stats(self) -> QueueStats:
        """Returns the totals. Called periodically, after `workers`, it also measures how fast the
        work of each model is done, which a QueueFull's `retry_after_s` is computed from."""
        ...

    async def models(self) -> Mapping[str, AnnouncedModel]:
        """Returns, by name, the models of live workers and those announced within the last day or
        kept."""
        ...

    async def keep_models(self, digests: Mapping[str, Sequence[str]]) -> None:
        """Keeps the cards and blobs of models (name -> digests of its blobs) for another day."""
        ...

    async def get_blob(self, digest: str) -> bytes | None:
        """Returns the blob; None if it is not stored."""
        ...

    async def order(self, worker_id: str, order: Order) -> Ordered:
        """Orders a worker to drain, to exit or to serve again. From then on it takes no job, or any
        again once it has read the order, with its next heartbeat."""
        ...

    async def pause(self, model: str, by: str) -> bool | None:
        """Pauses the model's queue: jobs are accepted, and no worker takes one. Returns False if it
        was paused before; None for a model that no worker announced lately.

        Raises TooManyPaused.
        """
        ...

    async def resume(self, model: str) -> bool:
        """Resumes the model's queue. Returns False if it was not paused."""
        ...
