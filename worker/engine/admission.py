"""Admission: which requests are inside an engine of others, and which are held in front of it.

vLLM runs requests in the order of arrival. So it gets no more requests than it has running slots,
chosen by SlotShares and the policy's ranks, as in worker.engine.scheduler.

A running request is preempted by leaving vLLM: the engine holds it with its output and later adds
it as a resumed request. If that would not be exact, no request is preempted: only the order of
admission is ours.

vLLM may lack KV blocks for a request that is inside: it has preempted it, or does not start it. It
is `starved`, and counts as waiting. While it is its turn it stays, no request enters after it, and
a holder of many more slots gives one up, with its blocks. When it is another's turn it leaves,
because vLLM would start it before the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic

from worker.engine.queue import SchedulingPolicy
from worker.engine.running_slots import S, SlotShares


@dataclass(slots=True)
class Moves(Generic[S]):
    """Requests that leave and enter vLLM before a step, in this order."""

    leaving: list[S] = field(default_factory=list)  # vLLM, to be held
    gave_way: list[S] = field(default_factory=list)  # those of them that left for a higher class
    entering: list[S] = field(default_factory=list)


class Admission(Generic[S]):
    """Knows each request from `add` to `remove`."""

    def __init__(self, num_slots: int, policy: SchedulingPolicy, *, preempts: bool) -> None:
        """`preempts`: running requests can leave vLLM and return."""
        self._num_slots = num_slots
        self._preempts = preempts
        self._rank = policy.rank
        self._shares = SlotShares(policy)
        self._waiting: dict[int, S] = {}  # by seq_id, like the others
        self._running: dict[int, S] = {}
        self._starved: dict[int, S] = {}  # those that wait inside vLLM
        self._has_changed = False  # since the last call of `moves`
        self.num_preemptions = 0  # running requests that left vLLM for others

    def add(self, request: S) -> None:
        """Takes a request that is to enter when it is its turn."""
        self._waiting[request.seq_id] = request
        self._has_changed = True

    def remove(self, request: S) -> None:
        """Forgets a request, wherever it is."""
        if request.seq_id in self._running:
            self._stop_running(request)
        del self._waiting[request.seq_id]
        self._starved.pop(request.seq_id, None)
        self._has_changed = True

    def moves(self, starved: Iterable[S] = ()) -> Moves[S]:
        """Returns the requests that leave and enter vLLM now, and counts them as moved.

        `starved`: those inside vLLM for which it has no blocks. At most one running request is
        preempted in a step.
        """
        self._note(starved)
        moves: Moves[S] = Moves()
        if not self._has_changed or not self._waiting:
            return moves
        self._has_changed = False
        if self._preempts:
            self._take_slot(moves)
        while self._waiting and len(self._running) < self._num_slots:
            first = self._shares.next_of(self._waiting.values())
            if first.seq_id in self._starved:
                break
            self._run(first)
            moves.entering.append(first)
            if self._starved:
                moves.leaving += self._starved.values()
                self._starved = {}
                self._has_changed = True
                break  # whether vLLM has blocks for more is seen after the step
        return moves

    def _note(self, starved: Iterable[S]) -> None:
        now = {request.seq_id: request for request in starved}
        if now.keys() == self._starved.keys():
            return
        self._has_changed = True
        for seq_id, request in self._starved.items():
            if seq_id not in now:
                self._run(request)
        for seq_id, request in now.items():
            if seq_id not in self._starved:
                self._stop_running(request)
        self._starved = now

    def _take_slot(self, moves: Moves[S]) -> None:
        newcomer = self._shares.next_of(self._waiting.values())
        if len(self._running) < self._num_slots and newcomer.seq_id not in self._starved:
            return
        running = sorted(self._running.values(), key=self._rank)
        moves.gave_way = self._shares.lower(newcomer, running)[:1]
        giver = moves.gave_way[0] if moves.gave_way else self._shares.giver(newcomer, running)
        for request in moves.gave_way:
            request.num_lane_preemptions += 1
        if giver is not None:
            self._stop_running(giver)
            self.num_preemptions += 1
            moves.leaving.append(giver)

    def _run(self, request: S) -> None:
        del self._waiting[request.seq_id]
        self._running[request.seq_id] = request
        self._shares.take(request)

    def _stop_running(self, request: S) -> None:
        del self._running[request.seq_id]
        self._waiting[request.seq_id] = request
        self._shares.give_back(request)
        self._has_changed = True
