"""The wheel: what is in it, and that it serves when it is installed alone.

It is installed into an environment of its own, which finds the packages that it requires among
those of the tests. `test_a_clean_environment_has_all_that_the_worker_extra_promises` installs
these, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from shared.process import dying_with_this_process
from tests.support.launched import free_port
from tests.support.variables import with_prefix

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = ("api", "worker", "shared")
pytestmark = [pytest.mark.packages, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(REPOSITORY)],
        check=True,
        timeout=300,
    )
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_has_one_package_with_all_rooms_and_their_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"penstock"}
    for room in (*ROOMS, "penstock"):
        for path in (REPOSITORY / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = str(path.relative_to(REPOSITORY))
                place = name if room == "penstock" else f"penstock/packages/{name}"
                assert place in names, path


class Installed:
    """The wheel in a virtual environment of its own, and a directory in which somebody works who
    has packages named like ours."""

    def __init__(self, root: Path) -> None:
        self.environment = root / "environment"
        self.directory = root / "work"
        self.python = str(self.environment / "bin/python")
        self.command = [str(self.environment / "bin/penstock")]
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(self.environment)],
            check=True,
            timeout=120,
        )
        self.site_packages = next(self.environment.glob("lib/python3*/site-packages"))
        for name in (*ROOMS, "packages"):
            (self.directory / name).mkdir(parents=True)
            wrong = f"raise RuntimeError('{name} of the current directory was imported')\n"
            (self.directory / name / "__init__.py").write_text(wrong)

    def install(self, *words: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", *words]
        environment = {**os.environ, "PIP_NO_COMPILE": "1"}
        subprocess.run(pip, check=True, env=environment, timeout=800)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *words],
            cwd=self.directory,
            env=self.variables(env),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "HOME": str(self.directory), **with_prefix(more)}

    def first_token_of_up(self, **env: str) -> str:
        """Runs `penstock up` until it has streamed one token; returns what it printed."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        log = self.directory / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*self.command, "up"],
                cwd=self.directory,
                env=self.variables({"PORT": str(port), "OMP_NUM_THREADS": "1", **env}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=dying_with_this_process(),
            )
        try:
            deadline = time.monotonic() + 240
            while "Stop: Ctrl-C" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            question = [{"role": "user", "content": "What is Penstock?"}]
            body = {"model": "penstock-demo", "messages": question, "max_tokens": 8}
            with httpx.stream(
                "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60
            ) as answer:
                events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
            assert "".join(delta.get("content") or "" for delta in deltas).strip()
            page = httpx.get(f"{url}/", timeout=10)
            assert page.status_code == 200, "the playground is in the wheel"
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        assert code == 0, log.read_text()
        return log.read_text()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    found = Installed(tmp_path_factory.mktemp("installed"))
    found.install("--no-deps", str(wheel))
    spec = importlib.util.find_spec("typer")
    assert spec is not None
    assert spec.origin is not None
    (found.site_packages / "required.pth").write_text(f"{Path(spec.origin).parents[1]}\n")
    return found


def test_site_packages_gets_no_package_but_penstock(installed: Installed) -> None:
    assert {p.name for p in installed.site_packages.iterdir() if p.is_dir()} == {
        "penstock",
        next(installed.site_packages.glob("*.dist-info")).name,
    }
    code = (
        "import importlib.util as u; print([u.find_spec(n) for n in ('api', 'worker', 'shared')])"
    )
    ended = subprocess.run(
        [installed.python, "-P", "-c", code], cwd="/", capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "[None, None, None]\n", ended.stderr


def test_the_client_is_installed_with_its_types(installed: Installed) -> None:
    code = (
        "import pathlib, penstock.client as c;"
        "print(c.Client.__name__, (pathlib.Path(c.__file__).parents[1] / 'py.typed').is_file())"
    )
    ended = subprocess.run(
        [installed.python, "-P", "-c", code], cwd="/", capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "Client True\n", ended.stderr


@pytest.mark.promise(
    "Command: an installed wheel has one package in site-packages, and serves the demo model from "
    "it alone, beside folders named like its rooms; files and modules of tracebacks are true"
)
def test_the_wheel_alone_serves_the_demo_model_beside_folders_named_like_its_rooms(
    installed: Installed,
) -> None:
    said = installed.first_token_of_up()
    assert "Traceback" not in said


def test_an_error_of_a_started_process_names_the_installed_file(installed: Installed) -> None:
    """Module and file of a traceback are the true ones."""
    code = (
        "from penstock.rooms import reach_rooms; reach_rooms();"
        "import shared.settings as s; print(s.__name__, s.__file__)"
    )
    ended = subprocess.run(
        [installed.python, "-c", code],
        cwd=installed.directory,
        capture_output=True,
        text=True,
        timeout=60,
    )
    file = installed.site_packages / "penstock/packages/shared/settings.py"
    assert ended.stdout.split() == ["shared.settings", str(file)], ended.stderr


@pytest.fixture
def clean(wheel: Path) -> Iterator[Installed]:
    """With all that `penstock[worker]` requires, on the repository's disk: it takes gigabytes."""
    (REPOSITORY / ".penstock").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=REPOSITORY / ".penstock") as root:
        yield Installed(Path(root))


def test_a_clean_environment_has_all_that_the_worker_extra_promises(
    clean: Installed, wheel: Path
) -> None:
    pins = str(REPOSITORY / "constraints.txt")
    clean.install("-c", pins, f"penstock[worker] @ file://{wheel}")
    said = clean.first_token_of_up()
    assert "Traceback" not in said


def test_uvx_runs_the_wheel_without_an_installation(wheel: Path, tmp_path: Path) -> None:
    """With the extras of a worker whose engine is elsewhere, which bring no PyTorch: the echo
    runner needs none. README's line differs by `worker`."""
    found = Installed(tmp_path)
    found.install("uv")
    uvx = str(found.environment / "bin/uvx")
    of_uv = {"UV_PYTHON": sys.executable, "UV_SYSTEM_CERTS": "1"}
    found.command = [uvx, "--from", f"{wheel}[api,server,worker-vllm]", "penstock"]
    assert found.run("--version", **of_uv).stdout == "penstock 0.1.0\n"
    said = found.first_token_of_up(RUNNER="echo", **of_uv)
    assert "Traceback" not in said
    missing = f"{wheel}[api,server]"
    found.command = [uvx, "--from", missing, "penstock"]
    refused = found.run("up", **of_uv)
    assert "is not installed" in refused.stderr
    assert "uvx --from 'penstock[worker]' penstock" in refused.stderr
