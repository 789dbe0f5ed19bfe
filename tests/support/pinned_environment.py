"""Virtual environments with the packages of a file of pins, for programs that are clients in tests.

Their packages want other versions of what ours use: ours never see them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".penstock"
INSTALL_TIMEOUT_S = 600.0


def pinned_environment(
    pins: Path, name: str, *, sees_ours: bool = False, for_any_python: bool = False
) -> Path:
    """Returns the directory of a virtual environment that has the packages of `pins`.

    The first call for the content of `pins` fetches them, into a directory below CACHE / `name`
    that stays for the next run. `sees_ours`: it has our packages (torch, transformers) behind its
    own. `for_any_python`: packages that name newer Pythons than ours are installed too. Raises
    RuntimeError where pip fails.
    """
    ours = sysconfig.get_path("purelib")
    key = pins.read_bytes() + sys.version.encode() + (f" {ours}".encode() if sees_ours else b"")
    directory = CACHE / name / hashlib.sha256(key).hexdigest()[:16]
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    making = directory.with_name(f"{directory.name}.{os.getpid()}")
    venv.create(making, symlinks=True)
    python = making / "bin/python"
    into = ["--python", str(python), "install", "--no-deps", "--no-compile", "-r", str(pins)]
    if for_any_python:
        into.append("--ignore-requires-python")
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *into],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if ended.returncode != 0:
        shutil.rmtree(making)
        raise RuntimeError(f"pip could not fetch the packages of {pins.name}:\n{ended.stderr}")
    if sees_ours:  # last: pip must not take what is there for something that it may replace
        (_own_packages(python) / "ours.pth").write_text(f"{ours}\n", encoding="utf-8")
    try:
        making.rename(directory)
    except OSError:  # another run was faster
        shutil.rmtree(making)
    return directory


def _own_packages(python: Path) -> Path:
    """Returns where the environment of `python` has its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    printed = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return Path(printed.strip())
