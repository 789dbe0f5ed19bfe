"""The penalty table is bounded, and being pushed out of it changes nothing."""

from __future__ import annotations

import torch

from shared.messages import SamplingParams
from tests.support.torch_device import torch_device
from worker.model.sampling.logits import HostPenalties, PenaltyTable
from worker.model.sampling.row import SamplingRow

VOCAB = 12
PARAMS = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0, max_tokens=64)
NOTHING = torch.empty(0, dtype=torch.int64)


def row(seq_id: int, outputs: list[int]) -> SamplingRow:
    return SamplingRow(seq_id, PARAMS, [seq_id], outputs, 1 + len(outputs))


def apply(table: PenaltyTable, rows: list[SamplingRow]) -> torch.Tensor:
    logits = torch.ones((len(rows), VOCAB), device=torch_device())
    table.apply(logits, range(len(rows)), rows, NOTHING.to(torch_device()))
    return logits.cpu()


def expected(seq_id: int, outputs: list[int]) -> torch.Tensor:
    logits = torch.ones(VOCAB)
    logits[[seq_id, *outputs]] = 0.5
    for token in outputs:
        logits[token] -= 1.0
    return logits


def test_rows_come_and_go_in_a_table_smaller_than_their_number() -> None:
    table = PenaltyTable(VOCAB, 3, torch_device())
    outputs: dict[int, list[int]] = {seq_id: [] for seq_id in range(7)}
    for step in range(40):
        chosen = [(step * 2 + i) % 7 for i in range(3)]
        for seq_id in chosen:
            outputs[seq_id].append((seq_id * step) % VOCAB)
        result = apply(table, [row(seq_id, outputs[seq_id]) for seq_id in chosen])
        for i, seq_id in enumerate(chosen):
            assert torch.equal(result[i], expected(seq_id, outputs[seq_id]))


def test_only_the_rows_named_are_changed() -> None:
    table = PenaltyTable(VOCAB, 8, torch_device())
    logits = torch.ones((4, VOCAB), device=torch_device())
    table.apply(logits, [2], [row(5, [1, 1])], NOTHING.to(torch_device()))
    assert torch.equal(logits[[0, 1, 3]].cpu(), torch.ones(3, VOCAB))
    assert torch.equal(logits[2].cpu(), expected(5, [1, 1]))


def test_nothing_is_allocated_before_the_first_penalty() -> None:
    table = PenaltyTable(10**9, 10**6, torch_device())  # a petabyte, if it were
    table.forget([1, 2, 3])


def test_the_host_applies_what_a_device_applies() -> None:
    """To the bit, with tokens in flight, outside the vocabulary and of a prompt."""
    vocab, generator = 300, torch.Generator().manual_seed(1)
    table, host = PenaltyTable(vocab, 4, torch.device("cpu")), HostPenalties(vocab)
    params = [
        SamplingParams(frequency_penalty=0.7, presence_penalty=-0.3, max_tokens=64),
        SamplingParams(repetition_penalty=1.3, max_tokens=64),
        SamplingParams(repetition_penalty=0.8, frequency_penalty=-1.9, max_tokens=64),
    ]
    prompts = [[5, 5, 299, 10**6], [7, -1], list(range(0, 200, 2))]
    outputs: list[list[int]] = [[], [], []]
    for step in range(150):
        sampled = torch.randint(0, vocab, (3,), generator=generator)
        rows = []
        for i in range(3):
            known, in_flight = outputs[i], (i if step % 3 else None)
            position = len(prompts[i]) + len(known) + (in_flight is not None)
            rows.append(SamplingRow(i, params[i], prompts[i], list(known), position, in_flight))
        logits = torch.randn((3, vocab), generator=generator) * 4
        expected = logits.clone()
        table.apply(expected, range(3), rows, sampled)
        host.apply(logits, range(3), rows, sampled)
        assert torch.equal(logits, expected)
        for i in range(3):
            outputs[i].append(int(sampled[i]))
