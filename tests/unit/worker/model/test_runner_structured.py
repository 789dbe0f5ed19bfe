"""TorchModelRunner draws rows with a grammar when it is told that their tokens are known."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from shared.messages import SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from shared.text.grammar import regex_grammar
from shared.text.grammar_compiler import GrammarCompiler
from tests.support.checkpoints import make_checkpoint
from tests.support.torch_device import torch_device
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.errors import OutOfMemory
from worker.model.attention.sdpa import SdpaAttention
from worker.model.config.model_config import ModelConfig
from worker.model.device import StepTimer
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.parallel.group import Placement
from worker.model.sampling import grammar_masks
from worker.model.sampling.grammar_masks import GrammarMasks
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.sampler import Sampler
from worker.model.step.runner import TorchModelRunner
from worker.model.weights.loader import Checkpoint

FREE = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
KEPT = SamplingParams(
    temperature=0.0, max_tokens=64, grammar=regex_grammar("[0-9]{200}", "guided_regex")
)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[CausalLM]:
    model = CausalLM(ModelConfig.from_directory(path), 64, Placement(torch_device(), torch.float32))
    Checkpoint(path, model.config).load(model)
    return model


@pytest.fixture
def runner(model: CausalLM, path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchModelRunner:
    # No row sits a step out, however busy the machine is.
    monkeypatch.setattr(grammar_masks, "STEP_WAIT_SECONDS", 60.0)
    device, config = torch_device(), model.config
    ends = config.eos_token_ids
    compiler = GrammarCompiler(load_tokenizer(path), config.vocab_size, sorted(ends))
    pool = KVCachePool(config, 32, 4, device=device, dtype=torch.float32)
    return TorchModelRunner(
        model,
        LayerByLayer(model, SdpaAttention(pool)),
        block_size=4,
        max_num_seqs=8,
        grammar_masks=GrammarMasks(compiler, ends, device),
    )


class Stream:
    """A sequence, as the engine knows it: its newest token may be in flight."""

    def __init__(self, seq_id: int, params: SamplingParams) -> None:
        self.seq_id = seq_id
        self.params = params
        self.outputs: list[int] = []
        self.table = list(range(8 * seq_id, 8 * seq_id + 8))

    def step(self, number: int) -> ScheduledSequence:
        """Step 0 computes the prompt, each further one a token."""
        start, end = (0, 3) if number == 0 else (2 + number, 3 + number)
        known = (PROMPT + self.outputs)[start:end]
        return ScheduledSequence(
            self.seq_id, start, end - start, known, self.table, True, self.params, PROMPT,
            self.outputs,
        )  # fmt: skip


def batch(number: int, *streams: Stream) -> ScheduledBatch:
    return ScheduledBatch(tuple(stream.step(number) for stream in streams))


def one_by_one(runner: TorchModelRunner, count: int, *streams: Stream) -> None:
    for number in range(count):
        handle = runner.launch(batch(number, *streams))
        handle.sample_structured([s.seq_id for s in streams if s.params is KEPT])
        result = handle.collect()
        for stream in streams:
            stream.outputs.append(result.token_ids[stream.seq_id])
    runner.launch(ScheduledBatch((), tuple(s.seq_id for s in streams))).collect()


def test_a_step_ahead_it_draws_what_it_draws_step_by_step(runner: TorchModelRunner) -> None:
    expected = Stream(0, KEPT), Stream(1, FREE), Stream(2, KEPT)
    one_by_one(runner, 8, *expected)
    streams = Stream(3, KEPT), Stream(1, FREE), Stream(0, KEPT)
    streams[1].seq_id, streams[2].seq_id = 11, 10
    before = None
    for number in range(8):
        handle = runner.launch(batch(number, *streams))
        if before is not None:
            result = before.collect()
            for stream in streams:
                stream.outputs.append(result.token_ids[stream.seq_id])
        handle.sample_structured([3, 10])
        before = handle
    assert before is not None
    result = before.collect()
    for stream, like in zip(streams, expected, strict=True):
        assert [*stream.outputs, result.token_ids[stream.seq_id]] == like.outputs


def two_steps(runner: TorchModelRunner, *streams: Stream) -> object:
    """Launches two, and collects the first."""
    first = runner.launch(batch(0, *streams))
    second = runner.launch(batch(1, *streams))
    for seq_id, token_id in first.collect().token_ids.items():
        next(s for s in streams if s.seq_id == seq_id).outputs.append(token_id)
    return second


def test_a_sequence_that_has_ended_gets_any_token_and_costs_no_mask(
    runner: TorchModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, kept, free = Stream(0, KEPT), Stream(1, KEPT), Stream(2, FREE)
    handle = two_steps(runner, ended, kept, free)
    masked: list[int] = []
    masks_of = GrammarMasks.masks_of
    monkeypatch.setattr(
        GrammarMasks,
        "masks_of",
        lambda self, rows: masked.extend(r.seq_id for r in rows.values()) or masks_of(self, rows),
    )
    handle.sample_structured([1])  # type: ignore[attr-defined]
    tokens = handle.collect().token_ids  # type: ignore[attr-defined]
    assert set(tokens) == {0, 1, 2}
    assert tokens[0] == 0
    assert masked == [1]


def test_tokens_that_were_not_drawn_are_not_known_to_the_next_step(
    runner: TorchModelRunner,
) -> None:
    kept = Stream(0, KEPT)
    handle = two_steps(runner, kept)
    with pytest.raises(ValueError, match="tokens of sequence 0 are unknown"):
        runner.launch(batch(2, kept))
    handle.collect()  # type: ignore[attr-defined]


def test_without_memory_for_a_draw_the_step_fails_and_the_same_may_come_again(
    runner: TorchModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, kept = Stream(1, KEPT), Stream(0, KEPT)
    one_by_one(runner, 2, expected)
    handle = two_steps(runner, kept)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", full)
        with pytest.raises(OutOfMemory) as raised:
            handle.sample_structured([0])  # type: ignore[attr-defined]
    assert raised.value.__context__ is None, "its traceback would hold the logits"
    again = runner.launch(batch(1, kept))
    again.sample_structured([0])
    assert [*kept.outputs, again.collect().token_ids[0]] == expected.outputs


class Event:
    """Stands for torch.cuda.Event: time goes on by a second with each record."""

    now_ms: ClassVar[float] = 0.0
    waited_ms: ClassVar[float] = 0.0  # what was recorded up to then has happened

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self) -> None:
        Event.now_ms += 1000
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        Event.waited_ms = self.at_ms

    def elapsed_time(self, end: Event) -> float:
        assert end.at_ms <= Event.waited_ms
        return end.at_ms - self.at_ms


def test_a_step_takes_from_its_first_launch_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert StepTimer(torch.device("cpu")).wait() is None
    timer = StepTimer(torch.device("cuda"))
    timer.end()
    timer.end()
    timer.begin()  # the second between is the host's
    timer.end()
    assert timer.wait() == 2.0 + 1.0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_steps_seconds_are_without_the_wait_for_masks(
    runner: TorchModelRunner, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch_device().type != "cpu":
        pytest.skip("its events are real")
    unready = GrammarMasks.unready

    def late(masks: GrammarMasks, rows: Collection[SamplingRow]) -> dict[int, Future[None]]:
        Event.now_ms += 100_000
        return unready(masks, rows)

    monkeypatch.setattr(GrammarMasks, "unready", late)
    streams = Stream(1, FREE), Stream(2, KEPT)
    before = runner.launch(batch(0, *streams)) if is_ahead else None
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    monkeypatch.setattr("worker.model.step.runner.StepTimer", lambda device: timer)
    begin_ms = Event.now_ms
    handle = runner.launch(batch(int(is_ahead), *streams))
    if before is not None:
        collected = before.collect()
        for stream in streams:
            stream.outputs.append(collected.token_ids[stream.seq_id])
    handle.sample_structured([2])
    result = handle.collect()
    assert len(result.token_ids) == 2
    assert Event.now_ms - begin_ms >= 100_000
    assert result.device_s is not None
    assert 0 < result.device_s < 10


def test_a_steps_result_has_the_devices_seconds(
    runner: TorchModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch_device().type == "cpu":
        assert runner.launch(batch(0, Stream(0, FREE))).collect().device_s is None
        monkeypatch.setattr(torch.cuda, "Event", Event)
        timer = StepTimer(torch.device("cuda"))
        monkeypatch.setattr("worker.model.step.runner.StepTimer", lambda device: timer)
    streams = Stream(1, FREE), Stream(2, KEPT)
    handle = runner.launch(batch(0, *streams))
    handle.sample_structured([2])
    seconds = handle.collect().device_s
    assert seconds is not None
    assert seconds > 0
