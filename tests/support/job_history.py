"""A history of what the clients of one deployment did to its jobs and what they were answered.

Each client (a test's HTTP client, a worker process) writes operations with the times of its call
and of its reply. All clients run on one machine, whose monotonic clock they share, so their times
can be compared. `tests/support/linearizability.py` decides whether the histories are explained by
one job that changes its state in one order.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HISTORY = "JOB_HISTORY"  # names a directory; processes with it in their environment record theirs

# Kinds of operations, and the members of their arguments and replies.
SUBMIT = "submit"  # -> status: "accepted" | "duplicate" | "refused"
CLAIM = "claim"  # attempt, num_tokens
APPEND = "append"  # attempt, start, end, end_state -> status
RELEASE = "release"  # attempt -> status: "released" | "not_owned"
CANCEL = "cancel"  # -> status: "won" | "lost" | "unknown_job", state
GET = "get"  # -> state, num_tokens; state None: no such job
END = "end"  # -> state, num_tokens: the terminal event of a stream


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on one job. `returned_s` is None where no reply was seen: it may have had effect."""

    job_id: str
    kind: str
    client: str
    invoked_s: float
    returned_s: float | None
    values: Mapping[str, Any]

    def __str__(self) -> str:
        until = "never" if self.returned_s is None else f"{self.returned_s:.4f}"
        values = " ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{self.invoked_s:.4f}..{until} {self.client}: {self.kind} {values}"


class HistoryWriter:
    """Appends one client's operations to a file of JSON lines.

    The call is written before it is made, so that a process which is killed in between leaves an
    operation without a reply instead of no trace.
    """

    def __init__(self, directory: Path, client: str) -> None:
        self._number = 0
        self._file = (directory / f"{client}.jsonl").open("a", buffering=1)

    def invoke(self, job_id: str, kind: str, **values: Any) -> int:
        """Records a call that is about to be made. Returns its number for `reply`."""
        self._number += 1
        self._write("invoke", self._number, job=job_id, kind=kind, values=values)
        return self._number

    def reply(self, number: int, **values: Any) -> None:
        """Records the reply to the call of this number."""
        self._write("reply", number, values=values)

    def record(self, job_id: str, kind: str, invoked_s: float, **values: Any) -> None:
        """Records a call and its reply at once, for calls whose job is known by the reply only."""
        self._number += 1
        self._write("invoke", self._number, at=invoked_s, job=job_id, kind=kind, values=values)
        self._write("reply", self._number, values={})

    def close(self) -> None:
        self._file.close()

    def _write(self, what: str, number: int, *, at: float | None = None, **members: Any) -> None:
        line = {"what": what, "number": number, "at": time.monotonic() if at is None else at}
        self._file.write(json.dumps(line | members) + "\n")


def read_histories(directory: Path) -> dict[str, list[Operation]]:
    """Returns the operations of all clients by job id, ordered by the times of their calls."""
    histories: dict[str, list[Operation]] = defaultdict(list)
    for path in sorted(directory.glob("*.jsonl")):
        for operation in _operations(path):
            histories[operation.job_id].append(operation)
    for operations in histories.values():
        operations.sort(key=lambda operation: operation.invoked_s)
    return dict(histories)


def _operations(path: Path) -> Iterator[Operation]:
    calls: dict[int, dict[str, Any]] = {}
    replies: dict[int, dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # cut off by a kill
        (calls if line["what"] == "invoke" else replies)[line["number"]] = line
    for number, call in calls.items():
        reply = replies.get(number)
        yield Operation(
            call["job"],
            call["kind"],
            path.stem,
            call["at"],
            None if reply is None else reply["at"],
            call["values"] | ({} if reply is None else reply["values"]),
        )


def record_worker_calls(directory: Path) -> None:
    """Makes this worker process record its claims, appends and releases.

    Called by tests/support/faults/sitecustomize.py in processes whose environment has HISTORY.
    """
    from shared.transport.job_queue import RedisJobQueue
    from shared.transport.ports.queue import Append, AppendResult, Delivery
    from shared.transport.pulls import Pulls

    writer = HistoryWriter(directory, f"worker-{os.getpid()}")

    def recorded_claims(owner: Any, name: str) -> Any:
        take = getattr(owner, name)

        async def claims(self: object, *arguments: Any, **more: Any) -> Any:
            invoked_s = time.monotonic()
            taken = await take(self, *arguments, **more)
            deliveries: Sequence[Delivery] = taken[0] if isinstance(taken, tuple) else taken
            for delivery in deliveries:
                writer.record(
                    delivery.job.job_id,
                    CLAIM,
                    invoked_s,
                    attempt=delivery.attempt,
                    num_tokens=delivery.end.num_tokens,
                )
            return taken

        return claims

    append, release = RedisJobQueue.append, RedisJobQueue.release

    async def recorded_append(
        self: RedisJobQueue, worker_id: str, lease_ms: int, items: Sequence[Append]
    ) -> Sequence[AppendResult]:
        numbers = [
            writer.invoke(
                item.job_id,
                APPEND,
                attempt=item.attempt,
                start=item.delta.start.num_tokens,
                end=item.delta.end.num_tokens,
                end_state=item.end_of_job.state.value if item.end_of_job else None,
            )
            for item in items
        ]
        results = await append(self, worker_id, lease_ms, items)
        for number, result in zip(numbers, results, strict=True):
            writer.reply(number, status=result.status.value)
        return results

    async def recorded_release(
        self: RedisJobQueue, worker_id: str, job_id: str, attempt: int, *more: int
    ) -> bool:
        number = writer.invoke(job_id, RELEASE, attempt=attempt)
        was_ours = await release(self, worker_id, job_id, attempt, *more)
        writer.reply(number, status="released" if was_ours else "not_owned")
        return was_ours

    for name in ("pull", "oversubscribe", "overtake", "reconcile", "recover"):
        setattr(RedisJobQueue, name, recorded_claims(RedisJobQueue, name))
    for name in ("take", "take_ahead"):  # by which a queue of several partitions claims
        setattr(Pulls, name, recorded_claims(Pulls, name))
    RedisJobQueue.append = recorded_append  # type: ignore[method-assign]
    RedisJobQueue.release = recorded_release  # type: ignore[method-assign]
