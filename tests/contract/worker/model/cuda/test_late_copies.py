"""Copies that arrive as late as they may change no token, and a missing wait changes one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from shared.messages import SamplingParams
from tests.support.engine_run import Generated, generate
from tests.support.native_models import QWEN3, new_model, new_pool
from tests.support.triton_device import IS_INTERPRETED, NOT_INTERPRETED, has_triton

if not (has_triton() and IS_INTERPRETED):
    pytest.skip(NOT_INTERPRETED, allow_module_level=True)

from tests.support import late_stream
from tests.support.late_stream import CUDA, Event, LateStream
from tests.support.step_graphs import new_graphs
from worker.engine.block_hash import BlockHash
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.offload import OffloadTier, Transfers
from worker.model.cuda.stack import CudaOps, CudaStack
from worker.model.device import StepTimer
from worker.model.kv_disk import DiskBlocks, _hash_of
from worker.model.kv_offload import HostBlocks
from worker.model.sampling.sampler import Sampler
from worker.model.step import runner as runner_module
from worker.model.step.rows import Staging
from worker.model.step.runner import TorchModelRunner

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numbers in padding
]
SHAPE = QWEN3 | {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
BLOCK_SIZE = 16
SEATS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=5)
PARAMS = [
    GREEDY,
    replace(DRAWN, top_p=0.9, logprobs=2),
    replace(DRAWN, frequency_penalty=0.5, prompt_logprobs=1, max_tokens=4),
    replace(GREEDY, max_tokens=4),
]
BRIEF = replace(GREEDY, max_tokens=3)
TURNS = 2 * [range(3, 55), range(60, 112)]  # three full blocks each
PROMPTS = [range(3, 33), range(40, 70), range(9, 20), range(3, 27)]
T = TypeVar("T")
NewDisk = Callable[[Tensor], DiskBlocks]


class Uncaptured:
    """A `Capture` after which all is computed again."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        return run

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        return len(replays) - 1


def new_engine(
    device: torch.device, lookahead: int, num_slots: int = 0, new_disk: NewDisk | None = None
) -> Engine:
    """An engine over graphs, which has to preempt; perhaps with slots for copies of evicted blocks,
    and a disk behind them."""
    model = new_model(SHAPE, CudaOps(), device=device, dtype=torch.float32)
    pool = new_pool(model.config, device=device, dtype=torch.float32)
    stack = new_graphs(
        model,
        CudaStack(model, pool),
        max_num_seqs=SEATS,
        max_num_tokens=32,
        max_blocks=6,
        device=device,
    )
    stack.capture_by(Uncaptured(), lambda share: None)
    host = HostBlocks(pool, num_slots) if num_slots else None
    runner = TorchModelRunner(
        model, stack, block_size=BLOCK_SIZE, max_num_seqs=SEATS, host_blocks=host
    )
    runner._sampler = Sampler(
        model.config.vocab_size,
        max_num_seqs=SEATS,
        eos_token_ids=frozenset({2}),
        device=device,
        uses_kernels=True,
    )
    config = EngineConfig(
        num_blocks=5,
        block_size=BLOCK_SIZE,
        max_num_seqs=SEATS,
        max_num_batched_tokens=24,
        max_model_len=64,
        lookahead=lookahead,
        eos_token_ids=frozenset({2}),
        num_offload_blocks=num_slots,
    )
    has_disk = host is not None and new_disk is not None
    return Engine(config, runner, disk=new_disk(host.slots) if has_disk else None)


def of_turns(engine: Engine) -> list[list[int]]:
    """Returns the tokens after long prompts, one after the other, each of which needs the pool."""
    turns = [generate(engine, [[*prompt]], BRIEF, f"{at}-") for at, prompt in enumerate(TURNS)]
    return [turn[0].token_ids for turn in turns]


def results_of(engine: Engine) -> list[Generated]:
    return generate(engine, [list(prompt) for prompt in PROMPTS], PARAMS)


def numbers_of(results: list[Generated]) -> list[float]:
    """Returns the log probabilities of all results."""
    chosen = [one.logprob for result in results for one in result.logprobs]
    prompts = [one.logprob for result in results for one in result.prompt_logprobs]
    return [*chosen, *prompts]


def assert_equal(seen: list[Generated], expected: list[Generated]) -> None:
    assert [one.token_ids for one in seen] == [one.token_ids for one in expected]
    assert numbers_of(seen) == pytest.approx(numbers_of(expected), abs=1e-4)


@pytest.fixture(scope="module")
def expected() -> list[Generated]:
    engine = new_engine(torch.device("cpu"), lookahead=0)
    results = results_of(engine)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0
    assert len({token for result in results for token in result.token_ids}) > 8
    return results


@pytest.fixture(scope="module")
def expected_turns() -> list[list[int]]:
    return of_turns(new_engine(torch.device("cpu"), lookahead=0))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStream]:
    def raised(self: Engine, planned: object, error: Exception) -> Any:
        raise error

    monkeypatch.setattr(Engine, "_recover", raised)
    monkeypatch.setattr(runner_module, "step_failure", lambda error, device: None)
    with late_stream.set_up(monkeypatch) as stream:
        yield stream
    gc.collect()  # memory that is pinned is given back while there are doubles


@pytest.fixture
def new_disk(tmp_path: Path) -> Iterator[NewDisk]:
    disks: list[DiskBlocks] = []

    def new(slots: Tensor) -> DiskBlocks:
        disks.append(DiskBlocks(tmp_path, "a" * 32, slots, 1 << 20))
        return disks[-1]

    yield new
    for disk in disks:
        disk.close()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_late_copies_change_no_token(
    expected: list[Generated], stream: LateStream, lookahead: int
) -> None:
    assert_equal(results_of(new_engine(CUDA, lookahead)), expected)
    assert stream.num_enqueued > 300


def test_a_ring_of_one_is_waited_for(
    expected: list[Generated], stream: LateStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Staging, "_RING", 1)
    assert_equal(results_of(new_engine(CUDA, 1)), expected)


@pytest.mark.parametrize(("num_slots", "has_disk"), [(8, False), (2, True)])
def test_late_copies_of_evicted_blocks_change_no_token(
    expected_turns: list[list[int]],
    stream: LateStream,
    new_disk: NewDisk,
    num_slots: int,
    has_disk: bool,
) -> None:
    engine = new_engine(CUDA, 1, num_slots, new_disk if has_disk else None)
    assert of_turns(engine) == expected_turns
    stats = engine.stats()
    assert stats.offload_loaded_blocks > 3
    assert (stats.offload_disk_blocks > 2) is has_disk


def test_a_block_that_is_written_before_its_copy_has_come_changes_tokens(
    expected_turns: list[list[int]],
    stream: LateStream,
    monkeypatch: pytest.MonkeyPatch,
    new_disk: NewDisk,
) -> None:
    take = OffloadTier.take_transfers

    def trust_at_once(tier: OffloadTier) -> Transfers:
        transfers = take(tier)
        tier.commit(transfers)
        return transfers

    def write_at_once(disk: DiskBlocks, key: BlockHash, tenant: str, slot: int) -> None:
        disk._write(key, _hash_of(tenant), disk._slots[slot].numpy())
        disk._ended.append(key)

    monkeypatch.setattr(OffloadTier, "take_transfers", trust_at_once)
    monkeypatch.setattr(DiskBlocks, "write", write_at_once)
    assert of_turns(new_engine(CUDA, 1, 2, new_disk)) != expected_turns


def forget_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host writes into memory that is still to be copied."""
    monkeypatch.setattr(Staging, "_RING", 1)
    wait = Event.synchronize
    monkeypatch.setattr(Event, "synchronize", lambda event: event.is_timed and wait(event))


def forget_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads results that have not arrived."""
    monkeypatch.setattr(StepTimer, "wait", lambda timer: 0.0)


@pytest.mark.parametrize("forget", [forget_the_ring, forget_the_end])
def test_a_missing_wait_changes_tokens(
    expected: list[Generated],
    stream: LateStream,
    monkeypatch: pytest.MonkeyPatch,
    forget: Callable[[pytest.MonkeyPatch], None],
) -> None:
    engine = new_engine(CUDA, 1)
    forget(monkeypatch)
    try:
        seen = results_of(engine)
    except (IndexError, ValueError):  # of a token or a place that there is not
        return
    assert [one.token_ids for one in seen] != [one.token_ids for one in expected]
