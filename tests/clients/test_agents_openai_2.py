"""Agent frameworks run their own loops against the demo model: those on OpenAI's SDK 2."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.agent_checks import DEMO, LEVEL, check_calls, check_reading
from tests.support.frameworks import complaints_about_pins, framework_says, outcome

pytestmark = [pytest.mark.packages, pytest.mark.timeout(900)]
ENVIRONMENT = "openai-2"


@pytest.fixture(scope="module")
def llama_index(demo_url: str) -> dict[str, Any]:
    return framework_says(ENVIRONMENT, "llama_index_cases", demo_url, DEMO)


@pytest.fixture(scope="module")
def instructor(demo_url: str) -> dict[str, Any]:
    return framework_says(ENVIRONMENT, "instructor_cases", demo_url, DEMO)


@pytest.mark.parametrize("case", ["loop", "stream"])
def test_llama_index_runs_a_tool_and_ends(llama_index: dict[str, Any], case: str) -> None:
    result = outcome(llama_index, case)
    check_calls(result["called"], 1)
    assert result["returned"] == [LEVEL]
    assert result["output"]
    if case == "stream":
        assert result["streamed"] == result["output"]
        assert result["pieces"] > 5


def test_llama_index_runs_two_calls_of_a_turn(llama_index: dict[str, Any]) -> None:
    result = outcome(llama_index, "two_calls")
    check_calls(result["called"], 2)
    assert result["returned"] == [LEVEL] * 2
    assert result["output"]


def test_llama_index_goes_on_in_a_context(llama_index: dict[str, Any]) -> None:
    result = outcome(llama_index, "remembered")
    check_calls(result["called"], 2)
    assert result["output"]


def test_a_workflow_of_llama_index_ends_with_a_typed_answer(llama_index: dict[str, Any]) -> None:
    result = outcome(llama_index, "workflow")
    check_calls(result["called"], 1)
    check_reading(result["typed"])


@pytest.mark.parametrize("way", ["schema", "call"])
def test_llama_index_gets_a_typed_answer(llama_index: dict[str, Any], way: str) -> None:
    check_reading(outcome(llama_index, f"typed_by_{way}"))


@pytest.mark.parametrize("mode", ["default", "tools_strict", "json_schema"])
def test_instructor_gets_a_typed_answer(instructor: dict[str, Any], mode: str) -> None:
    """By default it names the function that has to be called, and takes one call."""
    result = outcome(instructor, mode)
    check_reading(result["whole"])
    assert 0 < result["tokens"] < 100


def test_instructor_sees_the_answer_fill_up(instructor: dict[str, Any]) -> None:
    result = outcome(instructor, "partial")
    assert result["first"] == {"gate": None, "unit": None, "level": None}
    check_reading(result["whole"])
    assert result["pieces"] > 5


def test_instructor_takes_several_calls_of_a_turn(instructor: dict[str, Any]) -> None:
    readings = outcome(instructor, "several")
    assert len(readings) == 2
    for reading in readings:
        check_reading(reading)


def test_the_pins_are_whole() -> None:
    assert complaints_about_pins(ENVIRONMENT) == ""
