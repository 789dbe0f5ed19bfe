"""Reasoning efforts: maps the effort of a request to a variable of the model's chat template.

An effort is a hint. A template without a variable for it ignores it. One that knows some efforts
gets the nearest, and the response reports the requested one as ignored. One with
`enable_thinking` gets on or off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from api.generation.models import ServedModel
from shared.messages import InvalidParameter
from shared.text.base import ChatTemplate
from shared.text.tool_formats import ReasoningFormat, reasoning_format_of

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # from least to most
MAX_EFFORT_CHARS = 64  # of an effort that is not in EFFORTS
NO_EFFORT = EFFORTS[0]

_EFFORT, _ENABLE_THINKING = "reasoning_effort", "enable_thinking"
_HARMONY_EFFORTS = frozenset({"low", "medium", "high"})  # that its models were trained on
_UNKNOWN = "penstock_probe"  # an effort that no template knows
_PROBE = ({"role": "user", "content": "x"},)


def with_effort(
    model: ServedModel, effort: str | None, variables: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Returns the template's variables, and whether the effort is ignored: it has no effect on
    them, or another effort replaces it.

    `variables` are the request's own, which take precedence. The first call for a template renders
    it once for each effort: run it in the thread pool.
    """
    template = model.text.chat_template
    if effort is None or template is None:
        return dict(variables), effort is not None
    found: dict[str, Any] = {}
    if _EFFORT in template.variables:
        word = _nearest(effort, _words_of(model, template), template)
        if word is not None:
            found[_EFFORT] = word
    is_ignored = found.get(_EFFORT, effort) != effort
    if _ENABLE_THINKING in template.variables and effort in EFFORTS:
        found[_ENABLE_THINKING] = effort != NO_EFFORT
        is_ignored = is_ignored and effort != NO_EFFORT  # "none" has its effect then
    return {**found, **variables}, is_ignored or not found


def _nearest(effort: str, words: Iterable[str], template: ChatTemplate) -> str | None:
    """Returns the template's nearest effort; None where it has none for this one."""
    if effort not in EFFORTS:
        return effort if _knows(template, effort) else None
    place = EFFORTS.index(effort)
    ranked = ((abs(EFFORTS.index(word) - place), -EFFORTS.index(word), word) for word in words)
    return min(ranked, default=(0, 0, None))[2]  # of two that are as near, the higher one


def _words_of(model: ServedModel, template: ChatTemplate) -> frozenset[str]:
    words = _known_efforts(template)
    if reasoning_format_of(model.card.reasoning_format) is ReasoningFormat.OPENAI:
        words &= _HARMONY_EFFORTS
    return words


@lru_cache(maxsize=64)
def _known_efforts(template: ChatTemplate) -> frozenset[str]:
    """Returns those of EFFORTS that a ChatTemplate accepts, or the ones that it distinguishes.

    A template that distinguishes at most one value, besides `none`, has a branch for all others.
    """
    rendered = {word: _rendered(template, word) for word in EFFORTS}
    accepted = frozenset(word for word, text in rendered.items() if text is not None)
    unknown = _rendered(template, _UNKNOWN)
    if unknown is None or _UNKNOWN in unknown:
        return accepted
    distinct = frozenset(word for word in accepted if rendered[word] != unknown)
    return distinct if len(distinct - {NO_EFFORT}) > 1 else accepted


def _knows(template: ChatTemplate, word: str) -> bool:
    """Returns whether a template has a branch for this effort alone."""
    if not 0 < len(word) <= MAX_EFFORT_CHARS:
        return False
    text, unknown = _rendered(template, word), _rendered(template, _UNKNOWN)
    if text is None or (unknown is not None and _UNKNOWN in unknown):
        return False
    return text != unknown


def _rendered(template: ChatTemplate, word: str) -> str | None:
    try:
        return template.render(_PROBE, extra={_EFFORT: word})
    except InvalidParameter:
        return None
