"""RowRoom: what the rows of a batch share while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from api.batches.endpoints import Endpoint
from api.batches.lease import StopSign
from api.services import Services


@dataclass(frozen=True, slots=True)
class RowRoom:
    """One for each run of a batch."""

    services: Services
    endpoint: Endpoint
    tenant: str
    stop: StopSign
    submitting: asyncio.Lock  # one at a time waits for a place in the queue, in the file's order
    preparing: asyncio.Semaphore  # rows take few of the threads that read prompts
    time_left_ms: Callable[[], int]  # until the batch expires
