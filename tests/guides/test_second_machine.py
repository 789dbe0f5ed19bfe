"""The guide's second machine: two network namespaces, with a cable between them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shared.process import dying_with_this_process
from tests.support.launched import REPOSITORY
from tests.support.running_service import make_tiny_checkpoint, wait_until

pytestmark = [
    pytest.mark.alone,  # browsers end their requests where the machine's networks change
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and ip",
    ),
]
FIRST, SECOND = "10.214.7.1", "10.214.7.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Names of two namespaces."""
    names = (f"pst-a{os.getpid()}", f"pst-b{os.getpid()}")
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip(
            *["link", "add", "eth0", "netns"],
            names[0],
            *["type", "veth", "peer", "name", "eth0", "netns"],
            names[1],
        )
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names


ASK = """
import json, urllib.request
body = {"model": "of-the-second", "prompt": "a gate", "max_tokens": 8, "stream": False}
url, headers = "http://127.0.0.1:8000/generate", {"content-type": "application/json"}
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


class Started:
    """A command of the guide, run on one of the machines; stopped by SIGTERM."""

    def __init__(self, machine: str, directory: Path, env: dict[str, str], *words: str) -> None:
        directory.mkdir(exist_ok=True)
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, "-m", "penstock", *words],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=dying_with_this_process(),
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(self._process.stdout)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        print(self.output)  # shown where the test fails
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_a_worker_of_another_machine_joins_with_the_password(
    machines: tuple[str, str], tmp_path: Path
) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path)
    env = {"PENSTOCK_RUNNER": "echo", "PENSTOCK_MODEL": str(checkpoint)}
    with ExitStack() as stack:
        first = Started(machines[0], tmp_path / "a", env, "up", "--listen-redis", f"{FIRST}:6379")
        stack.callback(first.stop)
        wait_until(lambda: "Penstock is ready" in first.output, "the first machine to be ready", 90)
        found = re.search(
            r"PENSTOCK_REDIS_URL=(\S+) penstock worker; PASSWORD is in (\S+)", first.output
        )
        assert found is not None, first.output
        password = (tmp_path / "a" / found[2]).read_text()
        assert password not in first.output
        url = found[1].replace("PASSWORD", password)
        joining = {**env, "PENSTOCK_REDIS_URL": url, "PENSTOCK_SERVED_MODEL_NAME": "of-the-second"}
        second = Started(machines[1], tmp_path / "b", joining, "worker")
        stack.callback(second.stop)
        command = ["ip", "netns", "exec", machines[0], sys.executable, "-c", ASK]

        def answer() -> str:
            return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout

        wait_until(lambda: '"finish_reason"' in answer(), "an answer of the second machine", 60)
