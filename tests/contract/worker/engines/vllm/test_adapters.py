"""LoRA adapters through vLLM on a CPU: each says what its merged weights say.

All requests run together, so that rows of the base model and of two adapters share each step. The
references are transformers' greedy tokens for the base model and for checkpoints with an adapter
merged in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.messages import FinishReason, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.greedy_reference import NUM_TOKENS, GreedyReference, greedy_reference
from tests.support.lora_adapters import write_adapter, write_merged
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_model
from tests.support.vllm_models import TIMEOUT_S, Model, Work, run_models, vllm_options
from tests.support.vllm_runs import VllmRequest
from worker.engine_options import EngineOptions
from worker.lora import CONFIG

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(TIMEOUT_S + 60)]

BASE = ""
NUM_PROMPTS = 8
RESUMED_AT = 7
RANKS = {"ann": 4, "bob": 12}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=1)
LONG = tuple(range(3, 67))  # two blocks


def _requests(references: Mapping[str, GreedyReference]) -> list[VllmRequest]:
    return [
        VllmRequest(f"{adapter}/{i}", tuple(prompt), GREEDY, adapter=adapter)
        for i in range(NUM_PROMPTS)
        for adapter, reference in references.items()
        for prompt in [reference.prompts[i]]
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = make_checkpoint(folder / "tokenizer", vocab_size=VOCAB_SIZE)
    path = write_tiny_model(folder / "base", "llama", hidden_size=128, head_dim=32)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, path)
    return path


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> dict[str, Path]:
    return {
        name: write_adapter(checkpoint.parent / name, checkpoint, seed=seed, rank=rank)
        for seed, (name, rank) in enumerate(RANKS.items())
    }


@pytest.fixture(scope="module")
def references(checkpoint: Path, adapters: dict[str, Path]) -> dict[str, GreedyReference]:
    """What transformers says with each adapter, and without one."""
    merged = {
        name: write_merged(checkpoint.parent / f"{name}-merged", checkpoint, path)
        for name, path in adapters.items()
    }
    return {
        name: greedy_reference(path, torch.device("cpu"), attention="eager")
        for name, path in {BASE: checkpoint, **merged}.items()
    }


def _options(checkpoint: Path, adapters: Mapping[str, Path], **args: object) -> EngineOptions:
    options = vllm_options(checkpoint, "float32", json.dumps({"enforce_eager": True, **args}))
    named = ",".join(f"{name}={path}" for name, path in adapters.items())
    return replace(options, lora_modules=named)


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Path,
    adapters: dict[str, Path],
    references: dict[str, GreedyReference],
) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("adapters")
    together = _requests(references)
    resumed = [
        _cut(request, references[request.adapter], i // len(references))
        for i, request in enumerate(together)
    ]
    same_prompt = [
        VllmRequest(name, LONG, GREEDY, adapter=name.rstrip("2"), step=40 * i)
        for i, name in enumerate(("ann", "bob", "ann2"))
    ]
    broken = shutil.copytree(adapters["ann"], folder / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"none")
    biased = shutil.copytree(adapters["ann"], folder / "biased")
    config = json.loads((biased / CONFIG).read_text())
    (biased / CONFIG).write_text(json.dumps({**config, "lora_bias": True}))
    wide = write_adapter(folder / "wide", checkpoint, seed=9, rank=40)
    other = write_adapter(folder / "other", write_tiny_model(folder / "small", "llama"), seed=3)
    models = {
        "served": Work(_options(checkpoint, adapters), [together, resumed, same_prompt]),
        "few places": Work(_options(checkpoint, adapters, max_loras=2), []),
        "broken": Work(_options(checkpoint, {"broken": broken}), []),
        "biased": Work(_options(checkpoint, {"biased": biased}), []),
        "wide": Work(_options(checkpoint, {"wide": wide}, max_lora_rank=16), []),
        "other": Work(_options(checkpoint, {"other": other}), []),
        "gone": Work(_options(checkpoint, {"gone": folder}), []),
    }
    return run_models(models, folder)


def _cut(request: VllmRequest, reference: GreedyReference, i: int) -> VllmRequest:
    output = reference.outputs[i][:RESUMED_AT]
    return VllmRequest(
        request.id, request.prompt, request.params, tuple(output), adapter=request.adapter
    )


def test_each_adapter_says_what_its_merged_weights_say(
    found: dict[str, Model], references: dict[str, GreedyReference]
) -> None:
    assert found["served"].refusal == ""
    answers = found["served"].runs[0]
    for adapter, reference in references.items():
        said = [answers[f"{adapter}/{i}"].token_ids for i in range(NUM_PROMPTS)]
        assert said == reference.outputs[:NUM_PROMPTS], adapter
    assert references[BASE].outputs != references["ann"].outputs != references["bob"].outputs


def test_an_output_that_was_cut_continues_with_its_adapter(
    found: dict[str, Model], references: dict[str, GreedyReference]
) -> None:
    answers = found["served"].runs[1]
    for adapter, reference in references.items():
        said = [answers[f"{adapter}/{i}"].token_ids for i in range(NUM_PROMPTS)]
        assert said == [output[RESUMED_AT:] for output in reference.outputs[:NUM_PROMPTS]]


def test_a_prefix_is_found_again_by_its_adapter_alone(found: dict[str, Model]) -> None:
    answers = found["served"].runs[2]
    cached = {name: answer.num_cached_tokens for name, answer in answers.items()}
    assert cached == {"ann": 0, "bob": 0, "ann2": 32}
    assert answers["ann"].token_ids == answers["ann2"].token_ids != answers["bob"].token_ids
    assert answers["ann"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "adapter_model.safetensors cannot be read"),
        ("other", "the adapter 'other' is for another model: its model.layers.0"),
        ("biased", "vLLM cannot load the adapter 'biased': vLLM does not support LoRA bias"),
        ("wide", "the adapter 'wide' has the rank 40, and 'max_lora_rank' in"),
        ("few places", "on a CPU 'max_loras' must be at least 3"),
        ("gone", f"the adapter 'gone' has no {CONFIG} in"),
    ],
)
@pytest.mark.promise("vLLM: a LoRA adapter that cannot be used is refused by name at the start")
def test_an_adapter_that_cannot_be_used_is_refused_by_name(
    found: dict[str, Model], name: str, words: str
) -> None:
    assert words in found[name].refusal
