"""pip, with a sign of life while it unpacks.

    python -m penstock.launcher.install -e .

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

# Modules are compiled when they are first imported, which most of them never are: that is a quarter
# of the time of an installation.
PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile")
TELL_S = 5.0  # between two progress lines while pip unpacks
TELL_BYTES = 20_000_000  # less than this is no news


def say(sentence: str) -> None:
    """Prints one line at the terminal."""
    sys.stderr.write(f"penstock: {sentence}\n")
    sys.stderr.flush()


def drop_half_installed(packages: Path) -> None:
    """Removes the metadata of packages whose install was interrupted: pip writes RECORD last, and
    takes a package without it for installed."""
    for metadata in packages.glob("*.dist-info"):
        if not (metadata / "RECORD").exists():
            shutil.rmtree(metadata)


def install(words: Sequence[str]) -> int:
    """Runs `pip install` with `words` for this interpreter; returns the exit status.

    pip shows what it fetches, but unpacks in silence, for a minute and longer: meanwhile the growth
    of the packages is printed.
    """
    packages = Path(sysconfig.get_path("purelib"))
    if sys.prefix != sys.base_prefix:  # Debian's own packages have no RECORD
        drop_half_installed(packages)
    told = size_of(packages)
    with subprocess.Popen([*PIP, *words]) as pip:
        while True:
            try:
                return pip.wait(TELL_S)
            except subprocess.TimeoutExpired:
                size = size_of(packages)
            except KeyboardInterrupt:  # pip has it too, and ends tidily
                pip.wait()
                say("stopped; the next start resumes the installation")
                return 128 + signal.SIGINT
            if size - told > TELL_BYTES:
                say(f"{size / 1e9:.1f} GB are unpacked")
                told = size


def size_of(directory: Path) -> int:
    """Returns the bytes of all files below; 0 without any."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip renames what it has written
                continue
    return total


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
