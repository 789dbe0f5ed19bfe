from __future__ import annotations

import random

import pytest

from shared.messages import SamplingParams
from tests.unit.worker.engine.scripted_runner import ScriptedRunner, make_config
from worker.engine.engine import Engine
from worker.engine.queue import (
    FirstComeFirstServed,
    HighestPriorityFirst,
    SequenceQueue,
    make_policy,
)
from worker.engine.sequence import Sequence


def make_sequence(seq_id: int, priority: int = 0) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        prompt_token_ids=(1,),
        params=SamplingParams(),
        max_model_len=10,
        priority=priority,
    )


def test_an_unknown_policy_is_refused_at_the_start_by_name() -> None:
    with pytest.raises(ValueError, match=r"'lottery'.*fcfs, priority"):
        Engine(make_config(policy="lottery"), ScriptedRunner())
    assert isinstance(make_policy("fcfs"), FirstComeFirstServed)


def test_first_come_is_first_served_whatever_the_priority() -> None:
    queue = SequenceQueue(FirstComeFirstServed())
    for seq_id in (2, 0, 1):
        queue.add(make_sequence(seq_id, priority=-seq_id))
    assert [s.seq_id for s in queue] == [0, 1, 2]


def test_the_smaller_priority_goes_first_and_equals_by_arrival() -> None:
    queue = SequenceQueue(HighestPriorityFirst())
    for seq_id, priority in ((0, 1), (1, 0), (2, 1), (3, 0)):
        queue.add(make_sequence(seq_id, priority))
    assert [s.seq_id for s in queue] == [1, 3, 0, 2]
    assert (queue.first.seq_id, queue.last.seq_id) == (1, 2)


def test_a_queue_stays_sorted_whatever_comes_and_goes() -> None:
    rng = random.Random(5)
    queue = SequenceQueue(HighestPriorityFirst())
    live: list[Sequence] = []
    for seq_id in range(500):
        if live and rng.random() < 0.4:
            queue.remove(live.pop(rng.randrange(len(live))))
        else:
            live.append(make_sequence(seq_id, rng.randint(0, 3)))
            queue.add(live[-1])
        assert len(queue) == len(live)
        assert list(queue) == sorted(live, key=lambda s: (s.priority, s.seq_id))
