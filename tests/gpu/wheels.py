"""The wheels that the stages `service` and `vllm` of gpu-bench need on a bare machine.

    make gpu-wheels        # where there is a network: into .whl/, some 30 MB

The GPU machine has Linux for x86-64, Python 3.12, torch, Triton and numpy, and no network: all else
that serves is downloaded beforehand at this project's pins, and carried with the tree. There
gpu-bench puts it beside itself, outside of any environment. Standard library only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".whl"
PACKAGES = ROOT / ".penstock" / "gpu-packages"
PYTHON = "3.12"
# Every tag that a system with glibc 2.35 accepts; pip is told each.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)] + ["manylinux2014_x86_64"]
# What the machine has, or what our native families do without.
LEFT_OUT = {"torch", "numpy", "transformers", "accelerate", "fakeredis"}
MOST_BYTES = 45 << 20  # with the tree under the 60 MiB that may be carried


def requirements() -> list[str]:
    """Returns what the service and the client of the bench import, as pyproject.toml has it."""
    extras = project()["optional-dependencies"]
    wanted = [
        *project()["dependencies"],
        *extras["api"],
        *extras["worker-torch"],
        *extras["server"],
    ]
    wanted += [one for one in extras["bench"] if one.startswith("aiohttp")]
    return [one for one in wanted if name_of(one) not in LEFT_OUT]


def project() -> dict[str, Any]:
    """Returns the table [project] of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found["project"]  # type: ignore[no-any-return]


def name_of(requirement: str) -> str:
    """Returns the package's name of a requirement such as `redis>=8.0,<9`."""
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, requirement
    return match[0]


def download() -> int:
    """Fills .whl/ anew; returns pip's exit status, or 1 where it is too large to be carried."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    words = ["--only-binary=:all:", "--python-version", PYTHON, "-d", str(WHEELS)]
    words += [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    status = subprocess.run(
        [*pip, *words, "-c", str(ROOT / "constraints.txt"), *requirements()], check=False
    ).returncode
    if status:
        return status
    size = sum(path.stat().st_size for path in WHEELS.iterdir())
    print(f"{len(list(WHEELS.iterdir()))} wheels, {size / 2**20:.0f} MiB: {WHEELS}")
    if size > MOST_BYTES:
        print(f"they are more than {MOST_BYTES >> 20} MiB")
        return 1
    return 0


def unpacked(wheels: Path = WHEELS, packages: Path = PACKAGES) -> Path | None:
    """Returns the directory of the packages, unpacked from the wheels.

    None where there are no wheels, or they are of another Python: then what is installed is used.
    Raises CalledProcessError.
    """
    if not wheels.is_dir() or f"{sys.version_info[0]}.{sys.version_info[1]}" != PYTHON:
        return None
    shutil.rmtree(packages, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words = ["--no-index", "--no-deps", "--no-compile", "--target", str(packages)]
    subprocess.run([*pip, *words, *sorted(map(str, wheels.glob("*.whl")))], check=True)
    # Frontends say their version, which a tree that nobody installed does not have.
    version = project()["version"]
    metadata = packages / f"penstock-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: penstock\nVersion: {version}\n"
    )
    return packages


if __name__ == "__main__":
    sys.exit(download())
