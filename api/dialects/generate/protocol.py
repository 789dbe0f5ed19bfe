"""The request of POST /generate."""

from __future__ import annotations

from api.generation.protocol import JobParameters, Prompt, StreamParameters, Texts, TokenIds


class GenerateRequest(StreamParameters, JobParameters):
    """POST /generate: the native dialect, which streams unless it is told otherwise."""

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    rep_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts = []
    stop_token_ids: TokenIds = []
    min_tokens: int = 0
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    stream: bool = True
