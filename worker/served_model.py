"""ServedModel: the one model of a worker, as its service knows it: card, text, bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from shared.messages import ErrorCode, Job
from shared.text.base import Tokenizer
from shared.text.card import AUTO, ModelCard, card_from_checkpoint, load_card_tokenizer
from worker.engine_messages import EngineReady


class JobRefused(Exception):
    """A claimed job cannot be run by this model; the job fails with `code`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Facts of the checkpoint and of the engine that serves it."""

    name: str
    card: ModelCard
    blobs: Mapping[str, bytes]  # by digest
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        name: str,
        ready: EngineReady,
        tool_format: str = AUTO,
        reasoning_format: str = AUTO,
        generation_config: str = AUTO,
        override_generation_config: Mapping[str, float] = MappingProxyType({}),
    ) -> ServedModel:
        """Reads the checkpoint's text files; what has a default is as for `card_from_checkpoint`.

        Raises ValueError or OSError with a sentence.
        """
        card, blobs = card_from_checkpoint(
            checkpoint,
            name=name,
            max_model_len=ready.max_model_len,
            kv_capacity_tokens=ready.kv_capacity_tokens,
            dtype=ready.dtype,
            num_parameters=ready.num_parameters,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            structured_output=ready.structured_output,
            generation_config=generation_config,
            override_generation_config=override_generation_config,
        )
        return cls(
            name=name,
            card=card,
            blobs=blobs,
            tokenizer=load_card_tokenizer(card, blobs),
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            eos_token_ids=frozenset(ready.eos_token_ids),
        )

    def check(self, job: Job) -> None:
        """The edge has validated the job; this catches one of another model or a newer release.

        Raises JobRefused.
        """
        if job.model != self.name:
            raise JobRefused(
                ErrorCode.PAYLOAD_INVALID, f"this worker serves {self.name!r}, not {job.model!r}"
            )
        if not job.prompt_token_ids:
            raise JobRefused(ErrorCode.PAYLOAD_INVALID, "the prompt is empty")
        if job.sampling.seed is None:
            raise JobRefused(ErrorCode.PAYLOAD_INVALID, "the seed was not resolved")
        if len(job.prompt_token_ids) >= self.max_model_len:
            raise JobRefused(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(job.prompt_token_ids)} tokens; the model takes at most "
                f"{self.max_model_len} with the output",
            )
        if not 0 <= min(job.prompt_token_ids) <= max(job.prompt_token_ids) < self.vocab_size:
            raise JobRefused(
                ErrorCode.PAYLOAD_INVALID,
                f"a prompt token id is outside the vocabulary of {self.vocab_size}",
            )
        named = (*job.sampling.logit_bias, *job.sampling.stop_token_ids)
        if named and not max(named) < self.vocab_size:
            raise JobRefused(
                ErrorCode.PAYLOAD_INVALID,
                f"a token id of logit_bias or stop_token_ids is outside the vocabulary of "
                f"{self.vocab_size}",
            )
