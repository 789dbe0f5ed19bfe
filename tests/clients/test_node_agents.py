"""Agents of the AI SDK run their own loops against the demo model, over each of its providers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.agent_checks import DEMO, LEVEL, check_calls, check_reading, check_tokens
from tests.support.frameworks import outcome
from tests.support.node import node_says

pytestmark = [pytest.mark.node, pytest.mark.packages, pytest.mark.timeout(600)]
PROVIDERS = ["compatible", "chat", "responses", "anthropic"]


@pytest.fixture(scope="module")
def result(demo_url: str) -> dict[str, dict[str, Any]]:
    """What each provider's cases tell."""
    return {name: node_says("ai_agent_cases", demo_url, name, DEMO) for name in PROVIDERS}


@pytest.mark.parametrize("case", ["agent", "agentStreams", "generates", "streams"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_agent_runs_a_tool_and_ends(
    result: dict[str, dict[str, Any]], provider: str, case: str
) -> None:
    found = outcome(result[provider], case)
    check_calls(found["called"], 1)
    assert found["asked"] == found["called"]
    assert found["returned"] == [LEVEL]
    assert found["reasons"] == ["tool-calls", "stop"]
    check_tokens(found["tokens"])
    assert found["text"]
    if case == "agentStreams":
        kinds = {"tool-input-start", "tool-input-delta", "tool-call", "tool-result", "text-delta"}
        assert kinds <= set(found["kinds"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_streams_end_without_an_error(result: dict[str, dict[str, Any]], provider: str) -> None:
    assert outcome(result[provider], "streams")["errors"] == []


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_that_is_named_is_called_once(
    result: dict[str, dict[str, Any]], provider: str
) -> None:
    found = outcome(result[provider], "named")
    check_calls(found["called"], 1)
    assert found["returned"] == [LEVEL]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_objects_are_generated_and_streamed(
    result: dict[str, dict[str, Any]], provider: str
) -> None:
    found = outcome(result[provider], "object")
    check_reading(found["whole"])
    assert found["streamed"] == found["whole"]
    assert found["pieces"] > 1
    check_reading(outcome(result[provider], "output"))


def test_two_calls_of_a_turn_are_run(result: dict[str, dict[str, Any]]) -> None:
    found = outcome(result["compatible"], "twoCalls")
    check_calls(found["called"], 2)
    assert found["returned"] == [LEVEL] * 2
