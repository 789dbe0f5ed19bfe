"""Agents of LlamaIndex: python llama_index_cases.py <base url> <model>"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ToolCallResult,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from station import (
    MAX_TOKENS,
    QUESTION,
    SHORT,
    TIMEOUT_S,
    TWO_CALLS,
    Asked,
    Reading,
    Station,
    main,
    model,
    openai_url,
)


def served(*, extra_body: Any = SHORT, **options: Any) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=openai_url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=16384,
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        timeout=TIMEOUT_S,
        additional_kwargs={"extra_body": extra_body},
        **options,
    )


def agent(
    station: Station, *, streamed: bool, parallel: bool = False, **options: Any
) -> FunctionAgent:
    """Its first step has to call, the others may end."""
    return FunctionAgent(
        name="keeper",
        description="Keeps the gates.",
        tools=[FunctionTool.from_defaults(station.read_gauge, fn_schema=Asked)],
        llm=served(**options),
        initial_tool_choice="required",
        allow_parallel_tool_calls=parallel,
        streaming=streamed,
        timeout=TIMEOUT_S,
    )


def loop(*, streamed: bool, **options: Any) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        station = Station()
        handler = agent(station, streamed=streamed, **options).run(user_msg=QUESTION)
        deltas, returned = [], []
        async for event in handler.stream_events():
            if isinstance(event, AgentStream):
                deltas.append(event.delta)
            elif isinstance(event, ToolCallResult):
                returned.append(str(event.tool_output))
        result = await handler
        return {
            "called": station.calls,
            "returned": returned,
            "pieces": len([delta for delta in deltas if delta]),
            "streamed": "".join(deltas),
            "output": result.response.content,
        }

    return case


async def remembered() -> dict[str, Any]:
    """A second run in the same context sends the calls of the first."""
    station = Station()
    made = agent(station, streamed=True)
    context = Context(made)
    await made.run(user_msg=QUESTION, ctx=context)
    result = await made.run(user_msg="And now?", ctx=context)
    return {"called": station.calls, "output": result.response.content}


async def workflow() -> dict[str, Any]:
    """An agent inside a workflow of agents, with a typed answer at its end."""
    station = Station()
    made = AgentWorkflow(
        agents=[agent(station, streamed=True)],
        root_agent="keeper",
        output_cls=Reading,
        timeout=TIMEOUT_S,
    )
    result = await made.run(user_msg=QUESTION)
    return {
        "called": station.calls,
        "typed": result.get_pydantic_model(Reading).model_dump(),
        "output": result.response.content,
    }


def typed(**options: Any) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        chat = [ChatMessage(role="user", content=QUESTION)]
        answer = await served(**options).as_structured_llm(Reading).achat(chat)
        assert isinstance(answer.raw, Reading)
        return answer.raw.model_dump()

    return case


main(
    {
        "loop": loop(streamed=False),
        "stream": loop(streamed=True),
        "two_calls": loop(streamed=True, parallel=True, extra_body=TWO_CALLS),
        "remembered": remembered,
        "workflow": workflow,
        "typed_by_schema": typed(should_use_structured_outputs=True, extra_body=None),
        "typed_by_call": typed(extra_body=None),
    }
)
