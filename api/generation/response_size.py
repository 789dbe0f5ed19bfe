"""Estimates how many bytes a response has, before and while it is made.

Its length is unknown before a worker has generated it. The estimates are the bytes of JSON for a
token of a common vocabulary, and for each of its alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.messages import Delta, Failed, Finished, InvalidParameter, Job, SamplingParams

TOKEN_BYTES = 8  # of text, escapes included
TOKEN_ID_BYTES = 8
CHAT_ENTRY_BYTES = 96  # {"token":" light","logprob":-1.34567832946777,"bytes":[32,108,105,103,104]}
COMPLETION_ENTRY_BYTES = 40  # " light":-11.34567832946777 in one of three lists
PROMPT_ENTRY_BYTES = 72  # "1234":{"logprob":-1.234567,"rank":1234,"decoded_token":" light"}
SHORT_BYTES = 65_536  # encoded in one go, in less than a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSize:
    """The parameters that determine a response's size, by their names in the dialect."""

    choices: tuple[tuple[str, int], ...] = ()  # members that multiply to the number of choices
    max_tokens: tuple[str, int | None]  # None: left to the default
    logprobs: tuple[str, int | None] = ("logprobs", None)  # alternatives of each token
    entry_bytes: int = CHAT_ENTRY_BYTES
    has_token_ids: bool = False
    prompts: tuple[str, int] = ("echo", 0)  # bytes of the prompts that the answer repeats

    @property
    def num_choices(self) -> int:
        num_choices = 1
        for _, factor in self.choices:
            num_choices *= factor
        return num_choices

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of each token of each choice."""
        num_bytes = TOKEN_BYTES + (TOKEN_ID_BYTES if self.has_token_ids else 0)
        num_alternatives = self.logprobs[1]
        if num_alternatives is not None:
            num_bytes += (1 + num_alternatives) * self.entry_bytes
        return num_bytes

    def fitted(self, sampling: SamplingParams, max_bytes: int) -> SamplingParams:
        """Returns `sampling`, with a default of max_tokens that keeps the answer in `max_bytes`.

        Raises InvalidParameter, on max_tokens or on the prompts, if the caller requests more.
        """
        prompts_param, prompt_bytes = self.prompts
        step_bytes = self.num_choices * self.token_bytes
        num_bytes = prompt_bytes + sampling.max_tokens * step_bytes
        if num_bytes <= max_bytes:
            return sampling
        param, requested = self.max_tokens
        num_tokens = max(0, max_bytes - prompt_bytes) // step_bytes
        if requested is None and num_tokens:
            return replace(sampling, max_tokens=num_tokens)
        members = [(name, factor) for name, factor in self.choices if factor > 1]
        members.append((param, sampling.max_tokens))
        if self.logprobs[1] is not None:
            members.append((self.logprobs[0], self.logprobs[1]))
        named = ", ".join(f"{name} {value}" for name, value in members)
        if prompt_bytes:
            named += f" and {prompt_bytes} bytes of prompts ({prompts_param})"
        if prompt_bytes and not num_tokens:
            raise InvalidParameter(
                prompts_param,
                f"an answer with {named} can have about {num_bytes} bytes, and {max_bytes} are "
                f"allowed: the prompts that it repeats leave no room for a token.",
                "answer_too_large",
            )
        raise InvalidParameter(
            param,
            f"an answer with {named} can have about {num_bytes} bytes, and {max_bytes} are "
            f"allowed. Please ask for less: {param} can be {num_tokens} here.",
            "answer_too_large",
        )


def prompt_logprobs_bytes(num_tokens: int, num_top: int | None) -> int:
    """Returns the bytes that `prompt_logprobs` of `num_tokens` tokens, with `num_top` alternatives
    each, take in an answer; 0 where the request has none (None)."""
    return 0 if num_top is None else num_tokens * (1 + num_top) * PROMPT_ENTRY_BYTES


def delta_bytes(delta: Delta) -> int:
    """Returns about how many bytes of an answer a delta is."""
    num_bytes = len(delta.text) + TOKEN_ID_BYTES * len(delta.token_ids)
    if delta.logprobs:
        num_bytes += len(delta.logprobs) * (1 + len(delta.logprobs[0].top)) * CHAT_ENTRY_BYTES
    return num_bytes


def is_small_response(job: Job, end: Finished | Failed) -> bool:
    """Returns whether the response of such a job, with its prompt in each choice, is small."""
    alternatives = job.sampling.logprobs
    token_bytes = TOKEN_BYTES + TOKEN_ID_BYTES
    entry_bytes = 0 if alternatives is None else (1 + alternatives) * CHAT_ENTRY_BYTES
    num_prompt_tokens = end.usage.prompt_tokens
    scores_bytes = prompt_logprobs_bytes(num_prompt_tokens, job.sampling.prompt_logprobs)
    prompt_bytes = job.num_choices * (num_prompt_tokens * token_bytes + scores_bytes)
    answer_bytes = end.usage.completion_tokens * (token_bytes + entry_bytes)
    return prompt_bytes + answer_bytes <= SHORT_BYTES
