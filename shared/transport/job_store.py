"""JobStore over Redis: one script or pipeline for each call."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import RedisError

from shared.keys import Keys, is_job_id
from shared.messages import (
    START,
    Cursor,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    Job,
    JobEvent,
    JobState,
    OnDisconnect,
)
from shared.redis.connections import Connections
from shared.transport.drain_rate import DrainRates
from shared.transport.expiry import decode_tombstone, text_expiry
from shared.transport.failures import is_out_of_memory, translated
from shared.transport.job_records import JobRecords, end_of
from shared.transport.ports.admission import (
    AdmissionLimits,
    KeptKey,
    KeyTaken,
    QueueFull,
    Submission,
)
from shared.transport.ports.jobs import (
    CancelResult,
    Expired,
    JobLook,
    JobRecord,
    Restored,
    Submitted,
    TransportError,
)
from shared.transport.record_parts import record_bytes
from shared.transport.scripts import Scripts
from shared.transport.submission import allowances, check_job, check_reply, submit_arguments
from shared.transport.wire import decode_entry, expired_output, lost_output

log = logging.getLogger(__name__)

MAX_LOG_READ = 4096  # events of one read_log
ATTACH_PAGE = 256  # readers per script call
LOOK_PAGE = 256  # jobs per script call
RENEW_PAGE = 4  # likewise; each may have two thousand parts
SAVED_PAGE = 64  # likewise
MEMORY_RETRY_S = 5.0
RETAIN_MS = 3_600_000
SECRET_LIFE_MS = 7 * 24 * 3_600_000
DECODE_S = 0.004  # of decoding without a pause
_MAX_ID_PART = 2**63 - 1
_STATES = {b"gone": None, **{state.encode(): state for state in JobState}}

Fields = dict[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePolicy:
    """Lifetimes in milliseconds that no parameter of a port gives."""

    grace_ms: int = 10_000  # OnDisconnect.GRACE: how long a job waits for a reader
    frontend_lease_ms: int = 10_000  # granted by submit and attach until the next heartbeat
    record_ms: int = RETAIN_MS  # a job's record after its end, and
    text_ms: int = RETAIN_MS  # its text (log and prompt), where it has no `retain_ms`


class RedisJobStore:
    """Implements JobStore. Safe for any number of tasks."""

    def __init__(
        self,
        keys: Keys,
        connections: Connections,
        scripts: Scripts,
        policy: StorePolicy,
        drains: DrainRates,
    ) -> None:
        """`drains`: as a WorkerRegistry measures them; `submit` estimates waits by them."""
        self._keys = keys
        self._redis = connections.commands
        self._calls = connections.scripts
        self._heartbeats = connections.heartbeat
        self._scripts = scripts
        self._policy = policy
        self._server_clock = connections.clock
        self._drains = drains
        self._records = JobRecords(connections, scripts)

    async def submit(self, job: Job, limits: AdmissionLimits, reader_id: str) -> Submission:
        word, _, left = await self._submit(job, limits, reader_id)
        outcome = Submitted.DUPLICATE if word == b"DUP" else Submitted.ACCEPTED
        return Submission(outcome, allowances(left))

    def partition_for(self, name: str = "", num: int = 0) -> int:
        return self._keys.partition

    def partition_of(self, job_id: str) -> int:
        return self._keys.partition

    async def requeue(self, dead_letter_id: str, job: Job, limits: AdmissionLimits) -> str | None:
        reply = await self._submit(job, limits, "", dead_letter=dead_letter_id)
        if reply[0] == b"NODEADLETTER":
            return None
        return reply[1].decode() if reply[0] == b"REQUEUED" else job.job_id

    async def submit_again(self, job: Job, timeout_ms: int, reader_id: str = "") -> Restored:
        job = replace(job, timeout_ms=max(1, timeout_ms))
        try:
            reply = await self._submit(job, AdmissionLimits(), reader_id, again=True)
        except KeyTaken:  # by an equal request that came later
            return Restored.OVER
        return Restored.OVER if reply[0] == b"OVER" else Restored.RESTORED

    async def states(self, job_ids: Sequence[str]) -> Sequence[JobState | None]:
        with translated("states"):
            pipe = self._redis.pipeline(transaction=False)
            for job_id in job_ids:
                pipe.hget(self._keys.job(job_id), "state")
                pipe.exists(self._keys.tombstone(job_id))
            words = await pipe.execute() if job_ids else []
        return [
            JobState(state.decode()) if state else JobState.CANCELLED if is_buried else None
            for state, is_buried in zip(words[::2], words[1::2], strict=True)
        ]

    async def _submit(
        self,
        job: Job,
        limits: AdmissionLimits,
        reader_id: str,
        *,
        dead_letter: str = "",
        again: bool = False,
    ) -> Any:
        """Returns the transition's reply. Raises ValueError, QueueFull and KeyTaken."""
        check_job(job, self._keys.partition)
        drain = self._drains.of(job.model)
        arguments = submit_arguments(
            job,
            limits,
            drain,
            reader=reader_id,
            grace=self._grace_of(job.on_disconnect),
            frontend_lease_ms=self._policy.frontend_lease_ms,
            record_ms=self._policy.record_ms,
            text_ms=self._policy.text_ms,
            dead_letter=dead_letter,
            again=again,
        )
        with translated("submit"):
            try:
                answer = await self._call("submit", *arguments)
            except RedisError as error:
                if is_out_of_memory(error):
                    raise QueueFull("memory", MEMORY_RETRY_S) from error
                raise
        check_reply(answer, drain)
        return answer

    async def kept_key(self, key: str) -> KeptKey | None:
        with translated("kept_key"):
            kept: Any = await self._redis.hmget(self._keys.idempotency(key), ("id", "body"))
            if kept[0] is None:
                return None
            job_id, body = kept[0].decode(), kept[1].decode()
            state: Any = await self._redis.hget(self._keys.job(job_id), "state")
        return KeptKey(job_id, body, None if state is None else JobState(state.decode()))

    async def read_log(
        self, job_id: str, after: Cursor, count: int = 256
    ) -> Sequence[Delta | JobEvent]:
        if not is_job_id(job_id):
            return []
        log_key = self._keys.log(job_id)
        parts = (min(part, _MAX_ID_PART) for part in after)
        start = "-" if after == START else "(" + str(Cursor(*parts))
        count = max(1, min(count, MAX_LOG_READ))
        events: list[Delta | JobEvent] = []
        while True:
            with translated("read_log"):
                # MULTI: an end seen after a page that missed it would hide the entries between.
                pipe = self._redis.pipeline(transaction=True)
                pipe.xrange(log_key, start, "+", count=count)
                pipe.xrevrange(log_key, "+", "-", count=1)
                pipe.hgetall(self._keys.job(job_id))
                rows, newest, fields = await pipe.execute()
            events += await _events(job_id, rows)
            if len(rows) < count or len(events) >= count:
                break
            start = "(" + rows[-1][0].decode()  # some are of kinds that a newer release writes
        if events or rows:
            return events[:count]
        if not fields:
            expired = await self.expired(job_id)
            return [] if expired is None else [expired_output(after, expired.message)]
        last = await _events(job_id, newest)
        if last and isinstance(last[0], Finished | Failed):
            return last
        end = end_of(fields)
        if end is None:
            return []
        return [end if end.end <= after else await self._missing_text(end, fields)]

    async def _missing_text(self, end: Finished | Failed, fields: Fields) -> Failed:
        with translated("read_log"):
            now_ms = await self._now_ms()
        expiry = text_expiry(fields, now_ms)
        return lost_output(end) if expiry is None else expired_output(end.end, expiry, end.usage)

    async def _now_ms(self) -> int:
        seconds, microseconds = await self._redis.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def expired(self, job_id: str) -> Expired | None:
        if not is_job_id(job_id):
            return None
        with translated("expired"):
            text: Any = await self._redis.get(self._keys.tombstone(job_id))
            return decode_tombstone(text, await self._now_ms()) if text else None

    async def look(self, job_ids: Sequence[str]) -> Sequence[JobLook | None]:
        looks: list[JobLook | None] = [None] * len(job_ids)
        ours = [index for index, job_id in enumerate(job_ids) if is_job_id(job_id)]
        for at in range(0, len(ours), LOOK_PAGE):
            page = ours[at : at + LOOK_PAGE]
            with translated("look"):
                words = await self._call("look", *[job_ids[index] for index in page])
            for index, word in zip(page, words, strict=True):
                looks[index] = _job_look(word)
        return looks

    async def get(self, job_id: str) -> JobRecord | None:
        if not is_job_id(job_id):
            return None
        with translated("get"):
            fields: Any = await self._redis.hgetall(self._keys.job(job_id))
            if not fields:
                return None
            (record,) = await self._records.of([(job_id, fields)])
        return record

    async def request_record(self, job_id: str) -> str | None:
        if not is_job_id(job_id):
            return None
        with translated("request record"):
            record = await self._call("record", job_id)
        if record is None:
            log.warning("a part of a stored request is missing", extra={"job_id": job_id})
        return record.decode() if record else None

    async def stored_bytes(self, job_id: str) -> int:
        if not is_job_id(job_id):
            return 0
        with translated("stored bytes"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.getrange(self._keys.request_record(job_id), 0, 15)
            pipe.strlen(self._keys.request_record(job_id))
            pipe.memory_usage(self._keys.log(job_id))
            start, num_bytes, log_bytes = await pipe.execute()
        return record_bytes(start, num_bytes) + int(log_bytes or 0)

    async def cancel(self, job_id: str, reason: str) -> CancelResult | None:
        if not _is_code(reason):
            raise ValueError(f"a reason is a code: {reason[:80]!r}")
        if not is_job_id(job_id):
            return None
        with translated("cancel"):
            reply = await self._call(
                "finish", job_id, "", "", JobState.CANCELLED, reason, _cancel_message(reason)
            )
        if reply[0] == b"GONE":
            return None
        return CancelResult(JobState(reply[1].decode()), int(reply[2]), won=reply[0] == b"OK")

    async def forget(self, job_id: str) -> bool:
        if not is_job_id(job_id):
            return True
        with translated("forget"):
            reply = await self._call("forget", job_id)
        return bool(reply[0] != b"LIVE")

    async def renew(self, job_ids: Sequence[str]) -> None:
        ours = [job_id for job_id in job_ids if is_job_id(job_id)]
        for at in range(0, len(ours), RENEW_PAGE):
            with translated("renew"):
                await self._call("renew", *ours[at : at + RENEW_PAGE])

    async def saved(self, job_ids: Sequence[str]) -> None:
        """Keeps these jobs of a batch's rows, whose results are saved, for a minute more."""
        for at in range(0, len(job_ids), SAVED_PAGE):
            with translated("saved"):
                await self._call("saved", *job_ids[at : at + SAVED_PAGE])

    async def attach(self, readers: Sequence[tuple[str, str]]) -> Sequence[JobState | None]:
        states: list[JobState | None] = [None] * len(readers)
        ours = [index for index, (job_id, _) in enumerate(readers) if is_job_id(job_id)]
        for at in range(0, len(ours), ATTACH_PAGE):
            page = ours[at : at + ATTACH_PAGE]
            arguments = [word for index in page for word in readers[index]]
            with translated("attach"):
                words = await self._call("attach", self._policy.frontend_lease_ms, *arguments)
            for index, word in zip(page, words, strict=True):
                states[index] = _STATES[word]
        return states

    async def detach(self, job_id: str, reader_id: str) -> None:
        if is_job_id(job_id):
            with translated("detach"):
                await self._call("detach", job_id, reader_id)

    async def frontend_heartbeat(self, frontend_id: str, lease_ms: int) -> bool:
        with translated("frontend_heartbeat"):
            lease = self._keys.frontend(frontend_id)
            is_in_time = bool(await self._heartbeats.pexpire(lease, lease_ms))
            try:
                await self._heartbeats.set(lease, str(lease_ms), px=lease_ms)
            except RedisError as error:
                # Above maxmemory SET is refused; an existing lease has been renewed.
                if not (is_out_of_memory(error) and is_in_time):
                    raise
        return is_in_time

    async def reap(self) -> int:
        num_ended, stands_still = await self._reap()
        if stands_still:  # until a client testifies whether time has passed: at once
            more, _ = await self._reap()
            num_ended += more
        return num_ended

    async def _reap(self) -> tuple[int, bool]:
        """Returns how many jobs it ended, and whether the server's time stands still."""
        begun_s = self._server_clock.now_s()
        with translated("reap"):
            seen, num_ended = await self._call("reap", self._server_clock.testimony)
        return int(num_ended), self._server_clock.answered(begun_s, seen)

    async def shared_secret(self, purpose: str) -> bytes:
        key = self._keys.secret(purpose)
        with translated("shared_secret"):
            while not await self._redis.pexpire(key, SECRET_LIFE_MS):
                await self._redis.set(key, secrets.token_bytes(32), px=SECRET_LIFE_MS, nx=True)
            found: Any = await self._redis.get(key)
        assert isinstance(found, bytes), "it lives for a week"
        return found

    async def ping(self) -> float:
        with translated("ping"):
            begin_s = time.perf_counter()
            await self._redis.ping()
            return time.perf_counter() - begin_s

    async def _call(self, name: str, *arguments: str | bytes | int) -> Any:
        return await self._scripts.call(self._calls, name, *arguments)

    def _grace_of(self, policy: OnDisconnect) -> str:
        if policy is OnDisconnect.CONTINUE:
            return ""
        return "0" if policy is OnDisconnect.CANCEL else str(self._policy.grace_ms)


async def _events(job_id: str, rows: Sequence[tuple[bytes, Fields]]) -> list[Delta | JobEvent]:
    """Decodes entries; yields to the event loop in between: a page may be megabytes."""
    decoded = []
    ends_s = time.monotonic() + DECODE_S
    try:
        for entry_id, fields in rows:
            decoded.append(decode_entry(entry_id, fields))
            if time.monotonic() >= ends_s:
                await asyncio.sleep(0)
                ends_s = time.monotonic() + DECODE_S
    except (ValueError, KeyError, TypeError) as error:
        raise TransportError(f"the log of job {job_id} is malformed: {error}") from error
    return [event for event in decoded if event is not None]


@functools.lru_cache(maxsize=1024)  # all waiting jobs have the same reply
def _job_look(word: bytes) -> JobLook | None:
    """Decodes one job's part of the script's reply."""
    state, *found = word.split(b" ")
    known = _STATES[state]
    if known is None:
        return None
    num_tokens, _, num_bytes = found[0].partition(b"-")
    look = JobLook(known, Cursor(int(num_tokens), int(num_bytes)))
    if len(found) > 1:
        look = replace(look, lost_attempt=int(found[1]), cause=found[2].decode())
    return look


def _is_code(reason: str) -> bool:
    return 0 < len(reason) <= 64 and all(char == "_" or "a" <= char <= "z" for char in reason)


def _cancel_message(reason: str) -> str:
    """Returns '' where the transition has its own sentence."""
    known = {ErrorCode.CANCELLED, ErrorCode.DISCONNECTED, ErrorCode.ORPHANED}
    return "" if reason in known else f"The job was cancelled ({reason})."
