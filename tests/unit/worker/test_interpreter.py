"""The interpreter of an engine process that is not this one's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import llguidance
import pytest

from tests.support.polling import until
from worker.engine_options import EngineOptions
from worker.runtime.interpreter import EngineNotLoaded, check_interpreter, environment_of

REPOSITORY = Path(__file__).resolve().parents[3]


def refusal_of(python: str) -> str:
    with pytest.raises(EngineNotLoaded) as refused:
        asyncio.run(check_interpreter(python))
    assert refused.value.by_settings
    return str(refused.value)


def test_an_interpreter_that_is_not_there_is_named() -> None:
    assert "PENSTOCK_ENGINE_PYTHON='/nowhere/python' cannot be started" in refusal_of(
        "/nowhere/python"
    )


def test_a_program_that_is_no_interpreter_is_refused() -> None:
    assert refusal_of("/bin/true").endswith("is no Python interpreter")


def test_an_interpreter_without_vllm_is_told_what_it_lacks() -> None:
    assert "lacks vllm" in refusal_of(sys.executable)


async def test_an_interpreter_is_ended_with_the_start_that_asks_it(tmp_path: Path) -> None:
    pid_file, program = tmp_path / "pid", tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.new; mv {pid_file}.new {pid_file}\nexec sleep 60\n"
    )
    program.chmod(0o755)
    checking = asyncio.create_task(check_interpreter(str(program)))
    await until(pid_file.exists)
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_the_engine_process_finds_two_packages_and_not_their_neighbours() -> None:
    env = environment_of(EngineOptions(checkpoint="/m", engine="vllm"))
    assert env is not None
    code = (
        "import worker.engine.errors, shared.messages, importlib.util as u;"
        "print(worker.__path__, shared.__path__, u.find_spec('api'), u.find_spec('tests'))"
    )
    printed = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: without what is installed here
        capture_output=True,
        text=True,
        env=env,
        cwd=REPOSITORY,
        check=True,
    ).stdout
    assert printed.split() == [
        f"['{REPOSITORY / 'worker'}']",
        f"['{REPOSITORY / 'shared'}']",
        "None",
        "None",
    ]


@pytest.mark.parametrize("engine", ["vllm", "penstock"])
def test_the_engine_process_has_no_secret_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    secrets = {
        "PENSTOCK_REDIS_URL": "redis://:password@redis",
        "HF_TOKEN": "hf_secret", "HUGGING_FACE_HUB_TOKEN": "hf_secret",
        "AWS_SECRET_ACCESS_KEY": "s",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=s", "VLLM_API_KEY": "s",
        "PENSTOCK_API_KEYS": "s", "HTTPS_PROXY": "http://user:s@proxy",
    }  # fmt: skip
    kept = {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "2",
        "HF_HOME": "/h",
        "VLLM_USE_V1": "1",
    }
    for name, value in (secrets | kept).items():
        monkeypatch.setenv(name, value)
    env = environment_of(EngineOptions(checkpoint="/m", engine=engine))
    assert not secrets.keys() & env.keys()
    assert kept.items() <= env.items()


def test_the_engine_process_compiles_grammars_with_the_services_package() -> None:
    env = environment_of(EngineOptions(checkpoint="/m", engine="vllm"))
    assert env is not None
    code = (
        "import llguidance, llguidance.numpy;"
        "print(llguidance.__file__, llguidance._lib.__file__, llguidance.numpy.__file__)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        cwd=REPOSITORY,
        check=True,
    ).stdout
    assert printed.split() == [
        str(REPOSITORY / "worker/engines/vllm/packages/llguidance/__init__.py"),
        llguidance._lib.__file__,
        str(Path(llguidance.__file__).parent / "numpy.py"),
    ]


def test_the_openmp_of_vllms_environment_is_loaded_first(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    options = EngineOptions(checkpoint="/m", engine="vllm", engine_python=str(python))
    env = environment_of(options)
    assert env is not None
    assert env.get("LD_PRELOAD") == os.environ.get("LD_PRELOAD")  # there is none
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    env = environment_of(options)
    assert env is not None
    assert env["LD_PRELOAD"].split(":")[0] == str(library)


def test_a_preloaded_openmp_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setenv("LD_PRELOAD", "/opt/lib/libgomp.so.1")
    options = EngineOptions(
        checkpoint="/m", engine="vllm", engine_python=str(tmp_path / "bin" / "python")
    )
    env = environment_of(options)
    assert env is not None
    assert env["LD_PRELOAD"] == "/opt/lib/libgomp.so.1"


def test_our_own_engine_runs_where_the_service_does() -> None:
    env = environment_of(EngineOptions(checkpoint="/m"))
    assert {name for name in env if name.startswith("PYTHON")} == {
        name for name in os.environ if name.startswith("PYTHON") and name != "PYTHONHOME"
    }
