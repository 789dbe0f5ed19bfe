"""From a request of embeddings to a job and the formatter of its response."""

from __future__ import annotations

from dataclasses import replace

from api.dialects.embeddings.formatter import EmbeddingFormatter, Vectors
from api.dialects.embeddings.protocol import EmbeddingRequest
from api.generation.models import GenerationService, ServedModel
from api.generation.protocol import job_lane
from api.generation.sampling import renamed_parameters
from api.generation.text_prompts import EncodedPrompt, encoded_prompts, is_short_prompt
from api.http.caller import Caller
from api.jobs.new_job import Prepared, new_job
from api.jobs.retention import UNSTORED_TEXT_MS
from shared.messages import (
    MAX_EMBEDDED_TOKENS,
    InvalidParameter,
    Pooling,
    SamplingParams,
)

NUMBER_CHARS = 22  # a number as JSON: -0.012345678901234567 and a comma
BASE64_CHARS = 16 / 3  # a float32 as base64: four characters for three bytes
OBJECT_CHARS = 64  # around each vector
KEYED_VECTORS_MS = 60_000  # in which a request with a key can be repeated


async def prepare_embedding(
    generation: GenerationService, caller: Caller, request: EmbeddingRequest
) -> Prepared:
    """Returns the job of a request and its formatter. Raises ApiError and InvalidParameter."""
    model = await generation.models.require(request.model, "embed")
    dimensions = _dimensions(model, request.dimensions)
    if is_short_prompt(model, request.input):
        inputs = _inputs(model, request)
    else:
        inputs = await generation.pool.run(_inputs, model, request)
    _check_size(len(inputs), dimensions, request, generation.max_response_bytes)
    pooling = Pooling(tuple(len(one.token_ids) for one in inputs), dimensions)
    job = new_job(
        caller,
        generation.job_defaults,
        model=model,
        kind=EmbeddingFormatter.kind,
        token_ids=tuple(token_id for one in inputs for token_id in one.token_ids),
        sampling=SamplingParams(max_tokens=0, temperature=0.0, seed=0),
        on_disconnect=request.on_disconnect,
        params=request,
        lane=job_lane(request),
    )
    job = replace(job, pooling=pooling)
    if request.store is None and request.expires_after is None:
        # Vectors are large: they are deleted earlier than text.
        if job.idempotency is not None:
            job = replace(job, retain_ms=KEYED_VECTORS_MS)
        else:
            job = replace(job, text_ms=UNSTORED_TEXT_MS)
    vectors = Vectors(pooling)
    formatter = EmbeddingFormatter(
        model.card.name, vectors, as_base64=request.encoding_format == "base64"
    )
    return Prepared(job, formatter, prompt=vectors)


def _inputs(model: ServedModel, request: EmbeddingRequest) -> tuple[EncodedPrompt, ...]:
    """Returns the inputs, encoded. Raises InvalidParameter."""
    with renamed_parameters({"prompt": "input"}):
        inputs = encoded_prompts(model, request.input, with_text=False)
    num_tokens = 0
    for one in inputs:
        param = one.param.replace("prompt", "input", 1)
        length = len(one.token_ids)
        num_tokens += length
        if not length:
            raise InvalidParameter(param, "must have at least one token")
        if length > model.context_tokens:
            raise InvalidParameter(
                param,
                f"This model's maximum input length is {model.context_tokens} tokens, and this "
                f"input has {length}. Please shorten it.",
                "context_length_exceeded",
            )
    if num_tokens > MAX_EMBEDDED_TOKENS:
        raise InvalidParameter(
            "input", f"at most {MAX_EMBEDDED_TOKENS} tokens in all inputs, got {num_tokens}"
        )
    return inputs


def _dimensions(model: ServedModel, requested: int | None) -> int:
    size = model.card.embedding_size
    if requested is None:
        return size
    if not 1 <= requested <= size:
        raise InvalidParameter("dimensions", f"must be between 1 and {size}")
    return requested


def _check_size(
    num_inputs: int, dimensions: int, request: EmbeddingRequest, max_bytes: int
) -> None:
    """Raises InvalidParameter for a response that would have more than `max_bytes`."""
    number_chars = BASE64_CHARS if request.encoding_format == "base64" else NUMBER_CHARS
    vector_bytes = OBJECT_CHARS + dimensions * number_chars
    if num_inputs * vector_bytes > max_bytes:
        raise InvalidParameter(
            "input",
            f"{num_inputs} vectors of {dimensions} numbers can have about "
            f"{round(num_inputs * vector_bytes)} bytes, and {max_bytes} are allowed. Please send "
            f"{int(max_bytes // vector_bytes)} inputs at a time, or ask for base64.",
            "answer_too_large",
        )
