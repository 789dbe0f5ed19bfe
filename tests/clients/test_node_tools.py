"""Tools, by the SDK of OpenAI for Node and the AI SDK, from a model that repeats its prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.api.chat_service import (
    ECHO_HERMES,
    STOP,
    hermes_call,
    module_chat_service,
    saying,
)
from tests.support.node import node_says
from tests.support.redis_server import redis_url  # noqa: F401

pytestmark = [pytest.mark.node, pytest.mark.packages]

CALL = hermes_call("depth", '{"gate": 3}')


base_url = module_chat_service(ECHO_HERMES)


def says(base_url: str, case: str, **options: Any) -> Any:
    members = {"messages": saying(CALL), "stop": STOP, "max_tokens": 400, **options}
    return node_says("openai_cases", base_url, case, ECHO_HERMES, json.dumps(members))


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_s_loop_runs_a_tool(base_url: str, stream: bool) -> None:
    result = says(base_url, "run_tools", stream=stream)
    assert result["called"][0] == {"gate": 3}
    assert result["roles"][:4] == ["system", "user", "assistant", "tool"]


def test_deltas_of_a_call_add_up(base_url: str) -> None:
    result = says(base_url, "tool_deltas")
    (call,) = result["calls"].values()
    assert call["name"] == "depth"
    assert json.loads(call["arguments"]) == {"gate": 3}
    assert result["finish"] == "tool_calls"


def test_the_ai_sdk_runs_a_tool(base_url: str) -> None:
    result = node_says("ai_cases", base_url, "tools", ECHO_HERMES, CALL + STOP)
    assert result["first"] == [["depth", {"gate": 3}]]
    assert result["steps"] == 2
    assert result["called"][0] == {"gate": 3}
    assert {"tool-input-start", "tool-call", "tool-result"} <= set(result["kinds"])
