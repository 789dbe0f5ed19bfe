"""The request of POST /v1/completions."""

from __future__ import annotations

from typing import ClassVar

from api.generation.protocol import CompletionFields, Prompt


class CompletionRequest(CompletionFields):
    """POST /v1/completions."""

    kind: ClassVar[str] = "completion"

    prompt: Prompt
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
