"""Without a GPU pip gets the index of PyTorch's builds for the CPU, where it answers."""

from __future__ import annotations

import http.server
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.launcher import torch_build
from penstock.launcher.torch_build import CPU_INDEX, index_words, wanted_device

REPOSITORY = Path(__file__).resolve().parents[3]
AWAY = "http://127.0.0.1:9/whl/cpu"
EXTRA = "--extra-index-url"


class Index(http.server.BaseHTTPRequestHandler):
    """One that has torch, and nothing else."""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/whl/cpu"
        server.shutdown()


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, and without a proxy."""
    monkeypatch.setattr(torch_build, "has_nvidia_driver", lambda: False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def chosen(device: str, index: str, environ: dict[str, str] | None = None) -> tuple[list[str], str]:
    said: list[str] = []
    words = index_words(device, environ or {}, said.append, index)
    return words, " ".join(said)


@pytest.mark.promise(
    "Command: without an NVIDIA driver PyTorch's build for the CPU is installed; an index of it "
    "that is away costs four seconds and one line"
)
def test_without_a_driver_the_build_for_the_cpu_is_looked_for_too(index: str) -> None:
    words, said = chosen("auto", index)
    assert words == [EXTRA, index]
    assert "PENSTOCK_DEVICE=cuda" in said


def test_an_index_that_is_away_is_named_in_one_line_and_left_out(index: str) -> None:
    for away, reason in ((AWAY, "refused"), (f"{index}/elsewhere", "status 404")):
        words, said = chosen("auto", away)
        assert words == []
        assert reason in said
        assert "CUDA" in said
        assert "\n" not in said


def test_an_index_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "LOOK_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        words, said = chosen("auto", f"http://127.0.0.1:{silent.getsockname()[1]}/whl/cpu")
        assert time.monotonic() - began_s < 10
    assert words == []
    assert re.search("no answer|timed out", said)


def test_a_name_whose_look_up_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(*_: object, **__: object) -> None:
        over.wait(30)
        raise OSError("no such name")

    monkeypatch.setattr(torch_build, "LOOK_S", 0.3)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        words, said = chosen("auto", "http://index.invalid/whl/cpu")
        assert (words, "no answer within 0.3 s" in said) == ([], True)
    finally:
        over.set()


def test_a_driver_or_a_setting_chooses_the_build_of_the_default_index(
    index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("cuda", "cuda:1"):
        assert chosen(device, index) == ([], "")
    monkeypatch.setattr(torch_build, "has_nvidia_driver", lambda: True)
    assert chosen("auto", index) == ([], "")
    assert chosen("cpu", index)[0] == [EXTRA, index]


def test_words_that_are_given_are_taken_as_they_are(index: str) -> None:
    for given, words in (("", []), ("--index-url 'a b'", ["--index-url", "a b"])):
        assert chosen("auto", index, {"TORCH_PIP_ARGS": given}) == (words, "")


def test_the_device_is_that_of_the_setting() -> None:
    assert wanted_device({}) == "auto"
    assert wanted_device({"DEVICE": "cpu"}) == "auto"
    assert wanted_device({"PENSTOCK_DEVICE": "cuda:1"}) == "cuda:1"


def test_images_look_at_the_same_index() -> None:
    for dockerfile in ("worker/Dockerfile", "worker/Dockerfile.vllm"):
        assert f'ARG TORCH_PIP_ARGS="{EXTRA} {CPU_INDEX}"' in (REPOSITORY / dockerfile).read_text()


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_make_asks_for_the_version_of_python_before_anything_else(
    version: tuple[int, int], tmp_path: Path
) -> None:
    """In an empty copy: with an interpreter that says it is of another version."""
    for name in ("Makefile", "constraints.txt", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text((REPOSITORY / name).read_text())
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"sys.version_info, sys.version = {version}, '{version[0]}.{version[1]}.0 (main)'\n"
        "print('asked for', sys.argv[1:2], file=sys.stderr)\n"
        "exec(sys.argv[2]) if sys.argv[1] == '-c' else sys.exit('continued')\n"
    )
    python.chmod(0o755)
    ended = subprocess.run(
        ["make", ".venv/.run", f"PYTHON={python}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ("continued" in ended.stderr) is (version >= (3, 11))
    needs = f"needs Python 3.11 or newer; {python} is 3.10.0. make PYTHON=python3.11 chooses"
    assert (needs in ended.stderr) is (version < (3, 11))
    assert not (tmp_path / ".venv").exists()
