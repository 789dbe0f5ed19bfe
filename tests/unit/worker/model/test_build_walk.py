"""A reader follows `build_model` to a ready model in few steps."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.tool_models import DEMO_CHECKPOINT
from worker.engine_options import EngineOptions
from worker.model.build import build_model
from worker.model.cpu.library import build_for
from worker.model.cpu.processor import cpu_features
from worker.model.errors import TierUnavailable

ROOT = Path(__file__).resolve().parents[4]
MODEL = ROOT / "worker" / "model"
ROOMS = (f"{ROOT}/worker/", f"{ROOT}/shared/")
# The modules that choose and put together. Every other room is what they put together.
BUILDS = frozenset(
    str(MODEL / name)
    for name in (
        "build.py",
        "native.py",
        "tier.py",
        "cpu/tiers.py",
        "cuda/tier.py",
        "parallel/plan.py",
        "step/kv_sizing.py",
        "step/warm_up.py",
    )
)


class Walk:
    """Collects the steps of calls: a function of BUILDS calls one of another room, which is a
    folder of `worker/model`, or a module beside these. Each pair counts once; a property is data.
    """

    def __init__(self) -> None:
        self.steps: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        caller, path = frame.f_back, frame.f_code.co_filename
        if event != "call" or caller is None or not path.startswith(ROOMS):
            return
        calling = caller.f_code.co_filename
        name = frame.f_code.co_qualname
        if calling not in BUILDS or _room(calling) == _room(path) or name.endswith(">"):
            return
        module = _module(path)
        if not _is_property(module, name):
            step = f"{caller.f_code.co_qualname} -> {module}:{name}"
            if step not in self.steps:
                self.steps.append(step)


def _room(path: str) -> str:
    parts = Path(path).relative_to(ROOT).with_suffix("").parts
    return parts[2] if parts[:2] == ("worker", "model") else "/".join(parts[:2])


def _module(path: str) -> str:
    return ".".join(Path(path).relative_to(ROOT).with_suffix("").parts)


def _is_property(module: str, name: str) -> bool:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return isinstance(found, property)


@pytest.mark.parametrize(
    ("cpu_tier", "max_steps"),
    [("native", 27), ("reference", 29)],  # whose layers and attention are two parts
)
def test_a_model_is_built_in_few_steps(cpu_tier: Any, max_steps: int) -> None:
    if cpu_tier == "native":
        try:
            build_for(cpu_features())
        except TierUnavailable as error:
            pytest.skip(f"needs the native kernels: {error}")
    options = EngineOptions(checkpoint=str(DEMO_CHECKPOINT), num_threads=1, cpu_tier=cpu_tier)
    walk = Walk()
    sys.setprofile(walk)
    try:
        built = build_model(options)
    finally:
        sys.setprofile(None)
    built.close()
    assert "NativeSource.load -> worker.model.tier:choose_tier" in walk.steps
    assert 15 < len(walk.steps) <= max_steps, "\n".join(walk.steps)
