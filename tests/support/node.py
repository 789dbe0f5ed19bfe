"""Node programs with the clients that tests/clients/node pins, and with this repository's own, as
processes a test talks to."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.process import dying_with_this_process

PINS = Path(__file__).resolve().parents[1] / "clients/node"
REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".penstock/node"
OUR_CLIENT = REPOSITORY / "clients/typescript"
INSTALL_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 110.0


def installed_clients(pins: Path = PINS) -> Path:
    """Returns the directory whose node_modules has the packages that `pins` has a lock file of.

    The first call for a lock file fetches them from the npm registry, into a directory that is
    named by that file and stays for the next run.
    """
    files = [pins / "package.json", pins / "package-lock.json"]

    def install(making: Path) -> None:
        for file in files:
            shutil.copy(file, making)
        _npm(making, "ci")

    return _made_once("", files[1:], install)


def our_client() -> Path:
    """The directory whose node_modules has `penstock`, compiled from the sources as they are now,
    beside the pinned packages, and the compiler `tsc`."""
    clients = installed_clients()
    ours = [file for file in OUR_CLIENT.rglob("*") if file.is_file()]
    files = [file for file in ours if not {"node_modules", "dist"} & set(file.parts)]

    def build(making: Path) -> None:
        package = making / "node_modules/penstock"
        for file in files:
            copy = package / file.relative_to(OUR_CLIENT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        for name in (clients / "node_modules").iterdir():
            if not name.name.startswith("."):
                (making / "node_modules" / name.name).symlink_to(name)
        _npm(package, "ci")
        _npm(package, "run", "build")

    return _made_once("penstock-", [*files, PINS / "package-lock.json"], build)


def _made_once(prefix: str, files: list[Path], make: Callable[[Path], None]) -> Path:
    """Returns a directory that `make` fills, named by the contents of files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    directory = CACHE / f"{prefix}{digest.hexdigest()[:16]}"
    if directory.exists():
        return directory
    CACHE.mkdir(parents=True, exist_ok=True)
    making = CACHE / f"{directory.name}.{os.getpid()}"
    making.mkdir()
    try:
        make(making)
        making.rename(directory)
    except OSError:
        if not directory.exists():  # else another run was faster
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return directory


def _npm(directory: Path, *words: str) -> None:
    options = ["--ignore-scripts", "--no-audit", "--no-fund"] if words == ("ci",) else []
    ended = subprocess.run(
        ["npm", *words, *options],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"npm {' '.join(words)} failed:\n{ended.stdout}{ended.stderr}")


class NodeProgram:
    """`with NodeProgram(name, ...)`: runs tests/clients/node/<name>.mjs, which imports the clients.

    The program gets `arguments` in process.argv (from 1 on), reads cues as lines, and says JSON
    values, one to a line. `home` has the node_modules; by default the pinned clients.
    """

    def __init__(self, name: str, *arguments: str, home: Path | None = None) -> None:
        source = (PINS / f"{name}.mjs").read_text()
        self._process = subprocess.Popen(
            # Given as text, its imports are looked up from the working directory.
            ["node", "--input-type=module", "--eval", source, "--", *arguments],
            cwd=home or installed_clients(),
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


def node_says(name: str, *arguments: str, home: Path | None = None) -> Any:
    """What a program that says one value says."""
    with NodeProgram(name, *arguments, home=home) as program:
        return program.heard()
