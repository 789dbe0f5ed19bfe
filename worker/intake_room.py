"""IntakeRoom: how many more choices this worker should take from the queue now.

A place in the batch is not enough: a job whose prompt finds no KV blocks would wait here, while
another worker may have them. So one such job at most is taken, which keeps the engine fed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from shared.transport.base import Delivery
from worker.engine_messages import EngineReady
from worker.running_jobs import RunningJob, RunningJobs

MEMORY = 16  # prompts over which the usual length of one is averaged


class EngineFigures(Protocol):
    """The engine's last word, which may be a twentieth of a second old."""

    @property
    def stats(self) -> Mapping[str, int]: ...
    @property
    def ready(self) -> EngineReady | None: ...


class IntakeRoom:
    """Called before each pull; `took` is told what came of it.

    Blocks are known for what has begun. What has not (it waits, or its prefill is under way) is
    counted by the tokens that it needs, so that during a long prefill a worker rather holds back
    than takes too much. What comes next is not known: it is taken to be as long as the last prompts
    were.
    """

    def __init__(self, jobs: RunningJobs, engine: EngineFigures) -> None:
        self._jobs = jobs
        self._engine = engine
        self._usual_tokens = 0.0  # not known yet

    def __call__(self) -> int:
        """Choices; 0 is also the answer while a job that does not fit waits in the engine."""
        places = self._jobs.room
        ready = self._engine.ready
        if places == 0 or ready is None:
            return places
        if self._usual_tokens == 0.0:
            return 1  # it will tell
        not_begun = sum(_tokens(job) for job in self._jobs if _has_not_begun(job))
        free_tokens = self._engine.stats.get("free_blocks", 0) * ready.block_size - not_begun
        usual = max(self._usual_tokens, ready.block_size)
        fitting = int(free_tokens // usual)
        if fitting < 1:
            return 0 if not_begun else 1
        return min(places, fitting)

    def took(self, deliveries: Sequence[Delivery]) -> None:
        """Remembers how long prompts are."""
        for delivery in deliveries:
            length = len(delivery.job.prompt_token_ids)
            if self._usual_tokens == 0.0:
                self._usual_tokens = length
            self._usual_tokens += (length - self._usual_tokens) / MEMORY


def _has_not_begun(job: RunningJob) -> bool:
    return job.in_engine and job.first_token_s is None


def _tokens(job: RunningJob) -> int:
    """What its first step needs: the prompt once, and what each choice has said before."""
    return len(job.job.prompt_token_ids) + job.num_resumed
