"""CompletionFormatter: events of jobs as `text_completion`s, in chunks or whole.

A request may have several prompts, each with several choices. Their choices are numbered through:
all of the first prompt, then all of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from api.generation.choices import ChoiceReader, PlacedLogprob, ReaderOptions
from api.generation.formatter import ChunkFormatter, ResponseContext
from api.generation.logprobs import (
    CompletionEntry,
    CompletionEntryForm,
    CompletionLogprobs,
    EchoedLogprobs,
    PromptLogprobs,
    ScoredPrompt,
    completion_logprobs,
)
from api.http.sse import JoinedText
from api.output_parsers.events import OutputEvent, Text
from shared.messages import Finished
from shared.text.base import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """Options of a completion request for its response as a whole.

    ResponseContext.num_choices is the number of prompts times `best_of`.
    """

    best_of: int = 1  # choices that are run for a prompt
    n: int = 1  # choices that are shown of them: those with the highest mean log probability
    echoes: tuple[str, ...] | None = None  # each prompt's text, repeated before its choices
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()  # each prompt's, of several
    job_ids: tuple[str, ...] = ()  # each prompt's, of several
    scored: tuple[ScoredPrompt, ...] = ()  # each prompt's, where anything of them is shown
    num_prompt_logprobs: int | None = None  # as the request's `prompt_logprobs`


ONE_CHOICE = CompletionShape()


class CompletionFormatter(ChunkFormatter[CompletionEntry]):
    """`text_completion`, in chunks and whole."""

    kind = "completion"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self, context: ResponseContext, tokenizer: Tokenizer, shape: CompletionShape = ONE_CHOICE
    ) -> None:
        self._shape = shape
        self._echoed: list[EchoedLogprobs] = []  # of each prompt
        num_choices, num_top = context.num_choices, context.num_logprobs
        prompt_chars = None
        if shape.echoes is not None and shape.scored and num_top is not None:
            self._echoed = [
                EchoedLogprobs(prompt, text, tokenizer, num_top)
                for prompt, text in zip(shape.scored, shape.echoes, strict=True)
            ]
            prompt_chars = [len(self._echo(choice)) for choice in range(num_choices)]
        options = ReaderOptions(
            num_choices=num_choices,
            tokenizer=tokenizer,
            form=None if num_top is None else CompletionEntryForm(tokenizer, num_top),
            has_token_ids=context.prompt_token_ids is not None,
            ranks_choices=shape.best_of > shape.n,
            prompt_chars=prompt_chars,
        )
        super().__init__(context, ChoiceReader(options))
        self._tokenizer = tokenizer
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]  # of a whole response
        self._is_echoed = [False] * num_choices  # in a stream, with its log probabilities

    def opening(self) -> Sequence[Any]:
        """Returns the prompts that the response shows: one chunk per choice.

        If it shows their log probabilities, too, these come with the text.
        """
        members = self.prompt_members()
        is_echoed = self._shape.echoes is not None and not self._echoed
        num_chunks = 1 if members else 0
        if is_echoed or self._shape.prompt_token_ids:
            num_chunks = self._context.num_choices
        chunks = []
        for choice in range(num_chunks):
            text = self._echo(choice) if is_echoed else ""
            has_ids = self._context.prompt_token_ids is not None
            item = self._choice(choice, {"text": text}, token_ids=[] if has_ids else None)
            chunks.append(self._chunk([{**item, **self._own_prompt_members(choice)}]))
        if chunks:
            chunks[0].update(members)
        return chunks

    def before_choice(self, choice: int) -> Iterable[Any]:
        """Yields the prompt, once: its text and the first part of its log probabilities, then the
        other parts."""
        if not self._echoed or self._is_echoed[choice]:
            return
        self._is_echoed[choice] = True
        text = self._echo(choice)
        for logprobs in self._echoed[self._prompt_of(choice)].parts():
            item = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None}
            if self._context.prompt_token_ids is not None:
                item["token_ids"] = []
            yield self._chunk([item])
            text = ""

    def delta_member(self, piece: OutputEvent | None) -> dict[str, Any]:
        return {"text": piece.text if isinstance(piece, Text) else ""}

    def keep_piece(self, choice: int, piece: OutputEvent) -> None:
        assert isinstance(piece, Text), "a completion is not parsed"
        self._texts[choice].append(piece.text)

    def whole_member(self, choice: int) -> dict[str, Any]:
        text, echo = "".join(self._texts[choice]), self._echo(choice)
        return {"text": JoinedText(echo, text) if echo else text}  # the choices share the prompt

    def entries(
        self, placed: Sequence[PlacedLogprob[CompletionEntry]]
    ) -> Sequence[PlacedLogprob[CompletionEntry]]:
        return placed

    def logprobs(
        self, entries: Sequence[PlacedLogprob[CompletionEntry]]
    ) -> CompletionLogprobs | None:
        return completion_logprobs(entries)

    def whole_choice(self, choice: int) -> dict[str, Any]:
        item = {**super().whole_choice(choice), **self._own_prompt_members(choice)}
        prompt = self._prompt_of(choice)
        if self._echoed:
            item["logprobs"] = self._echoed[prompt].before(item["logprobs"])
        num_top = self._shape.num_prompt_logprobs
        if num_top is not None:
            logprobs = PromptLogprobs(self._shape.scored[prompt], num_top, self._tokenizer)
            item["prompt_logprobs"] = logprobs.payload()
        return item

    def shown_choices(self) -> Sequence[int]:
        """Returns the best of each prompt's choices first; equal ones in order."""
        shape, shown = self._shape, list[int]()
        for first in range(0, self._context.num_choices, shape.best_of):
            choices: Sequence[int] = range(first, first + shape.best_of)
            if shape.best_of > shape.n:
                ranked = sorted(choices, key=self.reader.mean_logprob, reverse=True)
                choices = ranked[: shape.n]
            shown += choices
        return shown

    def prompt_members(self) -> dict[str, Any]:
        if self._shape.job_ids:
            return {"job_ids": self._shape.job_ids}
        return super().prompt_members()

    def body(self, end: Finished) -> Any:
        body = super().body(end)
        for index, choice in enumerate(body["choices"]):
            choice["index"] = index
        return body

    def _own_prompt_members(self, choice: int) -> dict[str, Any]:
        token_ids = self._shape.prompt_token_ids
        return {"prompt_token_ids": token_ids[self._prompt_of(choice)]} if token_ids else {}

    def _prompt_of(self, choice: int) -> int:
        return choice // self._shape.best_of

    def _echo(self, choice: int) -> str:
        echoes = self._shape.echoes
        return "" if echoes is None else echoes[self._prompt_of(choice)]
