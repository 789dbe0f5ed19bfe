"""Agents of pydantic-ai: python pydantic_ai_cases.py <base url> <model>"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_ai import Agent, NativeOutput, PartDeltaEvent, RunContext
from pydantic_ai.messages import ModelMessage, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from station import (
    MAX_TOKENS,
    QUESTION,
    SHORT,
    TWO_CALLS,
    Reading,
    Station,
    base_url,
    main,
    model,
    openai_url,
)

openai = OpenAIProvider(base_url=openai_url, api_key="none")
anthropic = AnthropicProvider(base_url=base_url, api_key="none")
MODELS: dict[str, Callable[[], Model]] = {
    "chat": lambda: OpenAIChatModel(model, provider=openai),
    "responses": lambda: OpenAIResponsesModel(model, provider=openai),
    # Else it thinks that only the models whose names it knows keep to schemas.
    "anthropic": lambda: AnthropicModel(
        model, provider=anthropic, profile={"supports_json_schema_output": True}
    ),
}


def settings(context: RunContext[Any]) -> Any:
    """The first step has to call a tool; the others may end."""
    return {
        "temperature": 0.0,
        "max_tokens": MAX_TOKENS,
        "parallel_tool_calls": False,
        "tool_choice": "required" if context.run_step == 1 else "auto",
    }


def two_calls(context: RunContext[Any]) -> Any:
    if context.run_step > 1:
        return {**settings(context), "extra_body": SHORT}
    return {**settings(context), "parallel_tool_calls": True, "extra_body": TWO_CALLS}


def report(
    station: Station, messages: list[ModelMessage], usage: Any, output: Any
) -> dict[str, Any]:
    parts = [part for message in messages for part in message.parts]
    return {
        "called": station.calls,
        "asked": [part.args_as_dict() for part in parts if isinstance(part, ToolCallPart)],
        "returned": [part.content for part in parts if isinstance(part, ToolReturnPart)],
        "requests": usage.requests,
        "tokens": [usage.input_tokens, usage.output_tokens],
        "output": output,
    }


def agent(kind: str, station: Station, chosen: Any = settings, **options: Any) -> Agent[Any, Any]:
    tools = [station.read_gauge]
    return Agent(MODELS[kind](), tools=tools, model_settings=chosen, **options)


def loop(kind: str, chosen: Any = settings) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        station = Station()
        result = await agent(kind, station, chosen).run(QUESTION)
        return report(station, result.all_messages(), result.usage, result.output)

    return case


def stream(kind: str) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        station = Station()
        async with agent(kind, station).run_stream(QUESTION) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        return {
            **report(station, result.all_messages(), result.usage, "".join(pieces)),
            "pieces": len(pieces),
        }

    return case


def events(kind: str) -> Callable[[], Any]:
    async def case() -> list[str]:
        station, kinds = Station(), []
        async with agent(kind, station).run_stream_events(QUESTION) as found:
            async for event in found:
                delta = event.delta.part_delta_kind if isinstance(event, PartDeltaEvent) else ""
                kinds.append(f"{event.event_kind} {delta}".strip())
        return sorted(set(kinds))

    return case


def typed(kind: str, output: Any) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        made = Agent(
            MODELS[kind](),
            output_type=output,
            model_settings={"temperature": 0.0, "max_tokens": MAX_TOKENS},
        )
        result = await made.run(QUESTION)
        assert isinstance(result.output, Reading)
        async with made.run_stream(QUESTION) as running:
            seen = [part async for part in running.stream_output(debounce_by=None)]
        assert isinstance(seen[-1], Reading)
        return {
            "whole": result.output.model_dump(),
            "streamed": seen[-1].model_dump(),
            "requests": result.usage.requests,
        }

    return case


main(
    {
        f"{name}_{kind}": case
        for kind in MODELS
        for name, case in {
            "loop": loop(kind),
            "stream": stream(kind),
            "events": events(kind),
            "tool_output": typed(kind, Reading),
            "native_output": typed(kind, NativeOutput(Reading)),
            **({} if kind == "anthropic" else {"two_calls": loop(kind, two_calls)}),
        }.items()
    }
)
