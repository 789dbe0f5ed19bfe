"""Arguments of lua/submit.lua, and its reply."""

from __future__ import annotations

import json
from typing import Any

from shared.keys import NUM_LANES, is_job_id, partition_of
from shared.messages import Job, SamplingParams
from shared.prefixes import digests_of_prompt
from shared.transport.drain_rate import DrainRate, spread_s
from shared.transport.ports.admission import AdmissionLimits, KeyTaken, QueueFull
from shared.transport.ports.jobs import Allowance
from shared.transport.record_parts import INDEX_MARK, split_record
from shared.transport.scripts import Argument
from shared.transport.wire import encode_job

MAX_TIMEOUT_MS = 7 * 24 * 3_600_000
# Bytes of a token in the log (docs/guides/operate/size.md, Memory), and of each log probability.
TOKEN_BYTES, LOGPROB_BYTES = 34, 30
# Members of SamplingParams that a job's record shows: those that a model may have defaults for.
RECORDED_SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    "seed",
)


def check_job(job: Job, partition: int) -> None:
    """Raises ValueError for a job id, lane, timeout or record that cannot be queued in the
    partition."""
    if not is_job_id(job.job_id) or partition_of(job.job_id) != partition:
        raise ValueError(f"not a job id of partition {partition}: {job.job_id[:80]!r}")
    if job.request_record.startswith(INDEX_MARK):
        raise ValueError("a request record does not start with '#'")
    if not 1 <= job.timeout_ms <= MAX_TIMEOUT_MS:
        raise ValueError(f"timeout_ms is between 1 and {MAX_TIMEOUT_MS}: {job.timeout_ms}")
    if job.queue_timeout_ms is not None and not 1 <= job.queue_timeout_ms <= MAX_TIMEOUT_MS:
        raise ValueError(
            f"queue_timeout_ms is between 1 and {MAX_TIMEOUT_MS}: {job.queue_timeout_ms}"
        )
    if not 0 <= job.lane < NUM_LANES:
        raise ValueError(f"a lane is between 0 and {NUM_LANES - 1}: {job.lane}")


def submit_arguments(
    job: Job,
    limits: AdmissionLimits,
    drain: DrainRate,
    *,
    reader: str,
    grace: str,
    frontend_lease_ms: int,
    record_ms: int,
    text_ms: int,
    dead_letter: str = "",
    again: bool = False,
) -> list[Argument]:
    """Returns names and values; `grace` is the policy as stored: ms, "0" none, "" unlimited.
    `record_ms`, `text_ms`: how long a job without `retain_ms` is kept after its end."""
    record = job.request_record
    parts: dict[str, bytes] = {}
    if "\n" in record:
        record, parts = split_record(job.tenant, record)
    params: dict[str, Argument] = {
        "id": job.job_id,
        "model": job.model,
        "lane": job.lane,
        "tenant": job.tenant,
        "kind": job.kind,
        "request": encode_job(job),
        "timeout_ms": job.timeout_ms,
        "queue_timeout_ms": _or_none(job.queue_timeout_ms),
        "prompt_tokens": len(job.prompt_token_ids),
        "token_bytes": _token_bytes(job.sampling),
        "max_output": job.sampling.max_tokens * job.num_choices,
        "vector_bytes": 0 if job.pooling is None else job.pooling.num_bytes,
        "choices": "" if job.num_choices == 1 else job.num_choices,
        "crid": job.client_request_id or "",
        "sampling": _recorded(job.sampling),
        "facts": record,
        "retain_ms": _or_none(job.retain_ms),
        "record_ms": record_ms,
        "text_ms": text_ms if job.text_ms is None else job.text_ms,
        "own_text": "" if job.text_ms is None else "1",
        "reader": reader,
        "grace": grace,
        "frontend_lease_ms": frontend_lease_ms,
        "max_queued": limits.max_queued_jobs,
        "max_queued_tokens": limits.max_queued_tokens,
        "max_tenant_share": share_argument(limits.max_queue_share_per_tenant),
        "max_store_share": share_argument(limits.max_store_share_per_tenant),
        "max_tenant_queued": _or_none(limits.max_queued_jobs_per_tenant),
        "max_tenant_queued_tokens": _or_none(limits.max_queued_tokens_per_tenant),
        "max_tenant_jobs": _or_none(limits.max_jobs_per_tenant),
        "requests_per_minute": _or_none(limits.requests_per_minute),
        "tokens_per_minute": _or_none(limits.tokens_per_minute),
        "tok_s": str(drain.tokens_per_s or ""),  # 0: a worker may come and do it all the same
        "idem": "" if job.idempotency is None else job.idempotency.key,
        "idem_body": "" if job.idempotency is None else job.idempotency.body,
        "prompt_digest": job.prompt_digest,
        "prefixes": digests_of_prompt(job.tenant, job.prompt_token_ids, job.adapter),
        "dead_letter": dead_letter,
        "again": "1" if again else "",
    }
    params |= {f"part:{digest}": text for digest, text in parts.items()}
    return [word for pair in params.items() for word in pair]


def check_reply(reply: Any, drain: DrainRate) -> None:
    """Raises QueueFull and KeyTaken for a reply that is a refusal."""
    if reply[0] in (b"SAME", b"REUSED"):
        raise KeyTaken(reply[1].decode(), same_request=reply[0] == b"SAME")
    if reply[0] == b"FULL":
        _, scope, work, wait_ms, left = reply
        wait_s = spread_s(int(wait_ms) / 1000) if wait_ms else drain.retry_after_s(int(work))
        raise QueueFull(scope.decode(), wait_s, allowances(left))


def allowances(left: Any) -> tuple[Allowance, ...]:
    """Returns the tenant's allowances in a reply."""
    return tuple(Allowance(name.decode(), *map(int, numbers)) for name, *numbers in left)


def _recorded(sampling: SamplingParams) -> str:
    values = {name: getattr(sampling, name) for name in RECORDED_SAMPLING}
    return json.dumps(values, separators=(",", ":"))


def _token_bytes(sampling: SamplingParams) -> int:
    if sampling.logprobs is None:
        return TOKEN_BYTES
    return TOKEN_BYTES + LOGPROB_BYTES * (1 + sampling.logprobs)


def share_argument(share: float | None) -> Argument:
    return "" if share is None or share >= 1 else str(share)


def _or_none(limit: int | None) -> Argument:
    return "" if limit is None else limit
