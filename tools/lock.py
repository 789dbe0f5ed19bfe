"""Writes the hashes of all packages that are installed: requirements.lock and constraints-vllm.txt.

    python -m tools.lock

Versions are those of constraints.txt and of constraints-vllm.txt: change one there, then run this.
It asks the package index by uv, which lists the hashes of every file of a version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints.txt"
LOCK = ROOT / "requirements.lock"
VLLM_PINS = ROOT / "penstock/launcher/constraints-vllm.txt"
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
LINUX = frozenset(PLATFORMS[:2])
# Its builds differ between indexes: it is installed by its version, after what it requires.
TORCH = "torch"
TORCH_REQUIRES = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy")
GROUPS = ("api", "server", "worker-torch", "otel", "dev", "test-clients", "bench", "lock")
_HEAD = """\
# Written by `make lock` from constraints.txt: each package with the hashes of its files, and the
# extras of pyproject.toml that need it; `build` is what builds the package itself.
"""


def pins(text: str) -> dict[str, str]:
    """Returns the lines `name==version`, with a marker where they have one, by normalized name."""
    found = re.findall(r"^([\w.-]+)(==[^\s;]+(?: *; *[^#\n]*?)?)(?= *(?:--hash|#|$))", text, re.M)
    return {normalized(name): f"{normalized(name)}{rest}" for name, rest in found}


def normalized(name: str) -> str:
    """Returns a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashed(text: str) -> dict[str, str]:
    """Returns each pin but torch's with the hashes of all its files, by name. Raises
    CalledProcessError."""
    wanted = {name: line for name, line in pins(text).items() if name != TORCH}
    found = {}
    listed = _uv(wanted.values(), "--no-deps", "--generate-hashes", "--universal")
    for block in re.split(r"\n(?=\S)", listed):
        name = normalized(block.partition("==")[0])
        hashes = re.findall(r"--hash=\S+", block)
        found[name] = " ".join([wanted[name], *hashes])
    return found


def needed(requirements: Iterable[str], constraints: str) -> dict[str, str]:
    """Returns the markers of all that the requirements need, by name; "": everywhere. Raises
    CalledProcessError."""
    platforms: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pins").write_text("\n".join(pins(constraints).values()))
        (Path(folder) / "without").write_text(f"{TORCH} ; sys_platform == 'none'\n")
        words = ["-c", f"{folder}/pins", "--override", f"{folder}/without"]
        for platform in PLATFORMS:
            place = ["--python-version", "3.11", "--python-platform", platform]
            for line in _uv(requirements, *words, *place).splitlines():
                platforms.setdefault(normalized(line.partition("==")[0]), set()).add(platform)
    return {
        name: "sys_platform == 'linux'" if found <= LINUX else ""
        for name, found in platforms.items()
    }


def _uv(requirements: Iterable[str], *words: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{line}\n" for line in requirements)
        file.flush()
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
        command += ["--no-annotate", *words, file.name]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Writes both files; returns the exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    base = project["project"]["dependencies"]
    wanted = {"build": list(project["build-system"]["requires"])}
    for group in GROUPS:
        wanted[group] = [*base, *(line for line in extras[group] if "penstock[" not in line)]
    wanted["worker-torch"] += TORCH_REQUIRES
    constraints = PINS.read_text()
    groups = {name: needed(lines, constraints) for name, lines in wanted.items()}
    text = _HEAD
    for name, line in sorted(hashed(constraints).items()):
        needing = [group for group, names in groups.items() if name in names]
        marker = next((groups[group][name] for group in needing), "")
        pin, _, hashes = line.partition(" ")
        text += f"{pin}{' ; ' + marker if marker else ''} {hashes}  # {' '.join(needing)}\n"
        if not needing:
            print(f"{name} is pinned, and nothing needs it", file=sys.stderr)
    LOCK.write_text(text)
    vllm = VLLM_PINS.read_text()
    lines = [line for line in vllm.splitlines() if line.startswith("#")]
    lines += [pins(vllm)[TORCH], *(line for _, line in sorted(hashed(vllm).items()))]
    VLLM_PINS.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
