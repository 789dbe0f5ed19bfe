"""Tools, thinking and formats in the Messages dialect, by the Anthropic SDK, through real workers.

The echoing model says what the system prompt says, up to STOP, and so never ends by itself.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.integration.api.chat_service import (
    ECHO_HERMES,
    ENFORCED,
    STOP,
    hermes_call,
    module_chat_service,
)
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import redis_url  # noqa: F401
from tests.support.service_fixtures import anthropic_client

anthropic = lazy_import("anthropic")
jsonschema = lazy_import("jsonschema")

GATE = {
    "type": "object",
    "properties": {"gate": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["gate"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "depth", "description": "How deep the water is.", "input_schema": GATE},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ALWAYS_THE_SAME = {"temperature": 0}
FIRST = '{"gate": 1}'
QUESTION: Any = [{"role": "user", "content": "How deep is it at the first gate?"}]
PARAMS: Any = {
    "model": ECHO_HERMES,
    "max_tokens": 500,
    "messages": QUESTION,
    "stop_sequences": [STOP],
}


base_url = module_chat_service(ECHO_HERMES, ENFORCED)
client = anthropic_client


def plain(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """The blocks, without the ids of calls."""
    blocks = [block.to_dict() for block in message.content]
    return [{name: block[name] for name in block if name != "id"} for block in blocks]


def test_calls_are_blocks_whole_and_streamed(client: anthropic.Anthropic) -> None:
    output = f"I look.\n{hermes_call('depth', FIRST)}\n{hermes_call('now', '{}')}"
    whole = client.messages.create(**PARAMS, system=output + STOP, tools=TOOLS)
    assert plain(whole) == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "depth", "input": {"gate": 1}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", STOP)
    with client.messages.stream(**PARAMS, system=output + STOP, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    assert final.stop_reason == whole.stop_reason
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert "input_json" in kinds
    ids = [block.id for block in final.content if block.type == "tool_use"]
    assert len(set(ids)) == 2


def test_a_call_and_its_result_go_back_into_the_prompt(client: anthropic.Anthropic) -> None:
    output = hermes_call("depth", FIRST)
    first = client.messages.create(**PARAMS, system=output + STOP, tools=TOOLS)
    (call,) = first.content
    assert call.type == "tool_use"
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "seven metres"},
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "no such gate"}],
            "is_error": True,
        },
    ]
    counts = []
    for result in results:
        messages = [*QUESTION, first.to_param(), {"role": "user", "content": [result]}]
        second = client.messages.create(
            **{**PARAMS, "messages": messages}, system=f"Seven metres.{STOP}", tools=TOOLS
        )
        assert plain(second) == [{"type": "text", "text": "Seven metres."}]
        counts.append(second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0))
    assert counts[0] > first.usage.input_tokens
    assert counts[0] != counts[1]


def test_the_sdk_s_own_loop_runs_a_tool(client: anthropic.Anthropic) -> None:
    params: list[int] = []

    @anthropic.beta_tool
    def depth(gate: Literal[1, 2, 3]) -> str:
        """How deep the water is.

        Args:
            gate: The number of the gate.
        """
        params.append(gate)
        return "seven metres"

    runner = client.beta.messages.tool_runner(
        model=ENFORCED,
        max_tokens=400,
        messages=QUESTION,
        tools=[depth],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        max_iterations=2,
        extra_body=ALWAYS_THE_SAME,
    )
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use"] * 2, messages
    assert params
    assert set(params) <= {1, 2, 3}


@pytest.mark.promise(
    "Clients: Anthropic's tool runner works with its defaults; a budget limits the thinking; an "
    "assistant prefill is continued (the budget where grammars are supported)"
)
def test_a_thread_is_refused_with_the_code_that_the_sdk_falls_back_on(
    client: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.beta.messages.create(**PARAMS, extra_body={"thread": {"type": "create"}})
    assert type(caught.value) is anthropic.types.ThreadUnsupportedRequestError
    body: Any = caught.value.body
    assert body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "param": "thread",
    }


def test_the_sdk_s_own_loop_streams(client: anthropic.Anthropic) -> None:
    results: list[str] = []

    @anthropic.beta_tool
    def now() -> str:
        """What time it is."""
        results.append("noon")
        return "noon"

    runner = client.beta.messages.tool_runner(
        model=ENFORCED,
        max_tokens=400,
        messages=QUESTION,
        tools=[now],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        max_iterations=2,
        extra_body=ALWAYS_THE_SAME,
        stream=True,
    )
    kinds = [{event.type for event in stream} for stream in runner]
    assert len(kinds) == 2
    assert all("message_stop" in kind for kind in kinds)
    assert results


def test_an_answer_continues_the_text_that_the_caller_began(client: anthropic.Anthropic) -> None:
    """The echoing model says its prompt again: up to the last text, and no further."""
    begun: Any = {"role": "assistant", "content": "It is ("}
    echo = {**PARAMS, "stop_sequences": [], "max_tokens": 200}
    whole = client.messages.create(**{**echo, "messages": [*QUESTION, begun]})
    (block,) = whole.content
    assert block.type == "text"
    # Without special tokens: after the text that was begun comes the prompt's start once more.
    assert f"{QUESTION[0]['content']}\nassistant\nIt is (user\n" in block.text
    with client.messages.stream(**{**echo, "messages": [*QUESTION, begun]}) as stream:
        assert "".join(stream.text_stream) == block.text
    parts = {"role": "assistant", "content": [{"type": "text", "text": "It is ("}]}
    params: Any = {"model": ECHO_HERMES, "messages": [*QUESTION, parts]}
    assert client.messages.count_tokens(**params).input_tokens == whole.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="white space"):
        client.messages.create(
            **{**PARAMS, "messages": [*QUESTION, {**begun, "content": "It is "}]}
        )


def test_a_budget_ends_the_thinking(client: anthropic.Anthropic) -> None:
    """The computing model is a random one: it would think to the end of its tokens."""
    begun: Any = {"role": "assistant", "content": "<think>\nThe gate"}
    params: Any = {
        "model": ENFORCED,
        "max_tokens": 60,
        "messages": [*QUESTION, begun],
        "extra_body": ALWAYS_THE_SAME,
    }
    free = client.messages.create(**params, thinking={"type": "adaptive"})
    assert [block.type for block in free.content] == ["thinking"]
    bound = client.messages.create(**params, thinking={"type": "enabled", "budget_tokens": 9})
    assert [block.type for block in bound.content] == ["thinking", "text"]
    assert bound.usage.output_tokens_details is not None
    assert bound.usage.output_tokens_details.thinking_tokens == 10  # with the marker
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        client.messages.create(**params, thinking={"type": "enabled", "budget_tokens": 60})


def test_a_model_that_cannot_be_kept_to_a_budget_thinks_as_it_likes(
    client: anthropic.Anthropic,
) -> None:
    output = "<think>\nI count to sixty.\n</think>\n\nSixty."
    thinking: Any = {"type": "enabled", "budget_tokens": 1}
    message = client.messages.create(**PARAMS, system=output + STOP, thinking=thinking)
    assert plain(message)[0]["thinking"] == "I count to sixty."


def test_a_call_that_is_cut_off_stops_with_max_tokens(client: anthropic.Anthropic) -> None:
    output = hermes_call("depth", FIRST)
    params = {**PARAMS, "max_tokens": 30, "system": output + STOP, "tools": TOOLS}
    whole = client.messages.create(**params)
    assert whole.stop_reason == "max_tokens"
    assert all(block.type != "tool_use" for block in whole.content)
    with client.messages.stream(**params) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_thinking_is_a_block_of_its_own(client: anthropic.Anthropic) -> None:
    output = "<think>\nI count to sixty.\n</think>\n\nSixty."
    whole = client.messages.create(**PARAMS, system=output + STOP)
    assert plain(whole) == [
        {"type": "thinking", "thinking": "I count to sixty.", "signature": ""},
        {"type": "text", "text": "Sixty."},
    ]
    assert whole.usage.output_tokens_details is not None
    assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
    with client.messages.stream(**PARAMS, system=output + STOP) as stream:
        assert "".join(e.thinking for e in stream if e.type == "thinking") == "I count to sixty."
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    again = client.messages.create(
        **{**PARAMS, "messages": [*QUESTION, whole.to_param(), *QUESTION]}, system=f"Yes.{STOP}"
    )
    assert plain(again) == [{"type": "text", "text": "Yes."}]


def test_thinking_is_enabled_through_the_template(client: anthropic.Anthropic) -> None:
    counted = [
        client.messages.count_tokens(model=ECHO_HERMES, messages=QUESTION, thinking=thinking)
        for thinking in ({"type": "adaptive"}, {"type": "disabled"})
    ]
    assert counted[1].input_tokens > counted[0].input_tokens  # the template closes it at once


class Reading(BaseModel):
    gate: Literal[1, 2, 3]
    is_open: bool


def test_an_answer_keeps_to_a_schema(client: anthropic.Anthropic) -> None:
    params: dict[str, Any] = {
        "model": ENFORCED,
        "max_tokens": 400,
        "messages": QUESTION,
        "thinking": {"type": "disabled"},
        "output_format": Reading,
        "extra_body": ALWAYS_THE_SAME,
    }
    whole = client.messages.parse(**params)
    assert isinstance(whole.parsed_output, Reading)
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**params) as stream:
        final = stream.get_final_message()
    assert final.parsed_output == whole.parsed_output
    bad: Any = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    del params["output_format"]
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        client.messages.create(**params, output_config=bad)


def test_tools_may_be_there_and_not_be_called(client: anthropic.Anthropic) -> None:
    output = hermes_call("now", "{}")
    message = client.messages.create(
        **PARAMS, system=output + STOP, tools=TOOLS, tool_choice={"type": "none"}
    )
    assert plain(message) == [{"type": "text", "text": output}]
