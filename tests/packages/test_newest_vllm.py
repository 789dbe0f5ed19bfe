"""The newest published vLLM has the interface that worker.engines.vllm uses.

Its wheel is not installed: its Python source is imported beside the packages of the interpreter
that the tests have. What it computes is no part of this test.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.vllm_environment import vllm_python
from tests.support.vllm_interface import check_interface

pytestmark = [
    pytest.mark.packages,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(vllm_python() is None, reason="no interpreter with vLLM"),
]


def test_the_newest_release_has_everything_that_is_relied_upon(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "-d", str(tmp_path), "vllm"], check=True, timeout=900)
    (wheel,) = tmp_path.glob("vllm-*.whl")
    source = tmp_path / "source"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(source, [name for name in archive.namelist() if name.endswith(".py")])
    found = check_interface(source)
    assert found.version == wheel.name.split("-")[1], "it is the release that was imported"
    assert found.now == []
