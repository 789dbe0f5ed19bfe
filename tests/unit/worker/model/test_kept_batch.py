"""What a runner keeps between steps gives the batches that it would make from nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shared.messages import SamplingParams
from tests.support.torch_device import torch_device
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.ports import StepResult
from worker.engine.request import EngineRequest
from worker.model.sampling.base import PreviousSample
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.rows import SamplingRows
from worker.model.step.forward_batch import ForwardBatch, KeptBatch
from worker.model.step.rows import SequenceRows

VOCAB_SIZE = 50
BLOCK_SIZE = 4
EOS = 7


class Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def collect(self) -> StepResult:
        return self._result


class ComparingRunner:
    """Samples at random; builds each step twice, with what was kept and without."""

    def __init__(self, rng: random.Random, seats: int, num_groups: int) -> None:
        self.vocab_size = VOCAB_SIZE
        self._rng = rng
        self._device = torch_device()
        self.kept = self._new_kept(seats, num_groups)
        self._num_groups = num_groups
        self._rows = SamplingRows()
        self._previous = PreviousSample(self._sample([]), {})
        self.num_continued = 0
        self.num_begun = 0
        self.num_mixed = 0

    def _new_kept(self, seats: int, num_groups: int) -> KeptBatch:
        return KeptBatch(seats, BLOCK_SIZE, VOCAB_SIZE, self._device, num_groups)

    def _sample(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self._device)

    def launch(self, batch: ScheduledBatch) -> Done:
        self.kept.forget(batch.finished_seq_ids)
        self._rows.forget(batch.finished_seq_ids)
        plain = ScheduledBatch(batch.sequences, batch.finished_seq_ids)
        assert plain.num_tokens == batch.num_tokens
        assert plain.num_decodes == batch.num_decodes
        previous = self._previous
        ours, fresh = (
            self._build(batch, self.kept),
            self._build(plain, self._new_kept(len(plain), self._num_groups)),
        )
        check_same(ours, fresh)
        rows, index_of = self._rows.of(batch, previous)
        sampled = [s for s in batch.sequences if s.samples]
        assert rows == [SamplingRow.of(s, previous.index_of.get(s.seq_id)) for s in sampled]
        assert index_of == {s.seq_id: i for i, s in enumerate(sampled)}
        assert ours.num_sampled == len(sampled)
        if batch.decodes is not None:
            self.num_begun += batch.decodes.number == 0
            self.num_continued += batch.decodes.number > 0
            self.num_mixed += batch.decodes.number > 0 and len(batch.others) > 0
        token_ids = [self._token(s) for s in sampled]
        self._previous = PreviousSample(self._sample(token_ids), dict(index_of), batch.decodes)
        return Done(StepResult(dict(zip(index_of, token_ids, strict=True))))

    def _token(self, sequence: ScheduledSequence) -> int:
        return EOS if self._rng.random() < 0.02 else self._rng.randrange(10, VOCAB_SIZE)

    def _build(self, batch: ScheduledBatch, kept: KeptBatch) -> ForwardBatch:
        return ForwardBatch.build(
            batch,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            device=self._device,
            previous=self._previous,
            kept=kept,
        )


def check_same(ours: ForwardBatch, fresh: ForwardBatch) -> None:
    for name in ("input_ids", "positions", "logits_rows"):
        assert_equal(getattr(ours, name), getattr(fresh, name))
    mine, other = ours.metadata, fresh.metadata
    for name in ("cu_q", "seq_lens", "slots"):
        assert_equal(getattr(mine, name), getattr(other, name))
    for name in ("num_decodes", "max_query_len", "num_tokens", "query_lens", "context_lens"):
        assert getattr(mine, name) == getattr(other, name)
    assert mine.block_tables.shape == other.block_tables.shape
    for row, length in enumerate(mine.context_lens):
        width = -(-length // BLOCK_SIZE)
        assert_equal(mine.block_tables[:, row, :width], other.block_tables[:, row, :width])


def assert_equal(ours: torch.Tensor, fresh: torch.Tensor) -> None:
    assert ours.dtype == fresh.dtype == torch.int32
    assert ours.tolist() == fresh.tolist()


def request(rng: random.Random, number: int) -> EngineRequest:
    shared = tuple(range(10, 10 + rng.choice([0, 8, 12])))
    prompt = (*shared, *(rng.randrange(10, VOCAB_SIZE) for _ in range(rng.randint(1, 20))))
    params = SamplingParams(max_tokens=rng.randint(1, 40), seed=number)
    return EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params)


@pytest.mark.parametrize("has_device", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_under_preemption_cancels_and_prefix_hits(
    lookahead: int, has_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`has_device`: the device has a table of its own, which gets what is new and nothing else."""
    if has_device:
        apart = SequenceRows.__init__

        def keep_apart(self: SequenceRows, num_rows: int, *args: Any) -> None:
            apart(self, 0, *args)
            self.is_shared = False
            self.there = self.there.clone()
            self._add_rows(num_rows)

        monkeypatch.setattr(SequenceRows, "__init__", keep_apart)
    begun = continued = mixed = preemptions = hits = 0
    for seed in range(8):
        rng = random.Random(seed)
        seats = rng.choice([1, 3, 6])
        windows = [(None,), (None, 6, 6)][seed % 2]
        runner = ComparingRunner(rng, seats, len(windows))
        config = EngineConfig(
            num_blocks=rng.choice([11, 14, 80]) * len(windows),
            block_size=BLOCK_SIZE,
            max_num_seqs=seats,
            max_num_batched_tokens=rng.choice([seats, 12, 64]),
            max_model_len=44,
            lookahead=lookahead,
            eos_token_ids=frozenset({EOS}),
            windows=windows,
        )
        engine = Engine(config, runner)
        live: list[str] = []
        number = 0
        for step in range(120):
            if rng.random() < 0.2 and len(live) < 12:
                engine.add(request(rng, number))
                live.append(str(number))
                number += 1
            if live and rng.random() < 0.03:
                engine.cancel(live.pop(rng.randrange(len(live))))
            for output in engine.step():
                if output.finish_reason is not None:
                    live.remove(output.request_id)
            if step % 10 == 0:
                engine.check_integrity()
        begun += runner.num_begun
        continued += runner.num_continued
        mixed += runner.num_mixed
        preemptions += engine.stats().preemptions
        hits += engine.stats().prefix_hit_tokens
    assert min(begun, continued, mixed, preemptions, hits) > 5
    assert continued > begun


def test_more_sequences_than_slots_reuse_the_rows_of_waiting_ones() -> None:
    rows = SequenceRows(2, torch_device())
    tables = {seq_id: [seq_id, seq_id + 10] for seq_id in range(5)}
    for pair in ([0, 1], [1, 2], [3, 0], [4, 2]):
        found = rows.of(pair, [tables[i] for i in pair], set(pair))
        assert sorted(found.tolist()) == [0, 1]
        assert rows.table[0, found, :2].tolist() == [tables[i] for i in pair]
    rows.forget([4, 2, 99])
    wide = list(range(40))
    (row,) = rows.of([7], [wide], {7})
    assert rows.table[0, row, :40].tolist() == wide


def test_a_step_that_raises_leaves_nothing_half_kept() -> None:
    """The step after it has the same tables, whatever was written before the exception."""
    kept = KeptBatch(4, BLOCK_SIZE, VOCAB_SIZE, torch_device())
    good = ScheduledSequence(1, 4, 1, [20], [5, 6], True, SamplingParams(), [10] * 5, [])
    bad = good._replace(seq_id=2, token_ids=[VOCAB_SIZE], block_table=[3, 4])
    nothing = PreviousSample(torch.empty(0, dtype=torch.int64, device=torch_device()), {})
    with pytest.raises(ValueError, match="sequence 2 has a token outside"):
        kept.forward_batch(ScheduledBatch((good, bad)), nothing)
    mended = bad._replace(token_ids=[21])
    table = kept.forward_batch(ScheduledBatch((mended, good)), nothing).metadata.block_tables
    assert table.tolist() == [[[3, 4], [5, 6]]]
