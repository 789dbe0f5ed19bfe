"""StepMeasures and EngineCounts: distributions of an engine's steps, counted in the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.engine.plan import Schedule
    from worker.engine.sequence import Sequence

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Counts between the bounds, the last one above all of them; and the sum of the observations.
Counts = tuple[tuple[int, ...], float]

# A digest of a prefix, and whether the prefix cache holds it now.
PrefixChanges = tuple[tuple[bytes, bool], ...]


class Distribution:
    """Counts values by the first of its bounds that is no less."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def counts(self) -> Counts:
        return tuple(self._counts), self._sum


class StepMeasures:
    """Distributions since the engine's start. The engine observes sizes, its caller seconds.

    `drain_masks` returns the processor seconds of grammars' masks since its last call, by tenant;
    `drain_prefixes` the digests of prefixes that the prefix cache holds or has lost since.
    """

    def __init__(
        self,
        drain_masks: Callable[[], dict[str, float]] = dict,
        drain_prefixes: Callable[[], PrefixChanges] = tuple,
    ) -> None:
        self.drain_masks = drain_masks
        self.drain_prefixes = drain_prefixes
        self.seconds = Distribution(STEP_SECONDS)
        self.tokens = Distribution(SIZES)  # prompt tokens computed or hit, and generated ones
        self.sequences = Distribution(SIZES)
        self.gave_way: Collection[str] = ()  # requests preempted in the last step for their lane

    def counts(self) -> dict[str, Counts]:
        """Returns the counts so far, by the attributes' names."""
        return {
            "seconds": self.seconds.counts,
            "tokens": self.tokens.counts,
            "sequences": self.sequences.counts,
        }


class EngineCounts:
    """Counters of an engine since its start."""

    def __init__(self) -> None:
        self.num_steps = 0  # launched
        self.num_mixed_steps = 0  # of them, with decodes and chunks
        self.num_prompt_tokens = 0  # computed or hit, each once
        self.num_generated_tokens = 0

    def launching(self, schedule: Schedule) -> None:
        self.num_steps += 1
        batch = schedule.batch
        self.num_mixed_steps += 0 < batch.num_decodes < len(batch)

    def committed(self, schedule: Schedule, num_generated: int) -> None:
        """Counts a step that was committed, which gave `num_generated` tokens."""
        self.num_generated_tokens += num_generated
        for sequence in schedule.fresh:
            self._prompt(sequence, sequence.num_prompt_tokens)
        for item in schedule.chunks:
            self._prompt(item.sequence, min(item.end, item.sequence.num_prompt_tokens))

    def _prompt(self, sequence: Sequence, num_done: int) -> None:
        if num_done > sequence.num_counted_prompt_tokens:
            self.num_prompt_tokens += num_done - sequence.num_counted_prompt_tokens
            sequence.num_counted_prompt_tokens = num_done
