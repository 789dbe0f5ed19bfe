"""SamplingParams of a Messages request: ranges are Anthropic's, and its defaults are those of the
model's makers where these have any."""

from __future__ import annotations

import secrets

from api.anthropic.schemas import MessageRequest, ThinkingEnabled
from api.openai.sampling import Room, check_max_tokens
from shared.messages import InvalidParameter, SamplingParams

MAX_TEMPERATURE = 1.0


def message_sampling(request: MessageRequest, room: Room) -> SamplingParams:
    """Raises InvalidParameter.

    `max_tokens` may be more than the context has left: the answer then ends where the context does,
    and says so (`is_cut_by_context`).
    """
    temperature = request.temperature
    if temperature is not None and not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidParameter("temperature", f"must be between 0 and {MAX_TEMPERATURE:g}")
    check_max_tokens(request.max_tokens)
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and request.max_tokens <= thinking.budget_tokens:
        raise InvalidParameter("max_tokens", "must be greater than 'thinking.budget_tokens'")
    try:
        return SamplingParams(
            max_tokens=min(request.max_tokens, room.left),
            **room.defaults.fill(
                {"temperature": temperature, "top_p": request.top_p, "top_k": request.top_k}
            ),
            # Resolved here, so that every attempt on every worker continues the same stream.
            seed=secrets.randbits(63),
            stop=tuple(request.stop_sequences),
        )
    except InvalidParameter as error:
        if error.param != "stop":
            raise
        raise InvalidParameter("stop_sequences", error.message, error.code) from None


def is_cut_by_context(request: MessageRequest, room: Room) -> bool:
    """Whether an answer that ends by its length ends there because the context is full."""
    return request.max_tokens > room.left
