"""Agent frameworks run their own loops against the demo model: those on OpenAI's SDK 3.

What the model calls is right only because a grammar keeps it so. An agent asks for a call, runs the
tool, gives back its result and lets the model end.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.agent_checks import DEMO, LEVEL, check_calls, check_reading, check_tokens
from tests.support.frameworks import complaints_about_pins, framework_says, outcome

pytestmark = [pytest.mark.packages, pytest.mark.timeout(900)]
ENVIRONMENT = "openai-3"
OPENAI = ["chat", "responses"]
ALL = [*OPENAI, "anthropic"]


@pytest.fixture(scope="module")
def pydantic_ai(demo_url: str) -> dict[str, Any]:
    return framework_says(ENVIRONMENT, "pydantic_ai_cases", demo_url, DEMO)


@pytest.fixture(scope="module")
def openai_agents(demo_url: str) -> dict[str, Any]:
    return framework_says(ENVIRONMENT, "openai_agents_cases", demo_url, DEMO)


@pytest.fixture(scope="module")
def smolagents(demo_url: str) -> dict[str, Any]:
    return framework_says(ENVIRONMENT, "smolagents_cases", demo_url, DEMO)


@pytest.fixture(scope="module")
def langgraph(demo_url: str) -> dict[str, Any]:
    return framework_says(ENVIRONMENT, "langgraph_cases", demo_url, DEMO)


@pytest.mark.promise(
    "Clients: agent frameworks run their own loops: tools are called with valid arguments, results "
    "are returned, typed output parses, the loop ends, whole and streamed (pydantic-ai, "
    "openai-agents, LangGraph, smolagents, LlamaIndex, instructor, the AI SDK)"
)
@pytest.mark.parametrize("kind", ALL)
def test_pydantic_ai_runs_a_tool_and_ends(pydantic_ai: dict[str, Any], kind: str) -> None:
    whole, streamed = outcome(pydantic_ai, f"loop_{kind}"), outcome(pydantic_ai, f"stream_{kind}")
    for result in (whole, streamed):
        check_calls(result["called"], 1)
        assert result["asked"] == result["called"]
        assert result["returned"] == [LEVEL]
        assert result["requests"] == 2
        check_tokens(result["tokens"])
    assert streamed.pop("pieces") > 5
    assert streamed == whole
    assert whole["output"]


@pytest.mark.parametrize("kind", ALL)
def test_pydantic_ai_has_events_while_it_streams(pydantic_ai: dict[str, Any], kind: str) -> None:
    assert {
        "part_delta tool_call",
        "function_tool_call",
        "function_tool_result",
        "part_delta text",
        "agent_run_result",
    } <= set(outcome(pydantic_ai, f"events_{kind}"))


@pytest.mark.parametrize("way", ["tool_output", "native_output"])
@pytest.mark.parametrize("kind", ALL)
def test_pydantic_ai_gets_a_typed_answer(pydantic_ai: dict[str, Any], kind: str, way: str) -> None:
    result = outcome(pydantic_ai, f"{way}_{kind}")
    check_reading(result["whole"])
    assert result["streamed"] == result["whole"]
    assert result["requests"] == 1


@pytest.mark.parametrize("kind", OPENAI)
def test_pydantic_ai_runs_two_calls_of_a_turn(pydantic_ai: dict[str, Any], kind: str) -> None:
    result = outcome(pydantic_ai, f"two_calls_{kind}")
    check_calls(result["called"], 2)
    assert result["returned"] == [LEVEL] * 2
    assert result["requests"] == 2


@pytest.mark.parametrize("case", ["loop", "named", "stream"])
@pytest.mark.parametrize("kind", OPENAI)
def test_openai_agents_run_a_tool_and_end(
    openai_agents: dict[str, Any], kind: str, case: str
) -> None:
    result = outcome(openai_agents, f"{case}_{kind}")
    check_calls(result["called"], 1)
    assert result["items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result["returned"] == [LEVEL]
    assert result["requests"] == 2
    check_tokens(result["tokens"])
    assert result["output"]
    if case == "stream":
        assert result["text"] == result["output"]
        assert "response.function_call_arguments.delta" in result["raw"]


@pytest.mark.parametrize("kind", OPENAI)
def test_openai_agents_run_two_calls_of_a_turn(openai_agents: dict[str, Any], kind: str) -> None:
    result = outcome(openai_agents, f"two_calls_{kind}")
    check_calls(result["called"], 2)
    assert result["returned"] == [LEVEL] * 2


@pytest.mark.parametrize("kind", OPENAI)
def test_openai_agents_get_a_typed_answer(openai_agents: dict[str, Any], kind: str) -> None:
    check_reading(outcome(openai_agents, f"typed_{kind}"))


@pytest.mark.parametrize("kind", OPENAI)
def test_openai_agents_hand_over(openai_agents: dict[str, Any], kind: str) -> None:
    result = outcome(openai_agents, f"handoff_{kind}")
    assert result["last"] == "expert"
    assert result["items"] == ["handoff_call_item", "handoff_output_item", "message_output_item"]


@pytest.mark.parametrize("case", ["session_chat", "session_responses", "chained"])
def test_openai_agents_go_on_from_an_earlier_run(openai_agents: dict[str, Any], case: str) -> None:
    """From what they kept themselves, and from what the service did (`previous_response_id`)."""
    result = outcome(openai_agents, case)
    check_calls(result["called"], 2)
    assert result["requests"] == 2
    assert result["tokens"][0] > outcome(openai_agents, "loop_chat")["tokens"][0]


def test_openai_agents_may_say_what_changes_nothing(openai_agents: dict[str, Any]) -> None:
    result = outcome(openai_agents, "as_agents_set_it")
    check_calls(result["called"], 1)
    assert result["requests"] == 2


@pytest.mark.parametrize("case", ["loop", "loop_by_default", "stream"])
def test_smolagents_run_a_tool_and_answer(smolagents: dict[str, Any], case: str) -> None:
    result = outcome(smolagents, case)
    check_calls(result["called"], 1)
    assert result["output"] in ("deep", "shallow")
    check_tokens(result["tokens"])
    if case == "stream":
        assert result["pieces"] > 5
    else:
        assert result["returned"] == [LEVEL, result["output"]]
        assert (result["state"], result["errors"]) == ("success", [])


def test_smolagents_run_two_calls_of_a_turn(smolagents: dict[str, Any]) -> None:
    result = outcome(smolagents, "two_calls")
    check_calls(result["called"], 2)
    assert result["returned"] == [f"{LEVEL}\n{LEVEL}", result["output"]]
    assert (result["state"], result["errors"]) == ("success", [])


def test_smolagents_get_a_typed_answer(smolagents: dict[str, Any]) -> None:
    check_reading(outcome(smolagents, "typed"))


@pytest.mark.parametrize("kind", ALL)
def test_langgraph_runs_a_tool_and_ends(langgraph: dict[str, Any], kind: str) -> None:
    whole, streamed = outcome(langgraph, f"loop_{kind}"), outcome(langgraph, f"stream_{kind}")
    check_calls(whole["called"], 1)
    assert whole["roles"] == ["human", "ai", "tool", "ai"]
    assert whole["returned"] == [LEVEL]
    check_tokens(whole["tokens"])
    assert whole["output"]
    assert (streamed["called"], streamed["output"]) == (whole["called"], whole["output"])
    assert streamed["pieces"] > 5
    assert streamed["calls"] > 5


@pytest.mark.parametrize("kind", OPENAI)
def test_langgraph_runs_two_calls_of_a_turn(langgraph: dict[str, Any], kind: str) -> None:
    result = outcome(langgraph, f"two_calls_{kind}")
    check_calls(result["called"], 2)
    assert result["roles"] == ["human", "ai", "tool", "tool", "ai"]
    assert result["returned"] == [LEVEL] * 2


@pytest.mark.parametrize("way", ["schema", "call"])
@pytest.mark.parametrize("kind", ALL)
def test_langchain_gets_a_typed_answer(langgraph: dict[str, Any], kind: str, way: str) -> None:
    check_reading(outcome(langgraph, f"typed_by_{way}_{kind}"))


def test_langgraph_ends_with_a_typed_answer(langgraph: dict[str, Any]) -> None:
    result = outcome(langgraph, "response_format")
    check_calls(result["called"], 1)
    check_reading(result["typed"])


def test_langgraph_goes_on_in_a_thread(langgraph: dict[str, Any]) -> None:
    result = outcome(langgraph, "remembered")
    check_calls(result["called"], 2)
    assert result["roles"] == ["human", "ai", "tool", "ai"] * 2


def test_a_graph_of_langgraph_branches_after_its_loop(langgraph: dict[str, Any]) -> None:
    result = outcome(langgraph, "graph")
    check_calls(result["called"], 1)
    assert result["roles"] == ["human", "ai", "tool", "ai"]
    assert len(result["readings"]) == 2
    for reading in result["readings"]:
        check_reading(reading)


def test_the_pins_are_whole() -> None:
    assert complaints_about_pins(ENVIRONMENT) == ""
