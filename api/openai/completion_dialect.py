"""CompletionDialect: events of a job as `text_completion`s, in chunks or whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from api.openai.answer import ChoiceAnswer, ChoiceEnd, OpenAIAnswer
from api.openai.logprobs import PlacedLogprob, completion_logprobs
from shared.messages import Finished


class CompletionDialect(OpenAIAnswer):
    """`text_completion`, in chunks and whole."""

    kind = "completion"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def opening(self) -> Sequence[Any]:
        if self._facts.prompt_token_ids is None:
            return ()
        chunk = self._chunk([self._choice(choice, {"text": ""}) for choice in self._choices])
        return ({**chunk, "prompt_token_ids": self._facts.prompt_token_ids},)

    def _logprobs(self, placed: list[PlacedLogprob]) -> dict[str, Any] | None:
        return completion_logprobs(placed, self._tokenizer, self._facts.num_logprobs or 0)

    def _said(self, choice: ChoiceAnswer, text: str) -> Iterable[dict[str, Any]]:
        yield self._choice(choice, {"text": text})

    def _ended(self, choice: ChoiceAnswer, end: Finished) -> Iterable[dict[str, Any]]:
        yield self._choice(choice, {"text": ""}, _end_of(end))

    def _whole(self, choice: ChoiceAnswer, end: Finished) -> dict[str, Any]:
        return self._choice(choice, {"text": "".join(choice.texts)}, _end_of(end))


def _end_of(end: Finished) -> ChoiceEnd:
    return ChoiceEnd(end.reason.value, end.stop_reason)
