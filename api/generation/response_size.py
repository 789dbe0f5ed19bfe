"""Estimates how many bytes a response has, before and while it is made.

Its length is unknown before a worker has generated it. The estimates are the bytes of JSON for a
token of a common vocabulary, and for each of its alternatives.
"""

from __future__ import annotations

from shared.messages import Delta, Failed, Finished, Job

TOKEN_BYTES = 8  # of text, escapes included
TOKEN_ID_BYTES = 8
CHAT_ENTRY_BYTES = 96  # {"token":" light","logprob":-1.34567832946777,"bytes":[32,108,105,103,104]}
COMPLETION_ENTRY_BYTES = 40  # " light":-11.34567832946777 in one of three lists
PROMPT_ENTRY_BYTES = 72  # "1234":{"logprob":-1.234567,"rank":1234,"decoded_token":" light"}
SHORT_BYTES = 65_536  # encoded in one go, in less than a millisecond


def prompt_logprobs_bytes(num_tokens: int, num_top: int | None) -> int:
    """Returns the bytes that `prompt_logprobs` of `num_tokens` tokens, with `num_top` alternatives
    each, take in an answer; 0 where the request has none (None)."""
    return 0 if num_top is None else num_tokens * (1 + num_top) * PROMPT_ENTRY_BYTES


def delta_bytes(delta: Delta) -> int:
    """Returns about how many bytes of an answer a delta is."""
    num_bytes = len(delta.text) + TOKEN_ID_BYTES * len(delta.token_ids)
    if delta.logprobs:
        num_bytes += len(delta.logprobs) * (1 + len(delta.logprobs[0].top)) * CHAT_ENTRY_BYTES
    return num_bytes


def is_small_response(job: Job, end: Finished | Failed) -> bool:
    """Returns whether the response of such a job, with its prompt in each choice, is small."""
    alternatives = job.sampling.logprobs
    token_bytes = TOKEN_BYTES + TOKEN_ID_BYTES
    entry_bytes = 0 if alternatives is None else (1 + alternatives) * CHAT_ENTRY_BYTES
    num_prompt_tokens = end.usage.prompt_tokens
    scores_bytes = prompt_logprobs_bytes(num_prompt_tokens, job.sampling.prompt_logprobs)
    prompt_bytes = job.num_choices * (num_prompt_tokens * token_bytes + scores_bytes)
    answer_bytes = end.usage.completion_tokens * (token_bytes + entry_bytes)
    return prompt_bytes + answer_bytes <= SHORT_BYTES
