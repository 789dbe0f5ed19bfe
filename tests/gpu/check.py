"""Runs the model, sampler and engine tests on this machine's CUDA device, short suites first.

    python3 tests/gpu/check.py [--minutes 9] [--out DIRECTORY]

Works from a bare copy of the tree: it needs torch, pytest, transformers, safetensors, tokenizers,
numpy and xxhash, no installation, no network and no Redis; structured rows also llguidance and
msgspec. A line is printed as each suite ends, with what failed in it; `--out` has all that they
printed, and the lines as JSON. With `--minutes`, suites whose bound is longer
than what is left are left out. Exits 0 when every suite that ran has passed, and where there is no
CUDA device, after saying so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tests/contract/worker/model"
CUDA = f"{MODEL}/cuda"
UNIT = "tests/unit/worker/model"
END_S = 5.0  # in which pytest says what failed until it was interrupted


@dataclass(frozen=True)
class Suite:
    """Tests that can run on a device, or a program of the bench; `needs` are packages that a bare
    machine may lack."""

    name: str
    bound_s: float
    paths: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def suite_of(name: str, bound_s: float, *paths: str, needs: tuple[str, ...] = ()) -> Suite:
    return Suite(name, bound_s, tuple(f"{path}.py" for path in paths), needs=needs)


# On an H100 with 14 processes the first two took 20 s each.
SUITES = (
    suite_of(
        "tokens: engine, graphs, stack = torch's operators",
        90,
        *(f"{CUDA}/test_{name}" for name in ("engine_equality", "attention_plan", "gemv")),
        *(f"{CUDA}/test_{name}" for name in ("stack", "graphs")),
    ),
    suite_of(
        "sampling = torch's operators; runner, loader",
        90,
        f"{CUDA}/test_sampling",
        *(f"{UNIT}/test_{name}" for name in ("runner", "loader", "sampler", "noise", "penalties")),
        *(f"{UNIT}/test_{name}" for name in ("forward_batch", "kept_batch")),
    ),
    Suite(
        "32 requests, Qwen3-0.6B shape, random weights",
        90,
        program=("bench.engine_throughput", "--requests", "32", "--temperature", "0.7"),
    ),
    suite_of(
        "attention = formula; transformers, FP8, batch invariance",
        120,
        f"{MODEL}/test_attention_backend",
        *(
            f"{CUDA}/test_{name}"
            for name in ("transformers", "experts", "fp8_kernels", "invariant")
        ),
    ),
    suite_of(
        "structured rows = without kernels",
        120,
        f"{CUDA}/test_structured_steps",
        needs=("llguidance", "msgspec"),
    ),
    suite_of("logits, bfloat16, batch of n", 120, f"{MODEL}/test_forward"),
    suite_of("greedy tokens = transformers, float32", 240, f"{MODEL}/test_greedy_equality"),
)


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    name: str
    status: str  # "ok", "FAIL" or "left out"
    result: str
    seconds: float = 0.0

    @property
    def line(self) -> str:
        return f"{self.status:8}  {self.seconds:6.1f} s  {self.name}: {self.result}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of all suites")
    parser.add_argument("--out", type=Path, default=ROOT / ".penstock" / "gpu-check")
    args = parser.parse_args()
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
    device = torch.cuda.get_device_name()
    print(f"gpu-check: {device}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    return check(SUITES, args.out, time.monotonic() + 60 * args.minutes)


def check(suites: tuple[Suite, ...], out: Path, end_s: float) -> int:
    """Runs the suites that end before `end_s` by their bounds; returns the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for suite in suites:
        outcome = outcome_of(suite, out / "check.log", end_s)
        print(outcome.line, flush=True)
        with (out / "check.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        has_failed |= outcome.status == "FAIL"
    return int(has_failed)


def outcome_of(suite: Suite, log: Path, end_s: float) -> Outcome:
    missing = [name for name in suite.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome(suite.name, "left out", f"{', '.join(missing)} is not there")
    if time.monotonic() + suite.bound_s > end_s:
        return Outcome(suite.name, "left out", f"it may take {suite.bound_s:.0f} s")
    begin_s = time.monotonic()
    status, lines = run(suite, log)
    seconds = time.monotonic() - begin_s
    if status == 0:
        return Outcome(suite.name, "ok", lines[-1].strip("= "), seconds)
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
    why = f"not done in {suite.bound_s:.0f} s" if status is None else f"status {status}"
    return Outcome(suite.name, "FAIL", "\n".join([why, *failures[:20], *lines[-5:]]), seconds)


def run(suite: Suite, log: Path) -> tuple[int | None, list[str]]:
    """Runs a suite; returns its exit status, None where it met its bound, and what it printed,
    which is added to the log."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PENSTOCK_TEST_DEVICE": os.environ.get("PENSTOCK_TEST_DEVICE", "cuda"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", *(suite.program or pytest_words(suite))]
    with log.open("a+", encoding="utf-8") as file:
        begin = file.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        status = ended(process, suite.bound_s, END_S)
        file.seek(begin)
        return status, file.read().splitlines() or [""]


def ended(process: subprocess.Popen[bytes], bound_s: float, end_s: float) -> int | None:
    """Returns the exit status, None where the process had to be interrupted."""
    try:
        return process.wait(bound_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(end_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def pytest_words(suite: Suite) -> list[str]:
    """Returns pytest's arguments: without the project's settings, whose plugins may be absent."""
    words = ["pytest", "-v", "--noconftest", "--import-mode=importlib", f"--rootdir={ROOT}"]
    words += ["-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore", "--maxfail=8"]
    words += ["--tb=short", "-rf"]
    if importlib.util.find_spec("xdist") is not None:  # compiling kernels takes most of the time
        words += ["-p", "xdist", "-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
    return [*words, *suite.paths]


if __name__ == "__main__":
    sys.exit(main())
