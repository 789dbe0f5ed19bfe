"""The OpenAI Python SDK against the real app: what its users do, unchanged."""

from __future__ import annotations

import collections

import openai
import pytest
from openai import OpenAI

from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd
from tests.support.running_service import MODEL, RunningService
from tests.support.service_fixtures import openai_client

MESSAGES = [{"role": "user", "content": "The keeper counts to sixty, héllo 😀."}]
GO_ON = {"ignore_eos": True}  # the worker's echo of a chat has the template's end tokens
PROMPT = "The keeper counts to sixty, héllo 😀."

client = openai_client


@pytest.mark.promise(
    "Streaming: the parameters of OpenAI's API (an unsupported parameter is refused by name)"
)
@pytest.mark.promise("Chat: `stream` on the same route; without it one JSON object")
@pytest.mark.promise(
    "Chat: OpenAI's Python SDK works unchanged (other chat interfaces have not been tried; the "
    "playground has)"
)
def test_streamed_chat_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=60, seed=1, extra_body=GO_ON
    )
    assert whole._request_id == whole.id
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=60,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=GO_ON,
        )
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].id.startswith("chatcmpl-")
    assert {chunk.created for chunk in chunks} == {chunks[0].created}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.model_dump(exclude_unset=True) == {
        "role": "assistant",
        "content": "",
    }
    *body, last, usage = chunks[1:]
    assert last.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert last.choices[0].finish_reason == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in (chunks[0], *body))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all("role" not in chunk.choices[0].delta.model_fields_set for chunk in body)
    assert usage.choices == []
    assert usage.usage == whole.usage
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert "�" not in text


@pytest.mark.promise("Chat: usage only in its own chunk, and only when requested")
def test_no_chunk_has_usage_unless_requested(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, stream=True
    )
    for chunk in stream:
        assert chunk.choices
        assert "usage" not in chunk.model_fields_set


def test_the_stream_helper_accumulates_the_message(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=40) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content


@pytest.mark.promise("Engine: add, step, unfinished; prompts may be token ids")
def test_completions_take_text_and_token_ids_alike(client: OpenAI, service: RunningService) -> None:
    token_ids = service.text.tokenizer.encode(PROMPT)
    answers = [
        client.completions.create(model=MODEL, prompt=prompt)
        for prompt in (PROMPT, token_ids, [PROMPT], [token_ids])
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert answers[0].usage is not None
    assert answers[0].usage.completion_tokens == 16  # OpenAI's default
    assert answers[0].id.startswith("cmpl-")
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answers[0].choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.object for chunk in chunks} == {"text_completion"}


@pytest.mark.promise("Streaming: token ids on request; the deltas concatenated are the text")
def test_token_ids_are_shown_on_request(client: OpenAI, service: RunningService) -> None:
    prompt = service.text.tokenizer.encode("héllo 😀")
    extra = {"return_token_ids": True}
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=len(prompt), extra_body=extra
    )
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == prompt
    assert (answer.choices[0].model_extra or {})["token_ids"] == prompt
    streamed: list[int] = []
    for chunk in client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=len(prompt), extra_body=extra, stream=True
    ):
        streamed += (chunk.choices[0].model_extra or {})["token_ids"]
    assert streamed == prompt


@pytest.mark.promise("Chat: an error in mid-stream is an OpenAI error event, raised by the SDK")
def test_an_error_after_the_first_bytes_is_raised_by_the_sdk(
    client: OpenAI,
    service: RunningService,
) -> None:
    service.script.stop_after = 3
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.ENGINE_ERROR, Usage(5, 3), message="the step failed"
    )
    seen = []
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=50, stream=True
    )
    with pytest.raises(openai.APIError, match="the step failed") as caught:
        collections.deque(map(seen.append, stream), maxlen=0)
    assert len(seen) >= 2
    assert caught.value.code == "engine_error"


def test_models_are_listed_and_found_by_ids_with_slashes(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody/nothing")
    assert caught.value.code == "model_not_found"


def test_refusals_become_the_sdks_own_exceptions(client: OpenAI) -> None:
    def chat(**members: object) -> object:
        return client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, **members}  # type: ignore[call-overload]
        )

    with pytest.raises(openai.BadRequestError) as hot:
        chat(temperature=2.5)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(model="nobody")
    assert unknown.value.code == "model_not_found"
    assert unknown.value.request_id
