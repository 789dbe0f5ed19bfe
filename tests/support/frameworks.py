"""Programs with the agent frameworks that tests/clients/frameworks pins.

They run in virtual environments of their own, named by their files of pins: their packages want
other versions of what ours use, and not all of them agree on one of OpenAI's SDK.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

PINS = Path(__file__).resolve().parents[1] / "clients/frameworks"
CACHE = Path(__file__).resolve().parents[2] / ".penstock/frameworks"
INSTALL_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 300.0
# What would speak to anybody but the service under test fails at once.
NOWHERE = "http://127.0.0.1:9"


def installed_frameworks(environment: str) -> Path:
    """Returns the directory of a virtual environment that has the packages of a file of pins.

    The first call for a file fetches them, into a directory that is named by its content and stays
    for the next run.
    """
    pins = PINS / f"{environment}.txt"
    digest = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:16]
    directory = CACHE / digest
    if directory.exists():
        return directory
    CACHE.mkdir(parents=True, exist_ok=True)
    making = CACHE / f"{digest}.{os.getpid()}"
    venv.create(making, symlinks=True)
    into = ["--python", str(making / "bin/python"), "install", "--no-deps", "--no-compile"]
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *into, "-r", pins],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if ended.returncode != 0:
        shutil.rmtree(making)
        raise RuntimeError(f"pip could not fetch the frameworks that are tested:\n{ended.stderr}")
    try:
        making.rename(directory)
    except OSError:  # another run was faster
        shutil.rmtree(making)
    return directory


def complaints_about_pins(environment: str) -> str:
    """Returns what is wrong with a file of pins: "" where it has all that its `.in` file asks for,
    in those versions, and all that these packages need, in versions that they take."""
    pins = set((PINS / f"{environment}.txt").read_text().split())
    asked = re.sub(r"#.*|\[.*]", "", (PINS / f"{environment}.in").read_text()).split()
    python = installed_frameworks(environment) / "bin/python"
    checked = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "check"],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    missing = [f"{pin} is not in it\n" for pin in asked if pin not in pins]
    return "".join([*missing, checked.stdout if checked.returncode else ""])


def framework_says(environment: str, name: str, base_url: str, model: str) -> dict[str, Any]:
    """Runs tests/clients/frameworks/<name>.py against a service; returns what its cases tell."""
    python = installed_frameworks(environment) / "bin/python"
    kept = {"PATH", "HOME", "LANG", "TMPDIR"}
    ended = subprocess.run(
        [python, PINS / f"{name}.py", base_url, model],
        env={
            **{key: value for key, value in os.environ.items() if key in kept},
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
            "PYTHONPYCACHEPREFIX": str(python.parents[1] / "pycache"),
        },
        capture_output=True,
        text=True,
        timeout=ANSWER_TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


def outcome(told: dict[str, Any], case: str) -> Any:
    """Returns what a case tells; fails with its traceback where it raised."""
    value = told[case]
    if isinstance(value, dict) and "raised" in value:
        raise AssertionError(f"{case}:\n{value['raised']}")
    return value
