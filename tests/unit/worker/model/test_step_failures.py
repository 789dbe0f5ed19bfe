"""A step that runs out of memory, wherever it does, changes no token.

What a runner keeps between steps (block tables on the device, counts of penalties) may have been
written in part by then. Every operator of a step is made to fail once, under what a CUDA device
has: tables of its own and counts on the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.messages import SamplingParams
from tests.support.checkpoints import make_checkpoint
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.model.attention.sdpa import SdpaAttention
from worker.model.config.model_config import ModelConfig
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.parallel.group import Placement
from worker.model.sampling.logits import PenaltyTable
from worker.model.step.rows import SequenceRows
from worker.model.step.runner import TorchModelRunner
from worker.model.weights.loader import Checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 40
SEATS = 9
# Four more than the first rows of the counts: these grow in mid-run.
PARAMS = [
    *(
        SamplingParams(
            temperature=0.8,
            seed=seed,
            presence_penalty=1.5,
            frequency_penalty=0.5,
            repetition_penalty=1.5,
        )
        for seed in range(6)
    ),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={9: 3.0}),
    SamplingParams(temperature=0.7, seed=11, top_k=20, min_tokens=9, logprobs=2),
    SamplingParams(temperature=0.0),
]


class FailsOnce(TorchDispatchMode):
    """Counts operators; the one with the number `at` is out of memory."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at = at
        self.num_seen = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.num_seen += 1
        if self.num_seen == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = make_checkpoint(Path(tmp_path_factory.mktemp("checkpoint")), num_layers=1)
    model = CausalLM(ModelConfig.from_directory(path), 64, Placement(CPU, torch.float32))
    Checkpoint(path, model.config).load(model)
    return model


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SequenceRows.__init__

    def apart(self: SequenceRows, num_rows: int, *args: Any) -> None:
        made(self, 0, *args)
        self.is_shared = False
        self.there = self.there.clone()
        self._add_rows(num_rows)

    copied = SequenceRows._resize

    def resize(self: SequenceRows, num_rows: int, width: int) -> None:
        copied(self, num_rows, width)
        if not self.is_shared:
            self.there = self.there.clone()  # `to_device` of the CPU shares the memory

    monkeypatch.setattr(SequenceRows, "__init__", apart)
    monkeypatch.setattr(SequenceRows, "_resize", resize)


def new_engine(model: CausalLM, lookahead: int) -> Engine:
    pool = KVCachePool(model.config, NUM_BLOCKS, BLOCK_SIZE, device=CPU, dtype=torch.float32)
    runner = TorchModelRunner(
        model, LayerByLayer(model, SdpaAttention(pool)), block_size=BLOCK_SIZE, max_num_seqs=SEATS
    )
    sampler: Any = runner._sampler
    sampler._penalties = PenaltyTable(runner.vocab_size, SEATS, CPU)
    config = EngineConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=SEATS,
        max_num_batched_tokens=24,
        max_model_len=40,
        lookahead=lookahead,
    )
    return Engine(config, runner)


def outputs(engine: Engine, failing: Callable[[int], FailsOnce | None]) -> dict[str, list[int]]:
    """Runs everything to its end; step by step under the mode that `failing` returns."""
    found: dict[str, list[int]] = {}
    for number, params in enumerate(PARAMS):
        prompt = tuple(range(20 + number, 26 + 2 * number))
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    step = 0
    while engine.has_unfinished():
        mode = failing(step)
        with mode if mode is not None else _nothing():
            for output in engine.step():
                assert output.error is None, output.message
                found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
        step += 1
        assert step < 500
    return found


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("lookahead", [0, 1])
def test_no_token_changes_whichever_operator_runs_out_of_memory(
    model: CausalLM, lookahead: int
) -> None:
    counts: list[int] = []

    def counted(step: int) -> FailsOnce:
        if modes:
            counts.append(modes[-1].num_seen)
        modes.append(FailsOnce())
        return modes[-1]

    modes: list[FailsOnce] = []
    expected = outputs(new_engine(model, lookahead), counted)
    assert len(counts) > 12
    rng = random.Random(lookahead)
    # The first steps have prompts, and fill what is kept; later ones are decodes that go on.
    places = [(step, at) for step in (0, 1, 2, 5, 9) for at in range(1, counts[step] + 1)]
    num_failed = 0
    for step, at in rng.sample(places, 40):
        failing = FailsOnce(at)
        engine = new_engine(model, lookahead)
        found = outputs(engine, lambda now, step=step, mode=failing: mode if now == step else None)
        assert found == expected, f"operator {at} of step {step}"
        num_failed += engine.stats().failed_steps
    assert num_failed > 30  # some operators are outside of the steps themselves


@pytest.mark.parametrize("lookahead", [0, 1])
def test_no_count_of_penalties_is_lost_or_doubled(
    model: CausalLM, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators that count fail, which are few among those of a step."""
    modes: list[FailsOnce | None] = []
    seen: list[int] = []
    count = PenaltyTable.count

    def counted(self: PenaltyTable, rows: Any, sampled: Any) -> Any:
        mode = (modes.pop(0) if modes else None) or FailsOnce()
        with mode:
            slots = count(self, rows, sampled)
        seen.append(mode.num_seen)
        return slots

    monkeypatch.setattr(PenaltyTable, "count", counted)
    expected = outputs(new_engine(model, lookahead), lambda step: None)
    places = [(call, at) for call in range(8) for at in range(1, seen[call] + 1)]
    for call, at in random.Random(lookahead).sample(places, 25):
        modes[:] = [*[None] * call, FailsOnce(at)]
        engine = new_engine(model, lookahead)
        assert outputs(engine, lambda step: None) == expected, f"operator {at} of call {call}"
        assert engine.stats().failed_steps >= 1
