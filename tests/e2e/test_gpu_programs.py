"""Every program of gpu-bench runs, once and tiny, with the CPU in the place of a CUDA device."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch.profiler import ProfilerActivity

from bench import cuda_kernels, cuda_sampling
from bench.shapes import SHAPES
from tests.gpu.bench import NEED_PACKAGES, STAGES
from tests.support import cuda_on_cpu

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numbers in padding
]
TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 300,
}
SHAPE = ["--shape", "tiny"]
STEPS = ["--batch", "2", "--context", "9", "--prefill", "9", "--seconds", "0"]
LENGTHS = ["--shortest", "2", "--longest", "3"]
# By program: its words, and what it has in the place of what is measured on a card.
PROGRAMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "cuda_kernels": (
        [],
        {
            "HEADS": 4,
            "KV_HEADS": 2,
            "DIM": 16,
            "POOL_BYTES": 1,
            "DECODES": [(1, 64), (2, 33)],
            "UNEVEN": [[70, 9, 9]],
            "PREFIXES": [40],
            "PREFILLS": [33],
            "FEW_ROWS": [1],
            "SIZES": [(32, 48, 32)],
            "ceilings": lambda: cuda_kernels.Ceilings(1000.0, 100.0),
        },
    ),
    "cuda_fp8": ([], {"SHAPES": {"qkv": (128, 256)}, "ROWS": [1, 65], "WEIGHT_BYTES": 1}),
    "cuda_sampling": (
        ["--rows", "1", "--vocab", "300"],
        {
            "copy_speed": lambda device: 1e12,
            "median": lambda function: function() and 1.0,
            "CASES": {name: cuda_sampling.CASES[name] for name in ("greedy", "top_k 50")},
        },
    ),
    "engine_throughput": (
        [*SHAPE, "--requests", "2", "--seqs", "2", *LENGTHS, "--batched-tokens", "16"],
        {},
    ),
    "forward_steps": (
        [*SHAPE, *STEPS, "--device", "cuda", "--mix", "1x33+1x9", "--suffix", "33"],
        {},
    ),
    "step_trace": (
        [*SHAPE, "--batch", "2", "--context", "9"],
        {"STEPS": 2, "ProfilerActivity": SimpleNamespace(CUDA=ProfilerActivity.CPU)},
    ),
    "host_time": (["--device", "cuda", "--seqs", "2", "--steps", "3", "--kinds", "greedy"], {}),
    "transformers_steps": (
        [*SHAPE, *STEPS, "--device", "cuda", "--ways", "native", "engine"],
        {},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, others = PROGRAMS[name]
    program = importlib.import_module(f"bench.{name}")
    for constant, value in others.items():
        monkeypatch.setattr(program, constant, value)
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["tiny"] | TINY)
    monkeypatch.setattr(sys, "argv", [name, *words])
    cuda_on_cpu.set_up(monkeypatch)
    with cuda_on_cpu.CudaOnCpu():
        status: int | None = program.main()
    printed = capsys.readouterr().out
    assert not status, printed
    assert "a double" in printed or "batch 2:" in printed, printed


def test_each_program_of_gpu_bench_is_among_them() -> None:
    """But nano_vllm and those of the service, which have tests beside this one."""
    stages = [programs for stage, programs in STAGES.items() if stage not in NEED_PACKAGES]
    names = {words[0].removeprefix("bench.") for programs in stages for words, _ in programs}
    assert names <= {*PROGRAMS, "nano_vllm"}
