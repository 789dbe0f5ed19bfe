"""GenerateFormatter: the events of POST /generate, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.errors import ApiError
from api.generation.choices import ChoiceEvent, ChoiceReader, ReaderOptions
from api.generation.formatter import Formatter, PlainEvent, Timing, usage_payload
from api.generation.logprobs import PromptLogprobs
from api.output_parsers.events import Text
from shared.messages import Finished


class GenerateFormatter(Formatter[None]):
    """Events `{"text", "token_ids"}`; every one has a `text`, an error event too.

    The first has `is_first` and `ttft_ms`, the last `done`, `full_text`, `finish_reason` and
    `usage`; a response without text is one event that is both.
    """

    kind = "generate"

    def __init__(
        self,
        public_id: str,
        model: str,
        timing: Timing,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """`prompt_logprobs`: shown in a whole response."""
        super().__init__(ChoiceReader(ReaderOptions(has_token_ids=True)))
        self._prompt_logprobs = prompt_logprobs
        self._id = public_id
        self._model = model
        self._timing = timing
        self._texts: list[str] = []
        self._token_ids: list[int] = []  # of a whole response, or of a stream's last event
        self._is_first = True

    def opening(self) -> Sequence[Any]:
        return ()

    def event(self, event: ChoiceEvent[None]) -> Sequence[Any]:
        if not isinstance(event.piece, Text):
            self._token_ids += event.token_ids or ()  # the end's, for `closing`
            return ()
        text = event.piece.text
        self._texts.append(text)
        return (self._payload(text, event.token_ids or []),)

    def plain_event(self) -> PlainEvent | None:
        encode, keep = self.framing.event, self._texts.append

        def encoded(token_ids: Sequence[int], text: str) -> bytes:
            keep(text)
            return encode({"text": text, "token_ids": token_ids})

        return encoded

    def closing(self, end: Finished) -> Sequence[Any]:
        return ({**self._payload("", self._token_ids), "id": self._id, **self._end(end)},)

    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
        return {"text": "", "token_ids": [], **error.body()}

    def keep(self, event: ChoiceEvent[None]) -> None:
        self._token_ids += event.token_ids or ()
        if isinstance(event.piece, Text):
            self._texts.append(event.piece.text)

    def body(self, end: Finished) -> Any:
        body = {
            "id": self._id,
            "model": self._model,
            "text": "".join(self._texts),
            "token_ids": self._token_ids,
            "ttft_ms": self._timing.ttft_ms,
            **self._end(end),
        }
        if self._prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs.payload()
        return body

    def _payload(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        payload: dict[str, Any] = {"text": text, "token_ids": token_ids}
        if self._is_first:
            self._is_first = False
            ttft_ms = self._timing.ttft_ms
            payload.update(id=self._id, model=self._model, is_first=True, ttft_ms=ttft_ms)
        return payload

    def _end(self, end: Finished) -> dict[str, Any]:
        return {
            "done": True,
            "full_text": "".join(self._texts),
            "finish_reason": end.reason.value,
            "stop_reason": end.stop_reason,
            "usage": usage_payload(end.usage),
        }
