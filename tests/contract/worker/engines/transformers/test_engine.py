"""Transformers' models beside the engine's other promises: seeds, resumes, memory, end tokens."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.messages import FinishReason, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_run import generate, new_engine
from tests.support.tiny_models import write_tiny_model
from worker.engine_options import EngineOptions
from worker.engines.transformers.config import read_config
from worker.engines.transformers.loader import load_model
from worker.model.build import BuiltModel, build_model, choose_source
from worker.model.errors import CheckpointError, ModelError
from worker.model.kv_cache import KVCachePool, block_bytes
from worker.model.parallel.group import Placement

PROMPTS = [np.random.default_rng(n).integers(3, 300, n).tolist() for n in (3, 21, 40)]
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True, frequency_penalty=0.4
)


def build(path: Path, **options: object) -> BuiltModel:
    base = EngineOptions(checkpoint=str(path), device="cpu", dtype="float32", num_kv_blocks=64)
    return build_model(replace(base, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss")


@pytest.mark.promise("Transformers: a seeded stream is the same in any company and after a resume")
def test_a_seeded_stream_is_the_same_in_any_company_and_after_a_resume(gpt_oss: Path) -> None:
    whole = build(gpt_oss, block_size=16)
    together = [r.token_ids for r in generate(new_engine(whole), PROMPTS, SEEDED)]
    assert len({token for output in together for token in output}) > 20
    cut = new_engine(build(gpt_oss, block_size=4, max_num_batched_tokens=7, lookahead=1))
    for i, (prompt, output) in enumerate(zip(PROMPTS, together, strict=True)):
        (alone,) = generate(cut, [prompt], SEEDED, f"alone{i}")
        assert alone.token_ids == output
        (rest,) = generate(cut, [prompt], SEEDED, f"rest{i}", resumed=[output[:9]])
        assert rest.token_ids == output[9:]


def test_prompts_are_scored_as_the_native_family_scores_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3, logprobs=2)
    native, other = (
        generate(new_engine(build(tmp_path, model_impl=name)), PROMPTS, params)
        for name in ("native", "transformers")
    )
    for one, two in zip(native, other, strict=True):
        assert one.token_ids == two.token_ids
        assert [e.token_id for e in one.prompt_logprobs] == [
            e.token_id for e in two.prompt_logprobs
        ]
        for a, b in zip(one.prompt_logprobs, two.prompt_logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_end_tokens_are_the_checkpoints(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", eos_token_id=[5, 9])
    built = build(tmp_path, model_impl="transformers")
    assert {5, 9} <= built.engine_config.eos_token_ids
    assert built.engine_config.structured_output
    params = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={9: 100.0})
    (result,) = generate(new_engine(built), [PROMPTS[0]], params)
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.promise("Transformers: the KV cache is sized from what each layer keeps")
def test_the_pool_is_sized_from_what_each_layer_keeps(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "deepseek_v3")
    source = choose_source("auto", tmp_path)
    # 3 layers of 4 heads, keys of 8 + 16 numbers and values of 16
    assert block_bytes(source.config, 16, torch.float32) == 16 * 3 * 4 * (24 + 16) * 4
    gigabytes = 10.5 * 16 * 3 * 4 * 40 * 4 / 2**30
    built = build(tmp_path, num_kv_blocks=None, kv_cache_memory_gb=gigabytes, block_size=16)
    assert built.engine_config.num_blocks == 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(gpt_oss: Path, dtype: str) -> None:
    built = build(gpt_oss, dtype=dtype)
    assert built.dtype == dtype
    for result in generate(new_engine(built), PROMPTS, SEEDED):
        assert result.error is None
        assert len(result.token_ids) == 24


def test_random_weights_are_the_same_again(gpt_oss: Path) -> None:
    outputs = [
        [r.token_ids for r in generate(new_engine(built), PROMPTS, SEEDED)]
        for built in (build(gpt_oss, load_format="dummy"), build(gpt_oss, load_format="dummy"))
    ]
    assert outputs[0] == outputs[1]


def test_a_device_gets_each_tensor_as_it_is_read(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16}
    write_tiny_model(tmp_path, "qwen3_moe", **wide)
    config = read_config(tmp_path)
    on_host: dict[str, float] = {}
    for device in ("cpu", "meta"):
        gc.collect()  # what earlier models left would be freed meanwhile
        before, sizes = host_bytes(), []
        model = load_model(
            config,
            tmp_path,
            Placement(torch.device(device), torch.bfloat16),
            "eager",
            lambda share: sizes.append(host_bytes()),  # noqa: B023
        )
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        whole = sum(parameter.nbytes for parameter in model.parameters())
        on_host[device] = (max(sizes) - before) / whole
        del model
    assert on_host["cpu"] > 0.9, "what is counted is not what is read"
    assert on_host["meta"] < 0.1


@pytest.mark.parametrize(
    "part",
    [
        "worker.engines.transformers.source.replace_norms",
        "worker.engines.transformers.source.compare",
        "worker.engines.transformers.source.shorten",
        "transformers.core_model_loading.MergeModulelist.convert",
        "transformers.core_model_loading._materialize_copy",
    ],
)
def test_weights_that_do_not_fit_are_no_fault_of_the_checkpoint(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path, "qwen3_moe")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(part, full)
    with pytest.raises(ModelError, match="the weights do not fit in the memory of cpu") as raised:
        build(tmp_path, cpu_tier="native", dtype="bfloat16")
    assert type(raised.value) is ModelError


def test_a_checkpoint_at_fault_is_still_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path, "qwen3_moe")

    def wrong(*_: object, **__: object) -> None:
        raise ValueError("experts of two shapes")

    monkeypatch.setattr("transformers.core_model_loading.MergeModulelist.convert", wrong)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        build(tmp_path)


@torch.inference_mode()
def test_a_trial_pool_is_freed_once_it_is_released(gpt_oss: Path) -> None:
    options = EngineOptions(checkpoint=str(gpt_oss), device="cpu")
    placement = Placement(torch.device("cpu"), torch.float32)
    source = choose_source("auto", gpt_oss)
    built = source.load(options, placement, 64, 16, lambda stage, share: None)
    pool = KVCachePool(built.keeps, 8, 16, device=placement.device, dtype=built.kv_dtype)
    storage, stack = weakref.ref(pool.storage), built.stack(pool)
    del pool, stack
    assert storage() is not None, "what is released is not what is kept"
    built.release()
    assert storage() is None


def host_bytes() -> int:
    """Returns the bytes of the tensors in the host's memory."""
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum(one.nbytes for one in tensors if one.device.type == "cpu")


def test_progress_rises_to_the_whole(gpt_oss: Path) -> None:
    shares: list[float] = []
    build_model(
        EngineOptions(checkpoint=str(gpt_oss), device="cpu", num_kv_blocks=64),
        lambda stage, share: shares.append(share) if stage == "loading weights" else None,
    )
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert len(shares) > 10
