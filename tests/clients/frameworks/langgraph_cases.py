"""Agents of LangGraph, with LangChain's models: python langgraph_cases.py <base url> <model>"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Send
from station import (
    MAX_TOKENS,
    QUESTION,
    SHORT,
    TIMEOUT_S,
    TWO_CALLS,
    Reading,
    Station,
    base_url,
    main,
    model,
    openai_url,
)

warnings.filterwarnings("ignore", "create_react_agent")
OPENAI = {
    "model": model,
    "base_url": openai_url,
    "api_key": "none",
    "temperature": 0.0,
    "max_retries": 0,
    "timeout": TIMEOUT_S,
    "stream_usage": True,
}


def chat_model(kind: str, **options: Any) -> BaseChatModel:
    if kind == "anthropic":
        return ChatAnthropic(
            model_name=model,
            base_url=base_url,
            api_key="none",
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            timeout=TIMEOUT_S,
        )
    chosen = {**OPENAI, "max_tokens": MAX_TOKENS, **options}
    return ChatOpenAI(**chosen, use_responses_api=kind == "responses")


def bound(kind: str, station: Station, *, forced: bool, **options: Any) -> Any:
    """Anthropic's `any` is what the others call required."""
    choice = ("any" if kind == "anthropic" else "required") if forced else "auto"
    served = chat_model(kind, **options)
    parallel = "extra_body" in options
    return served.bind_tools([station.read_gauge], tool_choice=choice, parallel_tool_calls=parallel)


def result(station: Station, messages: list[AnyMessage]) -> dict[str, Any]:
    output = [message for message in messages if isinstance(message, AIMessage)]
    usages = [message.usage_metadata for message in output]
    return {
        "called": station.calls,
        "roles": [message.type for message in messages],
        "returned": [message.text for message in messages if isinstance(message, ToolMessage)],
        "tokens": [
            sum(usage["input_tokens"] for usage in usages if usage),
            sum(usage["output_tokens"] for usage in usages if usage),
        ],
        "output": messages[-1].text,
    }


def react(kind: str, station: Station, **options: Any) -> Any:
    """The prebuilt agent. What a person says has to be answered by a call."""
    changed = {key: options.pop(key) for key in ("extra_body",) if key in options}

    def choose(state: Any, runtime: Any) -> Any:
        forced = isinstance(state["messages"][-1], HumanMessage)
        return bound(kind, station, forced=forced, **changed)

    return create_react_agent(choose, [station.read_gauge], **options)


def loop(kind: str, **options: Any) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        station = Station()
        state = await react(kind, station, **options).ainvoke({"messages": [("user", QUESTION)]})
        return result(station, state["messages"])

    return case


def stream(kind: str) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        station, whole = Station(), AIMessageChunk("")
        pieces = calls = 0
        requested = {"messages": [("user", QUESTION)]}
        async for chunk, where in react(kind, station).astream(requested, stream_mode="messages"):
            if isinstance(chunk, AIMessageChunk):
                pieces += bool(chunk.text)
                calls += len(chunk.tool_call_chunks)
                if where["langgraph_step"] > 2:
                    whole += chunk
        return {"called": station.calls, "pieces": pieces, "calls": calls, "output": whole.text}

    return case


def typed(kind: str, method: str) -> Callable[[], Any]:
    async def case() -> dict[str, Any]:
        served = chat_model(kind)
        answer = await served.with_structured_output(Reading, method=method).ainvoke(QUESTION)
        assert isinstance(answer, Reading)
        return answer.model_dump()

    return case


async def response_format() -> dict[str, Any]:
    """The prebuilt agent's typed answer after its loop."""
    station = Station()
    made = create_react_agent(
        lambda state, runtime: bound(
            "chat", station, forced=isinstance(state["messages"][-1], HumanMessage)
        ),
        [station.read_gauge],
        response_format=Reading,
    )
    state = await made.ainvoke({"messages": [("user", QUESTION)]})
    assert isinstance(state["structured_response"], Reading)
    return {
        **result(station, state["messages"]),
        "typed": state["structured_response"].model_dump(),
    }


async def remembered() -> dict[str, Any]:
    """A checkpointer keeps the thread; its second run sends the calls of the first."""
    station = Station()
    made = react("chat", station, extra_body=SHORT, checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "one"}}
    await made.ainvoke({"messages": [("user", QUESTION)]}, thread)
    state = await made.ainvoke({"messages": [("user", "And now?")]}, thread)
    return result(station, state["messages"])


class Rounds(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    gates: list[str]
    readings: Annotated[list[Reading], operator.add]


async def graph() -> dict[str, Any]:
    """A graph of one's own: a loop of calls, then branches that ask at once."""
    station = Station()
    served = bound("chat", station, forced=True)
    speaks = bound("chat", station, forced=False)
    typed_model = chat_model("chat").with_structured_output(Reading, method="json_schema")

    async def think(state: Rounds) -> dict[str, Any]:
        forced = isinstance(state["messages"][-1], HumanMessage)
        return {"messages": [await (served if forced else speaks).ainvoke(state["messages"])]}

    async def read(state: dict[str, str]) -> dict[str, Any]:
        return {"readings": [await typed_model.ainvoke(f"Read the gate {state['gate']}.")]}

    made = StateGraph(Rounds)
    made.add_node("think", think)
    made.add_node("tools", ToolNode([station.read_gauge]))
    made.add_node("spread", lambda state: {})
    made.add_node("read", read)
    made.add_edge(START, "think")
    made.add_conditional_edges("think", tools_condition, {"tools": "tools", END: "spread"})
    made.add_edge("tools", "think")
    made.add_conditional_edges(
        "spread", lambda state: [Send("read", {"gate": gate}) for gate in state["gates"]], ["read"]
    )
    made.add_edge("read", END)
    requested = {"messages": [HumanMessage(QUESTION)], "gates": ["north", "south"], "readings": []}
    state = await made.compile().ainvoke(requested)
    return {
        **result(station, state["messages"]),
        "readings": [reading.model_dump() for reading in state["readings"]],
    }


main(
    {
        **{
            f"{name}_{kind}": case
            for kind in ("chat", "responses", "anthropic")
            for name, case in {
                "loop": loop(kind),
                "stream": stream(kind),
                "typed_by_schema": typed(kind, "json_schema"),
                "typed_by_call": typed(kind, "function_calling"),
                **({} if kind == "anthropic" else {"two_calls": loop(kind, extra_body=TWO_CALLS)}),
            }.items()
        },
        "response_format": response_format,
        "remembered": remembered,
        "graph": graph,
    }
)
