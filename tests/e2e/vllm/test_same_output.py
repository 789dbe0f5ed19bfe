"""A service with vLLM answers as one with this project's engine: same text, tokens, ends, counts.

Both run the demo model in float32. Every request goes to both, whole and as a stream.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from api.auth.keys import digest_of, new_key
from tests.support.launched import Launched
from tests.support.service_client import ServiceClient
from tests.support.tool_models import make_demo_with_tools
from tests.support.vllm_worker import (
    ALIKE,
    BLOCK_SIZE,
    READY_TIMEOUT_S,
    own_settings,
    vllm_settings,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(READY_TIMEOUT_S + 60)]

MODEL = "demo"
ANN, BOB = new_key(), new_key()  # of two tenants
TIMEOUT_S = 120.0
LOGPROB_TOLERANCE = 2e-3
SAMPLED = {"temperature": 1.0, "seed": 5, "top_p": 0.9}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["worker", "frontend"]},
        "count": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["kind", "count", "names"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"enum": [1, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
# What differs between any two answers to one request.
OF_ONE_RESPONSE = frozenset(
    {"id", "created", "created_at", "completed_at", "item_id", "call_id", "response_id"}
)


@dataclass(frozen=True)
class Services:
    """The same model behind the same API, on either engine."""

    vllm: ServiceClient
    own: ServiceClient

    def whole(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns both answers to one request, without what differs between any two."""
        answers = [client.http.post(path, json=body) for client in (self.vllm, self.own)]
        assert [answer.status_code for answer in answers] == [200, 200], [a.text for a in answers]
        vllm, own = (_comparable(answer.json()) for answer in answers)
        return vllm, own

    def streamed(self, path: str, body: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
        """Returns what both streams of one request say."""
        return _said(self.vllm.http, path, body), _said(self.own.http, path, body)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    checkpoint = make_demo_with_tools(tmp_path_factory.mktemp("models") / MODEL)
    model = {"MODEL": str(checkpoint), "SERVED_MODEL_NAME": MODEL, "TOOL_FORMAT": "hermes"}
    directories = [tmp_path_factory.mktemp(name) for name in ("own", "vllm")]
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    tenants = {"ann": ANN, "bob": BOB}.items()
    keys.write_text("".join(f"{digest_of(key)} tenant={name}\n" for name, key in tenants))
    model["API_KEYS_FILE"] = str(keys)
    with (
        Launched(directories[0], own_settings(**model)) as own,
        Launched(directories[1], vllm_settings(**model), READY_TIMEOUT_S) as vllm,
        ServiceClient(own) as own_client,
        ServiceClient(vllm) as vllm_client,
    ):
        for client in (own_client, vllm_client):
            client.http.timeout = TIMEOUT_S
            client.http.headers.update(_authorization(ANN))
        yield Services(vllm_client, own_client)


def _comparable(value: Any) -> Any:
    """Returns JSON without OF_ONE_RESPONSE, with log probabilities rounded coarsely enough."""
    if isinstance(value, dict):
        return {k: _comparable(v) for k, v in value.items() if k not in OF_ONE_RESPONSE}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return pytest.approx(value, abs=LOGPROB_TOLERANCE) if isinstance(value, float) else value


def _said(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, str]:
    """Returns the text of a stream's deltas, joined by choice or by kind of event: how tokens fall
    into events is a matter of time."""
    said: defaultdict[str, str] = defaultdict(str)
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for name, text in _deltas(json.loads(line.removeprefix("data: "))):
                    said[name] += text
    return dict(said)


def _deltas(event: dict[str, Any]) -> Iterator[tuple[str, str]]:
    assert "error" not in event, event
    for choice in event.get("choices", []):
        delta, name = choice["delta"], f"choice {choice['index']}"
        yield name, delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            yield name, call["function"].get("name", "") + call["function"]["arguments"]
        yield f"{name} ends", choice["finish_reason"] or ""
    delta = event.get("delta", {})
    if isinstance(delta, str):  # of Responses
        yield event["type"], delta
    else:  # of Messages
        for name in ("text", "partial_json", "stop_reason"):
            yield name, delta.get(name) or ""


def _chat(**members: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is Penstock?"}],
        "max_tokens": 48,
        **members,
    }


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded with top_p": SAMPLED,
    "seeded with all penalties": {
        **SAMPLED,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "seeded with top_k and min_p": {"temperature": 1.3, "seed": 9, "top_k": 20, "min_p": 0.02},
    "biased, not shorter than 30": {
        "temperature": 0,
        "logit_bias": {"300": 4.5, "17": -100},
        "min_tokens": 30,
    },
    "three choices": {**SAMPLED, "n": 3, "max_tokens": 24},
    "stop strings": {"temperature": 0, "stop": ["queue", "Redis"]},
    "log probabilities": {"temperature": 0, "logprobs": True, "top_logprobs": 4, "max_tokens": 12},
    "log probabilities of samples": {
        **SAMPLED,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 12,
    },
    "a JSON schema": {
        **SAMPLED,
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
}


@pytest.mark.promise(
    "vLLM: over HTTP every dialect answers as with this project's engine: text, ends, counts, log "
    "probabilities, choices, schemas, tools; whole and streamed"
)
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered_alike(services: Services, name: str) -> None:
    vllm, own = services.whole("/v1/chat/completions", _chat(**CHATS[name]))
    assert vllm == own
    for choice in own["choices"]:
        assert choice["message"]["content"]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_streamed_alike(services: Services, name: str) -> None:
    vllm, own = services.streamed("/v1/chat/completions", _chat(**CHATS[name]))
    assert vllm == own
    assert own["choice 0"]
    assert own["choice 0 ends"]


TOOL = {"name": "get_weather", "description": "The weather of a city."}
CHAT_TOOL = {"type": "function", "function": {**TOOL, "parameters": WEATHER, "strict": True}}
RESPONSE_TOOL = {"type": "function", **TOOL, "parameters": WEATHER, "strict": True}
MESSAGE_TOOL = {**TOOL, "input_schema": WEATHER}
QUESTION = "What is the weather in Oslo?"


def _with_tools(dialect: str, choice: str) -> tuple[str, dict[str, Any]]:
    """Returns path and body of a request with one tool, which it must call or may call."""
    common = {"model": MODEL, "temperature": 0}
    messages = [{"role": "user", "content": QUESTION}]
    if dialect == "chat":
        body = {"messages": messages, "tools": [CHAT_TOOL], "max_tokens": 80}
        return "/v1/chat/completions", {**common, **body, "tool_choice": choice}
    if dialect == "responses":
        body = {"input": QUESTION, "tools": [RESPONSE_TOOL], "max_output_tokens": 80}
        return "/v1/responses", {**common, **body, "tool_choice": choice}
    choices = {"required": {"type": "any"}, "auto": {"type": "auto"}}
    body = {"messages": messages, "tools": [MESSAGE_TOOL], "max_tokens": 80}
    return "/v1/messages", {**common, **body, "tool_choice": choices[choice]}


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_tools_are_called_alike(services: Services, dialect: str, choice: str) -> None:
    path, body = _with_tools(dialect, choice)
    vllm, own = services.whole(path, body)
    assert vllm == own
    assert "get_weather" in json.dumps(own, default=str) or choice == "auto"
    vllm, own = services.streamed(path, body)
    assert vllm == own
    assert any(own.values())


def test_a_prompt_is_scored_alike(services: Services) -> None:
    body = {
        "model": MODEL,
        "prompt": "Penstock serves large language models from a durable queue.",
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 2,
        "prompt_logprobs": 3,
    }
    vllm, own = services.whole("/v1/completions", body)
    assert vllm == own
    assert len(own["choices"][0]["prompt_logprobs"]) == own["usage"]["prompt_tokens"]


def test_a_scored_prompt_without_output_is_alike(services: Services) -> None:
    body = {"model": MODEL, "prompt": "A worker takes jobs.", "max_tokens": 0, "echo": True}
    vllm, own = services.whole("/v1/completions", {**body, "logprobs": 1})
    assert vllm == own
    assert own["choices"][0]["text"] == body["prompt"]


def test_end_tokens_and_stop_tokens_end_alike(services: Services) -> None:
    """The demo model ends its answers by itself."""
    vllm, own = services.whole("/v1/chat/completions", _chat(temperature=0, max_tokens=400))
    assert vllm == own
    assert own["choices"][0]["finish_reason"] == "stop"
    body = _chat(temperature=0, stop_token_ids=[300, 301, 302, 303])
    vllm, own = services.whole("/v1/chat/completions", body)
    assert vllm == own


def test_two_tenants_share_no_prefix(services: Services) -> None:
    """The second time a prompt comes from its tenant it is cached, from another it is not."""
    prompt = [7 + i % 900 for i in range(4 * BLOCK_SIZE)]
    for client in (services.vllm, services.own):
        cached = [_cached_tokens(client, prompt, key) for key in (ANN, ANN, BOB, BOB)]
        assert cached[0] == cached[2] == 0
        assert cached[1] == cached[3] >= 3 * BLOCK_SIZE


def test_a_tenant_does_not_wait_for_the_choices_of_another(services: Services) -> None:
    """Of three times as many choices as there are seats two thirds would have to end first."""
    num_choices = 3 * int(ALIKE["MAX_NUM_SEQS"])
    body = {"model": MODEL, "prompt": [7, 8, 9], "ignore_eos": True, "max_tokens": 300}
    wide = {**body, "n": num_choices, "temperature": 0, "stream": True}
    for client in (services.vllm, services.own):
        has_begun, ended = threading.Event(), list[int]()

        def read(
            client: ServiceClient = client,
            ended: list[int] = ended,
            has_begun: threading.Event = has_begun,
        ) -> None:
            with client.http.stream("POST", "/v1/completions", json=wide) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        has_begun.set()
                        if choice["finish_reason"]:
                            ended.append(choice["index"])

        reader = threading.Thread(target=read)
        reader.start()
        assert has_begun.wait(TIMEOUT_S)
        narrow = {**body, "max_tokens": 8}
        answer = client.http.post("/v1/completions", json=narrow, headers=_authorization(BOB))
        num_ended = len(ended)
        reader.join()
        assert answer.status_code == 200, answer.text
        assert num_ended <= num_choices // 3
        assert sorted(ended) == [*range(num_choices)]


def _cached_tokens(client: ServiceClient, prompt: list[int], key: str) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    answer = client.http.post("/v1/completions", json=body, headers=_authorization(key))
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
