"""Importing one room wakes no other: what a fresh interpreter has loaded after an import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Imported where vLLM is, and by nothing but worker.engines.vllm.build and vLLM itself.
WITH_VLLM = [
    REPOSITORY / "worker/engines/vllm" / name
    for name in (
        "adapters.py",
        "engine.py",
        "grammars.py",
        "live_request.py",
        "rank.py",
        "sampler.py",
        "stats.py",
    )
]


def loaded_by(module: str) -> set[str]:
    """Top-level modules in sys.modules after importing `module` in a process of its own."""
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=180
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == 1, "importing printed something"
    return {name.partition(".")[0] for name in json.loads(ended.stdout)}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (
            "api.main",
            {"torch", "safetensors", "triton", "transformers", "numpy", "jinja2", "worker"},
        ),
        ("worker.main", {"fastapi", "starlette", "uvicorn", "torch", "api"}),
        ("worker.service", {"fastapi", "starlette", "uvicorn", "torch", "api"}),
        # Of the launcher, also where no engine is installed.
        ("worker.settings", {"torch", "numpy", "safetensors", "gguf", "llguidance"}),
        ("worker.model.parallel.processes", {"torch", "numpy"}),  # ranks start before it
        ("worker.engine.engine", {"torch", "numpy", "redis", "asyncio", "pydantic", "msgspec"}),
        ("worker.model.step.runner", {"redis", "asyncio_redis", "fastapi", "pydantic", "msgspec"}),
        (
            "worker.runtime.process",
            {"asyncio", "fastapi", "pydantic", "redis", "torch", "xxhash"},
        ),
        ("shared.messages", {"torch", "pydantic", "redis", "asyncio"}),
        ("penstock.launcher.main", {"torch", "api", "worker", "fastapi", "typer", "rich"}),
        ("penstock.client", {"api", "worker", "shared", "typer", "rich", "pydantic", "redis"}),
        ("penstock.cli.application", {"torch", "api", "worker", "redis", "fastapi"}),
    ],
)
def test_importing_one_room_wakes_no_other(module: str, forbidden: set[str]) -> None:
    assert loaded_by(module) & forbidden == set()


@pytest.mark.promise("Streaming: importing a module has no side effects")
def test_every_module_imports_without_side_effects_on_the_file_system(tmp_path: Path) -> None:
    modules = sorted(
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for room in ("api", "worker", "shared", "penstock")
        for path in (REPOSITORY / room).rglob("*.py")
        if path.stem not in ("__main__", "__init__") and path not in WITH_VLLM
    )
    code = (
        "import importlib, os, sys; before = set(os.listdir('.'));"
        f"[importlib.import_module(name) for name in {modules!r}];"
        "assert set(os.listdir('.')) == before"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""


def test_a_frontend_imports_every_part_on_demand_before_it_serves() -> None:
    """The first request that needs a part does not hold the event loop for its import."""
    code = (
        "import sys; from api.main import create_app; from api.settings import ApiSettings\n"
        "from api.on_demand import PARTS\n"
        "late = set(PARTS.values()) - set(sys.modules); create_app(ApiSettings(redis_url='redis://127.0.0.1:1'))\n"
        "print(len(late), sorted(set(PARTS.values()) - set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=180
    )
    assert ended.returncode == 0, ended.stderr
    num_late, missing = ended.stdout.strip().split(" ", 1)
    assert int(num_late) > 0, "nothing is left to load"
    assert missing == "[]", ended.stderr


def test_one_module_of_the_api_imports_by_name() -> None:
    """What `importlib` loads is in no import closure: `make stats` knows the parts of this one."""
    files = (REPOSITORY / "api").rglob("*.py")
    named = [path.name for path in files if "import_module" in path.read_text()]
    assert named == ["on_demand.py"]
