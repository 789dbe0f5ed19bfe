"""CompletionFormatter: events of jobs as `text_completion`s, in chunks or whole.

A request may have several prompts, each with several choices. Their choices are numbered through:
all of the first prompt, then all of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from api.generation.choices import ChoiceAnswer, ChoiceEnd, OpenAIAnswer, ResponseContext
from api.generation.logprobs import (
    CompletionEntry,
    CompletionEntryForm,
    CompletionLogprobs,
    PlacedLogprob,
    completion_logprobs,
)
from api.generation.prompt_logprobs import EchoedLogprobs, PromptLogprobs, ScoredPrompt
from api.sse import JoinedText
from shared.choice_deltas import choice_deltas
from shared.messages import Delta, Finished
from shared.text.base import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """What a completion request asks of its answer as a whole.

    ResponseContext.num_choices is the number of prompts times `best_of`.
    """

    best_of: int = 1  # choices that are run for a prompt
    n: int = 1  # choices that are shown of them: those with the highest mean log probability
    echoes: tuple[str, ...] | None = None  # each prompt's text, to go before its answers
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()  # each prompt's, of several
    job_ids: tuple[str, ...] = ()  # each prompt's, of several
    scored: tuple[ScoredPrompt, ...] = ()  # each prompt's, where anything of them is shown
    num_prompt_logprobs: int | None = None  # as the request's `prompt_logprobs`


ONE_CHOICE = CompletionShape()

Choice = ChoiceAnswer[CompletionEntry]


class CompletionFormatter(OpenAIAnswer[CompletionEntry]):
    """`text_completion`, in chunks and whole."""

    kind = "completion"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self, facts: ResponseContext, tokenizer: Tokenizer, shape: CompletionShape = ONE_CHOICE
    ) -> None:
        super().__init__(facts, tokenizer, CompletionEntryForm(tokenizer, facts.num_logprobs or 0))
        self._shape = shape
        self._texts: list[list[str]] = [[] for _ in self._choices]  # of whole answers
        self._echoed: list[EchoedLogprobs] = []  # of each prompt
        if shape.echoes is not None and shape.scored and facts.num_logprobs is not None:
            self._echoed = [
                EchoedLogprobs(prompt, text, tokenizer, facts.num_logprobs)
                for prompt, text in zip(shape.scored, shape.echoes, strict=True)
            ]
            for choice in self._choices:
                choice.follow_prompt(len(self._echo(choice)))
        self._is_echoed = [False] * facts.num_choices  # in a stream, with its log probabilities
        self._num_tokens = [0] * facts.num_choices
        self._logprob_sums = [0.0] * facts.num_choices

    def opening(self) -> Sequence[Any]:
        """The prompts, where they are to be shown: one chunk for each choice.

        Where their log probabilities are shown too, their text comes with these.
        """
        about, is_echoed = self._about_prompt(), self._shape.echoes is not None and not self._echoed
        if is_echoed or self._shape.prompt_token_ids:
            choices = self._choices
        else:
            choices = self._choices[:1] if about else []
        chunks = [
            self._chunk([self._member(choice, self._echo(choice) if is_echoed else "")])
            for choice in choices
        ]
        for choice, chunk in zip(choices, chunks, strict=True):
            chunk["choices"][0].update(self._about_own_prompt(choice))
        if chunks:
            chunks[0].update(about)
        return chunks

    def before_choice(self, choice: int) -> Iterable[Any]:
        return (self._chunk([one]) for one in self._echo_with_logprobs(self._choices[choice]))

    def collect(self, delta: Delta) -> None:
        super().collect(delta)
        if self._shape.best_of > self._shape.n:
            for part in choice_deltas(delta):
                self._num_tokens[part.choice] += len(part.token_ids)
                self._logprob_sums[part.choice] += sum(
                    entry.logprob for entry in part.logprobs or ()
                )

    def _shown(self) -> Sequence[Choice]:
        """The best of each prompt's choices first; equal ones in the order of their numbers."""
        shape, shown = self._shape, []
        for first in range(0, len(self._choices), shape.best_of):
            of_prompt = self._choices[first : first + shape.best_of]
            if shape.best_of > shape.n:
                of_prompt = sorted(of_prompt, key=self._mean_logprob, reverse=True)[: shape.n]
            shown += of_prompt
        return shown

    def _mean_logprob(self, choice: Choice) -> float:
        return self._logprob_sums[choice.index] / max(1, self._num_tokens[choice.index])

    def _about_prompt(self) -> dict[str, Any]:
        if self._shape.job_ids:
            return {"job_ids": self._shape.job_ids}
        return super()._about_prompt()

    def _about_own_prompt(self, choice: Choice) -> dict[str, Any]:
        token_ids = self._shape.prompt_token_ids
        return {"prompt_token_ids": token_ids[self._prompt_of(choice)]} if token_ids else {}

    def _prompt_of(self, choice: Choice) -> int:
        return choice.index // self._shape.best_of

    def _echo(self, choice: Choice) -> str:
        echoes = self._shape.echoes
        return "" if echoes is None else echoes[self._prompt_of(choice)]

    def _member(
        self, choice: Choice, text: str | JoinedText, end: ChoiceEnd | None = None
    ) -> dict[str, Any]:
        return self._choice(choice, {"text": text}, end)

    def _logprobs(
        self, placed: Sequence[PlacedLogprob[CompletionEntry]]
    ) -> CompletionLogprobs | None:
        return completion_logprobs(placed)

    def _collect(self, choice: Choice, text: str) -> None:
        self._texts[choice.index].append(text)

    def _said(self, choice: Choice, text: str) -> Iterable[dict[str, Any]]:
        yield from self._echo_with_logprobs(choice)
        yield self._member(choice, text)

    def _ended(self, choice: Choice, end: ChoiceEnd) -> Iterable[dict[str, Any]]:
        yield from self._echo_with_logprobs(choice)
        yield self._member(choice, "", end)

    def _echo_with_logprobs(self, choice: Choice) -> Iterable[dict[str, Any]]:
        """The prompt, once, before everything else: its text and the first part of its log
        probabilities, then the other parts."""
        if not self._echoed or self._is_echoed[choice.index]:
            return
        self._is_echoed[choice.index] = True
        text = self._echo(choice)
        for logprobs in self._echoed[self._prompt_of(choice)].parts():
            said = {
                "index": choice.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": None,
            }
            if self._facts.prompt_token_ids is not None:
                said["token_ids"] = []
            yield said
            text = ""

    def _whole(self, choice: Choice, end: ChoiceEnd) -> dict[str, Any]:
        text, echo = "".join(self._texts[choice.index]), self._echo(choice)
        shown = JoinedText(echo, text) if echo else text  # no copy of the prompt for each choice
        said = {**self._member(choice, shown, end), **self._about_own_prompt(choice)}
        prompt = self._prompt_of(choice)
        if self._echoed:
            said["logprobs"] = self._echoed[prompt].before(said["logprobs"])
        num_top = self._shape.num_prompt_logprobs
        if num_top is not None:
            logprobs = PromptLogprobs(self._shape.scored[prompt], num_top, self._tokenizer)
            said["prompt_logprobs"] = logprobs.payload()
        return said

    def whole(self, end: Finished) -> Any:
        answer = super().whole(end)
        for index, choice in enumerate(answer["choices"]):
            choice["index"] = index
        return answer
