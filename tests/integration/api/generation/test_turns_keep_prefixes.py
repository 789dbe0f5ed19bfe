"""A conversation's next turn begins with the tokens of the turn before: its prompt and its output.

What a client sends back is rendered as the model wrote it, so that its KV cache has it already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.jobs.prefix_place import place_of
from tests.support.checkpoints import make_checkpoint
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import MODEL, RunningService, running_service
from tests.support.tool_models import (
    make_family_checkpoint,
    make_hermes_checkpoint,
    make_llama3_checkpoint,
)
from tests.support.tool_templates import FAMILIES
from tests.support.written_calls import WRITTEN

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOL = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
ASKED, SUN = "Weather in Oslo?", "Sun."
OSLO = '{"city": "Oslo", "days": 2}'
ODD = '{"days":2,  "city":"\\u00d8sl\\u00f8"}'  # as no serializer writes it
THOUGHT = "<think>\nWhich city?\n</think>\n\n"


ANALYSIS = "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant"
HEADER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"


def hermes(arguments: str) -> str:
    call = f'{{"name": "get_weather", "arguments": {arguments}}}'
    return f"\n<tool_call>\n{call}\n</tool_call>"


def family(name: str) -> Callable[[Path], Path]:
    return lambda path: make_family_checkpoint(path, name)


def with_call_ids(path: Path) -> Path:
    """Mistral's manners as in Mistral Small 3.2, whose template writes the ids of calls."""
    named = FAMILIES["mistral-named"]
    template = named.template.replace("+ '[ARGS]'", "+ '[CALL_ID]' + call.id + '[ARGS]'")
    return make_checkpoint(
        path,
        chat_template=template,
        special_markers=named.special_markers,
        max_position_embeddings=4096,
    )


# How a model is made, and what it writes in its turn.
MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "hermes": (make_hermes_checkpoint, hermes(OSLO)),
    "hermes-text": (make_hermes_checkpoint, "I look." + hermes(OSLO)),
    "hermes-thought": (make_hermes_checkpoint, THOUGHT + "I look." + hermes(OSLO)),
    "hermes-thought-call": (make_hermes_checkpoint, THOUGHT + hermes(OSLO)),
    "hermes-calls": (make_hermes_checkpoint, "I look." + hermes(OSLO) + hermes(OSLO)),
    "hermes-answer": (make_hermes_checkpoint, THOUGHT + "It is fine.\n"),
    "hermes-odd": (make_hermes_checkpoint, hermes(ODD)),
    "llama3": (make_llama3_checkpoint, f'{{"name": "get_weather", "parameters": {OSLO}}}'),
    "qwen3-coder": (family("qwen3-coder"), "\n" + WRITTEN["qwen3-coder"]([("get_weather", OSLO)])),
    "mistral": (with_call_ids, f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{OSLO}"),
    "gpt-oss": (family("gpt-oss"), ANALYSIS + HEADER + OSLO + "<|call|>"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest,
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunningService, str]]:
    make, written = MODELS[request.param]
    path = make(tmp_path_factory.mktemp("model") / "m")
    with running_service(redis_url, new_namespace(), path) as service:
        yield service, written


def chat(client: httpx.Client, speak: Callable[[], None]) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    body = {"model": MODEL, "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    speak()
    message = post(client, "/v1/chat/completions", body)["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": SUN}
        for call in message.get("tool_calls") or ()
    ] or [{"role": "user", "content": SUN}]
    post(client, "/v1/chat/completions", {**body, "messages": [*messages, message, *results]})


def _responses(client: httpx.Client, speak: Callable[[], None], *, is_stored: bool) -> None:
    asked = {"role": "user", "content": ASKED}
    body = {"model": MODEL, "input": [asked], "store": is_stored, "max_output_tokens": 140}
    body["tools"] = [{"type": "function", **TOOL}]
    if not is_stored:
        body["include"] = ["reasoning.encrypted_content"]
    speak()
    first = post(client, "/v1/responses", body)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": SUN}
        for item in first["output"]
        if item["type"] == "function_call"
    ] or [{"role": "user", "content": SUN}]
    if is_stored:
        more = {"input": results, "previous_response_id": first["id"]}
    else:
        more = {"input": [asked, *first["output"], *results]}
    post(client, "/v1/responses", {**body, **more, "max_output_tokens": 16})


def responses(client: httpx.Client, speak: Callable[[], None]) -> None:
    _responses(client, speak, is_stored=True)


def stateless_responses(client: httpx.Client, speak: Callable[[], None]) -> None:
    _responses(client, speak, is_stored=False)


def anthropic(client: httpx.Client, speak: Callable[[], None]) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": SCHEMA}
    body = {"model": MODEL, "messages": messages, "tools": [tool], "max_tokens": 140}
    body["thinking"] = {"type": "adaptive"}
    speak()
    content = post(client, "/v1/messages", body)["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": SUN}
        for block in content
        if block["type"] == "tool_use"
    ] or [{"type": "text", "text": SUN}]
    turns = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    post(client, "/v1/messages", {**body, "messages": [*messages, *turns]})


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("turns", [chat, responses, stateless_responses, anthropic])
def test_the_next_turn_begins_with_the_prompt_and_the_output_before_it(
    model: tuple[RunningService, str],
    turns: Callable[[httpx.Client, Callable[[], None]], None],
) -> None:
    service, written = model
    tokenizer = service.text.tokenizer
    said = tokenizer.encode(written, add_special_tokens=False)
    end = service.card.eos_token_ids[0]

    def speak() -> None:
        service.worker.seen.clear()
        service.worker.script.says = [*said, end]

    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        turns(client, speak)
    first, second = (seen.job.prompt_token_ids for seen in service.worker.seen)
    before = (*first, *tokenizer.encode(kept(written, turns), add_special_tokens=False))
    same = next(
        (i for i, pair in enumerate(zip(before, second, strict=False)) if pair[0] != pair[1]),
        len(before),
    )
    texts = [b"".join(b"%d," % each for each in ids) for ids in (second, before)]
    assert same == len(before), place_of(tokenizer, *texts, same)


def kept(written: str, turns: object) -> str:
    """Returns what can be kept of a turn. The template of gpt-oss writes a call's header in another
    order than the model; a client of Messages has the arguments as an object, without their
    text."""
    if turns is anthropic:
        written = written.partition(ODD)[0]
    return written.partition("<|channel|>commentary")[0]
