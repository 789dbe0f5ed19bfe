"""One table of the five dialects: how each writes a request, an answer, a stream and an error.

A test of something that holds in every dialect takes a row as its parameter:
`@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from tests.support.running_service import MODEL
from tests.support.sse_readers import payloads

Payload = dict[str, Any]
# The types of Anthropic's errors by their status; the others are of the request.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


@dataclass(frozen=True)
class Answer:
    """What an answer says, whatever its dialect calls it. `stop` is in the dialect's words."""

    id: str
    text: str
    stop: str | None
    stop_string: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Error(NamedTuple):
    """What every dialect's error says."""

    message: str
    param: str | None
    code: str | None


@dataclass(frozen=True)
class Dialect:
    """One row. `stops`: how it writes that a stop string, an end token or the limit ended a text.

    `names` are its names of parameters that others call otherwise, `lacking` those that it refuses
    as unknown.
    """

    name: str
    path: str
    kind: str  # of its jobs
    prefix: str  # of its ids
    prompt_member: str
    prompt: Callable[[str], Any]
    stops: Mapping[str, str]
    whole: Callable[[Payload], Answer]
    streamed: Callable[[Sequence[Payload]], Answer]
    piece: Callable[[Payload], str]  # the text in an event
    names: Mapping[str, str] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()
    end: bytes = b"data: [DONE]\n\n"  # of a stream
    keepalive: bytes = b": ka\n\n"  # once a stream has started
    usage_on_request: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def body(self, prompt: Any = "water", *, stream: bool = False, **members: Any) -> Payload:
        """A request; `members` are by the names that most dialects have, unless it lacks them."""
        given = {"model": MODEL, "max_tokens": 4, **members}
        written = prompt if isinstance(prompt, list) else self.prompt(prompt)
        body = {self.prompt_member: written, "stream": stream}
        if stream:
            body |= self.usage_on_request
        return body | {
            self.names.get(name, name): value
            for name, value in given.items()
            if name not in self.lacking
        }

    def post(self, client: httpx.Client, prompt: Any = "water", **members: Any) -> httpx.Response:
        """The response to `body`, which has ended."""
        return client.post(self.path, json=self.body(prompt, **members))

    def answer(self, client: httpx.Client, prompt: Any = "water", **members: Any) -> Answer:
        """An answer by its text: whole, or put together from a stream."""
        response = self.post(client, prompt, **members)
        assert response.status_code == 200, response.text
        if not members.get("stream"):
            return self.whole(response.json())
        assert response.content.endswith(self.end)
        return self.streamed(payloads(response.content))

    def error(
        self, response: httpx.Response, status: int, kind: str = "invalid_request_error"
    ) -> Error:
        """The error of a response, checked for what each has; `status` and `kind` are OpenAI's."""
        assert response.status_code == self.status(status), response.text
        assert response.headers["x-request-id"]
        assert response.headers["content-type"] == "application/json"
        body = response.json()
        if self.name == "messages":
            assert body.keys() == {"type", "error", "request_id"}
            assert body["request_id"] == response.headers["request-id"]
            kind = ANTHROPIC_TYPES.get(response.status_code, kind)
        else:
            assert body.keys() == {"error"}
        return self._error_in(body, kind)

    def failure(self, stream: bytes, kind: str) -> Error:
        """The error with which a stream ends."""
        assert (b"[DONE]" in stream) == self.end.endswith(b"[DONE]\n\n")
        if self.name != "messages":  # its error event is its last
            assert stream.endswith(self.end)
        *output, last = payloads(stream)
        assert not any("error" in event for event in output)
        if self.name == "responses" and kind == "service_unavailable":  # of the stream alone
            assert last["type"] == "error"
            return Error(last["message"], last["param"], last["code"])
        if self.name == "responses":
            assert last["type"] == "response.failed"
            ended = "cancelled" if kind == "cancelled" else "failed"
            assert last["response"]["status"] == ended
            error = last["response"]["error"]
            assert error["code"] == "server_error"
            return Error(error["message"], None, error["type"])
        if self.name == "messages":
            kind = {
                "server_error": "api_error",
                "timeout": "timeout_error",
                "cancelled": "conflict_error",
                "service_unavailable": "overloaded_error",
            }[kind]
        return self._error_in(last, kind)

    def _error_in(self, body: Payload, kind: str) -> Error:
        error = body["error"]
        assert error["message"]
        assert error["type"] == kind
        if self.name != "messages":
            assert error.keys() == {"message", "type", "param", "code"}
            return Error(error["message"], error["param"], error["code"])
        assert body["type"] == "error"
        assert error.keys() <= {"type", "message", "details"}
        details = error.get("details", {})
        assert details.keys() <= {"param", "error_code"}
        return Error(error["message"], details.get("param"), details.get("error_code"))

    def status(self, status: int) -> int:
        """Its status where OpenAI's is `status`."""
        return 529 if self.name == "messages" and status == 503 else status


def _joined(items: Iterable[Payload], member: str) -> str:
    return "".join(item.get(member) or "" for item in items)


def _conversation(prompt: str) -> list[Payload]:
    return [{"role": "user", "content": prompt}]


def _openai(
    payload: Payload, text: str, choice: Payload, usage: Payload, stop: str = "finish_reason"
) -> Answer:
    return Answer(
        payload["id"],
        text,
        choice[stop],
        choice.get("stop_reason"),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )


def _chat_piece(chunk: Payload) -> str:
    return _joined((choice["delta"] for choice in chunk.get("choices", ())), "content")


def _completion_piece(chunk: Payload) -> str:
    return _joined(chunk.get("choices", ()), "text")


def _chunks(piece: Callable[[Payload], str]) -> Callable[[Sequence[Payload]], Answer]:
    def streamed(chunks: Sequence[Payload]) -> Answer:
        assert len({chunk["id"] for chunk in chunks}) == 1
        *_, last, usage = chunks
        assert usage["choices"] == []
        return _openai(usage, "".join(map(piece, chunks)), last["choices"][0], usage["usage"])

    return streamed


def _chat(whole: Payload) -> Answer:
    (choice,) = whole["choices"]
    return _openai(whole, choice["message"]["content"], choice, whole["usage"])


def _completion(whole: Payload) -> Answer:
    (choice,) = whole["choices"]
    return _openai(whole, choice["text"], choice, whole["usage"])


def _generate(whole: Payload) -> Answer:
    assert whole["done"]
    return _openai(whole, whole["full_text"], whole, whole["usage"])


def _generate_streamed(events: Sequence[Payload]) -> Answer:
    assert _joined(events, "text") == events[-1]["full_text"]
    return _generate(events[-1])


def _response(whole: Payload) -> Answer:
    usage = whole["usage"]
    texts = [part for item in whole["output"] for part in item.get("content", ())]
    stop, details = whole["status"], whole["incomplete_details"]
    if details is not None:
        stop += f", {details['reason']}"
    return Answer(
        whole["id"],
        _joined(texts, "text"),
        stop,
        None,
        usage["input_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"],
    )


def _response_piece(event: Payload) -> str:
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


def _response_streamed(events: Sequence[Payload]) -> Answer:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    answer = _response(response)
    assert "".join(map(_response_piece, events)) == answer.text
    return answer


def _message(whole: Payload, text: str | None = None) -> Answer:
    usage = whole["usage"]
    cached = usage["cache_read_input_tokens"]
    return Answer(
        whole["id"],
        _joined(whole["content"], "text") if text is None else text,
        whole["stop_reason"],
        whole["stop_sequence"],
        usage["input_tokens"] + cached,
        cached,
        usage["output_tokens"],
    )


def _message_piece(event: Payload) -> str:
    return str(event.get("delta", {}).get("text", ""))


def _message_streamed(events: Sequence[Payload]) -> Answer:
    start, *_, delta, _ = events
    ended = {"id": start["message"]["id"], **delta["delta"], "usage": delta["usage"]}
    assert (
        start["message"]["usage"].items()
        >= {
            name: delta["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
        }.items()
    )
    return _message(ended, "".join(map(_message_piece, events)))


_OPENAI_STOPS = {"string": "stop", "token": "stop", "limit": "length"}
_WITH_USAGE = {"stream_options": {"include_usage": True}}

DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            *("chat", "/v1/chat/completions", "chat", "chatcmpl-", "messages", _conversation),
            *(_OPENAI_STOPS, _chat, _chunks(_chat_piece), _chat_piece),
            usage_on_request=_WITH_USAGE,
        ),
        Dialect(
            *("completions", "/v1/completions", "completion", "cmpl-", "prompt", str),
            *(_OPENAI_STOPS, _completion, _chunks(_completion_piece), _completion_piece),
            usage_on_request=_WITH_USAGE,
        ),
        Dialect(
            *("responses", "/v1/responses", "response", "resp_", "input", str),
            {"string": "completed", "token": "completed", "limit": "incomplete, max_output_tokens"},
            *(_response, _response_streamed, _response_piece),
            names={"max_tokens": "max_output_tokens"},
            lacking=frozenset({"on_disconnect", "stream_interval"}),
            end=b"\n\n",
        ),
        Dialect(
            *("messages", "/v1/messages", "message", "msg_", "messages", _conversation),
            {"string": "stop_sequence", "token": "end_turn", "limit": "max_tokens"},
            *(_message, _message_streamed, _message_piece),
            names={"stop": "stop_sequences"},
            lacking=frozenset(
                {
                    *("frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens"),
                    *("presence_penalty", "priority", "repetition_penalty", "seed"),
                    "stop_token_ids",
                }
            ),
            end=b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
            keepalive=b'event: ping\ndata: {"type":"ping"}\n\n',
        ),
        Dialect(
            *("generate", "/generate", "generate", "gen-", "prompt", str),
            *(_OPENAI_STOPS, _generate, _generate_streamed, lambda event: str(event["text"])),
            names={"repetition_penalty": "rep_penalty"},
            lacking=frozenset(
                {
                    *("frequency_penalty", "logit_bias", "presence_penalty", "priority"),
                    "service_tier",
                }
            ),
        ),
    )
}
