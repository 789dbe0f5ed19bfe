"""A step as rank 0 sends it: the batch again at the other end, in a message of constant size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from shared.messages import SamplingParams
from worker.engine.batch import DecodeRun, DecodeStep, ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.ports import StepHandle
from worker.engine.request import EngineRequest
from worker.engines.echo import EchoModelRunner
from worker.model.parallel.messages import StepDecoder, StepEncoder, decode_step, encode
from worker.model.sampling.base import PreviousSample
from worker.model.step.forward_batch import ForwardBatch, KeptBatch

CPU = torch.device("cpu")


def most_bytes(batch: ScheduledBatch) -> int:
    """What a step may take that follows from its own tokens: five bytes a token, and as many for
    each block that holds them."""
    tokens = sum(sequence.num_scheduled_tokens for sequence in batch.sequences)
    return 8 + 25 * len(batch.sequences) + 10 * tokens + 5 * len(batch.finished_seq_ids)


class Wire:
    """A ModelRunner that looks at each batch as another rank gets it."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._inner = EchoModelRunner(vocab_size)
        self._encoder, self._decoder = StepEncoder(), StepDecoder()
        self._kept = KeptBatch(64, 4, vocab_size, CPU)  # rows stay while a sequence waits
        self._last: DecodeStep | None = None
        self.num_steps = self.num_continued = 0

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        self.num_steps += 1
        body = encode(self._encoder.encode(batch))
        assert len(body) <= most_bytes(batch)
        step = decode_step(body)
        there = self._decoder.decode(step)
        self.num_continued += step.grown is not None
        assert there.finished_seq_ids == batch.finished_seq_ids
        assert there.num_decodes == batch.num_decodes
        for sent, got in zip(batch.sequences, there.sequences, strict=True):
            assert (got.seq_id, got.start, got.end) == (sent.seq_id, sent.start, sent.end)
            assert (got.samples, got.scores) == (sent.samples, sent.scores)
            num_blocks = -(-sent.end // 4)
            assert list(got.block_table[:num_blocks]) == list(sent.block_table[:num_blocks])
        assert len(self._decoder._sequences) <= 64, "what has ended is forgotten"
        self.check_kept(there, step.sampled, batch)
        return self._inner.launch(batch)

    def check_kept(
        self, there: ScheduledBatch, sampled: tuple[int, ...], batch: ScheduledBatch
    ) -> None:
        """What a rank keeps between steps gives the tensors of a batch that is made anew."""
        self._kept.forget(there.finished_seq_ids)
        token_ids = torch.tensor(sampled or (0,) * len(there), dtype=torch.int64)
        kept = self._tensors(there, PreviousSample(token_ids, {}, self._last), self._kept)
        if len(there):
            self._last = there.decodes
        known = tuple(
            sequence._replace(
                token_ids=(*sequence.token_ids, 0)[: sequence.num_scheduled_tokens],
                block_table=list(sequence.block_table),
            )
            for sequence in batch.sequences
        )
        nothing = PreviousSample(torch.empty(0, dtype=torch.int64), {})
        new = self._tensors(ScheduledBatch(known), nothing, None)
        for name in ("input_ids", "positions", "logits_rows"):
            assert torch.equal(getattr(kept, name), getattr(new, name)), name
        for name in ("cu_q", "seq_lens", "slots"):
            assert torch.equal(getattr(kept.metadata, name), getattr(new.metadata, name)), name
        for row, length in enumerate(new.metadata.context_lens):
            blocks = slice(-(-length // 4))
            tables = (m.metadata.block_tables[0, row, blocks] for m in (kept, new))
            assert torch.equal(*tables)

    def _tensors(
        self, batch: ScheduledBatch, previous: PreviousSample, kept: KeptBatch | None
    ) -> ForwardBatch:
        return ForwardBatch.build(
            batch,
            block_size=4,
            vocab_size=self.vocab_size,
            device=CPU,
            previous=previous,
            kept=kept,
        )


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_the_other_end_has_the_same_batches(seed: int, lookahead: int) -> None:
    rng = random.Random(seed)
    wire = Wire(64)
    config = EngineConfig(
        num_blocks=24,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=80,
        lookahead=lookahead,
    )
    engine = Engine(config, wire)
    live: list[str] = []
    for number in range(60):
        prompt = tuple(rng.randrange(3, 6) for _ in range(rng.randrange(1, 40)))
        params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 30))
        live.append(f"r{number}")
        engine.add(EngineRequest(request_id=live[-1], prompt_token_ids=prompt, params=params))
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.2:
            engine.cancel(live.pop(rng.randrange(len(live))))
    while engine.has_unfinished():
        engine.step()
    assert wire.num_steps > 100
    assert wire.num_continued > 30, "runs of decodes continue"
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0


def test_other_blocks_of_a_sequence_come_in_another_list() -> None:
    wire = Wire(64)
    tables = [[1, 2, 3], [4, 5, 6]]  # it lost its blocks in between, and is computed again
    for table in tables:
        params = SamplingParams()
        item = ScheduledSequence(7, 8, 2, (3, 4), table, True, params, range(10), ())
        batch = ScheduledBatch((item,))
        wire.check_kept(wire._decoder.decode(wire._encoder.encode(batch)), (), batch)


@dataclass
class Decode:
    """A DecodingSequence."""

    seq_id: int
    token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    tenant: str = ""


def bytes_of_steps(num_sequences: int, context: int, *, is_ahead: bool) -> list[int]:
    """Bytes of two steps that decode sequences of that length, once their blocks have been sent."""
    encoder = StepEncoder()
    sequences = tuple(Decode(70_000 + i, (70_000,) * context) for i in range(num_sequences))
    tables = [list(range(i, i + context // 16 + 1)) for i in range(num_sequences)]
    sizes = []
    for start in (context - 4, context - 2):  # the first of them sends the blocks
        run = DecodeRun(sequences, [start] * num_sequences, tables, [70_000] * num_sequences)
        steps = DecodeStep(run, 0), DecodeStep(run, 1, is_ahead=is_ahead)
        sizes = [len(encode(encoder.encode(ScheduledBatch((), decodes=step)))) for step in steps]
    return sizes


@pytest.mark.promise(
    "Engine: the data sent between processes per decode step does not grow with its sequences "
    "(7 bytes where the same ones decode again, and 5 for each token that the device does not "
    "share; about 25 for each sequence where one joins or leaves)"
)
@pytest.mark.parametrize(
    ("num_sequences", "first", "known", "ahead"), [(1, 31, 12, 7), (64, 1545, 329, 7)]
)
def test_a_decode_is_sent_in_as_many_bytes_whatever_came_before(
    num_sequences: int, first: int, known: int, ahead: int
) -> None:
    """The figures of docs/BENCHMARKS.md."""
    for context in (4096, 20_000, 60_000):
        assert bytes_of_steps(num_sequences, context, is_ahead=False) == [first, known]
        assert bytes_of_steps(num_sequences, context, is_ahead=True) == [first, ahead]
