"""Tools, by OpenAI's SDK for Node and the AI SDK, from a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.api.chat_service import ECHO_HERMES, STOP, chat_service, hermes_call, saying
from tests.support.node import node_says
from tests.support.redis_server import redis_url  # noqa: F401

pytestmark = [pytest.mark.node, pytest.mark.packages]

CALL = hermes_call("depth", '{"gate": 3}')


@pytest.fixture(scope="module")
def base_url(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    with chat_service(redis_url, tmp_path_factory.mktemp("node"), (ECHO_HERMES,)) as url:
        yield url


def says(base_url: str, case: str, **options: Any) -> Any:
    members = {"messages": saying(CALL), "stop": STOP, "max_tokens": 400, **options}
    return node_says("openai_cases", base_url, case, ECHO_HERMES, json.dumps(members))


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_s_loop_runs_a_tool(base_url: str, stream: bool) -> None:
    told = says(base_url, "run_tools", stream=stream)
    assert told["called"][0] == {"gate": 3}
    assert told["roles"][:4] == ["system", "user", "assistant", "tool"]


def test_deltas_of_a_call_add_up(base_url: str) -> None:
    told = says(base_url, "tool_deltas")
    (call,) = told["calls"].values()
    assert call["name"] == "depth"
    assert json.loads(call["arguments"]) == {"gate": 3}
    assert told["finish"] == "tool_calls"


def test_the_ai_sdk_runs_a_tool(base_url: str) -> None:
    told = node_says("ai_cases", base_url, "tools", ECHO_HERMES, CALL + STOP)
    assert told["first"] == [["depth", {"gate": 3}]]
    assert told["steps"] == 2
    assert told["called"][0] == {"gate": 3}
    assert {"tool-input-start", "tool-call", "tool-result"} <= set(told["kinds"])
