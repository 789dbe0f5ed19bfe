"""Copies that arrive as late as they may change no token, and a missing wait changes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from shared.messages import SamplingParams
from tests.support.engine_run import Generated, generate
from tests.support.native_models import QWEN3, new_model, new_pool
from tests.support.triton_device import IS_INTERPRETED, NOT_INTERPRETED, has_triton

if not (has_triton() and IS_INTERPRETED):
    pytest.skip(NOT_INTERPRETED, allow_module_level=True)

from tests.support import late_stream
from tests.support.late_stream import CUDA, Event, LateStream
from tests.support.step_graphs import new_graphs
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.model.cuda.stack import CudaOps, CudaStack
from worker.model.device import StepTimer
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
PROMPTS = [range(3, 33), range(40, 70), range(9, 20), range(3, 27)]
T = TypeVar("T")


class Uncaptured:
    """A `Capture` after which all is computed again."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        return run

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        return len(replays) - 1


def new_engine(device: torch.device, lookahead: int) -> Engine:
    """An engine over graphs, which has to preempt."""
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
    runner = TorchModelRunner(model, stack, block_size=BLOCK_SIZE, max_num_seqs=SEATS)
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
    )
    return Engine(config, runner)


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


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStream]:
    def raised(self: Engine, planned: object, error: Exception) -> Any:
        raise error

    monkeypatch.setattr(Engine, "_recover", raised)
    monkeypatch.setattr(runner_module, "step_failure", lambda error, device: None)
    with late_stream.set_up(monkeypatch) as stream:
        yield stream


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
