"""build_model: what is chosen when nothing is given, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared import cuda_devices
from shared.messages import InvalidParameter, SamplingParams
from shared.text.checkpoint_text import card_from_checkpoint
from tests.support.checkpoints import WINDOW, make_checkpoint
from tests.support.engine_run import generate, new_engine
from tests.support.torch_device import torch_device
from worker.engine.batch import ScheduledBatch
from worker.engine.config import EngineConfig
from worker.engine_options import CpuTier, EngineOptions
from worker.model import build
from worker.model.base import KVLayer
from worker.model.build import build_model, resumes_exactly
from worker.model.config.model_config import ModelConfig
from worker.model.device import available_host_bytes, choose_device, choose_dtypes
from worker.model.errors import DeviceUnavailable, KVCacheTooSmall, ModelError
from worker.model.kv_cache import KVCachePool, block_bytes, blocks_that_fit
from worker.model.step.kv_sizing import choose_groups
from worker.model.step.warm_up import warm_up

CPU = torch.device("cpu")


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(checkpoint=str(make_checkpoint(tmp_path)), device=torch_device().type)


def test_by_itself_it_fits_every_sequence_and_says_how_much(options: EngineOptions) -> None:
    stages: dict[str, list[float]] = {}
    built = build_model(options, lambda stage, share: stages.setdefault(stage, []).append(share))
    on_cuda = torch_device().type == "cuda"
    config = built.engine_config
    assert config.block_size == (32 if on_cuda else 16)
    assert config.lookahead == (1 if on_cuda else 0)
    assert config.max_model_len == 512
    assert config.num_blocks * config.block_size == config.capacity_tokens == 2 * 32 * 512
    assert config.eos_token_ids == {383, 381}
    assert list(stages) == [
        "loading weights",
        "laying out weights",
        "allocating KV cache",
        "warming up",
    ]
    assert all(shares == sorted(shares) and shares[-1] == 1.0 for shares in stages.values())


def test_a_pool_for_windows_has_what_sequences_hold_at_once(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mistral")
    options = EngineOptions(checkpoint=str(path), device="cpu", max_num_batched_tokens=8)
    config = build_model(options).engine_config
    assert config.windows == (WINDOW,)
    held = config.window_group_blocks
    assert held is not None
    assert 2 * 32 * held <= config.num_blocks < 2 * 32 * 512 // config.block_size
    # Less than the context, and enough for its window.
    config = build_model(replace(options, num_kv_blocks=3, max_model_len=512)).engine_config
    assert (config.max_model_len, config.sequence_capacity_tokens) == (512, 512)
    config = build_model(replace(options, num_kv_blocks=1)).engine_config
    assert config.max_model_len == config.sequence_capacity_tokens == config.block_size


def test_the_memory_of_a_model_of_mixed_layers_holds_longer_sequences(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gemma3_text")  # every other layer has a window
    options = EngineOptions(
        checkpoint=str(path), device="cpu", max_num_batched_tokens=8, num_kv_blocks=15
    )
    config = build_model(options).engine_config
    assert config.windows == (None, WINDOW)
    assert config.num_blocks == 2 * 15  # of half the layers
    assert config.capacity_tokens == 15 * config.block_size
    held = config.window_group_blocks
    assert held is not None
    longest = 2 * 15 - held
    assert config.max_model_len == config.sequence_capacity_tokens == longest * config.block_size
    assert config.held_blocks(config.max_model_len) == config.num_blocks
    build_model(replace(options, max_model_len=config.max_model_len))
    with pytest.raises(KVCacheTooSmall, match=f"holds {config.max_model_len} tokens of a sequence"):
        build_model(replace(options, max_model_len=config.max_model_len + 1))


FULL, LOCAL = KVLayer(1, 256, 256), KVLayer(1, 256, 256, 512)


@pytest.mark.parametrize(
    ("layers", "longest", "size", "windows"),
    [
        # Gemma 3 1B, 12B; gpt-oss 20B: a window in five of six layers, in every other one.
        (([LOCAL] * 5 + [FULL]) * 4 + [LOCAL] * 2, 32_768, 4, (None, *[512] * 6)),
        (([LOCAL] * 5 + [FULL]) * 8, 131_072, 8, (None, *[512] * 5)),
        ([LOCAL, FULL] * 12, 131_072, 12, (None, 512)),
        # A single group: the windows reach everything, the layers differ, or they are all alike.
        ([LOCAL, FULL] * 12, 1024, 24, (None,)),
        ([LOCAL, KVLayer(1, 512, 512)] * 12, 131_072, 24, (None,)),
        ([LOCAL] * 12, 131_072, 12, (512,)),
        ([FULL] * 12, 131_072, 12, (None,)),
        ([LOCAL] * 31 + [FULL], 131_072, 5, (None, *[512] * 7)),
    ],
)
def test_layers_form_groups_where_the_longest_sequence_takes_less(
    layers: list[KVLayer], longest: int, size: int, windows: tuple[int | None, ...]
) -> None:
    groups = choose_groups(layers, 16, longest, 512)
    assert (groups.size, groups.windows) == (size, windows)
    if len(windows) > 1:
        for layer, group in zip(layers, groups.of_layers, strict=True):
            assert windows[group] == layer.window


@pytest.mark.parametrize(
    ("device", "batch_invariant", "expected"),
    [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)],
)
def test_a_resume_on_a_gpu_is_exact_if_rows_are_computed_by_themselves(
    device: str, batch_invariant: bool, expected: bool, options: EngineOptions
) -> None:
    given = replace(options, batch_invariant=batch_invariant)
    assert resumes_exactly(given, torch.device(device)) is expected


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("transformers", 1, "this model is computed by transformers"),
        ("native", 2, "PENSTOCK_TENSOR_PARALLEL_SIZE is 2"),
    ],
)
def test_batch_invariance_is_refused_where_a_gpu_cannot_keep_it(
    name: str, size: int, reason: str, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SimpleNamespace(name=name)
    monkeypatch.setattr(build, "choose_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(build, "choose_source", lambda *arguments: source)
    given = replace(options, device="cuda", batch_invariant=True, tensor_parallel_size=size)
    with pytest.raises(ModelError, match=f"native model families on one GPU, and {reason}"):
        build_model(given)


def test_the_engine_ends_where_the_card_says(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, eos_token_id=[5, 6])
    card, _ = card_from_checkpoint(
        path, name="m", max_model_len=8, kv_capacity_tokens=8, dtype="", num_parameters=0
    )
    built = build_model(EngineOptions(checkpoint=str(path), device=torch_device().type))
    assert card.eos_token_ids == (5, 6, 383), "the tokenizer's own is <|im_end|>"
    assert built.engine_config.eos_token_ids == set(card.eos_token_ids)


def test_the_pool_is_sized_from_a_setting(options: EngineOptions) -> None:
    size = block_bytes(ModelConfig.from_directory(options.checkpoint), 16, torch.float32)
    gigabytes = 10.5 * size / 2**30
    built = build_model(
        replace(options, kv_cache_memory_gb=gigabytes, block_size=16, dtype="float32")
    )
    assert built.engine_config.num_blocks == 10
    assert built.engine_config.max_model_len == 160, "no longer than the pool"
    counted = build_model(
        replace(options, kv_cache_memory_gb=gigabytes, block_size=16, num_kv_blocks=3)
    )
    assert counted.engine_config.capacity_tokens == 48


def test_workers_of_one_machine_size_their_pools_from_their_shares(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order they start in: each takes its share of what is free, and half of that."""
    monkeypatch.setattr("worker.model.step.kv_sizing.available_host_bytes", lambda: 4 * 2**20)
    tight = replace(options, device="cpu", block_size=16, dtype="float32")
    size = block_bytes(ModelConfig.from_directory(options.checkpoint), 16, torch.float32)
    alone = build_model(tight).engine_config.num_blocks
    shared = build_model(replace(tight, memory_share=0.25)).engine_config.num_blocks
    assert alone == 2 * 2**20 // size
    assert shared == 2**19 // size
    assert 4 * shared <= alone


def test_a_kv_cache_in_fp8_has_more_blocks_in_the_same_memory(options: EngineOptions) -> None:
    """And close answers: a prefix that is found is read as it was computed with."""
    sized = replace(options, kv_cache_memory_gb=0.01, dtype="float32", prefix_caching=True)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompt = list(range(3, 60))
    outputs, blocks = [], []
    for name in ("auto", "fp8", "fp8_e4m3"):
        built = build_model(replace(sized, kv_cache_dtype=name))
        engine = new_engine(built)
        first, again = (generate(engine, [prompt], params, f"{i}")[0].token_ids for i in range(2))
        assert again == first, name
        outputs.append(first)
        blocks.append(built.engine_config.num_blocks)
    assert abs(blocks[1] - 4 * blocks[0]) <= 4
    assert blocks[2] == blocks[1]
    assert outputs[2] == outputs[1]
    assert outputs[1][0] == outputs[0][0], "the first token"


@pytest.mark.parametrize("tier", ["native", "auto"])
def test_the_native_tier_does_not_attend_over_fp8(tier: CpuTier, options: EngineOptions) -> None:
    asked = replace(
        options, device="cpu", dtype="bfloat16", kv_cache_dtype="fp8", cpu_tier=tier, block_size=16
    )
    if tier == "native":
        with pytest.raises(ModelError, match="kernels read bfloat16, kv_cache_dtype is fp8"):
            build_model(asked)
        return
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    assert len(generate(new_engine(build_model(asked)), [[1, 2, 3]], params)[0].token_ids) == 5


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"kv_cache_memory_gb": 1e-7}, KVCacheTooSmall, "cannot hold one block"),
        (
            {"num_kv_blocks": 2, "block_size": 16, "max_model_len": 64},
            KVCacheTooSmall,
            "max_model_len",
        ),
        ({"max_model_len": 513}, ModelError, "context of 512 tokens"),
        ({"num_kv_blocks": 0}, InvalidParameter, "num_kv_blocks"),
        ({"max_num_seqs": 0}, InvalidParameter, "max_num_seqs"),
        ({"kv_cache_memory_gb": 0.0}, InvalidParameter, "kv_cache_memory_gb"),
        ({"load_format": "gguf"}, InvalidParameter, "load_format: .*'gguf'"),
        ({"lookahead": 2}, InvalidParameter, "lookahead"),
        ({"dtype": "int8"}, InvalidParameter, "dtype: .*'int8'"),
        ({"device": "tpu"}, InvalidParameter, "device: .*'tpu'"),
        ({"checkpoint": "/nowhere"}, ModelError, "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    options: EngineOptions, changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        build_model(replace(options, **changes))


def test_dummy_weights_need_no_weight_files(options: EngineOptions) -> None:
    (Path(options.checkpoint) / "model.safetensors").unlink()
    built = build_model(replace(options, load_format="dummy", num_kv_blocks=16))
    (result,) = generate(
        new_engine(built),
        [[1, 2, 3]],
        SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
    )
    assert len(result.token_ids) == 5


def test_eos_ends_a_sequence_and_min_tokens_delays_it(options: EngineOptions) -> None:
    built = build_model(replace(options, num_kv_blocks=64))
    biased = {383: 100.0}
    quick = SamplingParams(max_tokens=9, temperature=0.0, logit_bias=biased)
    late = replace(quick, min_tokens=4)
    results = generate(new_engine(built), [[1, 2], [1, 2]], [quick, late])
    assert [len(r.token_ids) for r in results] == [1, 5]
    assert [r.finish_reason for r in results] == ["stop", "stop"]


@pytest.mark.parametrize(
    ("device", "stage", "count"), [("cuda", "compiling kernels", 5), ("cpu", "warming up", 2)]
)
def test_readiness_says_that_kernels_are_compiled(device: str, stage: str, count: int) -> None:
    suffixes: list[int] = []  # tokens before them

    def launch(batch: ScheduledBatch) -> SimpleNamespace:
        suffixes.extend(item.start for item in batch.sequences if item.start)
        return SimpleNamespace(collect=lambda: None)

    runner: Any = SimpleNamespace(launch=launch, capture=lambda report: None)
    config = EngineConfig(num_blocks=8, max_num_batched_tokens=64, max_model_len=256, block_size=16)
    reports: list[tuple[str, float]] = []
    warm_up(runner, config, torch.device(device), lambda *report: reports.append(report))
    assert {name for name, _ in reports} == {stage}
    shares = [share for _, share in reports]
    assert (shares[0], shares[-1], len(shares)) == (0.0, 1.0, count)
    # Kernels of a suffix differ from those of a whole prompt.
    assert suffixes == ([112] if device == "cuda" else [])


def test_dtype_follows_the_checkpoint_on_the_cpu() -> None:
    assert choose_dtypes("auto", "auto", "bfloat16", CPU) == (torch.bfloat16, torch.bfloat16)
    assert choose_dtypes("auto", "auto", "float16", CPU) == (torch.float32, torch.float32)
    assert choose_dtypes("float16", "auto", "float32", CPU) == (torch.float16, torch.float16)
    assert choose_device("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_auto_is_the_cpu_only_where_no_gpu_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda_devices, "has_nvidia_driver", lambda: True)
    with pytest.raises(DeviceUnavailable, match=r"finds no CUDA device.*set PENSTOCK_DEVICE=cpu"):
        choose_device("auto")
    assert choose_device("cpu") == CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert choose_device("auto") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_where_there_is_none_is_refused() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(DeviceUnavailable, match="no CUDA device"):
        choose_device("cuda")
    with pytest.raises(DeviceUnavailable, match="device 'cuda:1' was requested, but torch sees no"):
        choose_device("cuda:1")


def test_a_numbered_device_becomes_the_one_that_is_computed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: current.append(number))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    assert choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert current == [0, 1]
    with pytest.raises(DeviceUnavailable, match="cuda:2: the CUDA devices are cuda:0 to cuda:1"):
        choose_device("cuda:2")
    assert current == [0, 1]


def test_available_memory_is_a_number_of_this_machine() -> None:
    assert 1 << 20 < available_host_bytes() < 1 << 50


def test_a_pool_that_no_machine_holds_is_refused_with_its_size(options: EngineOptions) -> None:
    config = ModelConfig.from_directory(options.checkpoint)
    with pytest.raises(KVCacheTooSmall, match="GiB"):
        KVCachePool(config, 2**40, 16, device=torch_device(), dtype=torch.float32)
    assert (
        blocks_that_fit(10 * block_bytes(config, 16, torch.float32), config, 16, torch.float32)
        == 10
    )


def test_a_block_is_contiguous_over_all_layers(options: EngineOptions) -> None:
    config = ModelConfig.from_directory(options.checkpoint)
    pool = KVCachePool(config, 5, 4, device=torch_device(), dtype=torch.float32)
    assert not pool.storage.any()
    pool.keys[0][3].fill_(1)
    pool.values[1][3].fill_(2)
    assert pool.storage[3].is_contiguous()
    assert pool.storage[3].sum() == 3 * 4 * config.num_kv_heads * config.head_dim
    assert pool.storage.sum() == pool.storage[3].sum()


@pytest.mark.parametrize(
    "member", [{"quantization_config": {"quant_method": "awq"}}, {"model_type": "gemma2"}]
)
def test_what_no_native_family_computes_is_refused_with_what_would(
    member: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, **member)
    with pytest.raises(
        ModelError, match=f"{next(iter(member))}.*PENSTOCK_MODEL_IMPL=auto.*PENSTOCK_ENGINE=vllm"
    ):
        build_model(EngineOptions(checkpoint=str(path), model_impl="native", device="cpu"))
