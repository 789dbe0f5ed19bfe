"""SamplingParams of a Responses request: those of chat completions under their names here."""

from __future__ import annotations

from api.openai.sampling import Room, chat_sampling
from api.openai.schemas import ChatRequest
from api.responses.schemas import ResponseRequest
from shared.messages import InvalidParameter, SamplingParams


def response_sampling(request: ResponseRequest, room: Room) -> SamplingParams:
    """Raises InvalidParameter. The default of max_output_tokens is all the context has left."""
    try:
        return chat_sampling(as_chat(request), room)
    except InvalidParameter as error:
        if error.param not in ("max_tokens", "max_completion_tokens"):
            raise
        raise InvalidParameter("max_output_tokens", error.message, error.code) from None


def as_chat(request: ResponseRequest) -> ChatRequest:
    """The members that say how to answer, not what, of a request of chat completions."""
    return ChatRequest(
        model=request.model,
        messages=[],
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        service_tier=request.service_tier,
        priority=request.priority,
        seed=request.seed,
        stop=request.stop,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
    )
