"""Images without a Docker engine: buildah builds the repository's Dockerfiles, in chroot isolation.

What is pulled from a registry elsewhere is not here: `python:3.11-slim` is a Debian made by
mmdebstrap, servers of others are this machine's programs in it. The store stays in
`.penstock/images`, so that a second build uses the layers of the first.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
STORE = REPOSITORY / ".penstock" / "images"
BASE = "docker.io/library/python:3.11-slim"
BASE_PACKAGES = ("python3", "python3-venv", "python3-pip", "libpython3-dev", "ca-certificates")
PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
BUILD_TIMEOUT_S = 1800  # of vLLM, beside what else a machine does


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of itself."""

    env: dict[str, str]
    command: list[str]
    user: str
    directory: str
    labels: dict[str, str]
    healthcheck: dict[str, object]
    stop_signal: str
    layers: list[str]


class ImageStore:
    """buildah's images and containers in one folder."""

    def __init__(self, folder: Path = STORE) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # One run at a time. What one that was killed has left goes; its mounts have gone with it.
        self.lock = folder / "lock"
        fcntl.flock(os.open(self.lock, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)  # of this process
        self.buildah("rm", "--all")

    def buildah(self, *arguments: str, timeout_s: float = 120) -> str:
        """Returns what one call printed. Raises RuntimeError with the end of its messages."""
        ended = subprocess.run(
            [
                "buildah",
                *("--root", str(self._folder / "store"), "--runroot", str(self._folder / "run")),
                *("--storage-driver", "overlay"),
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if ended.returncode:
            output = (ended.stdout + ended.stderr)[-3000:]
            raise RuntimeError(
                f"buildah {' '.join(arguments[:3])} ended with {ended.returncode}:\n{output}"
            )
        return ended.stdout.strip()

    def has(self, image: str) -> bool:
        return bool(self.buildah("images", "--quiet", "--filter", f"reference={image}"))

    def make_base(self) -> None:
        """Makes the stand-in for the Dockerfiles' base, where there is none."""
        if self.has(BASE):
            return
        release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
        assert release is not None
        with self._made(BASE, "scratch", ["python3"]) as (_, root):
            subprocess.run(
                [
                    # Nothing here has to survive a power failure.
                    *("mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io"),
                    *(f"--include={','.join(BASE_PACKAGES)}", release[1], str(root)),
                ],
                check=True,
                timeout=BUILD_TIMEOUT_S,
            )
            for managed in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
                managed.unlink()
            (root / "usr/local/bin/python").symlink_to("../../bin/python3")
            authorities = "etc/ssl/certs/ca-certificates.crt"
            shutil.copy(Path("/") / authorities, root / authorities)

    def make_stand_in(
        self,
        image: str,
        programs: Mapping[str, Path],
        command: Sequence[str],
        *,
        prepare: str = "",
        directory: str = "/",
    ) -> None:
        """Makes `image` of the base and programs of this machine, by the names that they have
        there, with the libraries that they load. `prepare` is a line of shell that runs in it."""
        if self.has(image):
            return
        copies = {f"/usr/local/bin/{name}": path for name, path in programs.items()}
        for path in programs.values():
            loaded = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
            libraries = re.findall(r"=> (/\S+)", loaded)
            copies |= {library: Path(library) for library in libraries if "/libc.so" not in library}
        with self._made(image, BASE, command, directory) as (container, root):
            for goal, origin in copies.items():
                inside = root / goal.lstrip("/")
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.unlink(missing_ok=True)  # a link in there may lead out
                shutil.copy(origin, inside)
            if prepare:
                run = ("run", "--isolation", "chroot", "--network", "host", container)
                self.buildah(*run, "--", "sh", "-c", prepare)

    @contextmanager
    def _made(
        self, image: str, source: str, command: Sequence[str], directory: str = "/"
    ) -> Iterator[tuple[str, Path]]:
        """A container of `source` and where its files are, which becomes `image`."""
        container, root = self.mounted(source)
        try:
            yield container, root
            words = json.dumps(list(command))
            config = ("config", "--env", f"PATH={PATH}", "--workingdir", directory)
            self.buildah(*config, "--cmd", words, container)
            self.buildah("commit", "--quiet", container, image)
        finally:
            self.remove(container)

    def build(
        self, image: str, dockerfile: str, args: Mapping[str, str], context: Path = REPOSITORY
    ) -> str:
        """Builds the image, with the settings of this machine's pip and apt; returns what buildah
        printed."""
        given = [
            part for name, value in args.items() for part in ("--build-arg", f"{name}={value}")
        ]
        return self.buildah(
            # Of the two formats Docker's alone has healthchecks.
            *("bud", "--layers", "--format", "docker", "--isolation", "chroot"),
            *("--network", "host", "--pull-never"),
            *_package_settings(self._folder),
            *given,
            *("-f", str(context / dockerfile), "-t", image, str(context)),
            timeout_s=BUILD_TIMEOUT_S,
        )

    def config(self, image: str) -> ImageConfig:
        """Returns what an image says of itself."""
        inspected = json.loads(self.buildah("inspect", "--type", "image", image))
        docker, oci = inspected["Docker"]["config"], inspected["OCIv1"]
        return ImageConfig(
            env=dict(pair.split("=", 1) for pair in docker.get("Env") or []),
            command=[*(docker.get("Entrypoint") or []), *(docker.get("Cmd") or [])],
            user=docker.get("User", ""),
            directory=docker.get("WorkingDir") or "/",
            labels=docker.get("Labels") or {},
            healthcheck=docker.get("Healthcheck") or {},
            stop_signal=docker.get("StopSignal") or "SIGTERM",
            layers=oci["rootfs"]["diff_ids"],
        )

    def mounted(self, image: str) -> tuple[str, Path]:
        """Returns a new container of an image and where its files are."""
        container = self.buildah("from", "--pull-never", image)
        return container, Path(self.buildah("mount", container))

    def remove(self, container: str) -> None:
        self.buildah("rm", container)


def _package_settings(folder: Path) -> list[str]:
    """Returns options that lend a build this machine's settings of pip and apt, as files that are
    mounted while it runs: nothing of them stays in an image."""
    settings: dict[str, str] = {}
    for path in (Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf"):
        if path.exists():
            settings |= re.findall(r"^([a-z-]+)\s*=\s*(.+)$", path.read_text(), re.M)
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            settings[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    conf = folder / "pip.conf"
    lines = (f"{name} = {value}\n" for name, value in sorted(settings.items()))
    conf.write_text("[global]\n" + "".join(lines))
    words = " ".join(settings.values()).replace("file://", " ").split()
    # Directories of packages on this machine, of which an index may be a part.
    local = {Path(*Path(word).parts[:3]) for word in words if word.startswith("/")}
    mounted = {Path("/etc/pip.conf"): conf}
    for path in ("/etc/ssl/certs", "/etc/apt", "/usr/share/keyrings", *sorted(map(str, local))):
        if Path(path).is_dir():
            mounted[Path(path)] = Path(path)
    volumes = (f"{origin}:{goal}:ro" for goal, origin in mounted.items())
    return [part for volume in volumes for part in ("--volume", volume)]
