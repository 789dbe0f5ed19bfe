"""What an orchestrator asks a worker: whether it takes jobs, and whether it should be replaced.

The answers are read from state in the listener's thread, so they come while the service's loop is
busy, and report a loop that is blocked.
"""

from __future__ import annotations

from worker.heartbeat import Heartbeat
from worker.runtime.supervisor import EngineSupervisor

STANDSTILL_S = 60.0  # of the service's loop, after which the process is worth a restart


class WorkerProbes:
    """Each method returns why the answer is no, as one sentence, or nothing."""

    def __init__(self, supervisor: EngineSupervisor, heartbeat: Heartbeat) -> None:
        self._supervisor = supervisor
        self._heartbeat = heartbeat

    def by_path(self, path: str) -> str | None:
        """Returns the answer to a path of the listener; None: it is no probe's."""
        if path == "/ready":
            return self.not_ready()
        return self.not_live() if path == "/live" else None

    def not_ready(self) -> str:
        """Returns why the worker takes no jobs; empty if the engine is up, the worker does not
        drain, and its lease in Redis is current."""
        if not self._supervisor.up.is_set():
            return "The engine is not up."
        if self._heartbeat.draining:
            return "The worker drains."
        if not self._heartbeat.holds_lease:
            return "No heartbeat was confirmed within the lease."
        return ""

    def not_live(self) -> str:
        """Returns why the process is to be replaced; empty if the service's loop turns. An
        engine that hangs is replaced by the service itself, and a store that is away is no fault
        of this process."""
        age_s = self._heartbeat.turn_age_s
        return f"The event loop has been blocked for {age_s:.0f} s." if age_s > STANDSTILL_S else ""
