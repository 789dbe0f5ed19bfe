"""Every program of gpu-bench runs, once and tiny, with the CPU in the place of a CUDA device; those
of day.sh get words that they know."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
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
REPOSITORY = Path(__file__).resolve().parents[2]
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


def test_launches_are_timed_without_a_gpu() -> None:
    """In a process whose kernels are compiled, not interpreted."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.launch_time", "--calls", "1"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *_, line = done.stdout.splitlines()
    name, count, *times = line.rsplit(maxsplit=3)
    assert (name, count) == ("attention of decodes", "2")
    assert all(float(each) > 0 for each in times)


class Parsed(Exception):
    """The words of a program are known."""


PYTHON = """\
#!/bin/sh
# Writes its words down, and ends with the status that DAY_FAILS has for them.
printf '%s' "$(pwd)" >>"$DAY_CALLS"
for word in "$@"; do printf '\\t%s' "$word" >>"$DAY_CALLS"; done
echo >>"$DAY_CALLS"
case "$*" in *"$DAY_FAILS"*) exit 3 ;; esac
"""


def calls_of_day(
    run: int, path: Path, *, fails: str = "no program", folders: tuple[str, ...] = ()
) -> tuple[int, list[list[str]], str]:
    """Returns the status of a run of day.sh in a tree, where nothing computes, the folder and the
    words of each call of Python, and what is printed."""
    tree = path / "tree"
    (tree / "tests" / "gpu").mkdir(parents=True)
    script, python, calls = tree / "tests/gpu/day.sh", path / "python", path / "calls"
    script.write_text((REPOSITORY / "tests/gpu/day.sh").read_text(encoding="utf-8"))
    for folder in folders:
        (tree / folder).mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls.touch()
    done = subprocess.run(
        ["bash", str(script), str(run)],
        env=os.environ
        | {"PYTHON": str(python), "DAY_CALLS": str(calls), "DAY_FAILS": fails}
        | {"OUT": str(path / "out")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = calls.read_text().splitlines()
    return done.returncode, [line.split("\t") for line in lines], done.stdout


@pytest.mark.parametrize(("run", "count"), [(1, 1), (2, 6), (3, 3)])
def test_the_programs_of_day_know_their_words(
    run: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, calls, printed = calls_of_day(run, tmp_path, folders=(".peer", ".base/bench"))
    assert (status, len(calls)) == (0, count), printed
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for _, *words in calls:
        name = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
        monkeypatch.setattr(sys, "argv", words[1:] if words[0] == "-m" else words)
        with pytest.raises(Parsed):
            importlib.import_module(name).main()


def test_a_step_of_day_that_fails_stops_no_other(tmp_path: Path) -> None:
    status, calls, printed = calls_of_day(2, tmp_path, fails="qwen3-8b --temperature")
    assert (status, len(calls)) == (1, 5), printed
    assert "== 8B: status 3" in printed
    assert "== 0.6B at .base: not there" in printed
    assert "run 2: 1 steps failed" in printed


@pytest.mark.parametrize(("made", "module"), [(".base/bench", "bench"), (".base", "tests.bench")])
def test_an_older_tree_is_measured_wherever_its_bench_is(
    made: str, module: str, tmp_path: Path
) -> None:
    _, calls, printed = calls_of_day(2, tmp_path, folders=(made,))
    (call,) = [words for words in calls if words[0].endswith(".base")]
    assert call[1:3] == ["-m", f"{module}.engine_throughput"], printed
