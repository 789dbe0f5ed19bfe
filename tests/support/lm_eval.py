"""lm-evaluation-harness, as tests/clients/lm_eval pins it, in an environment of its own.

The environment sees our packages (torch, transformers) behind its own; ours never see its.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

PINS = Path(__file__).resolve().parents[1] / "clients/lm_eval/requirements.txt"
PROGRAM = PINS.with_name("multiple_choice.py")
CACHE = Path(__file__).resolve().parents[2] / ".penstock/lm_eval"
INSTALL_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 110.0
NO_NETWORK = ("Retrying (", "ConnectionError", "name resolution")  # what pip says then


class NoNetwork(Exception):
    """The packages are not here and cannot be fetched."""


def installed_harness() -> Path:
    """Returns the Python of the environment that has the pinned packages.

    The first call for these pins fetches them, into a directory that stays for the next run. Raises
    NoNetwork, and RuntimeError where pip fails otherwise.
    """
    ours = sysconfig.get_path("purelib")
    key = PINS.read_bytes() + f"{sys.version} {ours}".encode()
    directory = CACHE / hashlib.sha256(key).hexdigest()[:16]
    if directory.exists():
        return directory / "bin/python"
    CACHE.mkdir(parents=True, exist_ok=True)
    making = CACHE / f"{directory.name}.{os.getpid()}"
    venv.create(making, symlinks=True)
    python = making / "bin/python"
    into = ["--python", str(python), "install", "--no-deps", "--no-compile", "-r", str(PINS)]
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *into],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if ended.returncode != 0:
        shutil.rmtree(making)
        if any(word in ended.stderr for word in NO_NETWORK):
            raise NoNetwork(ended.stderr)
        raise RuntimeError(f"pip could not fetch lm-evaluation-harness:\n{ended.stderr}")
    # Last: pip must not take what is there for something that it may replace.
    own = _says(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(own, "ours.pth").write_text(f"{ours}\n", encoding="utf-8")
    try:
        making.rename(directory)
    except OSError:  # another run was faster
        shutil.rmtree(making)
    return directory / "bin/python"


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


def _says(python: Path, code: str) -> str:
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
