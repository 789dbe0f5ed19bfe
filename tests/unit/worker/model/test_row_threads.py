"""Rows that several threads draw from give what one thread gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shared.messages import SamplingParams
from worker.model.sampling.row import RowThreads, SamplingRow
from worker.model.sampling.sampler import Sampler

VOCAB = 150_000


def rows(params: SamplingParams, count: int) -> list[SamplingRow]:
    return [SamplingRow(i, params, [5], [6, 7], position=i) for i in range(count)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9),
        SamplingParams(temperature=0.8, seed=3, top_k=20, min_p=0.01),
    ],
    ids=["temperature", "top-p", "top-k"],
)
def test_the_same_tokens_are_drawn(params: SamplingParams) -> None:
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    nothing = torch.empty(0, dtype=torch.int64)
    with torch.inference_mode():
        drawn = [
            Sampler(
                VOCAB,
                max_num_seqs=16,
                eos_token_ids=frozenset({2}),
                device=torch.device("cpu"),
                row_threads=RowThreads(num_threads),
            ).sample(logits, rows(params, 11), nothing)
            for num_threads in (1, 3)
        ]
    assert torch.equal(drawn[0].token_ids, drawn[1].token_ids)


def test_an_error_in_any_part_is_raised() -> None:
    def fails_at_the_end(logits: torch.Tensor, some: Sequence[SamplingRow]) -> torch.Tensor:
        if some[-1].seq_id == 10:
            raise ValueError("the last part")
        return logits[:, 0]

    threads = RowThreads(3)
    with pytest.raises(ValueError, match="the last part"):
        threads.map(fails_at_the_end, torch.zeros(11, VOCAB), rows(SamplingParams(), 11))
