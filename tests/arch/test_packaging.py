"""The images' own commands work in clean environments."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from penstock.launcher.redis_server import PrivateServer
from shared.process import dying_with_this_process
from tests.support.vllm_environment import vllm_python
from tools.lock import normalized, pins

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "dockerfile", ["api/Dockerfile", "worker/Dockerfile", "worker/Dockerfile.vllm"]
)
def test_what_a_service_writes_into_volumes_belongs_to_its_user(dockerfile: str) -> None:
    """A new volume takes its owner from the directory in the image; one that is not there, and
    every directory above it that Docker has to make, is root's."""
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    text = re.sub(r"\\\n\s*", " ", (REPOSITORY / dockerfile).read_text())
    (user,) = re.findall(r"^USER (\S+)", text, re.M)
    made = re.findall(r"install -d (.+?)(?: &&|$)", text, re.M)
    owned = set()
    for options_and_paths in made:
        parts = shlex.split(options_and_paths)
        if parts[parts.index("-o") + 1] == user.partition(":")[0]:
            owned |= {part for part in parts if part.startswith("/")}
    named = [
        service
        for service in services.values()
        if service.get("build", {}).get("dockerfile") == dockerfile
    ]
    assert named
    targets = {
        volume.split(":")[1]
        for service in named
        for volume in service["volumes"]
        if not volume.endswith(":ro")
    }
    assert targets == owned
    for target in targets:
        above = {str(parent) for parent in Path(target).parents}
        # The home is the user's by --create-home, the rest is there in every image.
        assert above <= {"/", "/var", "/var/lib", "/var/lib/penstock", "/home", "/home/penstock"}


class Image:
    """A Dockerfile's COPY lines, the RUN lines that are Python's, and its CMD, carried out below a
    folder, all stages in one clean virtual environment."""

    # What the Dockerfiles name from the root.
    PATHS = re.compile(r"(?<![\w./])/(?=(?:srv|code|build)\b|\w+\.(?:txt|toml))")
    OURS = ("RUN pip ", "RUN python ", "RUN grep ")

    def __init__(self, dockerfile: Path, root: Path) -> None:
        self._text = re.sub(r"\\\n\s*", " ", dockerfile.read_text())
        self._root = root / "files"
        self._venv = root / "venv"
        self._directory = self._root
        self._root.mkdir(parents=True)

    def build(self) -> Image:
        """Carries all of it out but for the RUN line that makes vLLM's environment."""
        subprocess.run([sys.executable, "-m", "venv", str(self._venv)], check=True, timeout=120)
        for line in self._text.splitlines():
            if not self._place(line) and line.startswith(self.OURS):
                command = line.removeprefix("RUN ").replace("--no-cache-dir", "-q")
                subprocess.run(
                    ["bash", "-c", self.PATHS.sub(f"{self._root}/", command)],
                    check=True,
                    cwd=self._directory,
                    # torch's files take half a minute to compile
                    env={
                        **os.environ,
                        "PATH": f"{self._venv}/bin:{os.environ['PATH']}",
                        "PIP_NO_COMPILE": "1",
                    },
                    timeout=800,
                )
        shutil.rmtree(self._root / "build")  # what was installed must stand alone
        return self

    def _place(self, line: str) -> bool:
        """Carries out what says where files are; returns whether the line does."""
        instruction, _, rest = line.partition(" ")
        if instruction == "WORKDIR":
            self._directory = self._root / rest.lstrip("/")
            self._directory.mkdir(parents=True, exist_ok=True)
        elif instruction == "FROM":
            self._directory = self._root
        elif instruction == "COPY":
            *sources, target = shlex.split(rest)
            of = self._root if sources[0].startswith("--from=") else REPOSITORY
            for source in sources:
                if not source.startswith("--from="):
                    self._copy(of / source.lstrip("/"), target)
        return instruction in ("WORKDIR", "FROM", "COPY")

    def _copy(self, origin: Path, target: str) -> None:
        goal = (self._root if target.startswith("/") else self._directory) / target.lstrip("/")
        if target.endswith("/"):
            goal.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(origin, goal, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy(origin, goal)

    def environment_command(self) -> tuple[Path, list[str]]:
        """Returns the command that makes vLLM's environment, and a folder with the files that are
        there when it runs."""
        text = self._text[self._text.rindex("\nFROM ") :]
        for line in text.splitlines():
            if "vllm_environment" in line and line.startswith("RUN "):
                words = shlex.split(line.partition(" python ")[2])
                return self._directory, [word.replace("${VLLM_DEVICE}", "cpu") for word in words]
            if "--from=" not in line:
                self._place(line)
        raise AssertionError("no such line")

    def python(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            cwd="/",
            env=self.environment(**env),
            timeout=120,
        )

    def environment(self, **env: str) -> dict[str, str]:
        (given,) = re.findall(r"PYTHONPATH=(\S+)", self._text)
        code = given.replace("/srv/", f"{self._root}/srv/")
        return {"PATH": "/usr/bin:/bin", "HOME": str(self._venv), "PYTHONPATH": code, **env}

    def command(self, *arguments: str) -> list[str]:
        return [str(self._venv / "bin/python"), *arguments]

    def start_command(self) -> list[str]:
        (command,) = re.findall(r"^CMD (\[.*\])", self._text, re.M)
        words: list[str] = json.loads(command)
        assert words[0] == "python"
        return words[1:]


@contextmanager
def built(dockerfile: str) -> Iterator[Image]:
    """An image, on the repository's disk: the worker's takes 5 GB, and the temporary folder
    may be memory. It is removed in any case."""
    (REPOSITORY / ".penstock").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="image-", dir=REPOSITORY / ".penstock") as root:
        yield Image(REPOSITORY / dockerfile, Path(root)).build()


@pytest.fixture(scope="module")
def api_image() -> Iterator[Image]:
    with built("api/Dockerfile") as image:
        yield image


@pytest.mark.promise("HTTP: frontends hold no model")
@pytest.mark.packages
def test_the_api_extra_alone_imports_the_app_and_brings_no_torch(api_image: Image) -> None:
    code = (
        "import importlib.util as u, sys, api.main;"
        "assert u.find_spec('torch') is None and u.find_spec('worker') is None;"
        "assert 'torch' not in sys.modules"
    )
    ended = api_image.python("-c", code)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.packages
def test_the_api_image_starts_and_says_what_is_wrong_with_a_setting(api_image: Image) -> None:
    ended = api_image.python(
        *api_image.start_command(), PENSTOCK_REDIS_URL="nonsense://", PENSTOCK_PORT="8000"
    )
    assert ended.returncode == 2, ended.stderr
    assert "PENSTOCK_REDIS_URL" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture(scope="module")
def worker_image() -> Iterator[Image]:
    with built("worker/Dockerfile") as image:
        yield image


@pytest.mark.packages
def test_the_worker_image_installs_and_says_what_is_wrong_with_a_setting(
    worker_image: Image,
) -> None:
    image = worker_image
    ended = image.python(
        *image.start_command(),
        PENSTOCK_REDIS_URL="redis://127.0.0.1:1/0",
        PENSTOCK_MODEL="/no/such/model",
    )
    assert ended.returncode == 2, ended.stderr
    assert "PENSTOCK_MODEL" in ended.stderr
    assert "Traceback" not in ended.stderr
    found = image.python(
        "-c",
        "import importlib.util as u, torch, worker.main;"
        "print(u.find_spec('fastapi'), torch.__version__)",
    )
    assert found.stdout.startswith("None 2.13"), found.stdout + found.stderr


@pytest.mark.parametrize(
    ("lock", "pinned"),
    [
        ("requirements.lock", "constraints.txt"),
        ("penstock/launcher/constraints-vllm.txt", "penstock/launcher/constraints-vllm.txt"),
    ],
)
def test_every_pinned_package_but_torch_has_hashes(lock: str, pinned: str) -> None:
    wanted = {n: line.split()[0] for n, line in pins((REPOSITORY / pinned).read_text()).items()}
    found = {}
    for line in (REPOSITORY / lock).read_text().splitlines():
        if not line.startswith(("#", "torch==")):
            assert re.search(r" --hash=sha256:[0-9a-f]{64}( |$)", line), line
            found[normalized(line.partition("==")[0])] = line.split()[0]
    del wanted["torch"]
    assert found == wanted, "make lock"


def test_the_lock_has_all_that_each_extra_requires() -> None:
    """As the packages that are installed here say themselves, and for this platform."""
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()[2:]
    for group, extra in (
        ("server|api|worker-torch", "worker"),
        ("dev|otel|api", "dev"),
        ("test-clients|api", "test-clients"),
    ):
        locked = {normalized(each.partition("==")[0]) for each in lines if _is_of(each, group)}
        missing = _closure("penstock", frozenset({extra})) - locked - {"penstock", "torch"}
        assert not missing, f"make lock: {extra} lacks {missing}"


def _is_of(line: str, groups: str) -> bool:
    return not set(groups.split("|")).isdisjoint(line.rpartition("# ")[2].split())


def _closure(name: str, extras: frozenset[str]) -> set[str]:
    """Returns the names of all that a distribution requires with these extras, and its own."""
    done: set[tuple[str, frozenset[str]]] = set()
    waiting = [(normalized(name), extras)]
    while waiting:
        if (one := waiting.pop()) in done:
            continue
        done.add(one)
        for line in importlib.metadata.requires(one[0]) or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *one[1])):
                waiting.append((normalized(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in done}


def test_the_files_that_make_vllms_environment_suffice_alone(tmp_path: Path) -> None:
    """They come first in the image, so that no other change makes it fetch gigabytes again."""
    context, words = Image(REPOSITORY / "worker/Dockerfile.vllm", tmp_path).environment_command()
    *command, directory = words
    assert directory == "/opt/vllm"
    ended = subprocess.run(
        [sys.executable, *command, str(tmp_path / "vllm")],
        cwd=context,
        env={"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=120,
    )
    # As far as the first package, which no index is there for.
    assert ended.returncode == 1, ended.stderr
    assert "step 2, its packages by their hashes, ended with status 1" in ended.stderr
    assert "No matching distribution found for agent-detector==" in ended.stderr


@pytest.mark.packages
@pytest.mark.vllm
def test_the_vllm_image_serves_without_torch_of_its_own(tmp_path: Path) -> None:
    text = (REPOSITORY / "worker/Dockerfile.vllm").read_text()
    assert "PENSTOCK_ENGINE_PYTHON=/opt/vllm/bin/python" in text
    python = vllm_python()
    assert python is not None, "make vllm"
    with built("worker/Dockerfile.vllm") as image, PrivateServer(tmp_path / "redis") as server:
        found = image.python("-c", "import importlib.util as u; print(u.find_spec('torch'))")
        assert found.stdout == "None\n", found.stderr
        with (tmp_path / "log").open("w+") as log:
            worker = subprocess.Popen(
                image.command(*image.start_command()),
                cwd="/",
                env=image.environment(
                    HOME=str(tmp_path),
                    PENSTOCK_REDIS_URL=server.url,
                    PENSTOCK_ENGINE="vllm",
                    PENSTOCK_ENGINE_PYTHON=python,
                    PENSTOCK_VLLM_ARGS='{"enforce_eager": true}',
                    PENSTOCK_KV_CACHE_MEMORY_GB="0.1",
                    PENSTOCK_NUM_THREADS="1",
                    PENSTOCK_LOG_FORMAT="text",
                ),
                stdout=log,
                stderr=log,
                preexec_fn=dying_with_this_process(),
            )
            try:
                deadline = time.monotonic() + 300
                while "the worker is ready" not in (tmp_path / "log").read_text():
                    assert worker.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                    time.sleep(0.2)
            finally:
                worker.terminate()
                assert worker.wait(60) == 0
