"""Programs with the agent frameworks that tests/clients/frameworks pins.

They run in virtual environments of their own, named by their files of pins: their packages want
other versions of what ours use, and not all of them agree on one of OpenAI's SDK.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.pinned_environment import INSTALL_TIMEOUT_S, pinned_environment

PINS = Path(__file__).resolve().parents[1] / "clients/frameworks"
ANSWER_TIMEOUT_S = 300.0
# What would speak to anybody but the service under test fails at once.
NOWHERE = "http://127.0.0.1:9"


def installed_frameworks(environment: str) -> Path:
    """Returns the directory of a virtual environment that has the packages of a file of pins."""
    return pinned_environment(PINS / f"{environment}.txt", "frameworks")


def complaints_about_pins(environment: str) -> str:
    """Returns what is wrong with a file of pins: "" where it has all that its `.in` file asks for,
    in those versions, and all that these packages need, in versions that they take."""
    pins = set((PINS / f"{environment}.txt").read_text().split())
    requested = re.sub(r"#.*|\[.*]", "", (PINS / f"{environment}.in").read_text()).split()
    python = installed_frameworks(environment) / "bin/python"
    checked = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "check"],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    missing = [f"{pin} is not in it\n" for pin in requested if pin not in pins]
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


def outcome(result: dict[str, Any], case: str) -> Any:
    """Returns what a case tells; fails with its traceback where it raised."""
    value = result[case]
    if isinstance(value, dict) and "raised" in value:
        raise AssertionError(f"{case}:\n{value['raised']}")
    return value
