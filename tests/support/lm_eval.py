"""lm-evaluation-harness, as tests/clients/lm_eval pins it, in an environment of its own.

The environment sees our packages (torch, transformers) behind its own; ours never see its.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.pinned_environment import pinned_environment

PINS = Path(__file__).resolve().parents[1] / "clients/lm_eval/requirements.txt"
PROGRAM = PINS.with_name("evaluate.py")
ANSWER_TIMEOUT_S = 110.0


def installed_harness() -> Path:
    """Returns the Python of the environment that has the pinned packages. Raises RuntimeError where
    they cannot be fetched."""
    return pinned_environment(PINS, "lm_eval", sees_ours=True) / "bin/python"


def evaluate(
    python: Path,
    kind: str,
    arguments: dict[str, Any],
    questions: list[dict[str, object]],
    tasks: Sequence[str],
    work: Path,
) -> Any:
    """Returns the scores and responses of the harness's model `kind`: see PROGRAM, which reads the
    questions from a file below `work`."""
    file = work / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    ended = subprocess.run(
        [python, PROGRAM, kind, json.dumps(arguments), file, *tasks],
        capture_output=True,
        text=True,
        timeout=ANSWER_TIMEOUT_S,
        cwd=work,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(work),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENAI_API_KEY": "none",
            "NO_PROXY": "127.0.0.1",
        },
    )
    if ended.returncode != 0:
        raise AssertionError(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def client_arguments(url: str, model: str, tokenizer: Path) -> dict[str, Any]:
    """Returns the arguments of the harness's clients, `local-completions` and its like for chat."""
    return {
        "base_url": url,
        "model": model,
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 3,
        "max_retries": 1,
    }
