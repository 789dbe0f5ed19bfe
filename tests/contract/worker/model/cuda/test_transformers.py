"""Transformers' models over the attention in Triton, and replayed, say what transformers says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.olmo2 import modeling_olmo2

from shared.messages import SamplingParams
from tests.support.engine_run import generate, new_engine
from tests.support.tiny_models import write_tiny_model
from tests.support.torch_device import torch_device
from tests.support.triton_device import IS_INTERPRETED, NO_TRITON, has_triton
from worker.engine_options import EngineOptions
from worker.model.base import AttentionMetadata
from worker.model.build import build_model

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from tests.support.step_graphs import new_capture
from worker.engines.transformers import source
from worker.engines.transformers.gates import AllExperts, GatedModule
from worker.engines.transformers.layers import ShortLayer
from worker.engines.transformers.model import TransformersStack
from worker.engines.transformers.products import NormModule, ProductModule
from worker.model.cuda.attention import TritonAttention
from worker.model.cuda.graphs import StepGraphs

pytestmark = pytest.mark.triton
PROMPTS = [[5, 9, 4], list(range(3, 24))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


# Those whose operators were counted; the others of transformers are alike.
OFTEN = ("deepseek_v3", "gemma2", "gpt_oss", "mistral", "qwen3_moe")
TYPES = (
    *OFTEN,
    "cohere2",
    "ernie4_5",
    "glm4",
    "granite",
    "llama4_text",
    "mixtral",
    "olmo2",
    "phi3",
    "phimoe",
    "smollm3",
)


@pytest.fixture(autouse=True)
def _captures_with_a_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_uses_triton", lambda *_: True)
    if IS_INTERPRETED:
        monkeypatch.setattr(
            StepGraphs, "capture", lambda self, report: self.capture_by(new_capture(), report)
        )


def options_for(path: Path, **options: object) -> EngineOptions:
    base: dict[str, object] = {
        "checkpoint": str(path),
        "device": str(torch_device()),
        "dtype": "float32",
        "num_kv_blocks": 16,
        "block_size": 16,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 2,
        "model_impl": "transformers",
    }
    return EngineOptions(**(base | options))  # type: ignore[arg-type]


def tokens_of(options: EngineOptions) -> list[list[int]]:
    results = generate(new_engine(build_model(options)), PROMPTS, GREEDY)
    return [result.token_ids for result in results]


@torch.inference_mode()
def tokens_of_transformers(path: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    return [
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, prompt.shape[1] :].tolist()
        for prompt in ids
    ]


@pytest.mark.parametrize("uses_graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize(
    "model_type",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.models) for name in TYPES],
)
def test_the_same_tokens(
    model_type: str, uses_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path, model_type)
    prepared: list[int] = []
    decoded: list[int] = []
    prepare, call = TritonAttention.prepare, TransformersStack.__call__

    def counted(self: TritonAttention, metadata: AttentionMetadata) -> None:
        prepared.append(1)
        prepare(self, metadata)

    def called(self: TransformersStack, *step: Any) -> torch.Tensor:
        metadata = step[2]
        decoded.append(metadata.num_tokens == metadata.num_decodes)
        return call(self, *step)

    monkeypatch.setattr(TritonAttention, "prepare", counted)
    built = build_model(options_for(tmp_path, cuda_graphs=uses_graphs))
    monkeypatch.setattr(TransformersStack, "__call__", called)
    results = generate(new_engine(built), PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == tokens_of_transformers(tmp_path)
    assert prepared, "the attention is not that in Triton"
    assert any(decoded) is not uses_graphs, "decodes are replayed where there are graphs"


@pytest.mark.parametrize(
    ("model_type", "kinds", "is_short"),
    [
        ("qwen3_moe", {NormModule, ProductModule, AllExperts}, True),
        ("gpt_oss", {NormModule, ProductModule, AllExperts}, False),  # its attention has sinks
        ("gemma2", {NormModule, ProductModule, GatedModule}, True),
        ("olmo2", {NormModule, ProductModule, GatedModule}, False),  # norms of all heads at once
    ],
)
def test_the_kernels_compute_what_they_recognise(
    model_type: str, kinds: set[type], is_short: bool, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, model_type)
    built = build_model(options_for(tmp_path, cuda_graphs=False))
    network = built.runner._model.network  # type: ignore[attr-defined]
    found = {type(module) for module in network.modules()}
    assert kinds <= found
    short = {type(layer.forward) for layer in network.model.layers}
    assert (short == {ShortLayer}) is is_short


@pytest.mark.skipif(not IS_INTERPRETED, reason="of the double of a graph")
def test_a_replayed_step_has_as_many_launches_as_its_layers_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.graph_double import GraphDouble

    launches = []
    for num_layers in (1, 2):
        double = GraphDouble()
        monkeypatch.setattr(
            StepGraphs,
            "capture",
            lambda self, report, double=double: self.capture_by(double, report),
        )
        path = tmp_path / str(num_layers)
        write_tiny_model(path, "qwen3_moe", num_hidden_layers=num_layers)
        build_model(options_for(path, max_num_seqs=1))
        launches.append(len(double.launches[0]))
    of_layer = launches[1] - launches[0]
    assert (of_layer, launches[0] - of_layer) == (16, 15)


def test_a_model_whose_host_reads_the_device_is_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path, "olmo2")
    layer = modeling_olmo2.Olmo2DecoderLayer.forward

    def reading(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert hidden_states.is_meta or hidden_states.isfinite().any().item()
        return layer(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_olmo2.Olmo2DecoderLayer, "forward", reading)
    with caplog.at_level("WARNING"):
        tokens = tokens_of(options_for(tmp_path))
    assert "steps of this model cannot be captured as CUDA graphs" in caplog.text
    assert tokens == tokens_of_transformers(tmp_path)
