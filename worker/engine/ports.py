"""The engine's one port: ModelRunner turns a ScheduledBatch into sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.messages import PromptLogprob, TokenLogprob
from worker.engine.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled, by seq_id: of exactly the sequences with `samples` set.

    `prompt_logprobs` has an entry for each position of a sequence's `scores`, in their order. A
    sequence in `failed` has no sampled token; the value is the reason: an ErrorCode's value, and
    after ": " a sentence where there is more detail. The results of the others are valid.
    """

    token_ids: Mapping[int, int]
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[PromptLogprob]] = field(default_factory=dict)


class StepHandle(Protocol):
    """A launched step."""

    def collect(self) -> StepResult:
        """Waits for the device and returns the result; called once, in launch order."""
        ...


class ModelRunner(Protocol):
    """Computes what was scheduled. Implemented by the model side and by EchoModelRunner."""

    vocab_size: int

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Enqueues the device's work without waiting; steps execute in launch order.

        An exception here or in `collect` means that the whole step failed: OutOfMemory, DeviceLost
        (no further step can succeed in this process), or any other, after which the same
        sequences may be launched again.
        """
        ...
