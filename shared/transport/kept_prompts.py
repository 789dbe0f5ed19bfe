"""KeptPrompts over Redis, and the comparison of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from shared.keys import Keys
from shared.messages import JobState
from shared.transport.failures import translated
from shared.transport.job_records import job_record
from shared.transport.ports.jobs import JobRecord, TransportError
from shared.transport.ports.prompts import KeptPrompts

MAX_LISTED = 256
SURVEY_JOBS = 64
SURVEY_BYTES = 2**24
SKIPPED_BYTES = 200  # of ids after the first different one
PIECE_BYTES = 200
# The tokens of the last block of a prefix are computed again in any case: engines cache whole
# blocks, of 16 to 128 tokens.
BLOCK_TOKENS = 128


class _Prompt(msgspec.Struct):
    """The part of a stored request that is compared."""

    prompt_token_ids: msgspec.Raw


_decoder = msgspec.json.Decoder(_Prompt)


class RedisKeptPrompts:
    """Implements KeptPrompts."""

    def __init__(self, keys: Keys, redis: Redis) -> None:
        self._keys = keys
        self._redis = redis

    async def list(
        self, limit: int, tenant: str | None = None, model: str | None = None
    ) -> Sequence[JobRecord]:
        with translated("kept prompts"):
            ids: Any = await self._redis.zrevrange(self._keys.prompts, 0, MAX_LISTED - 1)
            pipe = self._redis.pipeline(transaction=False)
            for job_id in ids:
                pipe.hgetall(self._keys.job(job_id.decode()))
            hashes = await pipe.execute() if ids else []
        try:
            found = [
                job_record(job_id.decode(), fields)
                for job_id, fields in zip(ids, hashes, strict=True)
                if fields
            ]
        except ValueError as error:
            raise TransportError(str(error)) from error
        return [
            record
            for record in found
            if tenant in (None, record.tenant) and model in (None, record.model)
        ][:limit]

    async def tokens(self, job_id: str) -> bytes | None:
        with translated("kept prompt"):
            texts: Any = await self._redis.mget(
                self._keys.prompt(job_id), self._keys.request(job_id)
            )
        text = texts[0] or texts[1]
        if text is None:
            return None
        try:
            ids = bytes(_decoder.decode(text).prompt_token_ids)
        except msgspec.MsgspecError as error:
            raise TransportError(f"the request of job {job_id} is malformed: {error}") from error
        return ids.strip(b"[] ") + b","


def common_tokens(one: bytes, other: bytes) -> int:
    """Returns the length in ids of the common prefix of two texts of `KeptPrompts.tokens`.

    It compares halves of the texts: a megabyte takes less than a millisecond.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one.count(b",", 0, low)


def is_earlier(record: JobRecord, other: JobRecord) -> bool:
    """Returns whether `record` may have left a prefix for `other`."""
    return (
        record.job_id != other.job_id
        and (record.tenant, record.model)
        == (
            other.tenant,
            other.model,
        )
        and (record.submitted_ms, record.job_id) < (other.submitted_ms, other.job_id)
    )


def _continues(text: bytes, earlier: bytes, same: int, num_earlier: int) -> bool:
    """Returns whether a prompt starts with the larger part of an earlier one, or continues like it
    after the tokens that differ, e.g. after a changed date."""
    if 2 * same >= num_earlier:
        return True
    at = _bytes_of(earlier, same)
    begin = earlier.find(b",", at + SKIPPED_BYTES)
    piece = earlier[begin : begin + PIECE_BYTES]
    return begin >= 0 and len(piece) == PIECE_BYTES and piece in text[at:]


def _bytes_of(text: bytes, num_tokens: int) -> int:
    at = -1
    for _ in range(num_tokens):
        at = text.index(b",", at + 1)
    return at + 1


@dataclass(frozen=True, slots=True)
class PrefixSurvey:
    """How often recent jobs computed tokens again. `changed_at`: the most frequent number of equal
    tokens, how many jobs have it, and the id of one; `evicted`: likewise the id of one."""

    num_jobs: int = 0  # that continue an earlier one
    num_evicted: int = 0
    num_changed: int = 0
    evicted: str | None = None
    changed_at: tuple[int, int, str] | None = None


async def survey_prefixes(prompts: KeptPrompts) -> PrefixSurvey:
    """Compares the latest prompts with each other. Raises TransportError.

    It reads SURVEY_JOBS prompts and SURVEY_BYTES of them at most. A job continues an earlier one
    where it shares the larger part of that prompt.
    """
    read: list[tuple[JobRecord, bytes]] = []
    num_bytes = 0
    for record in await prompts.list(SURVEY_JOBS):
        text = None
        if record.state is JobState.FINISHED and num_bytes < SURVEY_BYTES:
            text = await prompts.tokens(record.job_id)
        if text is not None:
            read.append((record, text))
            num_bytes += len(text)
    return _surveyed(read)


def _surveyed(read: Sequence[tuple[JobRecord, bytes]]) -> PrefixSurvey:
    texts = {record.job_id: text for record, text in read}
    num_jobs, evicted, changed = 0, [], []
    for record, text in read:
        pairs = [
            (common_tokens(text, texts[other.job_id]), other)
            for other, _ in read
            if is_earlier(other, record)
        ]
        if not pairs:
            continue
        same, earlier = max(pairs, key=lambda pair: pair[0])
        if not _continues(text, texts[earlier.job_id], same, earlier.prompt_tokens):
            continue
        num_jobs += 1
        if record.cached_tokens + BLOCK_TOKENS < min(same, record.prompt_tokens - 1):
            evicted.append(record.job_id)
        elif same + BLOCK_TOKENS < min(earlier.prompt_tokens, record.prompt_tokens):
            changed.append((same, record.job_id))
    example = evicted[0] if evicted else None
    if not changed:
        return PrefixSurvey(num_jobs, len(evicted), evicted=example)
    ((place, count),) = Counter(same for same, _ in changed).most_common(1)
    job_id = next(job_id for same, job_id in changed if same == place)
    return PrefixSurvey(num_jobs, len(evicted), len(changed), example, (place, count, job_id))
