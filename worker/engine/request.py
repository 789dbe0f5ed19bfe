"""What enters and leaves the engine: EngineRequest, EngineOutput, EngineStats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.messages import (
    ErrorCode,
    FinishReason,
    Pooling,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
)
from worker.engine.config import EngineConfig
from worker.engine.errors import RequestRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What to generate. `params.seed` is a number unless `params` are greedy.

    `output_token_ids` resumes: tokens that an earlier attempt has emitted. They count towards every
    limit and penalty and are never emitted again.
    """

    request_id: str  # unique among live requests
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    tenant: str = "default"  # prefixes are shared within a tenant only, slots among tenants
    job_id: str = ""  # choices of one job share its slots; empty: each choice is its own job
    priority: int = 0  # its lane: smaller is served first, under a policy that uses it
    num_lane_preemptions: int = 0  # on earlier workers: see worker.engine.running_slots
    scores_prompt: bool = True  # False: the prompt's log probabilities are logged already
    pooling: Pooling | None = None  # for an engine that computes vectors
    adapter: str = ""  # name of the LoRA adapter that computes it; empty: the model alone


class RequestTimes(NamedTuple):
    """The times of one request inside the engine, in seconds."""

    queued_s: float  # until its first step
    prefill_s: float  # from there to its first token
    decode_s: float  # from there to its last token


class EngineOutput(NamedTuple):
    """New tokens of one request in one step, and its end if `finish_reason` is given.

    An output with `prompt_logprobs` or `vectors` has nothing else. A named tuple, because each
    token makes one and sends it to another process as an array.
    """

    request_id: str
    token_ids: tuple[int, ...]  # new since its last output; a stop token is among them
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, when requested
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that matched; None for EOS
    error: ErrorCode | None = None  # with finish reason ERROR
    message: str = ""  # a sentence about the error
    num_cached_tokens: int = 0  # of its prompt, found in the prefix cache
    prompt_logprobs: tuple[PromptLogprob, ...] = ()  # new since its last output
    # With a natural end of a request that was computed; our own engine's first token has them, too.
    times: RequestTimes | None = None
    vectors: tuple[bytes, ...] = ()  # of the next inputs, in order: see Pooling


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of now, then counters since the start."""

    step: int  # launched so far
    waiting: int  # preempted ones included
    prefilling: int
    active: int  # decoding
    running: int  # prefilling + active
    preemptions: int
    free_blocks: int  # held by no sequence, the cached ones included
    cached_blocks: int  # held by no sequence, content can still be hit
    total_blocks: int
    prompt_tokens: int  # prefilled or hit, each once: recomputing after preemption adds nothing
    generated_tokens: int
    prefix_query_tokens: int  # looked up in the prefix cache, at every admission
    prefix_hit_tokens: int  # not computed thanks to the prefix cache, at every admission
    mixed_steps: int  # launched with decodes and chunks in one batch
    failed_steps: int  # raised, and were computed again
    offload_blocks: int = 0  # in host memory
    offload_disk_blocks: int = 0
    offload_stored_blocks: int = 0  # copied out of the pool
    offload_loaded_blocks: int = 0  # copied into it
    offload_unwritten_blocks: int = 0  # given up while there is a disk that does not have them


def check_request(request: EngineRequest, config: EngineConfig, vocab_size: int) -> None:
    """Raises RequestRefused when the request could never run in an engine of these bounds."""
    params = request.params
    if not request.prompt_token_ids:
        raise RequestRefused(ErrorCode.PAYLOAD_INVALID, "the prompt has no tokens")
    if request.pooling is not None:
        raise RequestRefused(ErrorCode.PAYLOAD_INVALID, "this engine computes no embeddings")
    if params.seed is None and not params.greedy:
        raise RequestRefused(ErrorCode.PAYLOAD_INVALID, "sampling needs a seed")
    if params.grammar is not None and not config.structured_output:
        raise RequestRefused(
            ErrorCode.GRAMMAR_FAILED, "this engine does not support structured output"
        )
    if request.adapter and request.adapter not in config.adapters:
        raise RequestRefused(
            ErrorCode.PAYLOAD_INVALID, f"this engine has no adapter {request.adapter!r}"
        )
    num_prompt = len(request.prompt_token_ids)
    num_known = num_prompt + len(request.output_token_ids)
    if num_prompt >= config.max_model_len:
        raise RequestRefused(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {num_prompt} tokens; the context is {config.max_model_len} "
            f"and has to hold an output token as well",
        )
    if num_known > config.sequence_capacity_tokens:
        raise RequestRefused(
            ErrorCode.KV_CAPACITY_EXCEEDED,
            f"{num_known} tokens can never fit the KV cache of {config.sequence_capacity_tokens}",
        )
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("output", request.output_token_ids),
        ("logit_bias", tuple(params.logit_bias)),
    ):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID,
                f"{name} names a token outside the vocabulary of {vocab_size}",
            )
