"""Transformers' models over the attention in Triton say what they say over torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.messages import SamplingParams
from tests.support.engine_run import generate, new_engine
from tests.support.tiny_models import write_tiny_model
from tests.support.torch_device import torch_device
from tests.support.triton_device import NO_TRITON, has_triton
from worker.engine_options import EngineOptions
from worker.model.build import build_model

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from worker.engines.transformers import source
from worker.model.cuda.attention import TritonAttention

pytestmark = pytest.mark.triton
PROMPTS = [[5, 9, 4], list(range(3, 24))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    "model_type",
    [
        "mistral",  # windows
        "gemma2",  # soft caps
        "gpt_oss",  # sinks
        "deepseek_v3",  # values narrower than keys
    ],
)
def test_the_same_tokens(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, model_type)
    options = EngineOptions(
        checkpoint=str(tmp_path),
        device=str(torch_device()),
        dtype="float32",
        num_kv_blocks=16,
        block_size=16,
        max_num_batched_tokens=16,
        model_impl="transformers",
    )
    prepared: list[TritonAttention] = []
    prepare = TritonAttention.prepare

    def counted(self: TritonAttention, *arguments: object) -> None:
        prepared.append(self)
        prepare(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TritonAttention, "prepare", counted)
    outputs = []
    for uses_triton in (False, True):
        prepared.clear()
        monkeypatch.setattr(source, "_uses_triton", lambda *_, uses=uses_triton: uses)
        results = generate(new_engine(build_model(options)), PROMPTS, GREEDY)
        outputs.append([result.token_ids for result in results])
        assert bool(prepared) is uses_triton
    assert outputs[0] == outputs[1]
    assert [len(tokens) for tokens in outputs[0]] == [4, 4]
