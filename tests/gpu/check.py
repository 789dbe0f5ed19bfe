"""Runs the model, sampler and engine tests on this machine's CUDA device and prints one table.

    python3 tests/gpu/check.py

Works from a bare copy of the tree: it needs torch, pytest, transformers, safetensors, tokenizers,
numpy and xxhash, no installation, no network and no Redis. Exits 0 when every check passed, and
where there is no CUDA device, after saying so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240
# What runs on a device, with no package that a bare machine lacks.
UNIT = "tests/unit/worker/model"
SUITES = {
    "greedy tokens = transformers, float32": [
        "tests/contract/worker/model/test_greedy_equality.py"
    ],
    "attention = formula": ["tests/contract/worker/model/test_attention_backend.py"],
    "kernels = torch's operators": [
        f"tests/contract/worker/model/cuda/test_{name}.py"
        for name in (
            "stack",
            "graphs",
            "gemv",
            "sampling",
            "transformers",
            "experts",
            "fp8_kernels",
        )
    ],
    "logits, bfloat16, batch of n": ["tests/contract/worker/model/test_forward.py"],
    "sampler, loader, runner": [
        f"{UNIT}/test_{name}.py"
        for name in (
            "forward_batch",
            "kept_batch",
            "loader",
            "noise",
            "penalties",
            "runner",
            "sampler",
        )
    ],
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Outcome:
    """One line of the table; `details` are printed below it when the check failed."""

    name: str
    passed: bool
    result: str
    seconds: float
    details: str = ""


def main() -> int:
    sys.path.insert(0, str(ROOT))
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch
    except ImportError as error:
        if not Path("/dev/nvidia0").exists():
            print("gpu-check: this machine has no CUDA device; nothing was checked.")
            return 0
        print(f"gpu-check: there is a GPU, but {sys.executable} cannot import torch: {error}")
        return 1
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device on this machine; nothing was checked.")
        return 0
    outcomes = [run_suite(name, paths) for name, paths in SUITES.items()]
    outcomes += [
        measure("sampler: distance from the exact distribution", sampler_distance),
        measure("Qwen3-0.6B shape, bf16, random weights", throughput),
    ]
    print_table(outcomes, torch.cuda.get_device_name(), torch.__version__)
    for outcome in outcomes:
        if not outcome.passed:
            print(f"\n--- {outcome.name}\n{outcome.details}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def run_suite(name: str, paths: list[str]) -> Outcome:
    """Runs pytest on CUDA without the project's pytest settings, whose plugins may be absent."""
    environment = os.environ | {
        "PENSTOCK_TEST_DEVICE": "cuda",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = ["-q", "-x", "--noconftest", "--import-mode=importlib", f"--rootdir={ROOT}"]
    options += [
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "-m",
        "not models",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
    ]
    if importlib.util.find_spec("xdist") is not None:  # compiling kernels takes most of the time
        options += ["-p", "xdist", "-n", str(min(8, os.cpu_count() or 1))]
    started = time.monotonic()
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *paths],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(name, False, f"not done in {TIMEOUT_S} s", time.monotonic() - started)
    lines = run.stdout.strip().splitlines() or [""]
    summary = lines[-1].strip("= ").rsplit(" in ", 1)[0]
    details = "\n".join(lines[-60:]) + "\n" + run.stderr[-3000:]
    return Outcome(name, run.returncode == 0, summary, time.monotonic() - started, details)


def measure(name: str, check: Callable[[], tuple[bool, str]]) -> Outcome:
    started = time.monotonic()
    try:
        passed, result = check()
    except Exception as error:  # the table tells, and the other checks go on
        return Outcome(name, False, type(error).__name__, time.monotonic() - started, str(error))
    return Outcome(name, passed, result, time.monotonic() - started, result)


def sampler_distance() -> tuple[bool, str]:
    """Total variation of 50 000 draws over 500 tokens, and what honest draws would have."""
    import numpy as np
    import torch

    from shared.messages import SamplingParams
    from tests.support.sampling_exact import exact_distribution, noise_floor, total_variation
    from worker.model.sampling.row import SamplingRow
    from worker.model.sampling.sampler import Sampler

    device = torch.device("cuda", torch.cuda.current_device())
    vocab, num_draws = 500, 50_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 2
    results, passed = [], True
    base = SamplingParams(temperature=0.9, seed=1)
    for params in (base, replace(base, top_k=40, top_p=0.9, min_p=0.01)):
        sampler = Sampler(vocab, max_num_seqs=1, eos_token_ids=frozenset(), device=device)
        rows = [SamplingRow(i, params, (0,), (), i + 1) for i in range(num_draws)]
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        sampled = sampler.sample(logits.to(device).expand(num_draws, -1), rows, nothing)
        counts = np.bincount(sampled.token_ids.cpu().numpy(), minlength=vocab)
        exact = exact_distribution(logits.numpy(), params)
        distance, floor = total_variation(counts, exact), noise_floor(exact, num_draws)
        results.append(f"{distance:.4f} (noise {floor:.4f})")
        passed &= distance < 1.5 * floor and not counts[exact == 0].any()
    return passed, ", ".join(results)


def throughput() -> tuple[bool, str]:
    """Tokens per second through the Engine, 32 sequences at once."""
    from shared.messages import SamplingParams
    from worker.engine.engine import Engine
    from worker.engine.request import EngineRequest
    from worker.engine_options import EngineOptions
    from worker.model.build import build_model

    num_seqs, num_prompt, num_output = 32, 256, 128
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(QWEN3_0_6B), encoding="utf-8")
        built = build_model(
            EngineOptions(
                checkpoint=directory,
                device="cuda",
                dtype="bfloat16",
                load_format="dummy",
                kv_cache_memory_gb=2.0,
                max_num_seqs=num_seqs,
                max_num_batched_tokens=2048,
            )
        )
    engine = Engine(built.engine_config, built.runner)
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    for i in range(num_seqs):
        prompt = tuple((7919 * i + 31 * t) % 151_000 for t in range(num_prompt))
        engine.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    started, first_decode_s, errors, num_tokens = time.monotonic(), None, [], 0
    while engine.has_unfinished():
        for output in engine.step():
            num_tokens += len(output.token_ids)
            errors += [output.message] if output.error else []
        if first_decode_s is None and engine.stats().active == num_seqs:
            first_decode_s, decoded_before = time.monotonic(), num_tokens
    if errors or first_decode_s is None:
        return False, f"{len(errors)} sequences failed: {errors[:1]}"
    engine.check_integrity()
    prefill = num_seqs * num_prompt / (first_decode_s - started)
    decode = (num_tokens - decoded_before) / (time.monotonic() - first_decode_s)
    passed = num_tokens == num_seqs * num_output
    return passed, f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"


def print_table(outcomes: list[Outcome], device: str, torch_version: str) -> None:
    width = max(len(outcome.name) for outcome in outcomes)
    result_width = max(len(outcome.result) for outcome in outcomes)
    rule = "-" * (width + result_width + 18)
    print(f"\ngpu-check: {device}, torch {torch_version}, Python {sys.version.split()[0]}")
    print(rule)
    print(f"{'check':<{width}}  {'':4}  {'result':<{result_width}}  seconds")
    print(rule)
    for outcome in outcomes:
        mark = "ok" if outcome.passed else "FAIL"
        print(
            f"{outcome.name:<{width}}  {mark:<4}  {outcome.result:<{result_width}}  "
            f"{outcome.seconds:7.1f}"
        )
    print(rule)


if __name__ == "__main__":
    sys.exit(main())
