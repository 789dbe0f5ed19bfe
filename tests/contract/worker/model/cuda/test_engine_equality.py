"""Greedy sequences alone, whose steps end in a graph, say what torch's operators say.

With chunks, prefixes out of the cache, preemptions and a cancel, a step ahead, and products of few
rows fused; test_structured_steps has kernels one by one, the other graphs, and sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shared.messages import SamplingParams
from tests.support.native_models import QWEN3, new_model, new_pool
from tests.support.torch_device import torch_device
from tests.support.triton_device import NO_TRITON, has_triton
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import DecoderStack
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.ops import TorchOps
from worker.model.step.runner import TorchModelRunner

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from tests.support.step_graphs import new_capture, new_graphs
from worker.model.cuda.stack import CudaOps, CudaStack

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NaN in padding
]
SHAPE = QWEN3 | {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
BLOCK_SIZE = 16
SEATS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SHARED = [7 + i for i in range(17)]
PROMPTS = {
    "long": [*SHARED, *range(60, 75)],
    "cancelled": [3, 1, 4],
    "prefixed": [*SHARED, 99],
    "late": [*SHARED, *range(150, 157)],
}
CANCELLED_AT = 3  # tokens


def by_operators() -> tuple[CausalLM, DecoderStack]:
    model = new_model(SHAPE, TorchOps(), device=torch_device(), dtype=torch.float32)
    pool = new_pool(model.config, device=torch_device(), dtype=torch.float32)
    return model, LayerByLayer(model, SdpaAttention(pool, model.config.layer_scores))


def replayed() -> tuple[CausalLM, DecoderStack]:
    model = new_model(SHAPE, CudaOps(), device=torch_device(), dtype=torch.float32)
    pool = new_pool(model.config, device=torch_device(), dtype=torch.float32)
    stack = CudaStack(model, pool)
    graphs = new_graphs(model, stack, max_num_seqs=SEATS, max_num_tokens=24, max_blocks=6)
    graphs.capture_by(new_capture(fastest=1), lambda share: None)
    return model, graphs


def request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=tuple(PROMPTS[name]), params=GREEDY)


def run(way: tuple[CausalLM, DecoderStack], lookahead: int) -> dict[str, list[int]]:
    """Returns the tokens of all requests, of the cancelled one its first."""
    model, stack = way
    config = EngineConfig(
        num_blocks=5,  # the longest has four
        block_size=BLOCK_SIZE,
        max_num_seqs=SEATS,
        max_num_batched_tokens=24,
        max_model_len=64,
        eos_token_ids=frozenset({2}),
        lookahead=lookahead,
    )
    runner = TorchModelRunner(model, stack, block_size=BLOCK_SIZE, max_num_seqs=SEATS)
    engine = Engine(config, runner)
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for name in ("long", "cancelled", "prefixed"):
        engine.add(request(name))
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
        if len(tokens["cancelled"]) >= CANCELLED_AT and engine.cancel("cancelled"):
            engine.add(request("late"))
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert stats.mixed_steps > 0
    tokens["cancelled"] = tokens["cancelled"][:CANCELLED_AT]
    return tokens


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    tokens = run(by_operators(), lookahead=0)
    assert {name: len(ids) for name, ids in tokens.items()} == {
        "long": 20,
        "cancelled": CANCELLED_AT,
        "prefixed": 20,
        "late": 20,
    }
    assert len({token for ids in tokens.values() for token in ids}) > 8
    return tokens


@pytest.mark.timeout(400)  # of the interpreter, on a machine that has other work
@pytest.mark.parametrize(
    ("way", "lookahead"),
    [
        pytest.param(by_operators, 1, id="operators, ahead"),
        pytest.param(replayed, 1, id="graphs with fused products, ahead"),
    ],
)
def test_the_same_tokens(
    way: Callable[[], tuple[CausalLM, DecoderStack]],
    lookahead: int,
    expected: dict[str, list[int]],
) -> None:
    assert run(way(), lookahead) == expected
