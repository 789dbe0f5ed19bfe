"""GenerationService: what every dialect needs to turn a request into a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from api.dependencies import provided
from api.generation.models import ModelCatalog
from api.generation.thread_pool import TextPool
from shared.messages import Durability


@dataclass(frozen=True, slots=True)
class JobDefaults:
    """Defaults of a job's parameters. `queue_timeout_s` 0: no limit."""

    timeout_s: float
    queue_timeout_s: float
    durability: Durability


@dataclass(frozen=True, slots=True)
class GenerationService:
    """The models, the threads for text work, and the limits of requests; made once a process.

    `max_response_bytes`: the most that a response may come to, by its worst case.
    """

    models: ModelCatalog
    pool: TextPool
    max_response_bytes: int
    job_defaults: JobDefaults


GenerationDep = Annotated[GenerationService, provided(GenerationService)]
