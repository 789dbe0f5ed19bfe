"""The native dialect: POST /generate, and the events of GET /v1/jobs/{id}/stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.errors import ApiError
from api.generation.dialect import usage_payload
from api.generation.prompt_logprobs import PromptLogprobs
from api.generation.timing import Timing
from api.sse import PLAIN
from shared.messages import ChoiceDelta, Delta, Finished


class GenerateDialect:
    """Events `{"text", "token_ids"}`; every one has a `text`, an error event too.

    The first has `is_first` and `ttft_ms`, the last `done`, `full_text`, `finish_reason` and
    `usage`; an answer without text is one event that is both.
    """

    kind = "generate"
    framing = PLAIN

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

    def before_choice(self, choice: int) -> Sequence[Any]:
        return ()

    def delta(self, delta: Delta) -> Sequence[Any]:
        self.collect(delta)
        return (self._event(delta.text),) if delta.text else ()

    def held_bytes(self, choice: int) -> int:
        return 0

    def finished(self, end: Finished) -> Sequence[Any]:
        return ({**self._event(""), "id": self._id, **self._end(end)},)

    def failed(self, error: ApiError) -> Any:
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


def tail_delta(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """An event of a job's stream."""
    return {"text": text, "token_ids": token_ids}


def tail_choice(part: ChoiceDelta) -> dict[str, Any]:
    """An event of the stream of a job with several choices; a choice's last says how it ended."""
    event = {"index": part.choice, "text": part.text, "token_ids": part.token_ids}
    if part.finish_reason is None:
        return event
    return {
        **event,
        "finish_reason": part.finish_reason.value,
        "stop_reason": part.stop_reason,
    }


def tail_end(end: Finished, token_ids: Sequence[int]) -> dict[str, Any]:
    """The last event of a job's stream, with the tokens that stand for no text.

    Of a job with several choices: `finish_reason` is `length` when one of them was cut.
    """
    return {
        "text": "",
        "token_ids": token_ids,
        "done": True,
        "finish_reason": end.reason.value,
        "stop_reason": end.stop_reason,
        "usage": usage_payload(end.usage),
    }


def tail_error(error: ApiError) -> dict[str, Any]:
    """The last event of every other job's stream."""
    return {"text": "", "token_ids": [], **error.body()}
