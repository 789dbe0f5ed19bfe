"""LangChain and LiteLLM against one running service, as their users do."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr

from tests.integration.api.chat_service import (
    ECHO_HERMES,
    ENFORCED,
    STOP,
    chat_service,
    hermes_call,
    saying,
)
from tests.support.redis_server import redis_url  # noqa: F401

OSLO = '{"city": "Oslo"}'
CALL = hermes_call("get_weather", OSLO)


class get_weather(BaseModel):  # its name is the tool's
    """The weather in a city."""

    city: str = Field(max_length=8)


@pytest.fixture(scope="module")
def base_url(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("clients")
    with chat_service(redis_url, directory, (ECHO_HERMES, ENFORCED)) as url:
        yield f"{url}/v1"


def langchain(base_url: str, model: str = ECHO_HERMES, **options: Any) -> Any:
    # A second and more, which every process that collects this file would take.
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=base_url,
        api_key=SecretStr("none"),
        model=model,
        max_retries=0,
        **{"stop_sequences": [STOP], "stream_usage": True, **options},
    )


def conversation(text: str) -> list[Any]:
    return [("system", text + STOP), ("human", "Go on.")]


def test_langchain_streams_text_and_usage(base_url: str) -> None:
    whole: Any = None
    for chunk in langchain(base_url).stream(conversation("The gate is open, héllo 😀.")):
        assert chunk.type == "AIMessageChunk"
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content == "The gate is open, héllo 😀."
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] == "stop"


async def test_langchain_has_events_while_it_streams(base_url: str) -> None:
    texts = [
        event["data"]["chunk"].content
        async for event in langchain(base_url).astream_events(
            conversation("The gate."), version="v2"
        )
        if event["event"] == "on_chat_model_stream"
    ]
    assert "".join(texts) == "The gate."


def test_langchain_binds_tools_and_sends_their_results(base_url: str) -> None:
    model = langchain(base_url).bind_tools([get_weather])
    first = model.invoke(conversation(f"I look.\n{CALL}"))
    assert first.content == "I look."
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    whole: Any = None
    for chunk in model.stream(conversation(f"I look.\n{CALL}\n{CALL}")):
        assert chunk.type == "AIMessageChunk"
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}] * 2
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    result = {"role": "tool", "content": "sun", "tool_call_id": call["id"]}
    last = model.invoke([*conversation("Sunny."), first, result])
    assert last.content == "Sunny."


# Whatever a random model does, a call of this tool ends long before these limits.
ENOUGH = {"stop_sequences": None, "max_tokens": 600, "seed": 3}


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_langchain_forces_a_call(base_url: str, choice: str) -> None:
    model = langchain(base_url, ENFORCED, **ENOUGH)
    one = {"parallel_tool_calls": False, "strict": True}
    bound = model.bind_tools([get_weather], tool_choice=choice, **one)
    answer = bound.invoke([("human", "Weather?")], reasoning_effort="none")
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    get_weather.model_validate(call["args"])


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gets_structured_output(base_url: str, method: Any) -> None:
    model = langchain(base_url, ENFORCED, **ENOUGH)
    structured = model.with_structured_output(get_weather, method=method, strict=True)
    answer = structured.invoke([("human", "Weather?")], reasoning_effort="none")
    assert isinstance(answer, get_weather)


@pytest.fixture(scope="module")
def litellm() -> Any:
    """Imported late: it takes seconds, and looks for prices on the net unless told not to."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import litellm

    litellm.telemetry = False
    return litellm


@pytest.mark.filterwarnings("ignore")  # its own, of its models
def test_litellm_streams_and_calls_tools(base_url: str, litellm: Any) -> None:
    params = {
        "model": f"hosted_vllm/{ECHO_HERMES}",
        "api_base": base_url,
        "api_key": "none",
        "messages": saying(f"I look.\n{CALL}"),
        "stop": [STOP],
        "tools": [
            {
                "type": "function",
                "function": {"name": "get_weather", "parameters": get_weather.model_json_schema()},
            }
        ],
        "num_retries": 0,
    }
    whole = litellm.completion(**params).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    chunks = list(litellm.completion(**params, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks).choices[0]
    assert built.message.content == "I look."
    assert built.message.tool_calls[0].function.name == "get_weather"
    assert json.loads(built.message.tool_calls[0].function.arguments) == {"city": "Oslo"}


@pytest.mark.filterwarnings("ignore")
def test_litellm_finds_reasoning(base_url: str, litellm: Any) -> None:
    message = (
        litellm.completion(
            model=f"hosted_vllm/{ECHO_HERMES}",
            api_base=base_url,
            api_key="none",
            messages=saying("<think>\nHm.\n</think>\n\nYes."),
            stop=[STOP],
            num_retries=0,
        )
        .choices[0]
        .message
    )
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
