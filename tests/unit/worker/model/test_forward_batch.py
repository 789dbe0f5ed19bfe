"""A ScheduledBatch becomes exactly the tensors that it describes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shared.messages import SamplingParams
from tests.support.torch_device import torch_device
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.model.sampling.base import PreviousSample
from worker.model.step.forward_batch import ForwardBatch


def sequence(
    seq_id: int,
    start: int,
    tokens: Sequence[int],
    table: Sequence[int],
    *,
    samples: bool = True,
    scheduled: int | None = None,
) -> ScheduledSequence:
    count = len(tokens) if scheduled is None else scheduled
    return ScheduledSequence(seq_id, start, count, tokens, table, samples, SamplingParams(), [], [])


def build(
    *sequences: ScheduledSequence,
    previous: dict[int, int] | None = None,
    sampled: Sequence[int] = (),
) -> ForwardBatch:
    device = torch_device()
    return ForwardBatch.build(
        ScheduledBatch(sequences),
        block_size=4,
        vocab_size=100,
        device=device,
        previous=PreviousSample(
            torch.tensor(sampled, dtype=torch.int64, device=device), previous or {}
        ),
    )


def test_a_mixed_batch() -> None:
    batch = build(
        sequence(1, 5, [50], [9, 2]),
        sequence(2, 0, [51], [3]),
        sequence(3, 3, [1, 2, 3], [7, 0, 5], samples=False),
        sequence(4, 0, [4, 5, 6, 7, 8], [6, 1]),
    )
    meta = batch.metadata
    assert batch.input_ids.tolist() == [50, 51, 1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.positions.tolist() == [5, 0, 3, 4, 5, 0, 1, 2, 3, 4]
    assert meta.slots.tolist() == [[9, 12, 31, 0, 1, 24, 25, 26, 27, 4]]
    assert meta.cu_q.tolist() == [0, 1, 2, 5, 10]
    assert meta.seq_lens.tolist() == [6, 1, 6, 5]
    assert meta.block_tables.tolist() == [[[9, 2], [3, 0], [7, 0], [6, 1]]]
    assert (meta.num_decodes, meta.max_query_len, meta.num_tokens) == (2, 5, 10)
    assert (meta.query_lens, meta.context_lens) == ((1, 1, 3, 5), (6, 1, 6, 5))
    assert batch.logits_rows.tolist() == [0, 1, 9]
    assert batch.num_sampled == 3


def test_tokens_in_flight_come_from_the_step_before() -> None:
    batch = build(
        sequence(1, 5, [], [9, 2], scheduled=1),
        sequence(2, 1, [40], [3]),
        sequence(3, 2, [41], [4], scheduled=2),
        previous={1: 2, 3: 0, 8: 1},
        sampled=[77, 78, 79],
    )
    assert batch.input_ids.tolist() == [79, 40, 41, 77]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (sequence(6, 5, [], [9, 2], scheduled=1), "1 tokens of sequence 6 are unknown"),
        (sequence(6, 0, [1], [9, 2], scheduled=3), "2 tokens of sequence 6 are unknown"),
        (sequence(6, 4, [1], [9]), "sequence 6 has 1 blocks for 5 tokens"),
        (sequence(6, 0, [100], [9]), "outside the vocabulary"),
        (sequence(6, 0, [-1], [9]), "outside the vocabulary"),
        (sequence(6, 0, [], [9]), "sequence 6"),
    ],
)
def test_a_schedule_that_contradicts_itself_never_reaches_the_device(
    bad: ScheduledSequence, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        build(sequence(1, 5, [50], [9, 2]), bad, previous={1: 0}, sampled=[3])
