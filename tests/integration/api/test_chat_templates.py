"""Models with no chat template, several by name, one of the operator, and a strict one, over HTTP.

The engines echo their prompt: the output shows which template rendered it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import END_OF_TEXT, make_checkpoint
from tests.support.dialects import DIALECTS
from tests.support.redis_server import new_namespace
from tests.support.running_service import (
    MODEL,
    RunningService,
    frontend_of_workers,
    running_service,
)
from tests.support.turn_templates import MISTRAL

BARE, NAMED, GIVEN = "bare", "named", "given"
SAYS = "{{ messages[-1].content }} "
USER = [{"role": "user", "content": "hello"}]
BODIES: Mapping[str, dict[str, Any]] = {
    **{DIALECTS[name].path: DIALECTS[name].body() for name in ("chat", "responses", "messages")},
    "/tokenize": {"messages": USER},
}


@dataclass
class Service:
    base_url: str
    logs: Mapping[str, Path]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.base_url}{path}", json=body, timeout=60)

    def chat(self, model: str, **members: Any) -> str:
        response = self.post(
            "/v1/chat/completions", model=model, messages=USER, max_tokens=12, **members
        )
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture(scope="module")
def templates(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory, namespace = tmp_path_factory.mktemp("templates"), new_namespace()
    make_checkpoint(directory / BARE, chat_template=None)
    make_checkpoint(directory / NAMED, chat_template=None)
    (directory / NAMED / "chat_template.jinja").write_text("plain: " + SAYS)
    (directory / NAMED / "additional_chat_templates").mkdir()
    rag = directory / NAMED / "additional_chat_templates" / "rag.jinja"
    rag.write_text("rag: " + SAYS)
    make_checkpoint(directory / GIVEN)
    (directory / "given.jinja").write_text("given: " + SAYS)
    models = {name: {"MODEL": str(directory / name)} for name in (BARE, NAMED, GIVEN)}
    models[GIVEN]["CHAT_TEMPLATE"] = str(directory / "given.jinja")
    with frontend_of_workers(redis_url, namespace, directory, models) as frontend:
        logs = {name: directory / f"{name}.log" for name in models}
        yield Service(frontend.base_url, logs)


@pytest.mark.parametrize("path", BODIES)
def test_chat_with_a_model_without_a_template_is_a_400_that_says_so(
    templates: Service, path: str
) -> None:
    response = templates.post(path, **BODIES[path] | {"model": BARE})
    assert response.status_code == 400
    assert "has no chat template" in response.text
    assert "CHAT_TEMPLATE" in response.text


def test_such_a_model_serves_completions_and_is_named_in_the_log(templates: Service) -> None:
    response = templates.post("/v1/completions", model=BARE, prompt="hello", max_tokens=2)
    assert response.status_code == 200
    (warning,) = [
        line for line in templates.logs[BARE].read_text().splitlines() if "CHAT_TEMPLATE" in line
    ]
    assert "warning" in warning.lower()
    assert "PENSTOCK_CHAT_TEMPLATE can name" not in templates.logs[NAMED].read_text()
    listed = httpx.get(f"{templates.base_url}/v1/models", timeout=30).json()["data"]
    assert {model["id"]: model["has_chat_template"] for model in listed} == {
        BARE: False, NAMED: True, GIVEN: True
    }  # fmt: skip


def test_a_request_names_one_of_the_checkpoints_templates(templates: Service) -> None:
    assert templates.chat(NAMED).startswith("plain: hello")
    assert templates.chat(NAMED, chat_template="rag").startswith("rag: hello")
    response = templates.post(
        "/v1/responses", model=NAMED, input="hello", chat_template="rag", max_output_tokens=16
    )
    assert response.json()["output"][0]["content"][0]["text"].startswith("rag: hello")
    for name in ("nowhere", "{{ messages }}"):  # a template of the client's own is never run
        body = {"model": NAMED, "messages": USER, "chat_template": name}
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = templates.post(path, **body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "chat_template"
            assert "templates: default, rag" in refused.text


def test_the_operators_template_replaces_the_checkpoints(templates: Service) -> None:
    assert templates.chat(GIVEN).startswith("given: hello")


# The same conversation in each dialect. The template raises for each of the orders in it: two turns
# of the user, two of the assistant, and a system message between them.
STRICT: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "S."},
            {"role": "user", "content": "U1."},
            {"role": "user", "content": [{"type": "text", "text": "U2."}]},
            {"role": "assistant", "content": "A1."},
            {"role": "assistant", "content": "A2."},
            {"role": "developer", "content": "LATE."},
            {"role": "user", "content": "U3."},
        ],
        "max_tokens": 1,
    },
    "/v1/responses": {
        "instructions": "S.",
        "input": [
            {"role": "user", "content": "U1."},
            {"role": "user", "content": [{"type": "input_text", "text": "U2."}]},
            {"role": "assistant", "content": "A1."},
            {"role": "assistant", "content": [{"type": "output_text", "text": "A2."}]},
            {"role": "developer", "content": "LATE."},
            {"role": "user", "content": "U3."},
        ],
        "max_output_tokens": 16,
    },
    "/v1/messages": {
        "system": "S.",
        "messages": [
            {"role": "user", "content": "U1."},
            {"role": "user", "content": [{"type": "text", "text": "U2."}]},
            {"role": "assistant", "content": "A1."},
            {"role": "assistant", "content": [{"type": "text", "text": "A2."}]},
            {"role": "system", "content": "LATE."},
            {"role": "user", "content": "U3."},
        ],
        "max_tokens": 1,
    },
}


@pytest.fixture(scope="module")
def strict_service(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    path = make_checkpoint(tmp_path_factory.mktemp("strict") / "m", chat_template=MISTRAL)
    with running_service(redis_url, new_namespace(), path) as service:
        yield service


@pytest.mark.parametrize("path", STRICT)
def test_a_strict_template_gets_the_turns_of_every_dialect_in_its_order(
    strict_service: RunningService, path: str
) -> None:
    # Messages that follow one another are parts of one turn in Anthropic's dialect.
    between = "\n" if path == "/v1/messages" else "\n\n"
    strict_service.worker.seen.clear()
    body = {"model": MODEL, **STRICT[path]}
    response = httpx.post(f"{strict_service.base_url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    (seen,) = strict_service.worker.seen
    prompt = strict_service.text.tokenizer.decode(
        seen.job.prompt_token_ids, skip_special_tokens=False
    )
    assert prompt.removeprefix(END_OF_TEXT) == (
        f"[SYSTEM_PROMPT]S.[/SYSTEM_PROMPT][INST]U1.{between}U2.[/INST]A1.{between}A2.</s>"
        "[INST]LATE.\n\nU3.[/INST]"
    )
