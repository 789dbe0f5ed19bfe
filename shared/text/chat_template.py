"""JinjaChatTemplate: messages to prompt text, as transformers' apply_chat_template does it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from shared.messages import InvalidParameter
from shared.text.base import TextInvalid
from shared.text.rendering import RenderingProcesses, checked, shared_processes
from shared.text.rendering_process import RenderRequest, TemplateSource
from shared.text.sandbox import MAX_CHARS

_numbers = itertools.count()


class JinjaChatTemplate:
    """A checkpoint's chat template, rendered in a process of its own. Safe on several threads.

    `source` is a template, or several by name, of which "tool_use" serves requests with tools and
    "default" the others. `special_tokens` are variables of the template ("bos_token", ...).
    Raises TextInvalid for a source that does not compile, and RenderingUnavailable.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_CHARS,
        processes: RenderingProcesses | None = None,
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self._template = TemplateSource(next(_numbers), sources, dict(special_tokens), max_chars)
        self._processes = processes or shared_processes()
        self._now = now
        try:
            compiled = checked(
                self._processes.ask(RenderRequest(self._template.number), self._template)
            )
        except InvalidParameter as error:
            raise TextInvalid(f"the chat template does not compile: {error.message}") from error
        self.variables = frozenset(compiled.variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt's text, with the special tokens in it: encode it without adding any.

        `extra` are further variables, such as `documents` or `enable_thinking`. Raises
        InvalidParameter for "messages" when the template refuses the conversation or needs too
        much time or memory, and for "chat_template_kwargs" when a variable's name is not the
        caller's to set. Raises RenderingUnavailable as RenderingProcesses.ask.
        """
        request = RenderRequest(
            number=self._template.number,
            messages=list(messages),
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            extra=dict(extra or {}),
            now=self._now().isoformat(),
        )
        return checked(self._processes.ask(request, self._template)).text
