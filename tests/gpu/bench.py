"""Measures on this machine's CUDA device, stage by stage; the tables come last.

    python3 tests/gpu/bench.py kernels engine service vllm [--out DIRECTORY]

Works from a bare copy of the tree, as gpu-check does: it needs torch, Triton, numpy and xxhash, no
installation and no network. The stages `service` and `vllm` need the packages of the service too:
`make gpu-wheels` downloads them beforehand into .whl/, which is carried with the tree; without it
they are those of this interpreter. Every program of a stage has a bound; a stage ends within nine
minutes. JSON lines are written to `--out` as they come. A peer that cannot be imported here is "not
there", which is no pass: the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.wheels import unpacked  # noqa: E402 - needs the line above

STEPS = ["bench.forward_steps", "--device", "cuda", "--seconds", "0.5"]
STEPS += ["--batch", "1", "8", "64", "256", "--prefill", "512", "2048", "8192"]
TRACE = ["bench.step_trace", "--batch", "1", "64", "256"]
THROUGHPUT = ["bench.engine_throughput"]
QWEN_DEFAULTS = ["--temperature", "0.7", "--top-p", "0.8", "--top-k", "20"]
# Programs with their bounds in seconds.
SERVICE = ["bench.gpu_service", "--out", "{out}"]
STAGES: dict[str, list[tuple[list[str], int]]] = {
    "kernels": [
        (["bench.cuda_kernels", "--out", "{out}/attention.jsonl"], 120),
        (["bench.cuda_fp8", "--out", "{out}/fp8.jsonl"], 90),
        (["bench.cuda_sampling", "--out", "{out}/sampling.jsonl"], 120),
    ],
    "engine": [
        ([*THROUGHPUT, *QWEN_DEFAULTS], 60),
        ([*THROUGHPUT], 60),
        ([*THROUGHPUT, "--no-graphs"], 60),
        ([*THROUGHPUT, "--shape", "qwen3-8b", *QWEN_DEFAULTS], 90),
        ([*STEPS, "--shape", "qwen3-0.6b"], 60),
        ([*STEPS, "--shape", "qwen3-8b"], 60),
        ([*TRACE, "--shape", "qwen3-0.6b"], 60),
        ([*TRACE, "--shape", "qwen3-8b"], 60),
        (["bench.host_time", "--device", "cuda"], 60),
        (["bench.nano_vllm", "--out", "{out}"], 120),
    ],
    "service": [
        ([*SERVICE, "--shape", "qwen3-0.6b"], 260),
        ([*SERVICE, "--shape", "qwen3-8b"], 270),
    ],
    "vllm": [
        ([*SERVICE, "--shape", "qwen3-0.6b", "--peer", "vllm"], 260),
        ([*SERVICE, "--shape", "qwen3-8b", "--peer", "vllm"], 270),
    ],
}
# Shows without a GPU that the code of a stage runs; its figures mean nothing.
QUICK = ["--shape", "tiny", "--device", "cpu", "--quick", "--frontends", "2", "--clients", "2"]
STAGE_S = 530.0  # of nine minutes
NEED_PACKAGES = {"service", "vllm"}
NOT_THERE = 3  # of a program whose peer cannot be imported


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--out", type=Path, default=ROOT / ".penstock" / "gpu-bench")
    parser.add_argument("--quick", action="store_true", help="service and vllm, small, on the CPU")
    args = parser.parse_args()
    if args.quick and not NEED_PACKAGES.issuperset(args.stages):
        parser.error("--quick is for the stages service and vllm")
    args.out.mkdir(parents=True, exist_ok=True)
    packages = unpacked() if NEED_PACKAGES.intersection(args.stages) else None
    paths = [str(path) for path in (ROOT, packages) if path is not None]
    paths += filter(None, [os.environ.get("PYTHONPATH")])  # of a peer that was carried here
    failed = []
    for stage in args.stages:
        end_s = time.monotonic() + STAGE_S
        for program, bound_s in STAGES[stage][: 1 if args.quick else None]:
            arguments = [word.format(out=args.out) for word in program]
            arguments += QUICK if args.quick else []
            begin_s = time.monotonic()
            left_s = max(1.0, min(bound_s, end_s - begin_s))
            status = run(arguments, left_s, args.out / f"{stage}.log", paths)
            print(f"({time.monotonic() - begin_s:.0f} s)\n", flush=True)
            if status:
                failed.append(f"{' '.join(arguments)}: {status}")
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed else 0


def run(arguments: list[str], bound_s: float, log: Path, paths: list[str]) -> str:
    """Runs a program, with `paths` to import from, and shows what it prints. Returns why it failed,
    or ""."""
    print(f"python3 -m {' '.join(arguments)}", flush=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
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
        output, status = done.stdout, ""
        if done.returncode:
            is_there = done.returncode != NOT_THERE
            status = f"status {done.returncode}" if is_there else "not there: nothing measured"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        status = f"not done in {bound_s:.0f} s"
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ python3 -m {' '.join(arguments)}\n{output}\n")
    print(output, end="", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
