"""Node programs with the clients that tests/clients/node pins, as processes a test talks to."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.process import dying_with_this_process

PINS = Path(__file__).resolve().parents[1] / "clients/node"
CACHE = Path(__file__).resolve().parents[2] / ".penstock/node"
INSTALL_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 110.0


def installed_clients(pins: Path = PINS) -> Path:
    """Returns the directory whose node_modules has the packages that `pins` has a lock file of.

    The first call for a lock file fetches them from the npm registry, into a directory that is
    named by that file and stays for the next run.
    """
    lock = (pins / "package-lock.json").read_bytes()
    directory = CACHE / hashlib.sha256(lock).hexdigest()[:16]
    if directory.exists():
        return directory
    CACHE.mkdir(parents=True, exist_ok=True)
    making = CACHE / f"{directory.name}.{os.getpid()}"
    making.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(pins / name, making)
    ended = subprocess.run(
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=making,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if ended.returncode != 0:
        shutil.rmtree(making)
        raise RuntimeError(f"npm could not fetch the clients that are tested:\n{ended.stderr}")
    try:
        making.rename(directory)
    except OSError:  # another run was faster
        shutil.rmtree(making)
    return directory


class NodeProgram:
    """`with NodeProgram(name, ...)`: runs tests/clients/node/<name>.mjs, which imports the clients.

    The program gets `arguments` in process.argv (from 1 on), reads cues as lines, and says JSON
    values, one to a line.
    """

    def __init__(self, name: str, *arguments: str) -> None:
        source = (PINS / f"{name}.mjs").read_text()
        self._process = subprocess.Popen(
            # Given as text, its imports are looked up from the working directory.
            ["node", "--input-type=module", "--eval", source, "--", *arguments],
            cwd=installed_clients(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dying_with_this_process(),
        )
        self._complaints: list[str] = []
        self._reader = threading.Thread(target=self._read_complaints, daemon=True)
        self._reader.start()
        self._guard = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        self._guard.start()

    def heard(self) -> Any:
        """The next value that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._reader.join(5)
            raise AssertionError(f"node said nothing more:\n{''.join(self._complaints)}")
        return json.loads(line)

    def cue(self, word: str = "go") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _read_complaints(self) -> None:
        assert self._process.stderr is not None
        self._complaints.extend(self._process.stderr)

    def __enter__(self) -> NodeProgram:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        code = self._process.wait(ANSWER_TIMEOUT_S)
        self._guard.cancel()
        self._process.stdout.close()
        self._reader.join(5)
        assert self._process.stderr is not None
        self._process.stderr.close()
        if kind is None:
            assert code == 0, "".join(self._complaints)


def node_says(name: str, *arguments: str) -> Any:
    """What a program that says one value says."""
    with NodeProgram(name, *arguments) as program:
        return program.heard()
