"""EngineOptions and VLLM_ARGS as arguments of vLLM's EngineArgs; needs no vLLM."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any, Literal

import pytest

from worker.engine_options import EngineOptions
from worker.engines.vllm import options as options_module
from worker.engines.vllm.options import (
    CPU_RANK,
    PROCESSOR,
    check_types,
    check_version,
    choose_device,
    engine_args,
    num_ranks,
    parse_vllm_args,
    set_environment,
    share_threads,
    uses_own_sampler,
)

FREE = 2 << 30
FIELDS: dict[str, Any] = {
    "enforce_eager": bool,
    "seed": int,
    "watermark": float,
    "load_format": str,
    "hf_overrides": dict[str, Any],
    "quantization": str | None,
    "kv_cache_dtype": Literal["auto", "fp8"],
    "compilation_config": object,
    "ignore_patterns": str | list[str],
}


def args_of(device: str = "cpu", **options: Any) -> dict[str, Any]:
    made = EngineOptions(checkpoint="/m", engine="vllm", **options)
    return engine_args(made, device=device, free_bytes=FREE)


def test_each_option_becomes_vllms_argument() -> None:
    args = args_of(
        dtype="float32",
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=96,
        block_size=16,
        num_kv_blocks=7,
        kv_cache_memory_gb=0.5,
        prefix_caching=False,
        tensor_parallel_size=2,
        load_format="dummy",
        scheduling_policy="priority",
    )
    assert args == {
        "model": "/m",
        "dtype": "float32",
        "load_format": "dummy",
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 96,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 2,
        "block_size": 16,
        "scheduling_policy": "priority",
        "generation_config": "vllm",
        "max_logprobs": args["max_logprobs"],
        "use_tqdm_on_load": False,
        "worker_cls": CPU_RANK,
        "logits_processors": [PROCESSOR],
        "num_gpu_blocks_override": 8,
        "kv_cache_memory_bytes": 1 << 28,  # of each rank
    }


def test_defaults_leave_room_on_the_host_and_the_rest_to_vllm() -> None:
    args = args_of()
    assert args["kv_cache_memory_bytes"] == FREE // 2
    assert args["block_size"] == 32
    assert args["max_model_len"] == -1, "vLLM finds what the cache holds"
    assert args["kv_events_config"] == {"enable_kv_cache_events": True, "publisher": "null"}
    on_gpu = args_of("cuda")
    assert not {"kv_cache_memory_bytes", "block_size", "worker_cls"} & on_gpu.keys()


def test_a_budget_below_the_number_of_sequences_is_raised_to_it() -> None:
    assert args_of(max_num_seqs=600)["max_num_batched_tokens"] == 600


def test_vllm_args_are_passed_on() -> None:
    assert args_of(vllm_args='{"enforce_eager": true}')["enforce_eager"] is True


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("nested", [False, True])
def test_overrides_of_a_checkpoint_join_those_of_its_context(nested: bool, tmp_path: Path) -> None:
    config: dict[str, Any] = {"max_position_embeddings": 4096, "rope_scaling": YARN}
    given: dict[str, Any] = {"rms_norm_eps": 1e-5}
    expected = {"max_position_embeddings": 16384, "rms_norm_eps": 1e-5}
    if nested:
        config, given, expected = ({"text_config": each} for each in (config, given, expected))
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineOptions(
        checkpoint=str(tmp_path), engine="vllm", vllm_args=json.dumps({"hf_overrides": given})
    )
    assert engine_args(options, device="cpu", free_bytes=FREE)["hf_overrides"] == expected


def test_an_override_that_replaces_the_contexts_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"max_position_embeddings": 4096, "rope_scaling": YARN}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"hf_overrides": {"max_position_embeddings": 8192}}
    options = EngineOptions(checkpoint=str(tmp_path), engine="vllm", vllm_args=json.dumps(given))
    with caplog.at_level(logging.WARNING):
        args = engine_args(options, device="cpu", free_bytes=FREE)
    assert args["hf_overrides"] == given["hf_overrides"]
    assert [getattr(record, "member", None) for record in caplog.records] == [
        "max_position_embeddings"
    ]


def test_another_device_than_vllm_is_built_for_is_refused() -> None:
    with pytest.raises(
        ValueError, match="PENSTOCK_DEVICE=cuda: the vLLM in PENSTOCK_ENGINE_PYTHON is built for"
    ):
        engine_args(
            EngineOptions(checkpoint="/m", engine="vllm", device="cuda"),
            device="cpu",
            free_bytes=FREE,
        )


@pytest.mark.parametrize(
    ("visible", "device", "found"),
    [
        (None, "cuda", None),
        (None, "cuda:1", "1"),
        ("2,GPU-a", "cuda:1", "GPU-a"),
        (None, "cuda:2", "PENSTOCK_DEVICE=cuda:2: the CUDA devices are cuda:0 to cuda:1"),
        ("3", "cuda:1", "PENSTOCK_DEVICE=cuda:1: the only CUDA device is cuda:0"),
        ("", "cuda:0", "PENSTOCK_DEVICE=cuda:0: there is no CUDA device"),
    ],
)
def test_vllm_sees_the_numbered_device_alone(
    visible: str | None, device: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "num_cuda_devices", lambda: 2)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setattr(options_module.os, "environ", environ)
    options = EngineOptions(checkpoint="/m", engine="vllm", device=device)
    if found is not None and found.startswith("PENSTOCK_DEVICE"):
        with pytest.raises(ValueError, match=found):
            choose_device(options, {})
        return
    choose_device(options, {})
    assert environ.get("CUDA_VISIBLE_DEVICES") == found


def test_a_numbered_device_is_not_for_several_ranks() -> None:
    options = EngineOptions(checkpoint="/m", engine="vllm", device="cuda:0")
    with pytest.raises(ValueError, match="cuda:0 is one device, and the model is divided over 2"):
        choose_device(options, {"pipeline_parallel_size": 2})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "must be a JSON object"),
        ("{", "must be a JSON object: "),
        ('{"max_model_len": 5}', "'max_model_len' is set by PENSTOCK_MAX_MODEL_LEN"),
        ('{"block_size": 16}', "'block_size' is set by PENSTOCK_BLOCK_SIZE"),
        ('{"logprobs_mode": "raw_logits"}', "'logprobs_mode' is set by the worker"),
        ('{"max_num_queued_reqs": 2}', "'max_num_queued_reqs' is set by the worker"),
        ('{"data_parallel_size": 2}', "'data_parallel_size' is set by the worker"),
    ],
)
def test_what_is_not_the_operators_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_vllm_args(text)


@pytest.mark.promise(
    "vLLM: a setting, argument, interpreter or release that does not fit is one sentence that "
    "names it"
)
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"enforce_eagr": True}, "EngineArgs have no 'enforce_eagr'; is 'enforce_eager' meant?"),
        ({"qqq": True}, "EngineArgs have no 'qqq'"),
        ({"enforce_eager": 1}, "'enforce_eager' must be true or false, got 1"),
        ({"seed": True}, "'seed' must be an integer, got True"),
        ({"seed": 1.5}, "'seed' must be an integer, got 1.5"),
        ({"watermark": "x"}, "'watermark' must be a number, got 'x'"),
        ({"hf_overrides": []}, r"'hf_overrides' must be an object, got a list"),
        ({"quantization": 4}, "'quantization' must be text or null, got 4"),
        ({"kv_cache_dtype": "fp7"}, "'kv_cache_dtype' must be one of auto, fp8, got 'fp7'"),
        ({"ignore_patterns": 1}, "'ignore_patterns' must be text or a list, got 1"),
    ],
)
def test_a_value_that_vllm_does_not_take_is_refused(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_types(args, FIELDS)


def test_a_value_that_may_be_a_secret_is_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"'api_key' must be an integer, got text$"):
        check_types({"api_key": "TOP"}, {"api_key": int})
    with pytest.raises(ValueError, match=r"'seed' must be an integer, got an object$"):
        check_types({"seed": {"token": "TOP"}}, {"seed": int})


def test_what_fits_its_type_is_let_through() -> None:
    check_types(
        {
            "enforce_eager": False,
            "seed": 3,
            "watermark": 1,
            "hf_overrides": {"a": 1},
            "quantization": None,
            "kv_cache_dtype": "fp8",
            "compilation_config": 3,
            "ignore_patterns": ["*.bin"],
        },
        FIELDS,
    )


def test_releases_of_vllm() -> None:
    assert check_version("0.32.0")
    assert check_version("0.32.1+cpu")
    assert check_version("0.33.0")
    assert not check_version("0.34.0")
    assert not check_version("dev")
    with pytest.raises(ValueError, match=r"vLLM 0\.31\.2, 0\.32 is the oldest"):
        check_version("0.31.2")


SPECULATIVE: dict[str, Any] = {"speculative_config": {"method": "ngram"}}


@pytest.mark.parametrize(
    ("sampler", "args", "own"),
    [
        ("auto", {}, True),
        ("penstock", {}, True),
        ("vllm", {}, False),
        ("auto", SPECULATIVE, False),
        ("vllm", SPECULATIVE, False),
        ("auto", {"spec_model": "/draft"}, False),
        ("auto", {"pipeline_parallel_size": 2}, False),
        ("auto", {"pipeline_parallel_size": 1}, True),
    ],
)
def test_which_sampler_draws(sampler: Any, args: dict[str, Any], own: bool) -> None:
    options = EngineOptions(checkpoint="/m", engine="vllm", vllm_sampler=sampler)
    assert uses_own_sampler(options, args) is own


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            '{"speculative_config": {"method": "ngram"}}',
            "speculative decoding is not supported",
        ),
        ('{"spec_model": "/draft"}', "speculative decoding is not supported"),
        ('{"async_scheduling": true}', "'async_scheduling' has no effect on a CPU"),
    ],
)
def test_what_vllm_does_not_do_on_a_cpu_is_refused_there(args: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        args_of(vllm_args=args)
    assert args_of("cuda", vllm_args=args)


def test_ranks_share_the_memory_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = '{"pipeline_parallel_size": 2}'
    options = EngineOptions(
        checkpoint="/m", engine="vllm", tensor_parallel_size=3, vllm_args=stages
    )
    assert num_ranks(options, parse_vllm_args(stages)) == 6
    assert num_ranks(options, {"pipeline_parallel_size": 2, "nnodes": 2}) == 3
    args = engine_args(options, device="cpu", free_bytes=FREE)
    assert args["kv_cache_memory_bytes"] == args_of()["kv_cache_memory_bytes"] // 6
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "16", "MKL_NUM_THREADS": "4"})
    share_threads(6)
    assert os.environ == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "1"}


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("args", "is_local"),
    [
        ({}, True),
        ({"nnodes": 1, "distributed_executor_backend": "mp"}, True),
        ({"nnodes": 2}, False),
        ({"distributed_executor_backend": "ray"}, False),
    ],
)
def test_vllms_processes_on_one_machine_listen_on_its_loopback(
    args: dict[str, Any], is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth0"), (1, "lo")])
    set_environment(args)
    assert [os.environ.get(name) for name in INTERFACES] == ["lo" if is_local else None] * 2


def test_an_interface_that_the_operator_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict.fromkeys(INTERFACES, "eth1"))
    set_environment({})
    assert [os.environ[name] for name in INTERFACES] == ["eth1", "eth1"]


def test_our_sampler_cannot_be_demanded_where_vllm_has_no_place_for_it() -> None:
    options = EngineOptions(checkpoint="/m", engine="vllm", vllm_sampler="penstock")
    with pytest.raises(ValueError, match="PENSTOCK_VLLM_SAMPLER=penstock and speculative decoding"):
        uses_own_sampler(options, SPECULATIVE)


def test_vllms_sampler_gets_a_grammar_library_and_not_our_processor() -> None:
    args = args_of(vllm_sampler="vllm")
    assert "logits_processors" not in args
    assert args["structured_outputs_config"] == {"backend": "guidance"}


def test_no_pickle_of_a_checkpoint_is_read_unless_the_operator_says_so() -> None:
    assert args_of()["load_format"] == "safetensors"
    assert args_of(vllm_args='{"load_format": "auto"}')["load_format"] == "auto"


def test_gguf_files_are_refused_with_the_engine_that_reads_them(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match="PENSTOCK_ENGINE=penstock does"):
        engine_args(EngineOptions(checkpoint=str(tmp_path)), device="cpu", free_bytes=2**30)
