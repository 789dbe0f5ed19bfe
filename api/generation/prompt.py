"""Prompts to token ids. These functions take their time: call them on a thread of the TextPool, but
for what `is_short_prompt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import unsupported
from api.generation.models import ServedModel
from shared.messages import InvalidParameter

NO_TOOLS = "This model's chat template has no tools in a format that is known here."
NO_TOOLS_CODE = "tools_not_supported"

MAX_PROMPTS = 64  # of one request; each is a job of its own
QUICK_CHARS = 512
QUICK_IDS = 8192

Prompt = str | Sequence[str | int | list[int]]


def chat_text(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Returns the conversation through the model's template. Raises InvalidParameter.

    Calls of tools in it are refused where the model is not known to have any: its template would
    leave them out.
    """
    template = model.text.chat_template
    if template is None:
        raise InvalidParameter("messages", "this model has no chat template")
    if model.card.tool_format is None:
        for index, message in enumerate(messages):
            if "tool_calls" in message:
                raise InvalidParameter(f"messages.{index}.tool_calls", NO_TOOLS, NO_TOOLS_CODE)
    return template.render(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
    )


def check_text_fits(model: ServedModel, text: str, param: str) -> None:
    """Refuses a text that is far too long before it is tokenized. Raises InvalidParameter."""
    least = model.text.tokenizer.least_tokens(text)
    if least > model.context_tokens:
        model.budget(least).check_prompt(param, is_least=True)


def chat_token_ids(
    model: ServedModel, text: str, add_special_tokens: bool = False
) -> tuple[int, ...]:
    """What `chat_text` made. A template writes its own special tokens. Raises InvalidParameter."""
    return _encoded(model, text, "messages", add_special_tokens)


def prompt_token_ids(
    model: ServedModel,
    prompt: Prompt,
    add_special_tokens: bool = True,
    *,
    must_fit: bool = True,
) -> tuple[int, ...]:
    """Text, token ids, or a list with exactly one of these. `must_fit`: into the model's context.

    Raises InvalidParameter.
    """
    parts = each_prompt(prompt)
    if len(parts) > 1:
        raise unsupported("prompt", "here a request has one prompt")
    param, part = parts[0]
    if must_fit and isinstance(part, str):
        check_text_fits(model, part, param)
    return _token_ids(model, part, param, add_special_tokens)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the model sees it, and as text."""

    param: str  # the member it came in
    token_ids: tuple[int, ...]
    text: str  # "" for token ids whose text is not needed


def encoded_prompts(
    model: ServedModel, prompt: Prompt, with_text: bool
) -> tuple[EncodedPrompt, ...]:
    """Of one prompt or a list of them, in their order; `with_text`: token ids are also
    decoded to text. Raises InvalidParameter."""
    encoded = []
    for param, part in each_prompt(prompt):
        if isinstance(part, str):
            check_text_fits(model, part, param)
        token_ids = _token_ids(model, part, param, add_special_tokens=True)
        text = part if isinstance(part, str) else ""
        if with_text and not isinstance(part, str):
            text = model.text.tokenizer.decode(token_ids)
        encoded.append(EncodedPrompt(param, token_ids, text))
    return tuple(encoded)


def is_short_prompt(prompt: Prompt) -> bool:
    """Read in less time than it takes to hand it to a thread and back: one short text, or token
    ids, which are only compared."""
    if isinstance(prompt, str):
        return len(prompt) <= QUICK_CHARS
    return len(prompt) <= QUICK_IDS and all(isinstance(part, int) for part in prompt)


def each_prompt(prompt: Prompt) -> tuple[tuple[str, str | list[int]], ...]:
    """The prompts that a `prompt` stands for, each with the member's name in front. Raises
    InvalidParameter."""
    if isinstance(prompt, str):
        return (("prompt", prompt),)
    if not prompt:
        raise InvalidParameter("prompt", "must not be empty")
    token_ids = [part for part in prompt if isinstance(part, int)]
    if len(token_ids) == len(prompt):
        return (("prompt", token_ids),)
    parts = tuple(part for part in prompt if not isinstance(part, int))
    if token_ids or len({type(part) for part in parts}) > 1:
        raise InvalidParameter("prompt", "must be text, token ids, or a list of one of these")
    if len(parts) > MAX_PROMPTS:
        raise InvalidParameter("prompt", f"at most {MAX_PROMPTS} prompts, got {len(parts)}")
    return tuple((f"prompt.{index}", part) for index, part in enumerate(parts))


def checked_token_ids(model: ServedModel, token_ids: Sequence[Any], param: str) -> tuple[int, ...]:
    """Raises InvalidParameter for an id that the model does not have."""
    highest = model.card.vocab_size - 1
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= highest:
        raise InvalidParameter(param, f"token ids are between 0 and {highest}")
    return tuple(token_ids)


def _token_ids(
    model: ServedModel, prompt: str | list[int], param: str, add_special_tokens: bool
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return _encoded(model, prompt, param, add_special_tokens)
    return checked_token_ids(model, prompt, param)


def _encoded(
    model: ServedModel, text: str, param: str, add_special_tokens: bool
) -> tuple[int, ...]:
    try:
        return tuple(model.text.tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except InvalidParameter as error:
        raise InvalidParameter(param, error.message, error.code) from None
