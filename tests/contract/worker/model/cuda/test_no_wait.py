"""`launch` never waits for a CUDA device, whatever the rows of a step want."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from shared.messages import SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from shared.text.grammar import regex_grammar
from shared.text.grammar_compiler import GrammarCompiler
from tests.support.checkpoints import make_checkpoint
from tests.support.triton_device import IS_INTERPRETED, NOT_INTERPRETED, has_triton

if not (has_triton() and IS_INTERPRETED):
    pytest.skip(NOT_INTERPRETED, allow_module_level=True)

from tests.support import fake_cuda
from tests.support.fake_cuda import CUDA, FakeCuda, Launched, Registered, Waits, launching
from tests.support.step_graphs import new_graphs
from worker.engine.block_hash import BlockHash
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.offload import Load, Store
from worker.engine.request import EngineRequest
from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import DecoderStack
from worker.model.config.model_config import ModelConfig
from worker.model.cuda.graphs import Capture
from worker.model.cuda.stack import CudaOps, CudaStack
from worker.model.kv_cache import KVCachePool
from worker.model.kv_offload import HostBlocks
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.parallel.group import Placement
from worker.model.sampling.grammar_masks import GrammarMasks
from worker.model.sampling.sampler import Sampler
from worker.model.step import runner as runner_module
from worker.model.step.runner import TorchModelRunner

pytestmark = pytest.mark.triton
BLOCK_SIZE = 16
NUM_BLOCKS = 64
SEATS = 16
MAX_LEN = 96
VOCAB_SIZE = 384
PROMPT = 20
SAMPLED = {"temperature": 0.8, "seed": 3}
EACH_OPTION: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(**SAMPLED),
    "top_k": SamplingParams(**SAMPLED, top_k=20),
    "top_p": SamplingParams(**SAMPLED, top_p=0.9),
    "min_p": SamplingParams(**SAMPLED, min_p=0.1),
    "all filters": SamplingParams(**SAMPLED, top_k=30, top_p=0.9, min_p=0.05),
    "presence": SamplingParams(**SAMPLED, presence_penalty=0.5),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=0.5),
    "repetition": SamplingParams(**SAMPLED, repetition_penalty=1.2),
    "bias": SamplingParams(**SAMPLED, logit_bias={5: 1.0, 6: -1.0}),
    "min_tokens": SamplingParams(**SAMPLED, min_tokens=6, stop_token_ids=(9,)),
    "logprobs": SamplingParams(**SAMPLED, logprobs=3),
    "greedy logprobs": SamplingParams(temperature=0.0, logprobs=0),
    "prompt logprobs": SamplingParams(**SAMPLED, prompt_logprobs=2),
    "grammar": SamplingParams(**SAMPLED, grammar=regex_grammar("[0-9]{40}", "response_format")),
    "grammar and all": SamplingParams(
        **SAMPLED,
        grammar=regex_grammar("[0-9]{40}", "response_format"),
        logprobs=2,
        presence_penalty=0.3,
        top_p=0.9,
        min_tokens=4,
    ),
}
Stack = Callable[[CausalLM, KVCachePool], DecoderStack]
T = TypeVar("T")


class Uncaptured:
    """A `Capture` after which all is computed again."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        return run

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        return len(replays) - 1


class Replayed(Uncaptured):
    """A `Capture` whose replays are one launch, and compute nothing here."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        result = run()
        return lambda: result


def with_graphs(model: CausalLM, pool: KVCachePool, capture: Capture | None = None) -> DecoderStack:
    blocks = MAX_LEN // BLOCK_SIZE
    graphs = new_graphs(
        model,
        CudaStack(model, pool),
        max_num_seqs=SEATS,
        max_num_tokens=48,
        max_blocks=blocks,
        device=CUDA,
    )
    graphs.capture_by(capture or Uncaptured(), lambda share: None)
    return graphs


STACKS: dict[str, Stack] = {
    "graphs": with_graphs,
    "kernels": CudaStack,
    "sdpa": lambda model, pool: LayerByLayer(model, SdpaAttention(pool)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(Path(tmp_path_factory.mktemp("checkpoint")), vocab_size=VOCAB_SIZE)


@pytest.fixture
def digit(checkpoint: Path) -> int:
    """The token "7"."""
    (token_id,) = load_tokenizer(checkpoint).encode("7")
    return int(token_id)


@pytest.fixture(autouse=True)
def _errors_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would go on after a step that raised, and the runner ask the device why."""

    def raised(self: Engine, planned: object, error: Exception) -> Any:
        raise error

    monkeypatch.setattr(Engine, "_recover", raised)
    monkeypatch.setattr(runner_module, "step_failure", lambda error, device: None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, digit: int) -> list[str]:
    def draw(name: str, args: tuple[Any, ...]) -> None:
        if name == "sample_finalize":  # the tokens, and the best logits
            tokens = args[10]
            assert tokens.dtype == torch.int64
            torch.Tensor.fill_(tokens, digit)

    return fake_cuda.set_up(monkeypatch, draw)


class Launches:
    """The runner, whose launches are those of a CUDA device."""

    def __init__(self, runner: TorchModelRunner) -> None:
        self._runner = runner
        self.vocab_size = runner.vocab_size
        self.num_steps = self.num_mixed = 0
        self.last = Launched()

    def launch(self, batch: Any) -> Any:
        self.num_steps += 1
        self.num_mixed += 0 < batch.num_decodes < len(batch)
        with launching() as launched:
            handle = LaunchedAhead(self._runner.launch(batch))
        if batch.num_decodes:
            self.last = launched
        return handle


class LaunchedAhead:
    """A step's handle: what is left to sample is a part of its launch."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.collect = handle.collect

    def sample_structured(self, seq_ids: Any) -> Any:
        with launching(goes_on=True):
            return self._handle.sample_structured(seq_ids)


def new_engine(checkpoint: Path, stack: Stack, uses_kernels: bool) -> tuple[Engine, Launches]:
    config = ModelConfig.from_directory(checkpoint)
    with FakeCuda():
        model = CausalLM(config, MAX_LEN, Placement(CUDA, torch.bfloat16), CudaOps())
        model.finish()
        pool = KVCachePool(config, NUM_BLOCKS, BLOCK_SIZE, device=CUDA, dtype=torch.bfloat16)
        compiler = GrammarCompiler(
            load_tokenizer(checkpoint), config.vocab_size, sorted(config.eos_token_ids)
        )
        masks = GrammarMasks(compiler, config.eos_token_ids, CUDA)
        runner = TorchModelRunner(
            model,
            stack(model, pool),
            block_size=BLOCK_SIZE,
            max_num_seqs=SEATS,
            grammar_masks=masks,
        )
        if not uses_kernels:
            runner._sampler = Sampler(
                config.vocab_size,
                max_num_seqs=SEATS,
                eos_token_ids=config.eos_token_ids,
                device=CUDA,
                grammar_masks=masks,
                uses_kernels=False,
            )
    launches = Launches(runner)
    config_of_engine = EngineConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=SEATS,
        max_num_batched_tokens=48,
        max_model_len=MAX_LEN,
        lookahead=1,
        eos_token_ids=frozenset(config.eos_token_ids),
        structured_output=True,
    )
    return Engine(config_of_engine, launches), launches


def run(engine: Engine, params: list[SamplingParams], max_tokens: int = 8) -> int:
    """Runs requests that come one step after the other, so that steps are mixed. Returns how many
    tokens came."""
    num_tokens = 0
    waiting = [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(np.arange(PROMPT + 9 * (number % 3)) % 90 + number),
            params=replace(one, max_tokens=max_tokens, ignore_eos=True),
        )
        for number, one in enumerate(params)
    ]
    for _ in range(200):
        if waiting:
            engine.add(waiting.pop(0))
        for output in engine.step():
            assert output.error is None, output.message
            num_tokens += len(output.token_ids)
        if not (waiting or engine.has_unfinished()):
            return num_tokens
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("uses_kernels", [True, False], ids=["our kernels", "torch's operators"])
@pytest.mark.parametrize("option", EACH_OPTION)
def test_no_option_makes_a_launch_wait(
    checkpoint: Path, kernels: list[str], option: str, uses_kernels: bool
) -> None:
    engine, launches = new_engine(checkpoint, CudaStack, uses_kernels)
    params = [EACH_OPTION[option], EACH_OPTION["greedy"], EACH_OPTION[option]]
    assert run(engine, params) == 3 * 8
    assert launches.num_mixed
    assert ("sample_finalize" in kernels) is uses_kernels


@pytest.mark.parametrize("stack", STACKS)
def test_no_stack_makes_a_launch_wait_for_rows_of_all_kinds(
    checkpoint: Path, kernels: list[str], stack: str
) -> None:
    engine, launches = new_engine(checkpoint, STACKS[stack], uses_kernels=True)
    assert run(engine, list(EACH_OPTION.values())) == len(EACH_OPTION) * 8
    assert launches.num_mixed > 5
    assert ("fill_step" in kernels) is (stack == "graphs")
    assert ("attention" in kernels) is (stack != "sdpa")


@pytest.mark.parametrize(
    ("option", "to_device", "launches"),
    [
        ("greedy", 1, ["fill_step", "_to_copy"]),
        ("temperature", 2, ["fill_step", "logits_scan", "sample_finalize", "_to_copy", "mm"]),
        (
            "presence",
            3,
            [
                *("fill_step", "logits_scan", "sample_finalize", "_to_copy", "mm"),
                *("index_select", "add", "ones_like", "index_add_"),  # counts the last token
            ],
        ),
    ],
)
def test_a_decode_step_is_a_few_copies_and_launches_beside_its_graphs(
    checkpoint: Path, kernels: list[str], option: str, to_device: int, launches: list[str]
) -> None:
    stack = partial(with_graphs, capture=Replayed())
    engine, steps = new_engine(checkpoint, stack, uses_kernels=True)
    assert run(engine, [EACH_OPTION[option]]) == 8
    assert [*steps.last.kernels, *steps.last.operators] == launches
    assert len(steps.last.to_device) == to_device
    assert len(steps.last.to_host) == 2, "the token, and the best logit"


PLANTED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda logits: logits[0, 0].item(),
    "tolist": lambda logits: logits[0].tolist(),
    "float": lambda logits: float(logits.sum()),
    "bool": lambda logits: bool(logits.isfinite().all()),
    "if": lambda logits: 1 if (logits > 0).any() else 0,
    "nonzero": lambda logits: logits.nonzero(),
    "where": lambda logits: torch.where(logits > 0),
    "mask": lambda logits: logits[logits > 0],
    "mask written": lambda logits: logits.__setitem__(logits > 1e9, 0.0),
    "masked_select": lambda logits: logits.masked_select(logits > 0),
    "cpu": lambda logits: logits.cpu(),
    "to host": lambda logits: logits.to("cpu", non_blocking=True),
    "numpy": lambda logits: logits.float().numpy(),
    "from pageable memory": lambda logits: torch.ones(3).to(logits.device, non_blocking=True),
    "waited for": lambda logits: torch.ones(3).pin_memory().to(logits.device),
    "torch.tensor": lambda logits: torch.tensor([1, 2], device=logits.device),
    "list": lambda logits: logits[[0]],
    "of both sides": lambda logits: logits.float() + torch.ones(logits.shape),
    "unique": lambda logits: logits.unique(),
    "equal": lambda logits: torch.equal(logits, logits),
    "synchronize": lambda logits: torch.cuda.synchronize(),
    "stream": lambda logits: torch.cuda.current_stream().synchronize(),
    "event": lambda logits: waited_event(),
}


def waited_event() -> None:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A call that a launch makes with its logits."""
    calls: list[Any] = []
    sample = Sampler.sample

    def spied(self: Sampler, logits: Any, rows: Any, previous: Any) -> Any:
        for call in calls:
            call(logits)
        return sample(self, logits, rows, previous)

    monkeypatch.setattr(Sampler, "sample", spied)
    return calls


@pytest.mark.parametrize("name", PLANTED)
def test_whatever_waits_is_caught(
    checkpoint: Path,
    kernels: list[str],
    planted: list[Any],
    name: str,
) -> None:
    engine, _ = new_engine(checkpoint, CudaStack, uses_kernels=True)
    planted.append(PLANTED[name])
    with pytest.raises(Waits):
        run(engine, [EACH_OPTION["greedy"]])


def test_blocks_go_to_host_memory_and_come_back(kernels: list[str], checkpoint: Path) -> None:
    config = ModelConfig.from_directory(checkpoint)
    with FakeCuda():
        pool = KVCachePool(config, 4, BLOCK_SIZE, device=CUDA, dtype=torch.bfloat16)
        host = HostBlocks(pool, 2)
    content = torch.randint(255, host.slots.shape[1:], dtype=torch.uint8)
    with launching() as launched:  # off the disk to block 0, and over a slot to block 3
        host.run((Load(content, 0), Store(BlockHash(b""), 0, 1), Load(1, 3)))
    assert (len(launched.to_device), len(launched.to_host)) == (2, 1)
    copied = pool.storage.as_subclass(torch.Tensor).view(torch.uint8)
    assert torch.equal(copied[3], content)
    assert not copied[1:3].any()


def test_memory_of_the_host_is_pinned_as_large_as_it_is_and_given_back(
    kernels: list[str], checkpoint: Path
) -> None:
    config = ModelConfig.from_directory(checkpoint)
    with FakeCuda():
        pool = KVCachePool(config, 4, BLOCK_SIZE, device=CUDA, dtype=torch.bfloat16)
        host = HostBlocks(pool, 5)
    own = {host.slots.data_ptr(): 5 * pool.storage.shape[1] * pool.storage.element_size()}
    assert Registered.sizes == own, "not rounded up"
    del host
    assert not Registered.sizes
