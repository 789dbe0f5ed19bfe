"""Measures on this machine's CUDA device, stage by stage; the tables come last.

    python3 tests/gpu/bench.py kernels engine [--out DIRECTORY]

Works from a bare copy of the tree, as gpu-check does: it needs torch, Triton, numpy and xxhash, no
installation and no network. Every program of a stage has a bound; a stage ends within nine minutes.
JSON lines are written to `--out` as they come.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = ["tests.bench.forward_steps", "--device", "cuda", "--seconds", "0.5"]
STEPS += ["--batch", "1", "8", "64", "256", "--prefill", "512", "2048", "8192"]
THROUGHPUT = ["tests.bench.engine_throughput"]
QWEN_DEFAULTS = ["--temperature", "0.7", "--top-p", "0.8", "--top-k", "20"]
# Programs with their bounds in seconds.
STAGES: dict[str, list[tuple[list[str], int]]] = {
    "kernels": [
        (["tests.bench.cuda_kernels", "--out", "{out}/attention.jsonl"], 120),
        (["tests.bench.cuda_fp8", "--out", "{out}/fp8.jsonl"], 90),
        (["tests.bench.cuda_sampling", "--out", "{out}/sampling.jsonl"], 120),
    ],
    "engine": [
        ([*THROUGHPUT, *QWEN_DEFAULTS], 60),
        ([*THROUGHPUT], 60),
        ([*THROUGHPUT, "--no-graphs"], 60),
        ([*THROUGHPUT, "--shape", "qwen3-8b", *QWEN_DEFAULTS], 90),
        ([*STEPS, "--shape", "qwen3-0.6b"], 60),
        ([*STEPS, "--shape", "qwen3-8b"], 60),
        (["tests.bench.step_trace", "--batch", "1", "64", "256"], 60),
        (["tests.bench.host_time", "--device", "cuda"], 60),
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--out", type=Path, default=ROOT / ".penstock" / "gpu-bench")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for stage in args.stages:
        for program, bound_s in STAGES[stage]:
            arguments = [word.format(out=args.out) for word in program]
            begin_s = time.monotonic()
            status = run(arguments, bound_s, args.out / f"{stage}.log")
            print(f"({time.monotonic() - begin_s:.0f} s)\n", flush=True)
            if status:
                failed.append(f"{' '.join(arguments)}: {status}")
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed else 0


def run(arguments: list[str], bound_s: int, log: Path) -> str:
    """Runs a program and shows what it prints. Returns why it failed, or ""."""
    print(f"python3 -m {' '.join(arguments)}", flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=bound_s,
            check=False,
        )
        output, status = done.stdout, f"status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        status = f"not done in {bound_s} s"
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ python3 -m {' '.join(arguments)}\n{output}\n")
    print(output, end="", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
