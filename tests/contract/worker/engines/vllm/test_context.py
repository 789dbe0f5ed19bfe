"""vLLM takes the context that worker.engines.vllm.options gives it, and derives no other."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.vllm_environment import vllm_python
from worker.engines.vllm.options import context_args
from worker.model.config.model_config import ModelConfig

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_python() is None, reason="no interpreter with vLLM"),
]

PROGRAM = """
import json, sys
from vllm import EngineArgs

plans = json.load(sys.stdin)
made = {
    name: EngineArgs(skip_tokenizer_init=True, **args).create_model_config().max_model_len
    for name, args in plans.items()
}
print(json.dumps(made))
"""
ORIGINAL = {"original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
} | ORIGINAL
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "yarn": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0} | ORIGINAL}),
    "window": ("mistral", {}),
    "two rotations": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "left out": ("mistral", {"max_position_embeddings": None}),
}


def test_both_engines_serve_the_same_context(tmp_path: Path) -> None:
    plans, ours = {}, {}
    for name, (family, members) in CHECKPOINTS.items():
        path = make_checkpoint(tmp_path / name, family, config_style="v4", **members)
        if members.get("max_position_embeddings", 0) is None:
            config = json.loads((path / "config.json").read_text())
            del config["max_position_embeddings"]
            (path / "config.json").write_text(json.dumps(config))
        plans[name] = {"model": str(path), **context_args(str(path), None)}
        ours[name] = ModelConfig.from_directory(path).context_length
    done = subprocess.run(
        [str(vllm_python()), "-c", PROGRAM],
        input=json.dumps(plans),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "VLLM_CONFIGURE_LOGGING": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ours
