"""Why the prefix of a job's prompt was computed again: the earlier job that it shares most with,
and the place where the two part.

It reads on demand and never on the path of a request. A comparison is of bytes, one job at a time;
texts are decoded in the thread pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from api.generation.models import ServedModel
from api.generation.response_schemas import ResponseModel
from api.generation.thread_pool import TextPool
from api.ids import public_id
from api.jobs.prefix_place import Cause, place_of
from shared.messages import START, TERMINAL_STATES, Delta
from shared.transport.kept_prompts import BLOCK_TOKENS, common_tokens, is_earlier
from shared.transport.ports.jobs import JobRecord, JobStore
from shared.transport.ports.prompts import KeptPrompts

MAX_COMPARED = 32  # earlier jobs
MAX_COMPARED_BYTES = 2**24
MAX_OUTPUT_TOKENS = 32_768  # of the earlier job

_CHANGED: dict[Cause, str] = {
    "date": "a date or a time",
    "tools": "among the tools: another order, or another definition",
    "system": "in the system message",
    "reasoning": "in an earlier answer, whose reasoning is not in the prompt any more",
    "call_id": "in the id of a tool call",
    "tokens": "in other tokens of the same text: a model may write a text in other tokens than its "
    "tokenizer makes of it",
    "assistant": "in an earlier answer, which came back as another text",
    "message": "in a message of the user or of a tool",
    "changed": "the model is not known any more, so that there is no text to show",
}


class JobPrefix(ResponseModel):
    """How much of a prompt an earlier job had computed, and why it was computed again.

    `same_tokens`: that the prompt begins with and the earlier job's prompt and output too;
    `lost_tokens`: of the earlier job after them. The texts are those around the first different
    token; null without one, or if the earlier output is no longer stored.
    """

    cause: Cause
    sentence: str
    earlier_job: str | None = None
    earlier_worker: str | None = None
    same_tokens: int = 0
    cached_tokens: int = 0
    lost_tokens: int = 0
    text: str | None = None
    earlier_text: str | None = None


@dataclass(slots=True)
class _Earlier:
    """The job that shares most; `tokens`: of its prompt and output, as KeptPrompts has them."""

    record: JobRecord
    same: int
    tokens: bytes = field(repr=False)
    has_output: bool = False


async def explain_prefix(
    record: JobRecord,
    store: JobStore,
    prompts: KeptPrompts,
    model: ServedModel | None,
    pool: TextPool,
) -> JobPrefix:
    """Returns why the job's prompt was cached or not. Raises TransportError, and UnavailableError
    where no thread is free."""
    if record.state not in TERMINAL_STATES:
        sentence = "The job has not ended: how much was cached is not known yet."
        return JobPrefix(cause="not_ended", sentence=sentence)
    tokens = await prompts.tokens(record.job_id)
    if tokens is None:
        sentence = "The job's prompt is no longer stored, so that there is nothing to compare."
        return JobPrefix(cause="not_kept", sentence=sentence)
    earlier = await _earlier(record, tokens, prompts)
    if earlier is None:
        sentence = "No recent job of this tenant and model begins with the same tokens."
        return JobPrefix(cause="no_earlier_job", sentence=sentence)
    output = await _output(store, earlier.record)
    if output is not None:
        earlier.tokens, earlier.has_output = earlier.tokens + output, True
        earlier.same = common_tokens(tokens, earlier.tokens)
    found = _compared(record, earlier)
    if found.cause != "changed" or model is None:
        return found
    place = found.same_tokens
    cause, found.text, found.earlier_text = await pool.run(
        place_of, model.text.tokenizer, tokens, earlier.tokens, place
    )
    if not earlier.has_output and place >= earlier.record.prompt_tokens:
        cause, found.earlier_text = "assistant", None
    found.cause = cause
    found.sentence = _changed(earlier.record, place, cause)
    return found


async def _earlier(record: JobRecord, tokens: bytes, prompts: KeptPrompts) -> _Earlier | None:
    best, num_bytes = None, 0
    listed = await prompts.list(2 * MAX_COMPARED, record.tenant, record.model)
    for other in [other for other in listed if is_earlier(other, record)][:MAX_COMPARED]:
        found = await prompts.tokens(other.job_id)
        if found is None:
            continue
        same = common_tokens(tokens, found)
        if same and (best is None or same > best.same):
            best = _Earlier(other, same, found)
        num_bytes += len(found)
        if num_bytes > MAX_COMPARED_BYTES:
            break
    return best


async def _output(store: JobStore, record: JobRecord) -> bytes | None:
    """Returns the ids of the only choice; None where they are no longer stored, or too many."""
    if record.num_choices != 1 or record.completion_tokens > MAX_OUTPUT_TOKENS:
        return None
    ids: list[int] = []
    after = START
    while len(ids) < record.completion_tokens:
        deltas = [
            event
            for event in await store.read_log(record.job_id, after)
            if isinstance(event, Delta)
        ]
        if not deltas:
            return None
        for delta in deltas:
            ids += delta.token_ids
        after = deltas[-1].end
    return b"".join(b"%d," % token_id for token_id in ids)


def _compared(record: JobRecord, earlier: _Earlier) -> JobPrefix:
    other, same, cached = earlier.record, earlier.same, record.cached_tokens
    total = other.prompt_tokens + other.completion_tokens
    found = JobPrefix(
        cause="cached",
        sentence=f"The prompt begins with {same} tokens of job {_name(other)}; {cached} of the "
        f"prompt's {record.prompt_tokens} were cached.",
        earlier_job=_name(other),
        earlier_worker=other.owner,
        same_tokens=same,
        cached_tokens=cached,
    )
    # The last token of a prompt and that of an output are computed in any case.
    if cached + BLOCK_TOKENS < min(same, record.prompt_tokens - 1):
        found.cause = "not_cached"
        found.sentence = (
            f"{same} tokens are the same as in job {_name(other)}, but only {cached} were cached: "
            + _evicted(record, other)
        )
        return found
    if not earlier.has_output and same >= other.prompt_tokens:
        # Its output is not stored: the cached part of it shows how far it is the same.
        found.same_tokens = same = max(same, cached)
        if same + BLOCK_TOKENS >= min(total, record.prompt_tokens):
            return found
    if same + 2 >= min(total, record.prompt_tokens):
        return found
    found.cause, found.lost_tokens = "changed", total - same
    found.sentence = _changed(other, same, "changed")
    return found


def _evicted(record: JobRecord, other: JobRecord) -> str:
    if record.owner != other.owner:
        return f"worker {other.owner} computed them, and worker {record.owner} ran this job."
    return f"worker {record.owner} ran both, and had evicted them (or caches no prefixes)."


def _changed(other: JobRecord, same: int, cause: Cause) -> str:
    return (
        f"The prompt differs from job {_name(other)} after {same} tokens, {_CHANGED[cause]}. "
        "All tokens after that place are computed again."
    )


def _name(record: JobRecord) -> str:
    return public_id(record.kind, record.job_id)
