"""The vectors of the pooling engine against transformers' plain forward, an input at a time."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, normalize

from shared.messages import ErrorCode, FinishReason, Pooling, SamplingParams
from tests.support.embedding_models import (
    EMBEDDING_MODELS,
    SIZE,
    hidden_states,
    make_embedding_checkpoint,
    pooled,
)
from worker.engine.errors import OutOfMemory, RequestRefused
from worker.engine.request import EngineOutput, EngineRequest
from worker.engine_options import EngineOptions
from worker.engines.penstock import build_own_engine
from worker.engines.pooling.engine import PoolingEngine
from worker.model.config.pooling import pooling_config
from worker.model.errors import CheckpointError, UnsupportedModel

GREEDY = SamplingParams(max_tokens=0, temperature=0.0, seed=0)
TOLERANCE = 1e-5


def inputs_of(num: int, *, longest: int = 60, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, 250) for _ in range(draw.randint(1, longest))] for _ in range(num)]


def build(path: Path, runner: str = "model", **members: object) -> PoolingEngine:
    options = EngineOptions(checkpoint=str(path), runner=runner, device="cpu", **members)  # type: ignore[arg-type]
    engine = build_own_engine(options, lambda stage, share: None, lambda why: None).engine
    assert isinstance(engine, PoolingEngine)
    return engine


def request(
    inputs: Sequence[Sequence[int]], dimensions: int = SIZE, name: str = "r", priority: int = 0
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(token_id for one in inputs for token_id in one),
        params=GREEDY,
        priority=priority,
        pooling=Pooling(tuple(map(len, inputs)), dimensions),
    )


def finished(engine: PoolingEngine) -> dict[str, tuple[list[bytes], EngineOutput]]:
    """Runs the engine; the vectors of each request in the order in which they came, and its end."""
    vectors: dict[str, list[bytes]] = {}
    ends: dict[str, EngineOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in ends, "output after the end"
            vectors.setdefault(output.request_id, []).extend(output.vectors)
            if output.finish_reason is not None:
                ends[output.request_id] = output
    return {name: (vectors.get(name, []), end) for name, end in ends.items()}


def embedded(
    engine: PoolingEngine, inputs: list[list[int]], dimensions: int = SIZE
) -> torch.Tensor:
    engine.add(request(inputs, dimensions))
    vectors, end = finished(engine)["r"]
    assert end.finish_reason is FinishReason.STOP, end
    return torch.tensor([array("f", vector).tolist() for vector in vectors])


@pytest.mark.parametrize("model_type", EMBEDDING_MODELS)
@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
def test_vectors_are_those_of_transformers(tmp_path: Path, model_type: str, mode: str) -> None:
    path = make_embedding_checkpoint(tmp_path / "m", model_type, pooling=mode)
    inputs = inputs_of(40)
    expected = [normalize(pooled(one, mode), dim=0) for one in hidden_states(path, inputs)]
    found = embedded(build(path), inputs)
    torch.testing.assert_close(found, torch.stack(expected), atol=TOLERANCE, rtol=0)


def test_a_dense_layer_and_fewer_dimensions(tmp_path: Path) -> None:
    path = make_embedding_checkpoint(tmp_path / "m", dense=24)
    from safetensors.torch import load_file

    dense = load_file(path / "2_Dense/model.safetensors")
    inputs = inputs_of(5)
    whole = [
        torch.tanh(linear(pooled(one, "mean"), dense["linear.weight"], dense["linear.bias"]))
        for one in hidden_states(path, inputs)
    ]
    engine = build(path)
    for dimensions in (24, 7):
        expected = torch.stack([normalize(vector[:dimensions], dim=0) for vector in whole])
        found = embedded(engine, inputs, dimensions)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_vectors_that_the_model_does_not_normalize_stay_as_they_are(tmp_path: Path) -> None:
    path = make_embedding_checkpoint(tmp_path / "m", normalize=False)
    inputs = inputs_of(3)
    expected = [pooled(one, "mean")[:5] for one in hidden_states(path, inputs)]
    found = embedded(build(path), inputs, 5)
    torch.testing.assert_close(found, torch.stack(expected), atol=TOLERANCE, rtol=0)


def test_a_decoder_without_modules_gives_its_last_tokens_normalized_state(tmp_path: Path) -> None:
    path = make_embedding_checkpoint(
        tmp_path / "m", "qwen3", pooling=None, architecture="Qwen3ForCausalLM"
    )
    inputs = inputs_of(4)
    expected = [normalize(one[-1], dim=0) for one in hidden_states(path, inputs)]
    found = embedded(build(path, "pooling"), inputs)
    torch.testing.assert_close(found, torch.stack(expected), atol=TOLERANCE, rtol=0)


def test_requests_take_turns_and_those_of_higher_lanes_come_first(tmp_path: Path) -> None:
    engine = build(make_embedding_checkpoint(tmp_path / "m"), max_num_batched_tokens=64)
    engine.add(request(inputs_of(400), name="bulk", priority=7))
    engine.step()
    engine.add(request(inputs_of(1), name="one"))
    assert "one" in {output.request_id for output in engine.step()}
    ends = finished(engine)
    assert ends["bulk"][1].finish_reason is FinishReason.STOP


def test_a_request_of_a_low_lane_is_computed_beside_a_flood_of_others(tmp_path: Path) -> None:
    engine = build(make_embedding_checkpoint(tmp_path / "m"), max_num_batched_tokens=60)
    engine.add(request([[5] * 60], name="low", priority=7))
    seen: set[str] = set()
    for number in range(20):
        engine.add(request([[5] * 60], name=str(number)))
        seen |= {output.request_id for output in engine.step()}
    assert "low" in seen


def test_a_cancelled_request_has_no_further_output(tmp_path: Path) -> None:
    engine = build(make_embedding_checkpoint(tmp_path / "m"), max_num_batched_tokens=64)
    engine.add(request(inputs_of(200), name="gone"))
    engine.add(request(inputs_of(3), name="kept"))
    engine.step()
    assert engine.cancel("gone")
    assert not engine.cancel("gone")
    assert set(finished(engine)) == {"kept"}


def test_a_step_that_fails_ends_the_request_at_fault_alone(tmp_path: Path) -> None:
    engine = build(make_embedding_checkpoint(tmp_path / "m"))
    compute = engine._embed

    def embed(inputs: Sequence[Sequence[int]], dimensions: Sequence[int]) -> Sequence[bytes | None]:
        if any(13 in one for one in inputs):
            raise ValueError("unlucky")
        vectors = compute(inputs, dimensions)
        return [None if 14 in one else vectors[at] for at, one in enumerate(inputs)]

    engine._embed = embed
    for name, token_id in (("sound", 12), ("raises", 13), ("nan", 14)):
        engine.add(request([[token_id, 5]], name=name))
    ends = finished(engine)
    assert ends["sound"][1].finish_reason is FinishReason.STOP
    assert ends["raises"][1].error is ErrorCode.ENGINE_ERROR
    assert ends["nan"][1].error is ErrorCode.NONFINITE_LOGITS


def test_a_step_out_of_memory_is_computed_again_in_smaller_ones(tmp_path: Path) -> None:
    engine = build(make_embedding_checkpoint(tmp_path / "m"))
    compute = engine._embed

    def embed(inputs: Sequence[Sequence[int]], dimensions: Sequence[int]) -> Sequence[bytes | None]:
        if len(inputs) > 2:
            raise OutOfMemory("full")
        return compute(inputs, dimensions)

    engine._embed = embed
    inputs = inputs_of(9, longest=8)
    engine.add(request(inputs))
    vectors, end = finished(engine)["r"]
    assert (len(vectors), end.finish_reason) == (9, FinishReason.STOP)


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (request([[5] * 67]), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (request([[5, 9999]]), ErrorCode.PAYLOAD_INVALID),
        (request([[5]], dimensions=SIZE + 1), ErrorCode.PAYLOAD_INVALID),
        (
            EngineRequest(request_id="r", prompt_token_ids=(5,), params=GREEDY),
            ErrorCode.PAYLOAD_INVALID,
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    tmp_path: Path, refused: EngineRequest, code: ErrorCode
) -> None:
    engine = build(make_embedding_checkpoint(tmp_path / "m"))
    with pytest.raises(RequestRefused) as caught:
        engine.add(refused)
    assert caught.value.code is code
    assert not engine.has_unfinished()


def test_positions_that_begin_after_the_paddings_are_not_counted(tmp_path: Path) -> None:
    engine = build(make_embedding_checkpoint(tmp_path / "m", "roberta"))
    engine.add(request([[5] * 64]))
    with pytest.raises(RequestRefused, match="at most 64"):
        engine.add(request([[5] * 65], name="longer"))


def test_a_module_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = make_embedding_checkpoint(tmp_path / "m")
    modules = (path / "modules.json").read_text().replace("Normalize", "WordWeights")
    (path / "modules.json").write_text(modules)
    with pytest.raises(UnsupportedModel, match="WordWeights"):
        build(path)


def test_a_pooling_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = make_embedding_checkpoint(tmp_path / "m")
    (path / "1_Pooling/config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(UnsupportedModel, match="pooling_mode_max_tokens"):
        build(path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_embedding_checkpoint(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.0\.output"):
        build(path)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Qwen3ForCausalLM", "BertForMaskedLM"])
def test_a_model_with_a_head_generates_text(tmp_path: Path, architecture: str) -> None:
    path = make_embedding_checkpoint(tmp_path / "m", pooling=None, architecture=architecture)
    assert pooling_config(path, "model") is None
    assert pooling_config(path, "pooling") is not None
