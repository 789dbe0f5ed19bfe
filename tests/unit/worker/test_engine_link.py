"""A start of an engine process that fails leaves nothing behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from shared.logs import LogFormat, LogLevel
from worker.engine_options import EngineOptions
from worker.runtime import link as link_module
from worker.runtime.link import EngineLink
from worker.runtime.messages import Configure


async def test_a_process_that_cannot_be_spawned_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = list[str](), str(tmp_path)
    make = tempfile.mkdtemp

    def mkdtemp(prefix: str) -> str:
        made.append(make(prefix=prefix, dir=folder))
        return made[-1]

    async def passes(python: str) -> None:
        """It was there when it was checked, and is not any more."""

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(link_module, "check_interpreter", passes)
    options = EngineOptions(checkpoint="/m", engine="vllm", engine_python="/nowhere/python")
    with pytest.raises(FileNotFoundError):
        await EngineLink.start(Configure(options, LogLevel.INFO, LogFormat.TEXT))
    assert len(made) == 1
    assert os.listdir(folder) == []
