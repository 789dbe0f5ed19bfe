"""Agents of smolagents: python smolagents_cases.py <base url> <model>"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smolagents import ActionStep, LogLevel, OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessageStreamDelta
from station import (
    MAX_TOKENS,
    QUESTION,
    SHORT,
    TWO_CALLS,
    Reading,
    Station,
    main,
    model,
    openai_url,
)


class ReadGauge(Tool):  # type: ignore[misc]
    name = "read_gauge"
    description = "Reads a gauge."
    inputs = {  # noqa: RUF012
        "gate": {
            "type": "string",
            "enum": ["north", "south", "weir"],
            "description": "Which gate.",
        },
        "unit": {"type": "string", "enum": ["metres", "feet"], "description": "Of the answer."},
    }
    output_type = "string"

    def __init__(self, station: Station) -> None:
        super().__init__()
        self.station = station

    def forward(self, gate: str, unit: str) -> str:
        return self.station.read_gauge(gate, unit)  # type: ignore[arg-type]


class FinalAnswer(Tool):  # type: ignore[misc]
    name = "final_answer"
    description = "Gives the final answer."
    inputs = {  # noqa: RUF012
        "answer": {"type": "string", "enum": ["deep", "shallow"], "description": "The answer."}
    }
    output_type = "string"

    def forward(self, answer: str) -> str:
        return answer


def keep_to(name: str, agent: ToolCallingAgent, station: Station) -> None:
    """Leaves the agent one tool."""
    tools = {"read_gauge": ReadGauge(station), "final_answer": FinalAnswer()}
    agent.tools.clear()
    agent.tools[name] = tools[name]


def agent(station: Station, *, streamed: bool, **options: Any) -> ToolCallingAgent:
    """It always asks for a call: first there is only the gauge, then only the answer."""
    served = OpenAIModel(
        model,
        api_base=openai_url,
        api_key="none",
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        **options,
    )

    def answer_next(step: ActionStep, agent: ToolCallingAgent) -> None:
        keep_to("final_answer", agent, station)
        if "extra_body" in options:
            served.kwargs["extra_body"] = SHORT

    made = ToolCallingAgent(
        tools=[ReadGauge(station)],
        model=served,
        stream_outputs=streamed,
        verbosity_level=LogLevel.OFF,
        step_callbacks={ActionStep: answer_next},
        max_steps=3,
    )
    keep_to("read_gauge", made, station)
    return made


def loop(**options: Any) -> Callable[[], Any]:
    def case() -> dict[str, Any]:
        station = Station()
        made = agent(station, streamed=False, **options)
        result = made.run(QUESTION, return_full_result=True)
        steps = [step for step in made.memory.steps if isinstance(step, ActionStep)]
        return {
            "called": station.calls,
            "returned": [step.observations for step in steps],
            "errors": [str(step.error) for step in steps if step.error],
            "state": result.state,
            "tokens": [result.token_usage.input_tokens, result.token_usage.output_tokens],
            "output": result.output,
        }

    return case


def stream() -> dict[str, Any]:
    station = Station()
    made = agent(station, streamed=True, parallel_tool_calls=False)
    events = list(made.run(QUESTION, stream=True))
    deltas = [event for event in events if isinstance(event, ChatMessageStreamDelta)]
    usages = [delta.token_usage for delta in deltas if delta.token_usage]
    return {
        "called": station.calls,
        "pieces": len([delta for delta in deltas if delta.tool_calls]),
        "tokens": [sum(u.input_tokens for u in usages), sum(u.output_tokens for u in usages)],
        "output": events[-1].output,
    }


def typed() -> dict[str, Any]:
    """The model by itself, with `response_format`."""
    served = OpenAIModel(
        model, api_base=openai_url, api_key="none", temperature=0.0, max_tokens=MAX_TOKENS
    )
    schema = {"name": "reading", "schema": Reading.model_json_schema(), "strict": True}
    message = served.generate(
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    return Reading.model_validate_json(message.content).model_dump()


main(
    {
        "loop": loop(parallel_tool_calls=False),
        "loop_by_default": loop(extra_body=SHORT),
        "two_calls": loop(extra_body=TWO_CALLS),
        "stream": stream,
        "typed": typed,
    }
)
