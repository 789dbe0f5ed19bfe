"""Graphs, kernels and lookahead: structured and other sequences say what they say without these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.messages import SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from shared.text.grammar import json_object_grammar, regex_grammar
from shared.text.grammar_compiler import GrammarCompiler
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_run import Generated, generate
from tests.support.torch_device import torch_device
from tests.support.triton_device import (
    IS_INTERPRETED,
    NO_TRITON,
    NOT_INTERPRETED,
    has_triton,
)

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from tests.support.step_graphs import new_capture, new_graphs
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.model.attention.sdpa import SdpaAttention
from worker.model.config.model_config import ModelConfig
from worker.model.cuda.stack import CudaOps, CudaStack
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.ops import TorchOps
from worker.model.parallel.group import Placement
from worker.model.sampling.grammar_masks import GrammarMasks
from worker.model.sampling.sampler import Sampler
from worker.model.step.runner import TorchModelRunner
from worker.model.weights.loader import Checkpoint

pytestmark = pytest.mark.triton
BLOCK_SIZE = 16
NUM_BLOCKS = 5
NUM_SEATS = 3
TINY: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
# The first two need three blocks each, of five.
DRAWN = SamplingParams(max_tokens=7, temperature=1.0, seed=5)
PARAMS = [
    replace(DRAWN, grammar=regex_grammar("[xyz]{30,40}", "guided_regex"), presence_penalty=0.4),
    replace(DRAWN, temperature=0.0, ignore_eos=True),
    replace(DRAWN, top_p=0.9, frequency_penalty=0.5),
    replace(DRAWN, grammar=json_object_grammar(), temperature=0.0, repetition_penalty=1.3),
    replace(DRAWN, grammar=regex_grammar("[a-f]{3,9}-[0-9]+", "guided_regex"), logprobs=2),
]
LOAD = Checkpoint.load
SHARED = list(range(30, 30 + BLOCK_SIZE))
PROMPTS = [[*range(1, 31)], [*range(60, 90)], [*SHARED, 7], [*SHARED, 9, 11], [*SHARED, 7, 8]]
CANCELLED = {2: 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), **TINY)


def engine_over(
    path: Path, stack: str, *, lookahead: int, kernels: bool, device: torch.device | None = None
) -> Engine:
    """An engine that has to preempt. `stack` is "torch", "triton" or "graphs"."""
    config, device = ModelConfig.from_directory(path), device or torch_device()
    ops = TorchOps() if stack == "torch" else CudaOps()
    model = CausalLM(config, 128, Placement(device, torch.float32), ops)
    Checkpoint(path, model.config).load(model)
    model.finish()
    pool = KVCachePool(config, NUM_BLOCKS, BLOCK_SIZE, device=device, dtype=torch.float32)
    layers: Any = LayerByLayer(model, SdpaAttention(pool, config.layer_scores))
    if stack != "torch":
        layers = CudaStack(model, pool)
    if stack == "graphs":
        layers = new_graphs(model, layers, max_num_seqs=NUM_SEATS, max_num_tokens=32, max_blocks=8)
        layers.capture_by(new_capture(), lambda share: None)
    ends = config.eos_token_ids
    compiler = GrammarCompiler(load_tokenizer(path), config.vocab_size, sorted(ends))
    masks = GrammarMasks(compiler, ends, device)
    runner = TorchModelRunner(
        model, layers, block_size=BLOCK_SIZE, max_num_seqs=NUM_SEATS, grammar_masks=masks
    )
    runner._sampler = Sampler(
        config.vocab_size,
        max_num_seqs=NUM_SEATS,
        eos_token_ids=ends,
        device=device,
        grammar_masks=masks,
        uses_kernels=kernels,
    )
    return Engine(
        EngineConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_SEATS,
            max_num_batched_tokens=24,
            max_model_len=80,
            lookahead=lookahead,
            eos_token_ids=ends,
            structured_output=True,
        ),
        runner,
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Generated]:
    engine = engine_over(checkpoint, "torch", lookahead=0, kernels=False)
    results = generate(engine, PROMPTS, PARAMS, cancelled=CANCELLED)
    assert len(results[2].token_ids) == CANCELLED[2]
    return results


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stack", "lookahead", "kernels"),
    [("graphs", 0, False), ("graphs", 1, True), ("triton", 1, True)],
)
def test_they_say_the_same(
    checkpoint: Path, expected: list[Generated], stack: str, lookahead: int, kernels: bool
) -> None:
    """With preemption, prefixes that are found, and a neighbour that is cancelled."""
    engine = engine_over(checkpoint, stack, lookahead=lookahead, kernels=kernels)
    check(engine, expected)


@pytest.mark.skipif(not IS_INTERPRETED, reason=NOT_INTERPRETED)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", [False, True])
def test_they_say_the_same_where_copies_arrive_late(
    checkpoint: Path, expected: list[Generated], monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    from tests.support import late_stream

    monkeypatch.setattr(Checkpoint, "load", load_by_the_host)
    with late_stream.set_up(monkeypatch):
        engine = engine_over(
            checkpoint, "triton", lookahead=1, kernels=kernels, device=late_stream.CUDA
        )
        check(engine, expected)


def load_by_the_host(checkpoint: Checkpoint, model: CausalLM) -> None:
    """The threads that load weights would look for a real device."""
    same = CausalLM(model.config, 128, Placement(torch.device("cpu"), torch.float32), CudaOps())
    LOAD(checkpoint, same)
    for (_, to), (_, source) in zip(model.named_tensors(), same.named_tensors(), strict=True):
        assert to.data is not None
        assert source.data is not None
        to.data.copy_(source.data)


def check(engine: Engine, expected: list[Generated]) -> None:
    seen = generate(engine, PROMPTS, PARAMS, cancelled=CANCELLED)
    for result, like in zip(seen, expected, strict=True):
        assert result.error is None
        assert (result.token_ids, result.finish_reason) == (like.token_ids, like.finish_reason)
        for mine, other in zip(result.logprobs, like.logprobs, strict=True):
            assert mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
