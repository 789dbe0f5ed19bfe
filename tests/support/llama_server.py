"""llama.cpp's own server of the demo model, in float32."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx

from shared.process import dying_with_this_process
from tests.support.launched import free_port
from tests.support.pinned_environment import pinned_environment
from tests.support.polling import until
from worker.settings import DEMO_CHECKPOINT

PROGRAMS = Path(__file__).parents[1] / "clients/llama_server"
READY_TIMEOUT_S = 120.0


def demo_gguf(directory: Path) -> Path:
    """Returns the demo model as a GGUF file."""
    file = directory / "demo.gguf"
    python = pinned_environment(PROGRAMS / "requirements.txt", "llama-server", sees_ours=True)
    command = [python / "bin/python", PROGRAMS / "make_gguf.py", DEMO_CHECKPOINT, file]
    subprocess.run(list(map(str, command)), check=True, timeout=READY_TIMEOUT_S)
    return file


class LlamaServer:
    """llama.cpp's server of a file, on one port over its restarts."""

    def __init__(self, model: Path, log: Path, num_slots: int) -> None:
        self._model, self._log, self._num_slots = model, log, num_slots
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        python = pinned_environment(PROGRAMS / "requirements.txt", "llama-server", sees_ours=True)
        command = [python / "bin/python", PROGRAMS / "serve.py", self._model]
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                [*map(str, command), str(self._port), str(self._num_slots)],
                stdout=log,
                stderr=log,
                preexec_fn=dying_with_this_process(signal.SIGKILL),
            )

    async def ready(self) -> None:
        async with httpx.AsyncClient() as client:

            async def answers() -> bool:
                with suppress(httpx.TransportError):
                    return (await client.get(f"{self.url}/health")).status_code == 200
                assert self._popen.poll() is None, self._log.read_text()[-2000:]
                return False

            await until(answers, "llama.cpp's server", READY_TIMEOUT_S)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
