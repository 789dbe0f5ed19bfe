"""The model's logits against transformers', beyond the greedy choice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
)

from shared.messages import SamplingParams
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.engine_run import generate, new_engine
from tests.support.torch_device import torch_device
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine_options import EngineOptions
from worker.model.attention.sdpa import SdpaAttention
from worker.model.build import build_model
from worker.model.config.model_config import ModelConfig
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement
from worker.model.sampling.base import PreviousSample
from worker.model.step.forward_batch import ForwardBatch
from worker.model.weights.loader import Checkpoint

PROMPT = [5, 17, 101, 33, 250, 250, 7, 91, 12, 300, 41, 8, 77]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def all_logits(path: Path, dtype: torch.dtype, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), vocab] float32 on the CPU, from one prefill."""
    device = torch_device()
    config = ModelConfig.from_directory(path)
    model = CausalLM(config, 64, Placement(device, dtype))
    Checkpoint(path, model.config).load(model)
    pool = KVCachePool(config, 8, 16, device=device, dtype=dtype)
    backend = SdpaAttention(pool, config.layer_scores)
    sequence = ScheduledSequence(
        0, 0, len(prompt), prompt, [3, 1], False, SamplingParams(), prompt, []
    )
    nothing = PreviousSample(torch.empty(0, dtype=torch.int64, device=device), {})
    batch = ForwardBatch.build(
        ScheduledBatch((sequence,)),
        block_size=16,
        vocab_size=config.vocab_size,
        device=device,
        previous=nothing,
    )
    with torch.inference_mode():
        backend.prepare(batch.metadata)
        hidden = model(batch.input_ids, batch.positions, backend)
        return model.logits(hidden).float().cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_position_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(
        all_logits(path, torch.float32, PROMPT), expected, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family)
    exact = all_logits(path, torch.float32, PROMPT)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs = reference(torch.tensor([PROMPT])).logits[0].float()
    error = (all_logits(path, torch.bfloat16, PROMPT) - exact).square().mean().sqrt()
    their_error = (theirs - exact).square().mean().sqrt()
    assert error <= 1.3 * their_error
    assert their_error < 0.1 * exact.std(), "the reference itself is lost in noise"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_saved_by_transformers_loads(family: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", family, num_hidden_layers=1)
    config = AutoConfig.from_pretrained(source)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.generation_config.eos_token_id = [7, 9]
    theirs.save_pretrained(tmp_path / "saved")
    built = build_model(
        EngineOptions(
            checkpoint=str(tmp_path / "saved"),
            dtype="float32",
            device=torch_device().type,
            num_kv_blocks=16,
        )
    )
    assert built.model_config.eos_token_ids == {7, 9}
    assert built.num_parameters == theirs.num_parameters()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    (result,) = generate(new_engine(built), [PROMPT], replace(GREEDY, max_tokens=1, logprobs=3))
    assert result.logprobs[0].logprob == pytest.approx(expected.max().item(), abs=1e-3)


@pytest.mark.parametrize(
    ("family", "whole", "members"),
    [
        ("gemma3_text", Gemma3Config, {"mm_tokens_per_image": 4}),
        ("mistral", Mistral3Config, {"spatial_merge_size": 2}),
    ],
)
@pytest.mark.parametrize("as_version_4", [False, True])
def test_the_language_part_of_a_model_with_images_loads(
    family: str, whole: Any, members: dict[str, Any], as_version_4: bool, tmp_path: Path
) -> None:
    text = AutoConfig.from_pretrained(make_checkpoint(tmp_path / "source", family))
    vision = {
        "model_type": "siglip_vision_model" if family == "gemma3_text" else "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    config = whole(text_config=text.to_dict(), vision_config=vision, **members)
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path / "saved")
    if as_version_4:
        file = tmp_path / "saved" / "model.safetensors"
        tensors = {
            re.sub(r"^model\.language_model\.", "language_model.model.", name): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(
        all_logits(tmp_path / "saved", torch.float32, PROMPT), expected, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_members_left_out_take_the_defaults_of_transformers(family: str) -> None:
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "vocab_size": 100,
    }
    ours = ModelConfig.from_dict({"model_type": family, **shape})
    theirs = AutoConfig.for_model(family, **shape)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4096 // 32)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    theirs_by_layer = theirs.rope_parameters
    if ours.local_rope is not None:
        assert ours.local_rope.theta == theirs_by_layer["sliding_attention"]["rope_theta"]
        theirs_by_layer = theirs_by_layer["full_attention"]
    assert ours.rope.theta == theirs_by_layer["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    everywhere = ["full_attention" if window is None else "sliding_attention"] * 2
    assert [layer.window for layer in ours.layers] == [
        window if kind == "sliding_attention" else None
        for kind in getattr(theirs, "layer_types", None) or everywhere
    ]
    assert ours.eos_token_ids == ({theirs.eos_token_id} - {None})


@pytest.mark.promise("Streaming: all decoding sequences share one forward pass")
def test_a_batch_gives_what_each_prompt_gives_alone(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    options = EngineOptions(
        checkpoint=str(path), dtype="float32", device=torch_device().type, num_kv_blocks=256
    )
    built = build_model(options)
    prompts = [[i + 1, 2 * i + 3, 40 + i, *range(3 * i)] for i in range(6)]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=10, seed=i, ignore_eos=True)
        for i in range(6)
    ]
    together = generate(new_engine(built), prompts, params)
    for prompt, one, result in zip(prompts, params, together, strict=True):
        (alone,) = generate(new_engine(built), [prompt], one)
        assert alone.token_ids == result.token_ids


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_resumed_stream_continues_as_if_nothing_had_happened(
    lookahead: int, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    built = build_model(
        EngineOptions(
            checkpoint=str(path),
            dtype="float32",
            device=torch_device().type,
            num_kv_blocks=256,
            lookahead=lookahead,
        )
    )
    params = SamplingParams(
        temperature=1.2,
        top_p=0.9,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        max_tokens=24,
        min_tokens=24,
        logprobs=2,
    )
    engine = new_engine(built)
    (whole,) = generate(engine, [PROMPT], params)
    for emitted in (1, 7, 23):
        (rest,) = generate(engine, [PROMPT], params, resumed=[whole.token_ids[:emitted]])
        assert rest.token_ids == whole.token_ids[emitted:]
        assert [entry.token_id for entry in rest.logprobs] == rest.token_ids
        assert [entry.logprob for entry in rest.logprobs] == pytest.approx(
            [entry.logprob for entry in whole.logprobs[emitted:]], abs=1e-3
        )
