"""The requests of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from api.generation.protocol import Objects, RequestModel, TokenIds
from shared.messages import InvalidParameter


class TokenizeRequest(RequestModel):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: Objects | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameter("prompt", "exactly one of 'prompt' and 'messages' must be given")
        return self


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None
