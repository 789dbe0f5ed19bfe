"""lm-evaluation-harness, as tests/clients/lm_eval pins it, in an environment of its own.

The environment sees our packages (torch, transformers) behind its own; ours never see its.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.pinned_environment import pinned_environment

PINS = Path(__file__).resolve().parents[1] / "clients/lm_eval/requirements.txt"
PROGRAM = PINS.with_name("multiple_choice.py")
ANSWER_TIMEOUT_S = 110.0


def installed_harness() -> Path:
    """Returns the Python of the environment that has the pinned packages. Raises RuntimeError where
    they cannot be fetched."""
    return pinned_environment(PINS, "lm_eval", sees_ours=True) / "bin/python"


def evaluate(
    python: Path, base_url: str, model: str, tokenizer: Path, questions: Path, work: Path
) -> Any:
    """Returns what the harness finds of a file of questions: see PROGRAM."""
    ended = subprocess.run(
        [python, PROGRAM, base_url, model, tokenizer, questions],
        capture_output=True,
        text=True,
        timeout=ANSWER_TIMEOUT_S,
        cwd=work,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(work),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
        },
    )
    if ended.returncode != 0:
        raise AssertionError(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])
