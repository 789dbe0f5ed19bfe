"""Load tools run to their end and count every request and token.

They are GuideLLM and the benchmark clients of vLLM and SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.pinned_environment import pinned_environment
from tests.support.service_fixtures import processes_url
from tests.support.service_processes import MODEL
from tests.support.vllm_environment import vllm_python
from worker.settings import DEMO_CHECKPOINT

pytestmark = pytest.mark.packages
PINS = Path(__file__).with_name("load_tools")
NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 6, 24, 8
TIMEOUT_S = 150.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


base_url = processes_url(lambda: DEMO_CHECKPOINT, RUNNER="model", DEVICE="cpu", DTYPE="float32")


def run(command: list[str | Path], home: Path) -> str:
    """Runs a tool to its end. Returns what it prints; AssertionError where it fails."""
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        cwd=home,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
        },
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_guidellm_completes_every_request(base_url: str, tmp_path: Path, path: str) -> None:
    program = pinned_environment(PINS / "guidellm.txt", "guidellm", sees_ours=True)
    report = tmp_path / "report.json"
    command: list[str | Path] = [program / "bin/python", "-m", "guidellm", "run"]
    command += ["--backend", f"kind=openai_http,target={base_url},model={MODEL}"]
    command[-1] = f"{command[-1]},request_format={path}"
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={DEMO_CHECKPOINT}"]
    sizes = f"prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command += ["--data", f"kind=synthetic_text,{sizes}"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    run(command, tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert totals["successful"] == totals["total"] > 0
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["prompt_tokens"] >= INPUT_TOKENS
        assert request["time_to_first_token_ms"] > 0


@pytest.mark.vllm
@pytest.mark.parametrize(("backend", "path"), [("openai-chat", CHAT), ("openai", COMPLETIONS)])
def test_vllm_s_client_completes_every_request(
    base_url: str, tmp_path: Path, backend: str, path: str
) -> None:
    python = vllm_python()
    assert python is not None, "make vllm"
    report = tmp_path / "report.json"
    command: list[str | Path] = [python, PINS / "vllm_bench.py", "--backend", backend]
    command += ["--base-url", base_url, "--endpoint", path, "--model", MODEL]
    command += ["--tokenizer", DEMO_CHECKPOINT, "--dataset-name", "random"]
    command += ["--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    command += ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "2", "--ignore-eos"]
    command += ["--save-result", "--save-detailed", "--result-filename", report]
    run(command, tmp_path)
    result = json.loads(report.read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
    assert result["output_lens"] == [OUTPUT_TOKENS] * NUM_REQUESTS
    assert not any(result["errors"])


@pytest.mark.parametrize("backend", ["vllm-chat", "vllm"])
def test_sglang_s_client_completes_every_request(
    base_url: str, tmp_path: Path, backend: str
) -> None:
    """It takes each line of a stream as JSON: a comment before the first token would end it."""
    environment = pinned_environment(PINS / "sglang.txt", "sglang", sees_ours=True)
    (program,) = environment.glob("lib/python*/site-packages/sglang/bench_serving.py")
    report = tmp_path / "report.jsonl"
    command: list[str | Path] = [environment / "bin/python", "-P", program, "--backend", backend]
    command += ["--base-url", base_url, "--model", MODEL, "--tokenizer", DEMO_CHECKPOINT]
    command += ["--dataset-name", "random-ids", "--random-range-ratio", "1.0"]
    command += ["--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    command += ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "2"]
    command += ["--output-file", report, "--output-details"]
    run(command, tmp_path)
    result = json.loads(report.read_text())
    assert result["completed"] == NUM_REQUESTS
    assert result["output_lens"] == [OUTPUT_TOKENS] * NUM_REQUESTS
    assert not any(result["errors"])
