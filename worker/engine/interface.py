"""EngineInterface: the engine that EngineLoop drives. BuiltEngine: an engine and its facts.

worker.engine has one implementation, worker.engines.vllm another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.engine.config import EngineConfig
from worker.engine.measures import StepMeasures
from worker.engine.request import EngineOutput, EngineRequest, EngineStats

# Gets a stage of the loading and the share of it that is done, 0 to 1.
Progress = Callable[[str, float], None]


class EngineInterface(Protocol):
    """Runs many requests at once. One thread calls it, which no method holds up beyond a step.

    An implementation keeps the promises of worker.engine.engine: a resumed request continues
    after its `output_token_ids`, a cancelled one has no further outputs, and the fault of one
    request ends that request alone.
    """

    @property
    def measures(self) -> StepMeasures:
        """The distributions of its steps; the engine observes all but their seconds."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Adds a request; `step` returns its outputs. Raises RequestRefused."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Ends a request, whose blocks are free at once. Returns False when it is not live."""
        ...

    def has_unfinished(self) -> bool:
        """Returns whether `step` has anything to do."""
        ...

    def step(self) -> Sequence[EngineOutput]:
        """Runs one step and returns its outputs, each with any number of new tokens.

        Raises EngineFailed when no further step can succeed in this process.
        """
        ...

    def stats(self) -> EngineStats:
        """Returns gauges of now and counters since the start."""
        ...

    def self_test(self) -> None:
        """Computes a few tokens of no request. Raises EngineFailed."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine that has loaded its model; EngineReady carries all but the engine itself."""

    engine: EngineInterface
    config: EngineConfig
    vocab_size: int
    num_parameters: int  # 0 if it is not known
    dtype: str  # of weights and KV cache, e.g. "bfloat16"
    version: str = ""  # of another's engine
    exact_resume: bool = True  # whether a resumed output continues as if it had not been cut
    device: str = "auto"  # cpu or cuda, as chosen; auto: the engine has none
    embedding_size: int = 0  # of its vectors; 0: it generates text
