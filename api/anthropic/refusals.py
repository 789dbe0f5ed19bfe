"""Why a member is refused, where "invalid value" would not explain enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from api.errors import renaming, unsupported
from shared.messages import InvalidParameter

# What Anthropic's SDKs know: they send the whole conversation again, without the member.
_THREAD, _NO_THREADS = "thread", "thread_unsupported_request"
_MISSING = "missing_required_parameter"

# a member of ChatAsk, as planning names it -> as this dialect does
_RENAMED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"tools\.(\d+)\.function\.parameters"), r"tools.\1.input_schema"),
    (re.compile(r"tools\.(\d+)\.function"), r"tools.\1"),
    (re.compile(r"tool_choice\.function"), r"tool_choice"),
    (re.compile(r"response_format\.json_schema"), r"output_config.format"),
    (re.compile(r"response_format"), r"output_config.format"),
    (re.compile(r"chat_template_kwargs"), r"thinking"),
    (re.compile(r"reasoning_effort"), r"output_config.effort"),
    (re.compile(r"thinking_token_budget"), r"thinking"),
    # Turns are not the request's messages: which of them it is would be a guess.
    (re.compile(r"messages\.\d+.*"), r"messages"),
)

# what the member's path looks like -> why this value of it is not served
_REASONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"(messages\.\d+\.content|system)\.\d+(\.content\.\d+)?\.type"),
        "blocks are text, in an assistant's message also thinking and tool_use, in a user's also "
        "tool_result",
    ),
    (re.compile(r"tools\.\d+\.type"), "only custom tools are served: none runs at this server"),
    (
        re.compile(r"thinking\.type"),
        "'adaptive' lets the model think as long as it likes, 'enabled' as long as its budget "
        "lasts, 'disabled' asks the template for none",
    ),
    (re.compile(r"thinking\.display"), "what the model thinks is always shown"),
    (re.compile(r"speed"), "there is one speed"),
    (re.compile(r"service_tier"), "there is one tier"),
    (re.compile(r"tools\.\d+\.defer_loading"), "every tool is shown to the model"),
    (re.compile(r"tools\.\d+\.allowed_callers\.\d+"), "only the model itself calls tools"),
    (re.compile(r"tools\.\d+\.input_examples"), "examples are not shown to the model"),
)


@contextmanager
def explaining() -> Iterator[None]:
    """Explains errors of parsing a request, where this module knows the reason."""
    try:
        yield
    except InvalidParameter as error:
        if error.param == _THREAD:
            message = "No threads are kept here: send the whole conversation, without this member."
            raise InvalidParameter(_THREAD, message, _NO_THREADS) from None
        if error.code != _MISSING:
            for pattern, why in _REASONS:
                if pattern.fullmatch(error.param):
                    raise unsupported(error.param, why) from None
        raise


def in_this_dialect() -> AbstractContextManager[None]:
    """Errors of planning name the members that the caller sent."""
    return renaming(_RENAMED)
