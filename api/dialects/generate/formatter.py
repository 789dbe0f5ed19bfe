"""GenerateFormatter: the events of POST /generate, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.errors import ApiError
from api.generation.formatter import Formatter, usage_payload
from api.generation.prompt_logprobs import PromptLogprobs
from api.generation.timing import Timing
from shared.messages import Delta, Finished


class GenerateFormatter(Formatter):
    """Events `{"text", "token_ids"}`; every one has a `text`, an error event too.

    The first has `is_first` and `ttft_ms`, the last `done`, `full_text`, `finish_reason` and
    `usage`; an answer without text is one event that is both.
    """

    kind = "generate"

    def __init__(
        self,
        public_id: str,
        model: str,
        timing: Timing,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """`prompt_logprobs`: shown in a whole answer."""
        self._prompt_logprobs = prompt_logprobs
        self._id = public_id
        self._model = model
        self._timing = timing
        self._texts: list[str] = []
        self._token_ids: list[int] = []  # not shown yet; all of them in a whole answer
        self._is_first = True

    def opening(self) -> Sequence[Any]:
        return ()

    def delta(self, delta: Delta) -> Sequence[Any]:
        self.collect(delta)
        return (self._event(delta.text),) if delta.text else ()

    def finished(self, end: Finished) -> Sequence[Any]:
        return ({**self._event(""), "id": self._id, **self._end(end)},)

    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
        return {"text": "", "token_ids": [], **error.body()}

    def collect(self, delta: Delta) -> None:
        self._token_ids.extend(delta.token_ids)
        self._texts.append(delta.text)

    def whole(self, end: Finished) -> Any:
        answer = {
            "id": self._id,
            "model": self._model,
            "text": "".join(self._texts),
            "token_ids": self._token_ids,
            "ttft_ms": self._timing.ttft_ms,
            **self._end(end),
        }
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs.payload()
        return answer

    def _event(self, text: str) -> dict[str, Any]:
        event: dict[str, Any] = {"text": text, "token_ids": self._token_ids}
        self._token_ids = []
        if self._is_first:
            self._is_first = False
            event.update(
                id=self._id, model=self._model, is_first=True, ttft_ms=self._timing.ttft_ms
            )
        return event

    def _end(self, end: Finished) -> dict[str, Any]:
        return {
            "done": True,
            "full_text": "".join(self._texts),
            "finish_reason": end.reason.value,
            "stop_reason": end.stop_reason,
            "usage": usage_payload(end.usage),
        }
