"""Prompts of text and token ids, of completions and of the native dialect.

CPU-bound: run it in the thread pool, unless `is_short_prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.generation.models import ServedModel
from api.generation.prompt import check_text_fits, encoded, requested_grammar
from api.generation.protocol import NO_PROMPT, CompletionFields
from api.on_demand import load_part
from api.request_errors import unsupported
from shared.messages import Grammar, InvalidParameter
from shared.text.special_text import MarkedText

QUICK_CHARS = 512
QUICK_IDS = 8192

Prompt = str | Sequence[str | int | list[int]]


def prompt_token_ids(
    model: ServedModel,
    prompt: Prompt,
    add_special_tokens: bool = True,
    *,
    must_fit: bool = True,
) -> tuple[int, ...]:
    """Returns the ids of text, token ids, or a list of one of these. `must_fit`: into the context.

    Raises InvalidParameter.
    """
    parts = each_prompt(prompt)
    if len(parts) > 1:
        raise unsupported("prompt", "this route takes one prompt")
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
    """Returns one prompt or a list of them encoded, in order; `with_text`: token ids are also
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


def is_short_prompt(model: ServedModel, prompt: Prompt) -> bool:
    """Returns whether it is read faster than a thread would be reached: one short text, or token
    ids, which are only compared."""
    if isinstance(prompt, str):
        return len(prompt) <= QUICK_CHARS and model.text.is_local
    return len(prompt) <= QUICK_IDS and all(isinstance(part, int) for part in prompt)


def each_prompt(prompt: Prompt) -> tuple[tuple[str, str | list[int]], ...]:
    """Returns the prompts of `prompt`, each with its parameter's name. Raises
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
        raise InvalidParameter("prompt", NO_PROMPT)
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
        return encoded(model, MarkedText(prompt), param, add_special_tokens)
    return checked_token_ids(model, prompt, param)


def checked_grammar(model: ServedModel, request: CompletionFields) -> Grammar | None:
    """Returns the grammar of a request, compiled. Raises InvalidParameter."""
    requested = requested_grammar(request)
    if requested is None:
        return None
    load_part("grammars").check_grammar(model, requested)
    return requested.grammar
