"""LiteLLM's proxy relays a service to its clients; Continue's adapters and `llm` are clients."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from shared.process import dying_with_this_process
from tests.support.node import installed_clients, node_says
from tests.support.pinned_environment import pinned_environment
from tests.support.service_fixtures import processes_url
from tests.support.service_processes import MODEL
from worker.settings import DEMO_CHECKPOINT

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
START_S = 120.0
MESSAGES = [{"role": "user", "content": "water the garden"}]
OPTIONS = {"max_tokens": 16, "temperature": 0.0}


base_url = processes_url(lambda: DEMO_CHECKPOINT, RUNNER="model", DEVICE="cpu", DTYPE="float32")


@pytest.fixture(scope="module")
def litellm_url(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("litellm")
    upstream = {"model": f"openai/{MODEL}", "api_base": f"{base_url}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "proxied", "litellm_params": upstream}]}
    (home / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    program = pinned_environment(HERE / "load_tools/litellm.txt", "litellm") / "bin/litellm"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (home / "log").open("wb") as log:
        proxy = subprocess.Popen(
            # The script names the directory in which its environment was made.
            [
                program.with_name("python"),
                program,
                "--config",
                "config.yaml",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ],
            cwd=home,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "NO_PROXY": "127.0.0.1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            },
            stdout=log,
            stderr=log,
            preexec_fn=dying_with_this_process(),
        )
    try:
        end = time.monotonic() + START_S
        while not _answers(f"{url}/health/liveliness"):
            assert proxy.poll() is None, (home / "log").read_text()
            assert time.monotonic() < end, (home / "log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        proxy.terminate()
        try:
            proxy.wait(20)
        except subprocess.TimeoutExpired:
            proxy.kill()
            proxy.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_litellm_relays_chat_whole_and_streamed(base_url: str, litellm_url: str) -> None:
    texts, usages = [], []
    for url, model in ((base_url, MODEL), (litellm_url, "proxied")):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            asked = {"model": model, "messages": MESSAGES, **OPTIONS}
            whole = client.chat.completions.create(**asked)
            chunks = list(
                client.chat.completions.create(
                    **asked, stream=True, stream_options={"include_usage": True}
                )
            )
        deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        texts += [whole.choices[0].message.content, "".join(deltas)]
        usages += [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens]
    assert texts[0]
    assert texts == texts[:1] * 4
    assert usages == usages[:1] * 4


def test_litellm_relays_messages_whole_and_streamed(base_url: str, litellm_url: str) -> None:
    texts = []
    for url, model in ((base_url, MODEL), (litellm_url, "proxied")):
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            asked = {"model": model, "messages": MESSAGES, **OPTIONS}
            asked["extra_body"] = {"temperature": asked.pop("temperature")}
            whole = client.messages.create(**asked)
            texts.append("".join(block.text for block in whole.content))
            with client.messages.stream(**asked) as stream:
                texts.append("".join(stream.text_stream))
    assert texts[0]
    assert texts == texts[:1] * 4


@pytest.mark.node
def test_continue_s_adapters_get_one_answer_by_each_api(base_url: str) -> None:
    home = installed_clients(HERE / "continue")
    found = node_says("continue_cases", base_url, MODEL, home=home)
    assert found["models"] == [MODEL]
    assert found["completion"]
    first = found["openai"]["texts"][0]
    assert first
    for provider in ("openai", "anthropic"):
        assert found[provider]["texts"] == [first, first]
    openai_tokens, anthropic_tokens = (found[each]["tokens"] for each in ("openai", "anthropic"))
    assert openai_tokens[0] == openai_tokens[1]
    # Messages count prompt tokens that were cached apart, which a stream knows at its end alone.
    assert [output for _, output in anthropic_tokens] == [output for _, output in openai_tokens]


def test_llm_prints_one_answer_whole_and_streamed(base_url: str, tmp_path: Path) -> None:
    entry = {"model_id": "ours", "model_name": MODEL, "api_base": f"{base_url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    program = pinned_environment(HERE / "load_tools/llm.txt", "llm") / "bin/python"
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LLM_USER_PATH": str(tmp_path)}
    command = [program, "-m", "llm", "-m", "ours", "-o", "temperature", "0", "-o", "max_tokens"]
    texts = [
        subprocess.run(
            [*command, "16", *options, "water the garden"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**env, "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1"},
            check=True,
            text=True,
            timeout=60,
        ).stdout
        for options in ([], ["--no-stream"])
    ]
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **OPTIONS)
    assert [text.strip() for text in texts] == [answer.choices[0].message.content.strip()] * 2
