"""The engine's one port: ModelRunner turns a ScheduledBatch into sampled tokens.

handle = launch(batch)          the forward pass, and the rows without a grammar
handle.sample_structured(...)   the rows with one, once the tokens before are known: those whose
                                masks are ready
handle.collect()                the tokens
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from shared.messages import PromptLogprob, TokenLogprob
from worker.engine.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled, by seq_id: of exactly the sequences with `samples` set, but
    for those that `StepHandle.sample_structured` has put off.

    `prompt_logprobs` has an entry for each position of a sequence's `scores`, in their order. A
    sequence in `failed` has no sampled token; the value is the reason: an ErrorCode's value, and
    after ": " a sentence where there is more detail. The results of the others are valid.

    `device_s`: seconds of the device's work for the step; None if the runner cannot measure it.
    """

    token_ids: Mapping[int, int]
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[PromptLogprob]] = field(default_factory=dict)
    device_s: float | None = None


class StepHandle(Protocol):
    """A launched step."""

    def sample_structured(self, seq_ids: Collection[int]) -> Mapping[int, Future[None]]:
        """Samples those of the batch's sequences that have a grammar, as far as `launch` has not.

        Returns those that get no token in this step because their mask is not ready, by seq_id,
        each with the future that it waits for. A step waits for them only briefly: they are
        launched again, from their last token on, when the future is done.

        Called once where the batch has such sequences and samples from them: when the step before
        is collected, so that all their tokens are known, and before the next launch. A sequence of
        them that is not among `seq_ids` has ended: any token does for it. Never waits for the
        device. Raises as `launch`; such a step is not collected.
        """
        ...

    def collect(self) -> StepResult:
        """Waits for the device and returns the result; called once, in launch order.

        A step after a failed one is collected without `sample_structured`, and its result is
        dropped.
        """
        ...


class ModelRunner(Protocol):
    """Computes scheduled batches. Implemented by the model side and by EchoModelRunner."""

    vocab_size: int

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Enqueues the device's work without waiting; steps execute in launch order.

        While the previous step is in flight, a sequence with a grammar may lack the newest of its
        `output_token_ids`; its next tokens are masked later, see `sample_structured`.

        An exception here or in the handle means that the whole step failed: OutOfMemory, DeviceLost
        (no further step can succeed in this process), or any other, after which the same
        sequences may be launched again.
        """
        ...
