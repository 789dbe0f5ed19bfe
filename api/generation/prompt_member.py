"""The member `prompt` of completions and of the native dialect, and `input` of embeddings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from api.generation.protocol import NO_PROMPT, TokenIds
from api.generation.schemas import WHOLE_NUMBERS
from shared.messages import MAX_EMBEDDED_INPUTS, InvalidParameter

MAX_PROMPTS = 64  # per request; each becomes a job
_TOKEN_IDS = TypeAdapter(TokenIds, config=ConfigDict(strict=True))


def _check_number_of(param: str, most: int) -> WrapValidator:
    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Refuses too many prompts before each of them is validated, which holds the
        interpreter's lock all the while."""
        if isinstance(value, list) and len(value) > most:
            if isinstance(value[0], str | list):
                raise InvalidParameter(param, f"at most {most} {param}s, got {len(value)}")
            try:
                return _TOKEN_IDS.validate_python(value)
            except ValidationError:
                if list in map(type, value):
                    raise InvalidParameter(param, NO_PROMPT) from None
        return handler(value)

    return WrapValidator(check)


_TextsOrTokenIds = (
    str
    | Annotated[
        list[Annotated[int | str | TokenIds, Field(union_mode="left_to_right")]],
        Field(fail_fast=True),
    ]
)

# Text, token ids, or a list of texts or of token ids.
Prompt = Annotated[_TextsOrTokenIds, _check_number_of("prompt", MAX_PROMPTS), WHOLE_NUMBERS]
EmbeddedInput = Annotated[
    _TextsOrTokenIds, _check_number_of("input", MAX_EMBEDDED_INPUTS), WHOLE_NUMBERS
]
