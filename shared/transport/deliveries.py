"""Deliveries: claimed jobs, read with what their logs hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from shared.keys import Keys
from shared.messages import Cursor, Delta, ErrorCode, JobState, PromptSlice, Segment, TokenLogprob
from shared.redis.connections import Connections
from shared.transport.job_records import decode_claims
from shared.transport.ports.queue import Delivery, JobSnapshot, LostClaim
from shared.transport.scripts import Scripts
from shared.transport.wire import PayloadInvalid, decode_entry, decode_job

log = logging.getLogger(__name__)

LOG_PAGE = 1000


class DeliveryReader:
    """The reading half of RedisJobQueue."""

    def __init__(self, keys: Keys, connections: Connections, scripts: Scripts) -> None:
        self._keys = keys
        self._connections = connections
        self._redis = connections.commands
        self._scripts = scripts

    async def deliveries(self, worker_id: str, claims: Sequence[Any]) -> list[Delivery]:
        """Returns the deliveries of these claims; a job that cannot be run is failed instead.

        Raises RedisError.
        """
        deliveries = []
        claimed_s = self._connections.clock.now_s()
        for claim in claims:
            delivery = await self._delivery(worker_id, claim, claimed_s)
            if delivery is not None:
                deliveries.append(delivery)
        return deliveries

    async def _delivery(self, worker_id: str, claim: Any, claimed_s: float) -> Delivery | None:
        """Returns None for a job that cannot be run: it has been failed."""
        _, raw_id, attempt, n, b, _, crashes, cached, request, record, fields, *before = claim
        job_id, end = raw_id.decode(), Cursor(int(n), int(b))
        try:
            job = decode_job(request)
            if job.job_id != job_id:
                raise PayloadInvalid("The stored request belongs to another job.")
        except PayloadInvalid as error:
            await self._fail(worker_id, job_id, attempt, error.code, str(error))
            return None
        slices, deltas = await self._logged(job_id, end) if end.num_tokens else ([], [])
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        segments = segments_of(deltas)
        is_whole = len(token_ids) == end.num_tokens and all(
            segment.choice < job.num_choices for segment in segments or ()
        )
        if not is_whole:
            message = "The job cannot be resumed: its log is incomplete."
            await self._fail(worker_id, job_id, attempt, ErrorCode.JOB_LOST, message)
            return None
        logprobs: tuple[TokenLogprob, ...] = tuple(
            entry for delta in deltas for entry in delta.logprobs or ()
        )
        names = dict(zip(fields[::2], fields[1::2], strict=True))
        return Delivery(
            job,
            int(attempt),
            output_token_ids=token_ids,
            output_logprobs=logprobs,
            end=end,
            cached_tokens=int(cached),
            crashes=int(crashes),
            segments=segments,
            logged=tuple(deltas),
            snapshot=JobSnapshot(request, record, tuple(fields), claimed_s),
            prompt_slices=tuple(slices),
            num_lane_preemptions=int(names.get(b"preemptions", 0)),
            is_by_prefix=names.get(b"placed") == b"prefix",
            **_times(int(attempt), names, *before[:4]),
        )

    async def _logged(self, job_id: str, end: Cursor) -> tuple[list[PromptSlice], list[Delta]]:
        slices: list[PromptSlice] = []
        deltas: list[Delta] = []
        start, log_key = "-", self._keys.log(job_id)
        while True:
            rows: Any = await self._redis.xrange(log_key, start, str(end), count=LOG_PAGE)
            for entry_id, fields in rows:
                event = decode_entry(entry_id, fields)
                if isinstance(event, Delta):
                    deltas.append(event)
                elif isinstance(event, PromptSlice):
                    slices.append(event)
            if len(rows) < LOG_PAGE:
                return slices, deltas
            start = "(" + rows[-1][0].decode()

    async def _fail(
        self, worker_id: str, job_id: str, attempt: bytes, code: ErrorCode, message: str
    ) -> None:
        log.error(
            "a delivered job cannot run and was failed", extra={"job_id": job_id, "code": str(code)}
        )
        await self._scripts.call(
            self._connections.scripts,
            "finish",
            job_id,
            worker_id,
            attempt,
            JobState.FAILED,
            code,
            message[:1000],
        )


def _times(
    attempt: int,
    names: Mapping[bytes, bytes],
    lost_owner: bytes = b"",
    lost_ms: bytes = b"",
    first_delta_ms: bytes = b"",
    last_delta_ms: bytes = b"",
) -> dict[str, Any]:
    """Returns the members of a delivery about the state before the claim, from the fields of the
    job's hash and from the earlier claim."""
    claim_ms = int(names.get(b"claim_ms", 0))

    def since_s(since_ms: bytes) -> float:
        return max(0, claim_ms - int(since_ms)) / 1000

    if attempt == 1:
        return {"waited_s": since_s(names.get(b"sub_ms", b"0"))}
    if lost_owner:
        # A claim by an older release leaves the times of the one before.
        has_logged = bool(first_delta_ms) and int(first_delta_ms) >= int(lost_ms or b"0")
        before = (c for c in decode_claims(names.get(b"claims", b"")) if c.attempt == attempt - 1)
        lost = LostClaim(
            lost_owner.decode(),
            since_s(lost_ms or b"0"),
            since_s(first_delta_ms) if has_logged else None,
            since_s(last_delta_ms) if has_logged else None,
            next((claim.num_tokens for claim in before), None),
        )
        return {"lost_claim": lost}
    return {"requeued_s": since_s(names[b"free_ms"])} if b"free_ms" in names else {}


def segments_of(deltas: Sequence[Delta]) -> tuple[Segment, ...] | None:
    """Returns the segments of all deltas in a row; None when no delta has any."""
    if all(delta.segments is None for delta in deltas):
        return None
    segments: list[Segment] = []
    for delta in deltas:
        num_bytes = delta.end.num_bytes - delta.start.num_bytes
        whole = (Segment(0, len(delta.token_ids), num_bytes),)
        segments += whole if delta.segments is None else delta.segments
    return tuple(segments)
