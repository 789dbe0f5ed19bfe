"""Agents of openai-agents: python openai_agents_cases.py <base url> <model>"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
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

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=openai_url, api_key="none", max_retries=0)
MODELS: dict[str, Callable[[], Model]] = {
    "chat": lambda: OpenAIChatCompletionsModel(model, client),
    "responses": lambda: OpenAIResponsesModel(model, client),
}
# The framework lets the model choose again when a tool was called.
REQUIRED = {
    "temperature": 0.0,
    "max_tokens": MAX_TOKENS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "include_usage": True,
}


def agent(kind: str, station: Station, **options: Any) -> Agent[Any]:
    changed = options.pop("settings", {})
    return Agent(
        name="keeper",
        instructions="You keep the gates.",
        model=MODELS[kind](),
        tools=[function_tool(station.read_gauge)],
        model_settings=ModelSettings(**{**REQUIRED, **changed}),
        **options,
    )


def report(station: Station, result: Any) -> dict[str, Any]:
    usage = result.context_wrapper.usage
    items = [item.type for item in result.new_items]
    return {
        "called": station.calls,
        "items": items,
        "returned": [
            item.output for item in result.new_items if item.type == "tool_call_output_item"
        ],
        "requests": usage.requests,
        "tokens": [usage.input_tokens, usage.output_tokens],
        "output": result.final_output,
    }


def loop(kind: str, **options: Any) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        station = Station()
        return report(station, await Runner.run(agent(kind, station, **options), QUESTION))

    return case


def named(kind: str) -> Callable[[], Any]:
    """A function by its name."""
    return loop(kind, settings={"tool_choice": "read_gauge", "parallel_tool_calls": None})


def two_calls(kind: str) -> Callable[[], Any]:
    changed = {"parallel_tool_calls": True, "extra_body": TWO_CALLS}
    return loop(kind, settings=changed, tool_use_behavior="stop_on_first_tool")


def stream(kind: str) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        station = Station()
        result = Runner.run_streamed(agent(kind, station), QUESTION)
        raw, text = set(), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                raw.add(event.data.type)
                if event.data.type == "response.output_text.delta":
                    text += event.data.delta
        return {**report(station, result), "raw": sorted(raw), "text": text}

    return case


def typed(kind: str) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        made = Agent(
            name="reader",
            model=MODELS[kind](),
            output_type=Reading,
            model_settings=ModelSettings(temperature=0.0, max_tokens=MAX_TOKENS),
        )
        result = await Runner.run(made, QUESTION)
        assert isinstance(result.final_output, Reading)
        return result.final_output.model_dump()

    return case


def handoff(kind: str) -> Callable[[], Any]:
    """One agent hands the conversation to another."""

    async def case() -> dict[str, Any]:
        expert = Agent(
            name="expert",
            model=MODELS[kind](),
            model_settings=ModelSettings(temperature=0.0, max_tokens=MAX_TOKENS),
        )
        desk = Agent(
            name="desk",
            model=MODELS[kind](),
            handoffs=[expert],
            model_settings=ModelSettings(**REQUIRED),
        )
        result = await Runner.run(desk, QUESTION)
        return {"last": result.last_agent.name, "items": [item.type for item in result.new_items]}

    return case


def session(kind: str) -> Callable[[], Any]:
    """A second run goes on from the calls of the first."""

    async def case() -> dict[str, Any]:
        station, kept = Station(), SQLiteSession("one")
        keeper = agent(kind, station, settings={"extra_body": SHORT})
        await Runner.run(keeper, QUESTION, session=kept)
        result = await Runner.run(keeper, "And now?", session=kept)
        return {**report(station, result), "kept": len(await kept.get_items())}

    return case


async def chained() -> dict[str, Any]:
    """The service remembers the conversation: `previous_response_id`."""
    station = Station()
    keeper = agent("responses", station, settings={"extra_body": SHORT})
    first = await Runner.run(keeper, QUESTION, auto_previous_response_id=True)
    second = await Runner.run(keeper, "And now?", previous_response_id=first.last_response_id)
    return report(station, second)


async def as_agents_set_it() -> dict[str, Any]:
    """What users copy from examples for reasoning models changes nothing here."""
    station = Station()
    settings = {
        "store": False,
        "truncation": "auto",
        "verbosity": "medium",
        "response_include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
    }
    return report(
        station, await Runner.run(agent("responses", station, settings=settings), QUESTION)
    )


main(
    {
        **{
            f"{name}_{kind}": case
            for kind in MODELS
            for name, case in {
                "loop": loop(kind),
                "named": named(kind),
                "two_calls": two_calls(kind),
                "stream": stream(kind),
                "typed": typed(kind),
                "handoff": handoff(kind),
                "session": session(kind),
            }.items()
        },
        "chained": chained,
        "as_agents_set_it": as_agents_set_it,
    }
)
