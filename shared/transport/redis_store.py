"""JobStore over Redis: what a frontend asks and says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.codec import encode_job
from shared.job_id import partition_of
from shared.keys import NUM_LANES, Keys
from shared.messages import (
    START,
    TERMINAL_STATES,
    Cursor,
    Delta,
    ErrorCode,
    Job,
    JobEvent,
    JobState,
    OnDisconnect,
)
from shared.transport.base import (
    AdmissionLimits,
    CancelResult,
    JobRecord,
    QueueFull,
    QueueStats,
    Submitted,
    TransportError,
    WorkerStatus,
)
from shared.transport.drain_rate import DrainRate
from shared.transport.entries import decode_entry, lost_output
from shared.transport.failures import is_out_of_memory, translated
from shared.transport.records import end_of, job_record, queue_stats, worker_status
from shared.transport.scripts import Scripts

MAX_TIMEOUT_MS = 7 * 24 * 3_600_000
MAX_LOG_READ = 4096  # events of one read_log
MAX_LISTED = 1000  # records of one list_jobs
LIST_PAGE = 200
MAX_SCANNED = 10_000  # live jobs looked at by one list_jobs
POSITION_MAX = 1000  # entries counted per lane
MEMORY_RETRY_S = 5.0
_MAX_ID_PART = 2**63 - 1

Fields = dict[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePolicy:
    """How long things live that no contract parameter says."""

    grace_ms: int = 10_000  # OnDisconnect.GRACE: how long a job waits for a reader
    frontend_lease_ms: int = 10_000  # granted by submit and attach until the next beat
    delivered_retain_ms: int = 60_000  # a log whose reader was there when the job ended


class RedisJobStore:
    """Implements JobStore for one partition. Safe for any number of tasks."""

    def __init__(self, keys: Keys, redis: Redis, scripts: Scripts, policy: StorePolicy) -> None:
        self._keys = keys
        self._redis = redis
        self._scripts = scripts
        self._policy = policy
        self._drain = DrainRate()

    async def submit(self, job: Job, limits: AdmissionLimits, frontend_id: str) -> Submitted:
        """As JobStore. ValueError for a job id, lane, model or timeout that cannot be queued."""
        if not self._is_ours(job.job_id):
            raise ValueError(f"not a job id of partition {self._keys.partition}: {job.job_id[:80]}")
        if not 1 <= job.timeout_ms <= MAX_TIMEOUT_MS:
            raise ValueError(f"timeout_ms is between 1 and {MAX_TIMEOUT_MS}: {job.timeout_ms}")
        if not 0 <= job.lane < NUM_LANES:
            raise ValueError(f"a lane is between 0 and {NUM_LANES - 1}: {job.lane}")
        with translated("submit"):
            try:
                reply = await self._call(
                    "submit",
                    job.job_id,
                    job.model,
                    job.lane,
                    job.tenant,
                    job.kind,
                    encode_job(job),
                    job.timeout_ms,
                    len(job.prompt_token_ids),
                    limits.max_queued_jobs,
                    limits.max_queued_tokens,
                    limits.max_queued_jobs_per_tenant,
                    frontend_id,
                    self._grace_of(job.on_disconnect),
                    job.client_request_id or "",
                    self._policy.frontend_lease_ms,
                )
            except RedisError as error:
                if is_out_of_memory(error):
                    raise QueueFull("memory", MEMORY_RETRY_S) from error
                raise
        if reply[0] == b"FULL":
            await self.queue_stats()
            raise QueueFull(reply[1].decode(), self._drain.retry_after_s(int(reply[2])))
        return Submitted.DUPLICATE if reply[0] == b"DUP" else Submitted.ACCEPTED

    async def read_log(
        self, job_id: str, after: Cursor, count: int = 256
    ) -> Sequence[Delta | JobEvent]:
        """As JobStore. A job that has ended always ends: when nothing lies after `after`, its end
        is given again, and Failed(job_lost) to a reader whose text is no longer stored."""
        if not self._is_ours(job_id):
            return []
        log_key = self._keys.log(job_id)
        parts = (min(part, _MAX_ID_PART) for part in after)
        start = "-" if after == START else "(" + str(Cursor(*parts))
        with translated("read_log"):
            # MULTI: an end seen after a page that missed it would hide what lies between.
            pipe = self._redis.pipeline(transaction=True)
            pipe.xrange(log_key, start, "+", count=max(1, min(count, MAX_LOG_READ)))
            pipe.xrevrange(log_key, "+", "-", count=1)
            pipe.hgetall(self._keys.job(job_id))
            rows, newest, fields = await pipe.execute()
        if rows or not fields:
            return _events(job_id, rows)
        last = _events(job_id, newest)
        if last and not isinstance(last[0], Delta):
            return last
        end = end_of(fields)
        if end is None:
            return []
        return [end if end.end <= after else lost_output(end)]

    async def get(self, job_id: str) -> JobRecord | None:
        if not self._is_ours(job_id):
            return None
        with translated("get"):
            fields: Any = await self._redis.hgetall(self._keys.job(job_id))
            if not fields:
                return None
            position = None
            if fields.get(b"state") == b"queued":
                place = int(await self._call("position", job_id, POSITION_MAX))
                position = place if place >= 0 else None
        return _record(job_id, fields, position)

    async def list_jobs(self, state: JobState | None, limit: int) -> Sequence[JobRecord]:
        """Newest first: live jobs by deadline, then ended ones (the last thousand of each state)
        by their end. `limit` is capped at MAX_LISTED."""
        limit = max(0, min(limit, MAX_LISTED))
        found: list[JobRecord] = []
        if state not in TERMINAL_STATES:
            await self._list_index(self._keys.live, state, limit, found)
        if state is None or state in TERMINAL_STATES:
            ended: list[JobRecord] = []
            for one in sorted(TERMINAL_STATES) if state is None else (state,):
                part: list[JobRecord] = []
                await self._list_index(self._keys.ended(one), one, limit, part)
                ended += part
            ended.sort(key=lambda record: record.ended_ms or 0, reverse=True)
            found += ended
        return found[:limit]

    async def cancel(self, job_id: str, reason: str) -> CancelResult | None:
        """As JobStore. `reason` is a code of small letters and '_'."""
        if not _is_code(reason):
            raise ValueError(f"a reason is a code: {reason[:80]!r}")
        if not self._is_ours(job_id):
            return None
        with translated("cancel"):
            reply = await self._call(
                "finish", job_id, "", "", JobState.CANCELLED, reason, _cancel_message(reason)
            )
        if reply[0] == b"GONE":
            return None
        return CancelResult(JobState(reply[1].decode()), int(reply[2]), won=reply[0] == b"OK")

    async def attach(self, job_id: str, reader_id: str) -> JobState | None:
        if not self._is_ours(job_id):
            return None
        with translated("attach"):
            reply = await self._call("attach", job_id, reader_id, self._policy.frontend_lease_ms)
        return JobState(reply[1].decode()) if reply[0] == b"OK" else None

    async def detach(self, job_id: str, reader_id: str) -> None:
        if self._is_ours(job_id):
            with translated("detach"):
                await self._call("detach", job_id, reader_id, self._policy.delivered_retain_ms)

    async def beat_frontend(self, frontend_id: str, lease_ms: int) -> None:
        with translated("beat_frontend"):
            lease = self._keys.frontend(frontend_id)
            # Above maxmemory SET is refused, and a lease that is there can still be renewed.
            if not await self._redis.pexpire(lease, lease_ms):
                await self._redis.set(lease, b"1", px=lease_ms)

    async def reap(self) -> int:
        with translated("reap"):
            return int(await self._call("reap"))

    async def workers(self) -> Sequence[WorkerStatus]:
        with translated("workers"):
            known: Any = await self._redis.hkeys(self._keys.workers)
            names = sorted(known)
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            for name in names:
                pipe.hgetall(self._keys.worker(name.decode()))
            (seconds, microseconds), *hashes = await pipe.execute()
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        return [
            worker_status(name.decode(), fields, now_ms)
            for name, fields in zip(names, hashes, strict=True)
            if b"beat_ms" in fields  # else its lease ended
        ]

    async def queue_stats(self) -> QueueStats:
        with translated("queue_stats"):
            fields: Any = await self._redis.hgetall(self._keys.stat)
        stats = queue_stats(fields)
        self._drain.observe(sum(stats.totals.values()), time.monotonic())
        return stats

    async def models(self) -> Mapping[str, bytes]:
        served = {model for worker in await self.workers() for model in worker.models}
        with translated("models"):
            cards: Any = await self._redis.hgetall(self._keys.models)
        return {
            name.decode(): card for name, card in sorted(cards.items()) if name.decode() in served
        }

    async def get_blob(self, digest: str) -> bytes | None:
        with translated("get_blob"):
            blob: Any = await self._redis.get(self._keys.blob(digest))
        return blob if isinstance(blob, bytes) else None

    async def ping(self) -> float:
        with translated("ping"):
            begin_s = time.perf_counter()
            await self._redis.ping()
            return time.perf_counter() - begin_s

    async def _list_index(
        self, index: str, state: JobState | None, limit: int, found: list[JobRecord]
    ) -> None:
        for at in range(0, MAX_SCANNED, LIST_PAGE):
            if len(found) >= limit:
                return
            with translated("list_jobs"):
                ids: Any = await self._redis.zrevrange(index, at, at + LIST_PAGE - 1)
                pipe = self._redis.pipeline(transaction=False)
                for job_id in ids:
                    pipe.hgetall(self._keys.job(job_id.decode()))
                hashes = await pipe.execute() if ids else []
            for job_id, fields in zip(ids, hashes, strict=True):
                if fields and (state is None or fields.get(b"state") == state.encode()):
                    found.append(_record(job_id.decode(), fields, None))
            if len(ids) < LIST_PAGE:
                return

    async def _call(self, name: str, *arguments: str | bytes | int) -> Any:
        return await self._scripts.call(self._redis, name, *arguments)

    def _is_ours(self, job_id: str) -> bool:
        try:
            return partition_of(job_id) == self._keys.partition
        except ValueError:
            return False

    def _grace_of(self, policy: OnDisconnect) -> str:
        if policy is OnDisconnect.CONTINUE:
            return ""
        return "0" if policy is OnDisconnect.CANCEL else str(self._policy.grace_ms)


def _events(job_id: str, rows: Sequence[tuple[bytes, Fields]]) -> list[Delta | JobEvent]:
    try:
        decoded = [decode_entry(entry_id, fields) for entry_id, fields in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise TransportError(f"the log of job {job_id} is malformed: {error}") from error
    return [event for event in decoded if event is not None]


def _record(job_id: str, fields: Fields, position: int | None) -> JobRecord:
    try:
        return job_record(job_id, fields, position)
    except ValueError as error:
        raise TransportError(str(error)) from error


def _is_code(reason: str) -> bool:
    return 0 < len(reason) <= 64 and all(char == "_" or "a" <= char <= "z" for char in reason)


def _cancel_message(reason: str) -> str:
    """'' where the transition has a sentence of its own."""
    known = {ErrorCode.CANCELLED, ErrorCode.DISCONNECTED, ErrorCode.ORPHANED}
    return "" if reason in known else f"The job was cancelled ({reason})."
