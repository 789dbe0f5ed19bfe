"""ChunkFormatter: what chat and completions share, OpenAI's chunks and `choices`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from api.errors import ApiError
from api.generation.choices import ChoiceEnd, ChoiceEvent, ChoiceReader
from api.generation.formatter import Formatter, usage_payload
from api.generation.logprobs import EntryT, PlacedLogprob
from api.generation.timing import Timing
from api.output_parsers.events import OutputEvent
from shared.messages import Finished, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseContext:
    """What every chunk of a response repeats, and what its request wants to see."""

    id: str  # public id
    model: str
    created_s: int
    num_choices: int = 1
    include_usage: bool = False
    num_logprobs: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # given: show token ids
    service_tier: str | None = None  # given: show it
    timing: Timing | None = None  # given: show metrics


@dataclass(slots=True)
class KeptChoice:
    """One choice of a whole response, so far."""

    token_ids: list[int] | None
    entries: list[Any] = field(default_factory=list)  # of log probabilities
    end: ChoiceEnd | None = None


class ChunkFormatter(Formatter[EntryT], Generic[EntryT]):
    """A dialect shapes what a choice has of a piece: `delta_member` and `whole_member`."""

    chunk_object: str
    whole_object: str

    def __init__(self, context: ResponseContext, reader: ChoiceReader[EntryT]) -> None:
        super().__init__(reader)
        self._context = context
        has_ids = context.prompt_token_ids is not None
        self._kept = [KeptChoice([] if has_ids else None) for _ in range(context.num_choices)]

    @abstractmethod
    def delta_member(self, piece: OutputEvent | None) -> dict[str, Any]:
        """Returns the member of a chunk's choice that has a piece; None: the choice's end."""

    @abstractmethod
    def keep_piece(self, choice: int, piece: OutputEvent) -> None:
        """Keeps a piece for `whole_member`."""

    @abstractmethod
    def whole_member(self, choice: int) -> dict[str, Any]:
        """Returns the member of a whole response's choice that has its pieces."""

    @abstractmethod
    def entries(self, placed: Sequence[PlacedLogprob[EntryT]]) -> Sequence[Any]:
        """Returns what is kept of log probabilities."""

    @abstractmethod
    def logprobs(self, entries: Sequence[Any]) -> Mapping[str, Any] | None:
        """Returns the member `logprobs` of a choice."""

    def event(self, event: ChoiceEvent[EntryT]) -> Sequence[Any]:
        member = self._choice(
            event.choice,
            self.delta_member(event.piece),
            self.entries(event.logprobs) if event.logprobs else (),
            event.token_ids,
            event.end,
        )
        return (self._chunk([member]),)

    def finished(self, end: Finished) -> Sequence[Any]:
        chunks = super().finished(end)
        if chunks:
            chunks[-1].update(self._metrics(end.usage))
        return chunks

    def closing(self, end: Finished) -> Sequence[Any]:
        if not self._context.include_usage:
            return ()
        return ({**self._chunk([]), "usage": self._usage(end.usage)},)

    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
        return error.body()

    def keep(self, event: ChoiceEvent[EntryT]) -> None:
        kept = self._kept[event.choice]
        if event.logprobs:
            kept.entries += self.entries(event.logprobs)
        if event.token_ids and kept.token_ids is not None:
            kept.token_ids += event.token_ids
        if event.piece is None:
            kept.end = event.end
        else:
            self.keep_piece(event.choice, event.piece)

    def body(self, end: Finished) -> Any:
        return {
            "id": self._context.id,
            "object": self.whole_object,
            "created": self._context.created_s,
            "model": self._context.model,
            "choices": [self.whole_choice(choice) for choice in self.shown_choices()],
            "usage": self._usage(end.usage),
            **self._service_tier(),
            **self._metrics(end.usage),
            **self.prompt_members(),
        }

    def whole_choice(self, choice: int) -> dict[str, Any]:
        """Returns one of a whole response's `choices`."""
        kept = self._kept[choice]
        return self._choice(
            choice, self.whole_member(choice), kept.entries, kept.token_ids, kept.end
        )

    def shown_choices(self) -> Sequence[int]:
        """Returns the choices of a whole response, in its order."""
        return range(len(self._kept))

    def prompt_members(self) -> dict[str, Any]:
        """Returns members of a whole response, and of the first chunk of a stream."""
        token_ids = self._context.prompt_token_ids
        return {} if token_ids is None else {"prompt_token_ids": token_ids}

    def finish_reason(self, end: ChoiceEnd) -> str | None:
        return None if end.reason is None else end.reason.value

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        context = self._context
        chunk = {
            "id": context.id,
            "object": self.chunk_object,
            "created": context.created_s,
            "model": context.model,
            "choices": choices,
        }
        if context.service_tier is not None:
            chunk["service_tier"] = context.service_tier
        if context.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self,
        choice: int,
        member: dict[str, Any],
        entries: Sequence[Any] = (),
        token_ids: list[int] | None = None,
        end: ChoiceEnd | None = None,
    ) -> dict[str, Any]:
        """Returns an item of `choices`."""
        item = {
            "index": choice,
            **member,
            "logprobs": self.logprobs(entries) if entries else None,
            "finish_reason": None if end is None else self.finish_reason(end),
        }
        if end is not None and end.stop_reason is not None:
            item["stop_reason"] = end.stop_reason
        if token_ids is not None:
            item["token_ids"] = token_ids
        return item

    def _service_tier(self) -> dict[str, Any]:
        tier = self._context.service_tier
        return {} if tier is None else {"service_tier": tier}

    def _metrics(self, usage: Usage) -> dict[str, Any]:
        """Times are those of one sequence of tokens: there are none for several choices."""
        timing = self._context.timing
        if timing is None:
            return {}
        several = self._context.num_choices > 1
        return {"metrics": None if several else timing.metrics(usage.completion_tokens)}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_payload(usage, self.reader.reasoning_tokens or 0)
