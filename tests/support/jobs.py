"""Jobs, and what a worker remembers of one that it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from shared.choice_deltas import chain_links
from shared.keys import new_job_id
from shared.messages import (
    Cursor,
    Delta,
    Job,
    OnDisconnect,
    SamplingParams,
    Segment,
    TokenLogprob,
)
from shared.transport.ports.admission import AdmissionLimits, SubmittingStore
from shared.transport.ports.jobs import Submitted
from shared.transport.ports.queue import Append, Delivery, JobEnd
from shared.transport.wire import chain_hash

MODEL = "org/tiny:1"
LIMITS = AdmissionLimits()
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}


def make_job(job_id: str = "", prompt: Sequence[int] = (1, 2, 3), **members: Any) -> Job:
    """Returns a job that nobody has submitted; a new id where there is none.

    `members` are those of the Job and of its SamplingParams, which have no name in common: either
    `sampling` whole, or some of its members.
    """
    sampling = {name: members.pop(name) for name in _SAMPLING & members.keys()}
    assert not sampling or "sampling" not in members, f"sampling has its own {[*sampling]}"
    defaults: dict[str, Any] = {
        "job_id": job_id or new_job_id(),
        "model": MODEL,
        "prompt_token_ids": tuple(prompt),
        "sampling": SamplingParams(**{"max_tokens": 64, "seed": 7, **sampling}),
        "kind": "generate",
        "on_disconnect": OnDisconnect.CONTINUE,
    }
    return Job(**(defaults | members))


async def accepted(
    store: SubmittingStore, job: Job, frontend: str = "", limits: AdmissionLimits = LIMITS
) -> str:
    """Submits a job, which must be accepted. Returns its id."""
    assert (await store.submit(job, limits, frontend)).outcome is Submitted.ACCEPTED
    return job.job_id


class Stream:
    """Where a job's log ends, and the chain up to there."""

    def __init__(self, delivery: Delivery) -> None:
        self.job_id = delivery.job.job_id
        self.num_choices = delivery.job.num_choices
        self.attempt = delivery.attempt
        self.cursor = delivery.end
        links = chain_links(delivery.output_token_ids, delivery.segments)
        self.chain = chain_hash("", links)

    def append(
        self,
        token_ids: Sequence[int],
        text: str,
        end: JobEnd | None = None,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        segments: tuple[Segment, ...] | None = None,
        **more: Any,
    ) -> Append:
        num_bytes = len(text.encode())
        to = Cursor(self.cursor.num_tokens + len(token_ids), self.cursor.num_bytes + num_bytes)
        return Append(
            self.job_id,
            self.attempt,
            Delta(self.cursor, to, tuple(token_ids), text, logprobs, segments),
            self.chain,
            chain_hash(self.chain, chain_links(token_ids, segments)),
            end,
            **more,
        )

    def accept(self, item: Append) -> None:
        self.cursor, self.chain = item.delta.end, item.end_hash
