"""TorchModelRunner keeps its port's promises: failures stay with their sequence."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.messages import ErrorCode, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.torch_device import torch_device
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.errors import DeviceLost, OutOfMemory
from worker.engine.ports import ModelRunner
from worker.model import device
from worker.model.attention.sdpa import SdpaAttention
from worker.model.config.model_config import ModelConfig
from worker.model.device import step_failure
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.parallel.group import Placement
from worker.model.sampling.plan import BatchPlan
from worker.model.sampling.sampler import Sampled, Sampler
from worker.model.step.runner import TorchModelRunner
from worker.model.step.warm_up import run_widest_sample
from worker.model.weights.loader import Checkpoint

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CausalLM]:
    path = make_checkpoint(Path(tmp_path_factory.mktemp("checkpoint")))
    model = CausalLM(ModelConfig.from_directory(path), 64, Placement(torch_device(), torch.float32))
    Checkpoint(path, model.config).load(model)
    return model


def new_runner(model: CausalLM) -> TorchModelRunner:
    pool = KVCachePool(model.config, 16, 4, device=torch_device(), dtype=torch.float32)
    stack = LayerByLayer(model, SdpaAttention(pool))
    return TorchModelRunner(model, stack, block_size=4, max_num_seqs=8)


def part(
    seq_id: int,
    known: list[int],
    start: int,
    end: int,
    *,
    table: list[int],
    prompt: int = 4,
    samples: bool = True,
    params: SamplingParams = GREEDY,
) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id,
        start,
        end - start,
        known[start:end],
        table,
        samples,
        params,
        known[:prompt],
        known[prompt:],
    )


def test_an_empty_step_is_a_step(model: CausalLM) -> None:
    runner: ModelRunner = new_runner(model)
    assert runner.vocab_size == 384
    result = runner.launch(ScheduledBatch((), (5, 6))).collect()
    assert (result.token_ids, result.failed) == ({}, {})


def test_exactly_the_sampling_sequences_are_in_the_result(model: CausalLM) -> None:
    runner = new_runner(model)
    result = runner.launch(
        ScheduledBatch(
            (
                part(1, [5, 6, 7, 8], 0, 4, table=[0]),
                part(2, [9, 9, 9, 9], 0, 2, table=[1], samples=False),
            )
        )
    ).collect()
    assert set(result.token_ids) == {1}
    result = runner.launch(
        ScheduledBatch((part(2, [9, 9, 9, 9], 2, 3, table=[1], samples=False),))
    ).collect()
    assert result.token_ids == {}


def test_launching_ahead_gives_what_waiting_gives(model: CausalLM) -> None:
    waiting, ahead = new_runner(model), new_runner(model)
    # Three tokens far above the rest, and penalties that make them take turns: a token in flight
    # that is not counted changes the next one.
    penalised = SamplingParams(
        temperature=0.0,
        logit_bias={10: 80.0, 11: 80.0, 12: 80.0},
        frequency_penalty=2.0,
        presence_penalty=2.0,
        max_tokens=64,
    )
    prompt = [5, 6, 7, 8]
    table = [3, 1, 2, 0]
    known = list(prompt)
    for step in range(12):
        start = 0 if step == 0 else len(known) - 1
        batch = ScheduledBatch((part(1, known, start, len(known), table=table, params=penalised),))
        known.append(waiting.launch(batch).collect().token_ids[1])
    seen = list(prompt)
    handles = []
    for step in range(12):
        start, end = (0, 4) if step == 0 else (3 + step, 4 + step)
        batch = ScheduledBatch((part(1, seen, start, end, table=table, params=penalised),))
        handles.append(ahead.launch(batch))
        if len(handles) > 1:
            seen.append(handles[-2].collect().token_ids[1])
    seen.append(handles[-1].collect().token_ids[1])
    assert seen == known
    assert set(known[4:]) == {10, 11, 12}


def test_not_finite_logits_fail_their_sequence_alone(model: CausalLM) -> None:
    prompt = [5, 6, 7, 8]
    lone = new_runner(model).launch(ScheduledBatch((part(1, prompt, 0, 4, table=[0]),))).collect()
    runner = new_runner(model)
    weight = model.embed_tokens.weight
    kept = weight[300].clone()
    with torch.inference_mode():
        weight[300] = torch.nan
    try:
        result = runner.launch(
            ScheduledBatch(
                (
                    part(1, prompt, 0, 4, table=[0]),
                    part(2, [1, 2, 300, 4], 0, 4, table=[1]),
                )
            )
        ).collect()
    finally:
        with torch.inference_mode():
            weight[300] = kept
    assert result.token_ids == lone.token_ids
    assert result.failed == {2: ErrorCode.NONFINITE_LOGITS.value}
    # Its block goes to a decode whose end lies inside it: what it left there must not show.
    known = [*prompt, *lone.token_ids.values()]
    clean = runner.launch(ScheduledBatch((part(1, known, 4, 5, table=[0, 2]),))).collect()
    reused = runner.launch(ScheduledBatch((part(1, known, 4, 5, table=[0, 1]),))).collect()
    assert reused.token_ids == clean.token_ids
    assert not reused.failed


def test_a_step_that_cannot_be_launched_leaves_the_runner_usable(model: CausalLM) -> None:
    runner = new_runner(model)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        runner.launch(ScheduledBatch((part(1, [5, 6, 7, 999], 0, 4, table=[0]),)))
    result = runner.launch(ScheduledBatch((part(2, [5, 6, 7, 8], 0, 4, table=[0]),))).collect()
    assert set(result.token_ids) == {2}


def test_logprobs_come_with_the_sequences_that_request_them(model: CausalLM) -> None:
    asking = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    result = (
        new_runner(model)
        .launch(
            ScheduledBatch(
                (
                    part(1, [5, 6, 7, 8], 0, 4, table=[0]),
                    part(2, [5, 6, 7, 8], 0, 4, table=[1], params=asking),
                )
            )
        )
        .collect()
    )
    assert set(result.logprobs) == {2}
    entry = result.logprobs[2]
    assert entry.token_id == result.token_ids[2] == result.token_ids[1] == entry.top[0][0]
    assert len(entry.top) == 2
    assert entry.logprob == pytest.approx(entry.top[0][1])


class TestWhatAnErrorMeans:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            MemoryError(),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
            torch.AcceleratorError("CUDA error: out of memory"),
        ],
    )
    def test_memory_that_is_full(self, error: Exception) -> None:
        assert isinstance(step_failure(error, CPU), OutOfMemory)

    def test_a_device_that_is_lost(self) -> None:
        error = torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with ...")
        failure = step_failure(error, CPU)
        assert isinstance(failure, DeviceLost)
        assert str(failure) == "AcceleratorError: CUDA error: an illegal memory access"

    def test_anything_else_is_the_steps_own(self) -> None:
        assert step_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), CPU) is None

    @pytest.mark.parametrize("computes", [True, False])
    def test_on_cuda_the_device_is_checked_after_any_exception(
        self, computes: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device, "_computes", lambda _: computes)
        for error in (torch.AcceleratorError("CUDA error: x"), RuntimeError("Triton Error [CUDA]")):
            failure = step_failure(error, torch.device("cuda"))
            assert (failure is None) is computes

    def test_it_comes_out_of_launch_without_the_tensors_of_the_step(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = new_runner(model)
        kept: list[weakref.ref[torch.Tensor]] = []

        def full(*_: object) -> torch.Tensor:
            tensor = torch.empty(9)
            kept.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(runner, "_stack", full)
        batch = ScheduledBatch((part(0, [1, 2, 3, 4], 0, 4, table=[0]),))
        with pytest.raises(OutOfMemory) as raised:
            runner.launch(batch)
        assert raised.value.__context__ is None
        assert kept[0]() is None

    def test_memory_that_is_really_full_is_known_and_what_fits_is_computed(self) -> None:
        """In a process of its own, whose address space is limited."""
        done = subprocess.run(
            [sys.executable, "-c", REALLY_FULL], capture_output=True, text=True, timeout=120
        )
        assert done.stdout.split() == ["OutOfMemory", "32"], done.stderr


REALLY_FULL = """
import resource
import torch
from worker.engine.errors import OutOfMemory
from worker.model.device import step_failure

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
try:
    torch.ones(1 << 30).sum()
except Exception as error:
    print(type(step_failure(error, torch.device("cpu"))).__name__)
print(int(torch.ones(32).sum()))
"""


def test_the_widest_sample_has_all_that_rows_may_want(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = new_runner(model)
    plans: list[BatchPlan] = []
    sample = Sampler.sample

    def recorded(self: Sampler, logits: torch.Tensor, rows: Any, previous: torch.Tensor) -> Sampled:
        plans.append(BatchPlan.of(rows, runner.vocab_size))
        return sample(self, logits, rows, previous)

    monkeypatch.setattr(Sampler, "sample", recorded)
    run_widest_sample(runner, 4, 8)
    (plan,) = plans
    every = tuple(range(8))
    wanted = (plan.biased, plan.penalised, plan.with_minimum, plan.drawn, plan.scored)
    assert wanted == (every,) * 5
    assert plan.draws.is_filtered.all()
    result = runner.launch(ScheduledBatch((part(1, [5, 6, 7, 8], 0, 4, table=[0]),))).collect()
    assert set(result.token_ids) == {1}
