"""Prompts to token ids. These functions take their time: call them on a thread of the TextPool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.catalog import ServedModel
from api.errors import unsupported
from api.openai.messages import template_messages
from shared.messages import InvalidParameter

Prompt = str | Sequence[str | int | list[int]]


def chat_token_ids(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
) -> tuple[int, ...]:
    """The conversation through the model's template. Raises InvalidParameter."""
    template = model.text.chat_template
    if template is None:
        raise InvalidParameter("messages", "this model has no chat template")
    text = template.render(
        template_messages(messages), add_generation_prompt=add_generation_prompt, extra=extra
    )
    return _encoded(model, text, "messages", add_special_tokens)


def prompt_token_ids(
    model: ServedModel, prompt: Prompt, add_special_tokens: bool = True
) -> tuple[int, ...]:
    """Text, token ids, or a list with exactly one of these. Raises InvalidParameter."""
    if isinstance(prompt, str):
        return _encoded(model, prompt, "prompt", add_special_tokens)
    kinds = {type(part) for part in prompt}
    if not prompt:
        raise InvalidParameter("prompt", "must not be empty")
    if kinds == {int}:
        return checked_token_ids(model, prompt, "prompt")
    if len(kinds) > 1:
        raise InvalidParameter("prompt", "must be text, token ids, or a list of one of these")
    if len(prompt) > 1:
        raise unsupported("prompt", "one prompt per request for now")
    only = prompt[0]
    if isinstance(only, list):
        return checked_token_ids(model, only, "prompt.0")
    assert isinstance(only, str)
    return _encoded(model, only, "prompt", add_special_tokens)


def checked_token_ids(model: ServedModel, token_ids: Sequence[Any], param: str) -> tuple[int, ...]:
    """Raises InvalidParameter for an id that the model does not have."""
    highest = model.card.vocab_size - 1
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= highest:
        raise InvalidParameter(param, f"token ids are between 0 and {highest}")
    return tuple(token_ids)


def _encoded(
    model: ServedModel, text: str, param: str, add_special_tokens: bool
) -> tuple[int, ...]:
    try:
        return tuple(model.text.tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except InvalidParameter as error:
        raise InvalidParameter(param, error.message, error.code) from None
