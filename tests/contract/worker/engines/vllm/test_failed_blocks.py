"""What a request that is not finite leaves in vLLM's KV cache harms nobody who comes after it.

Over caches of several kinds: floats, also in a child process of vLLM's, floats of eight bits,
groups of layers with windows, and the states of recurrent layers. There are few blocks, so that
those of failed requests are given to others at once, which fill them in part. One driver runs all
models, one after the other.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.messages import ErrorCode, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_model
from tests.support.vllm_models import TIMEOUT_S, Model, Work, run_models, vllm_options
from tests.support.vllm_runs import VllmRequest
from worker.engines.vllm.kv_blocks import zero_blocks

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

# A token whose embedding is not a number. It ends the prompts too: vLLM's build for CPUs writes NaN
# into caches of eight bits as a number, and only the row itself is not finite then.
POISON = VOCAB_SIZE - 1
NUM_BLOCKS = 40
SHARED = tuple(range(3, 3 + 130))  # whole blocks of it are found by prefix
_WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Cache:
    """A model, and how vLLM keeps what it has read."""

    model_type: str
    members: dict[str, Any]
    vllm_args: str = '{"enforce_eager": true}'
    # vLLM's build for CPUs fails in recurrent layers that keep states to be found by prefix.
    prefix_caching: bool = True


CACHES = {
    "float32": Cache("llama", _WIDE),
    "processes": Cache(
        "llama", _WIDE, '{"enforce_eager": true, "distributed_executor_backend": "mp"}'
    ),
    "fp8": Cache("llama", _WIDE, '{"enforce_eager": true, "kv_cache_dtype": "fp8"}'),
    "fp8_e5m2": Cache("llama", _WIDE, '{"enforce_eager": true, "kv_cache_dtype": "fp8_e5m2"}'),
    "windows": Cache("gemma3_text", _WIDE),
    "hybrid": Cache(
        "granitemoehybrid",
        {
            **_WIDE,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "position_embedding_type": "rope",
        },
        prefix_caching=False,
    ),
}


def request(name: str, prompt: Iterable[int], max_tokens: int = 8) -> VllmRequest:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logit_bias={POISON: -100.0}
    )
    return VllmRequest(name, tuple(prompt), params)


def healthy(name: str) -> list[VllmRequest]:
    """Requests that take all blocks between them, few of which they fill, and one by prefix."""
    return [
        *(request(f"{name} {i}", range(10 * i + 3, 10 * i + 3 + 5 + i)) for i in range(6)),
        request(f"{name} by prefix", (*SHARED, 200)),
    ]


# Each run is one batch. One fails in a prompt of several blocks behind a shared beginning; one when
# it has but one token to go, so that vLLM has ended it; two hold the same blocks.
RUNS = [
    healthy("before"),
    [request("poisoned", (*SHARED, POISON, *range(40), POISON))],
    healthy("after"),
    [request("last token", (*range(90, 160), POISON), 1)],
    healthy("after last token"),
    [request(f"twin {i}", (*SHARED, POISON, *SHARED[:90], i, POISON)) for i in range(2)],
    healthy("after twins"),
    [request("again", (*SHARED, POISON, *range(40), POISON))],
]
FAILING = {"poisoned": 1, "last token": 3, "twin 0": 5, "twin 1": 5, "again": 7}


def poisoned_model(folder: Path, name: str, cache: Cache) -> Path:
    """Returns a checkpoint with one token whose embedding is not a number."""
    path = write_tiny_model(folder / name, cache.model_type, **cache.members)
    weights = load_file(path / "model.safetensors")
    assert "lm_head.weight" in weights
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("caches")
    tokenizer = make_checkpoint(folder / "tokenizer", vocab_size=VOCAB_SIZE)
    models = {}
    for name, cache in CACHES.items():
        path = poisoned_model(folder, name, cache)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, path)
        options = vllm_options(
            path,
            "float32",
            cache.vllm_args,
            num_kv_blocks=NUM_BLOCKS,
            prefix_caching=cache.prefix_caching,
        )
        models[name] = Work(options, RUNS)
    results = run_models(models, folder)
    shutil.rmtree(folder)
    return results


@pytest.mark.vllm
@pytest.mark.parametrize("name", CACHES)
def test_the_request_fails_alone(found: dict[str, Model], name: str) -> None:
    assert not found[name].refusal
    for failing, at in FAILING.items():
        answer = found[name].runs[at][failing]
        assert (answer.error, answer.token_ids) == (ErrorCode.NONFINITE_LOGITS, [])
    others = {
        key: answer.error
        for run in found[name].runs
        for key, answer in run.items()
        if key not in FAILING
    }
    assert not any(others.values()), others


@pytest.mark.vllm
@pytest.mark.parametrize("name", CACHES)
def test_reused_blocks_give_the_same_tokens(found: dict[str, Model], name: str) -> None:
    before = [answer.token_ids for answer in found[name].runs[0].values()]
    assert len({token for tokens in before for token in tokens}) > 10, "they say little"
    for at in (2, 4, 6):
        assert [answer.token_ids for answer in found[name].runs[at].values()] == before


class FakeRunner:
    """The part of a worker of vLLM's that holds the caches."""

    def __init__(self, kv_caches: list[torch.Tensor]) -> None:
        self.kv_caches = kv_caches
        self.model_runner = self


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_zeroes_whole_blocks_and_no_others(dtype: torch.dtype) -> None:
    """In layers whose blocks lie between those of another, and are several of the attention's."""
    num_blocks = 6
    raw = torch.full((num_blocks, 2, 64), 0x7F, dtype=torch.uint8)  # NaN as fp8 and as bfloat16
    layers = [raw[:, i].view(dtype) for i in range(2)]
    halves = torch.full((num_blocks * 2, 4, 8), 0x7F, dtype=torch.uint8)
    assert zero_blocks(FakeRunner([*layers, halves.view(dtype)]), [1, 4], num_blocks) == 0
    for i in range(num_blocks):
        wanted = 0 if i in (1, 4) else 0x7F
        assert raw[i].eq(wanted).all()
        assert halves[2 * i : 2 * i + 2].eq(wanted).all()


def test_a_cache_of_another_layout_stays_as_it_is() -> None:
    num_blocks = 6
    in_second = torch.ones(5, num_blocks, 8)
    flat = torch.ones(num_blocks * 8)
    known = torch.ones(num_blocks, 8)
    assert zero_blocks(FakeRunner([in_second, flat, known]), [1], num_blocks) == 2
    assert in_second.all()
    assert flat.all()
    assert not known[1].any()
