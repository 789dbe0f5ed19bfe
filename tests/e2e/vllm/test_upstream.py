"""PENSTOCK_ENGINE=http in front of a real vLLM server: same text, and a stream that outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.process import dying_with_this_process
from shared.transport.connect import open_transport
from tests.support.killed_upstreams import check_jobs, clear_prompts, workers
from tests.support.launched import Launched, free_port
from tests.support.llama_server import LlamaServer, demo_gguf
from tests.support.polling import wait_until
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.tool_models import make_demo_with_tools
from tests.support.vllm_environment import vllm_python
from tests.support.vllm_worker import ALIKE, READY_TIMEOUT_S, own_settings
from worker.settings import DEMO_CHECKPOINT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * READY_TIMEOUT_S + 60)]

MODEL = "demo"
NUM_JOBS, NUM_CLIENTS, NUM_SLOTS = 40, 12, 6
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "kind": {"enum": ["queue", "engine"]}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
QUESTIONS = ("What is Penstock?", "How do I add a worker?", "What is a lease?")
TIMEOUT_S = READY_TIMEOUT_S + 60.0


class VllmServer:
    """vLLM's own OpenAI server of a checkpoint, on one port over its restarts."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        self._checkpoint = checkpoint
        self._log = directory / "vllm.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        python = vllm_python()
        assert python is not None, "the marker vllm is for tests that are skipped without it"
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += ["--model", str(self._checkpoint), "--served-model-name", "there"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        command += ["--enable-prompt-tokens-details"]
        command += ["--structured-outputs-config", '{"backend": "guidance"}']
        command += ["--max-model-len", ALIKE["MAX_MODEL_LEN"], "--kv-cache-memory-bytes", "256M"]
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dying_with_this_process(signal.SIGKILL),
                env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(self._log.parent)},
            )

    def until_ready(self) -> None:
        wait_until(self._is_ready, "vLLM's server", READY_TIMEOUT_S)

    def _is_ready(self) -> bool:
        assert self._popen is not None
        assert self._popen.poll() is None, self._log.read_text()[-4000:]
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """kill -9 of it and its engine."""
        if self._popen is not None and self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()


@contextmanager
def vllm_server(checkpoint: Path, directory: Path) -> Iterator[VllmServer]:
    server = VllmServer(checkpoint, directory)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def body(question: str, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **more}


def texts(client: httpx.Client) -> list[object]:
    path = "/v1/chat/completions"
    answers = [client.post(path, json=body(each)).json() for each in QUESTIONS]
    return [
        (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"])
        for answer in answers
    ]


def check_structures(client: httpx.Client) -> None:
    """vLLM keeps an answer to a schema, a regular expression and a call that must come."""

    def message(**more: object) -> dict[str, Any]:
        answer = client.post("/v1/chat/completions", json=body(QUESTIONS[0], **more)).json()
        return dict(answer["choices"][0]["message"])

    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert json.loads(message(response_format=shape)["content"]).keys() == {"sure", "kind"}
    content = message(structured_outputs={"regex": "[ab]{3}-[0-9]{2}"})["content"]
    assert re.fullmatch("[ab]{3}-[0-9]{2}", content)
    given = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = message(**given)["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"sure", "kind"}


def check_what_is_reported(client: httpx.Client) -> None:
    """A job is counted with vLLM's cached tokens, and tells that it may not continue exactly."""
    long = "Tell me all of it. " * 40
    for _ in range(2):
        answer = client.post("/v1/chat/completions", json=body(long, max_tokens=4)).json()
    usage = answer["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    assert client.get(f"/v1/jobs/{answer['id']}").json()["exact_resume"] is False


def test_text_is_vllms_and_a_stream_continues_after_the_server_was_killed(tmp_path: Path) -> None:
    checkpoint = make_demo_with_tools(tmp_path / MODEL)
    model = {"MODEL": str(checkpoint), "SERVED_MODEL_NAME": MODEL}
    long = body(QUESTIONS[0], max_tokens=600, ignore_eos=True)
    directories = [tmp_path / name for name in ("own", "http", "vllm")]
    for directory in directories:
        directory.mkdir()
    with vllm_server(checkpoint, directories[2]) as vllm:
        with (
            Launched(directories[0], own_settings(**model)) as own,
            httpx.Client(base_url=own.base_url, timeout=TIMEOUT_S) as client,
        ):
            expected = texts(client)
            answer = client.post("/v1/chat/completions", json=long).json()
            whole = answer["choices"][0]["message"]["content"]
        vllm.until_ready()
        http = {**model, "ENGINE": "http", "UPSTREAM_URLS": vllm.url}
        with (
            Launched(directories[1], http) as penstock,
            httpx.Client(base_url=penstock.base_url, timeout=TIMEOUT_S) as client,
        ):
            assert texts(client) == expected
            card = client.get(f"/v1/models/{MODEL}").json()
            assert card["engine"] == "http"
            assert card["exact_resume"] is False
            check_structures(client)
            check_what_is_reported(client)
            parts: list[str] = []
            with client.stream(
                "POST", "/v1/chat/completions", json={**long, "stream": True}
            ) as stream:
                for line in stream.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    parts += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
                    if len(parts) == 20:
                        vllm.kill()
                        vllm.start()
            assert "".join(parts) == whole


async def test_no_job_is_lost_doubled_or_wrong_while_vllm_and_workers_are_killed(
    redis_url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """vLLM and llama.cpp's server for two workers, beside one with our engine on the same queue."""
    namespace, expected = new_namespace(), clear_prompts()
    llama = LlamaServer(demo_gguf(tmp_path), tmp_path / "llama", NUM_SLOTS)
    try:
        with vllm_server(DEMO_CHECKPOINT, tmp_path) as vllm:
            await llama.ready()
            await asyncio.to_thread(vllm.until_ready)
            urls = [vllm.url, llama.url]
            async with aclosing(await open_transport(redis_url, namespace=namespace)) as transport:
                with workers(redis_url, namespace, urls, NUM_SLOTS, tmp_path) as serving:

                    async def kill_all() -> None:
                        for number in range(len(serving.live)):
                            await asyncio.sleep(1)  # for a few tokens
                            llama.kill()
                            llama.start()
                            await serving.replace(number).ready()
                            await llama.ready()
                        vllm.kill()
                        vllm.start()
                        await asyncio.to_thread(vllm.until_ready)

                    for worker in serving.live:
                        await worker.ready()
                    await check_jobs(
                        transport, expected, kill_all, num_jobs=NUM_JOBS, num_clients=NUM_CLIENTS
                    )
    finally:
        llama.kill()
