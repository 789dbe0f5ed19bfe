"""SamplingParams of a chat completions request."""

from __future__ import annotations

from api.dialects.chat.protocol import ChatRequest
from api.generation.sampling import (
    Room,
    check_prompt_logprobs,
    renamed_parameters,
    sampling_params,
)
from shared.messages import InvalidParameter, SamplingParams


def chat_sampling(request: ChatRequest, room: Room) -> SamplingParams:
    """Raises InvalidParameter. The default of max_tokens is all that the context has left."""
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise InvalidParameter("top_logprobs", "needs 'logprobs' to be true")
    check_prompt_logprobs(request.prompt_logprobs, streamed=request.stream)
    name, asked = request.requested_tokens
    with renamed_parameters({"logprobs": "top_logprobs", "max_tokens": name}):
        max_tokens = room.max_tokens(asked, room.left)
        return sampling_params(request, max_tokens, logprobs, request.prompt_logprobs, room)
