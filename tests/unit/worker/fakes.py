"""Stand-ins for the worker's unit tests: an obedient JobQueue and a byte tokenizer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from shared.keys import NUM_LANES
from shared.messages import Job
from shared.text.detokenizer import ByteDetokenizer
from shared.transport.ports.jobs import Restored, TransportError
from shared.transport.ports.queue import (
    Append,
    AppendResult,
    AppendStatus,
    CrashCause,
    Delivery,
    HeartbeatReply,
    JobSnapshot,
    WorkerReport,
)
from tests.support import jobs

EOS = 256
HIDDEN = 257  # a special token without text
VOCAB_SIZE = 258


class ByteTokenizer:
    """Token id = byte; two special tokens have no text."""

    vocab_size = VOCAB_SIZE
    special_texts: Sequence[str] = ()

    def least_tokens(self, text: str) -> int:
        return 0

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        mark: str = "",
        tenant: str | None = None,
    ) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> ByteDetokenizer:
        return ByteDetokenizer(lambda token_id, first: bytes([token_id]) if token_id < 256 else b"")

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


Answer = Callable[[Append], AppendResult]


class FakeQueue:
    """Records every call; appends are answered by `answer`, or fail while `away`."""

    def __init__(self) -> None:
        self.away = False
        self.away_alone: set[str] = set()  # jobs whose partition does not answer, while others do
        self.appended: list[list[Append]] = []
        self.answer: Answer = accepted
        self.heartbeats: list[WorkerReport] = []
        self.drops: list[str] = []
        self.lost_jobs: list[str] = []
        self.taken_jobs: list[str] = []
        self.restored: list[tuple[str, int, int]] = []  # job id, attempt, sure_ms
        self.restore_answers: deque[Restored] = deque()  # then RESTORED
        self.released: list[tuple[str, int]] = []
        self.blamed: list[tuple[str, int]] = []
        self.retired = False
        self.announced = 0
        self.prefixes: list[tuple[list[bytes], list[bytes], bool]] = []  # held, lost, is_first
        self.noted: set[bytes] = set()
        self.deliveries: deque[Delivery] = deque()
        self.lost: list[Delivery] = []
        self.recoverable: list[Delivery] = []
        self.calls: list[str] = []
        self.on_pull: Callable[[], None] = lambda: None
        self.on_restore: Callable[[str], None] = lambda job_id: None
        self.gate = asyncio.Event()  # appends wait for it
        self.gate.set()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.away:
            raise TransportError("the store is away")

    def is_away(self, job_id: str) -> bool:
        return job_id in self.away_alone

    async def setup(self, models: Sequence[str]) -> None:
        self._called("setup")

    async def heartbeat(self, report: WorkerReport) -> HeartbeatReply:
        self._called("heartbeat")
        self.heartbeats.append(report)
        return HeartbeatReply(list(self.drops), list(self.lost_jobs), list(self.taken_jobs))

    async def pull(self, worker_id: str, count: int, block_ms: int) -> Sequence[Delivery]:
        self._called("pull")
        self.on_pull()
        if not self.deliveries:
            await asyncio.sleep(0.001)
        taken: list[Delivery] = []
        while self.deliveries and sum(one.job.num_choices for one in taken) < count:
            taken.append(self.deliveries.popleft())
        return taken

    async def oversubscribe(
        self, worker_id: str, count: int, leave_out: Sequence[str]
    ) -> Sequence[Delivery]:
        self._called("oversubscribe")
        taken: list[Delivery] = []
        while self.deliveries and len(taken) < count:
            if self.deliveries[0].job.tenant in leave_out:
                break
            taken.append(self.deliveries.popleft())
        return taken

    async def overtake(
        self, worker_id: str, count: int, lane: int, block_ms: int
    ) -> Sequence[Delivery]:
        self._called("overtake")
        await asyncio.sleep(block_ms / 1000)
        higher = [delivery for delivery in self.deliveries if delivery.job.lane < lane][:count]
        for delivery in higher:
            self.deliveries.remove(delivery)
        return higher

    async def note_prefixes(
        self,
        worker_id: str,
        lease_ms: int,
        held: Sequence[bytes],
        lost: Sequence[bytes],
        *,
        is_first: bool,
    ) -> int | None:
        self._called("note_prefixes")
        self.prefixes.append((list(held), list(lost), is_first))
        self.noted = ((set() if is_first else self.noted) | set(held)) - set(lost)
        return len(self.noted)

    async def reconcile(self, worker_id: str, known: frozenset[str]) -> Sequence[Delivery]:
        self._called("reconcile")
        lost, self.lost = [d for d in self.lost if d.job.job_id not in known], []
        return lost

    async def recover(
        self, worker_id: str, count: int, *, suspects: bool = True, before: int = NUM_LANES
    ) -> Sequence[Delivery]:
        self._called("recover" if suspects else "recover without suspects")
        taken, self.recoverable = self.recoverable[:count], self.recoverable[count:]
        return taken

    async def append(
        self, worker_id: str, lease_ms: int, items: Sequence[Append]
    ) -> Sequence[AppendResult]:
        self._called("append")
        await self.gate.wait()
        self.appended.append(list(items))
        return [self.answer(item) for item in items]

    async def restore(
        self, worker_id: str, job_id: str, attempt: int, snapshot: JobSnapshot, sure_ms: int
    ) -> Restored:
        self._called("restore")
        self.restored.append((job_id, attempt, sure_ms))
        self.on_restore(job_id)
        return self.restore_answers.popleft() if self.restore_answers else Restored.RESTORED

    async def release(
        self, worker_id: str, job_id: str, attempt: int, num_lane_preemptions: int = 0
    ) -> bool:
        self._called("release")
        self.released.append((job_id, attempt))
        return True

    async def crashed(
        self,
        worker_id: str,
        jobs: Sequence[tuple[str, int]],
        cause: CrashCause = CrashCause.ENGINE,
    ) -> None:
        self._called("crashed")
        self.blamed += jobs

    async def retire(self, worker_id: str, *, returns: bool = False) -> None:
        self._called("retire")
        self.retired = True

    async def cancellations(self, worker_id: str) -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield ""

    async def announce(self, model: str, card: bytes, blobs: Mapping[str, bytes]) -> None:
        self._called("announce")
        self.announced += 1


def accepted(item: Append) -> AppendResult:
    end = item.delta.end
    return AppendResult(AppendStatus.OK, end.num_tokens, num_bytes=end.num_bytes)


def make_job(
    job_id: str = "0-a", prompt: Sequence[int] = (1, 2, 3), num_choices: int = 1, **sampling: object
) -> Job:
    members = {"model": "m", "max_tokens": 100, "seed": 1, "num_choices": num_choices}
    return jobs.make_job(job_id, prompt, **(members | sampling))
