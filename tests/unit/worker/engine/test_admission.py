"""Requests in front of vLLM: who enters it, who leaves it, and that it settles."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from worker.engine.admission import Admission
from worker.engine.queue import make_policy

SEATS = 4


@dataclass(eq=False)
class Request:
    seq_id: int
    tenant: str
    job_id: str
    priority: int = 0
    num_lane_preemptions: int = 0


class Front:
    """An Admission, and what is inside vLLM by what it said."""

    def __init__(self, policy: str = "fcfs", *, preempts: bool = True) -> None:
        self.admission: Admission[Request] = Admission(
            SEATS, make_policy(policy), preempts=preempts
        )
        self.inside: list[Request] = []  # in the order of entering
        self.num_left = 0
        self._num_added = 0

    def add(self, tenant: str, count: int = 1, job_id: str = "", priority: int = 0) -> None:
        for _ in range(count):
            job = job_id or f"job {self._num_added}"
            self.admission.add(Request(self._num_added, tenant, job, priority))
            self._num_added += 1

    def step(self, count: int = 1, starved: Iterable[Request] = ()) -> None:
        for _ in range(count):
            moves = self.admission.moves(starved)
            assert not {*moves.leaving} & {*moves.entering}
            for request in moves.leaving:
                self.inside.remove(request)
            assert not {*moves.entering} & {*self.inside}
            self.inside += moves.entering
            self.num_left += len(moves.leaving)
            assert len(self.inside) <= SEATS

    def end(self, request: Request) -> None:
        self.admission.remove(request)
        self.inside.remove(request)

    @property
    def tenants(self) -> Counter[str]:
        return Counter(request.tenant for request in self.inside)

    @property
    def jobs(self) -> Counter[str]:
        return Counter(request.job_id for request in self.inside)

    @property
    def seq_ids(self) -> list[int]:
        return [request.seq_id for request in self.inside]


def test_no_more_requests_enter_than_slots_in_order_of_arrival() -> None:
    front = Front()
    front.add("a", 6)
    front.step()
    assert front.seq_ids == [0, 1, 2, 3]
    front.end(front.inside[1])
    front.step()
    assert front.seq_ids == [0, 2, 3, 4]
    assert front.num_left == 0


def test_a_new_tenant_gets_a_slot_in_the_next_step() -> None:
    front = Front()
    front.add("a", 16, job_id="wide")
    front.step(3)
    front.add("b")
    front.step()
    assert front.tenants == {"a": SEATS - 1, "b": 1}
    assert front.seq_ids == [0, 1, 2, 16], "the last one gave its seat"
    assert front.admission.num_preemptions == 1


def test_a_preempted_request_returns_before_later_ones() -> None:
    front = Front()
    front.add("a", 16, job_id="wide")
    front.step()
    front.add("b")
    front.step()
    front.end(front.inside[-1])
    front.step()
    assert front.seq_ids == [0, 1, 2, 3]


def test_jobs_of_one_tenant_share_as_well() -> None:
    front = Front()
    front.add("a", 16, job_id="wide")
    front.step()
    front.add("a", 16, job_id="too")
    front.step(10)
    assert front.jobs == {"wide": 2, "too": 2}
    assert front.num_left == 2


def test_shares_settle_and_then_none_moves() -> None:
    front = Front()
    for tenant in "abc":
        front.add(tenant, 16)
        front.step(SEATS)
    assert sorted(front.tenants.values()) == [1, 1, 2]
    num_left = front.num_left
    front.step(20)
    assert front.num_left == num_left


def test_a_single_tenant_of_single_jobs_is_not_preempted() -> None:
    front = Front()
    for _ in range(20):
        front.add("a", 2)
        front.step()
    assert front.num_left == 0


def test_no_request_preempts_a_smaller_priority() -> None:
    front = Front("priority")
    front.add("a", 8, priority=1)
    front.step()
    front.add("b", priority=2)
    front.step(3)
    assert front.tenants == {"a": SEATS}
    front.add("c", priority=0)
    front.step()
    assert front.tenants == {"a": SEATS - 1, "c": 1}
    front.end(front.inside[0])
    front.step()
    assert front.tenants == {"a": SEATS - 1, "c": 1}, "its class goes before b's share"


def test_where_nobody_can_return_only_the_order_of_entering_is_shared() -> None:
    front = Front(preempts=False)
    front.add("a", 16, job_id="wide")
    front.step()
    front.add("b")
    front.step(5)
    assert front.tenants == {"a": SEATS}
    front.end(front.inside[0])
    front.step()
    assert front.tenants == {"a": SEATS - 1, "b": 1}
    assert front.num_left == 0


def test_a_request_that_is_held_can_be_removed() -> None:
    front = Front()
    front.add("a", 16, job_id="wide")
    front.step()
    gone = Request(99, "b", "b")
    front.admission.add(gone)
    front.admission.remove(gone)
    front.step()
    assert front.tenants == {"a": SEATS}
    assert front.num_left == 0


def test_a_starved_request_gets_blocks_of_the_largest_holder() -> None:
    front = Front()
    front.add("a", 3)
    front.step()
    front.add("b")
    front.step()
    starved = [front.inside[-1]]
    front.step(starved=starved)
    assert front.seq_ids == [0, 1, 3], "b stays inside, where vLLM starts it next"
    front.step(5, starved=starved)
    assert front.seq_ids == [0, 3], "b counted for nothing, and none enters behind it"
    front.step()
    assert front.seq_ids == [0, 3, 1, 2], "vLLM had blocks for b"


def test_a_starved_request_makes_room_for_a_holder_of_fewer_slots() -> None:
    front = Front()
    front.add("a", 4)
    front.step()
    starved = front.inside[2:]
    front.add("b")
    front.step(starved=starved)
    assert front.seq_ids == [0, 1, 4]
    assert front.admission.num_preemptions == 0, "they did not run"
    front.step()
    assert front.seq_ids == [0, 1, 4, 2]


def test_a_single_tenant_without_blocks_moves_no_request() -> None:
    front = Front()
    front.add("a", 16)
    front.step()
    front.step(5, starved=front.inside[2:])
    assert front.seq_ids == [0, 1, 2, 3]
    assert front.num_left == 0


def test_who_has_no_blocks_can_be_removed() -> None:
    front = Front()
    front.add("a", 6)
    front.step()
    starved = front.inside[2:]
    front.step(starved=starved)
    front.end(starved[0])
    front.step(starved=starved[1:])
    front.end(starved[1])
    front.step()
    assert front.seq_ids == [0, 1, 4, 5]


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_comes_to_its_end(seed: int) -> None:
    """Inside, the first in order run as far as blocks go; each needs some steps in all."""
    rng = random.Random(seed)
    front = Front(rng.choice(["fcfs", "priority"]), preempts=rng.random() < 0.8)
    left = {i: rng.randint(1, 8) for i in range(80)}
    num_added = 0
    for _ in range(2000):
        while num_added < len(left) and rng.random() < 0.3:
            front.add(
                rng.choice("abcd"),
                job_id=rng.choice(["", "wide", "too"]),
                priority=rng.randint(0, 2),
            )
            num_added += 1
        room = rng.randint(1, SEATS)
        takes = front.admission._preempts
        front.step(starved=front.inside[room:] if takes else ())
        for request in front.inside[:room]:
            left[request.seq_id] -= 1
            if left[request.seq_id] == 0:
                front.end(request)
        if num_added == len(left) and not any(left.values()):
            return
    raise AssertionError(f"{sum(n > 0 for n in left.values())} did not end")
