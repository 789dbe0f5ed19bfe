"""The requests of bench.wire_record: all dialects, streamed and whole, right and wrong.

Each function sends its requests in order; names say what a response is about. Requests to the demo
model stream with one large interval, so that the frames do not depend on the machine's speed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.wire_bodies import (
    ACTIVE,
    CALLS,
    ECHO,
    FIGURES,
    FUNCTION,
    HELLO,
    KEY,
    OTHER_KEY,
    PATHS,
    REFUSED,
    TOOL,
    VARIED,
    WEATHER,
    Body,
    chat,
    completion,
    demo_settings,
    echo_settings,
    generate,
    keyed_settings,
    message,
    response,
)

if TYPE_CHECKING:
    from bench.wire_record import Recorder


def dialects(wire: Recorder) -> None:
    """Sends every parameter set of every dialect, whole and streamed, and the refused ones."""
    for dialect, (path, body) in PATHS.items():
        for number, given in enumerate(VARIED[dialect]):
            for stream in (False, True):
                sent = {**body(), **given, "stream": stream}
                if not stream:
                    sent.pop("stream_options", None)
                    sent.pop("stream_interval", None)
                if stream and given.get("best_of"):
                    sent.pop("best_of")
                name = f"{dialect} {number} {'stream' if stream else 'whole'} {sorted(given)}"
                wire.send(name, "POST", path, json=sent)
        for number, given in enumerate(REFUSED[dialect]):
            sent = {**body(), "stream": False, **given}
            wire.send(f"{dialect} refused {number} {sorted(given)}", "POST", path, json=sent)


def calls(wire: Recorder) -> None:
    """Sends each format's calls through the three dialects that have tools."""
    response_tool = {"type": "function", **FUNCTION}
    message_tool = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
    for model, text in CALLS.items():
        for stream in (False, True):
            how = "stream" if stream else "whole"
            given = {"max_tokens": 112, "stream": stream}
            sent: Body = chat(model, text, tools=[TOOL], **given)
            wire.send(f"chat calls {model} {how}", "POST", "/v1/chat/completions", json=sent)
            if model == ECHO:
                sent = chat(model, text, **given)
                wire.send(f"chat reasoning {how}", "POST", "/v1/chat/completions", json=sent)
                sent = chat(model, text, tools=[TOOL], n=2, logprobs=True, **given)
                wire.send(f"chat calls logprobs {how}", "POST", "/v1/chat/completions", json=sent)
                sent = chat(model, text, tools=[TOOL], stop=["days"], **given)
                wire.send(f"chat calls stop {how}", "POST", "/v1/chat/completions", json=sent)
                sent = chat(model, text, tools=[TOOL], tool_choice="none", **given)
                wire.send(f"chat no calls {how}", "POST", "/v1/chat/completions", json=sent)
            sent = response(model, text, tools=[response_tool], stream=stream)
            sent["max_output_tokens"] = 112
            wire.send(f"responses calls {model} {how}", "POST", "/v1/responses", json=sent)
            sent = message(model, text, tools=[message_tool], **given)
            wire.send(f"messages calls {model} {how}", "POST", "/v1/messages", json=sent)
    for stream in (False, True):
        custom = {"type": "custom", "name": "weather", "description": "Free text."}
        sent = response(ECHO, CALLS[ECHO], tools=[custom], stream=stream)
        sent["max_output_tokens"] = 112
        wire.send(f"responses custom tool {stream}", "POST", "/v1/responses", json=sent)
        hosted = [{"type": "web_search"}, {"type": "local_shell"}]
        sent = response(ECHO, HELLO, tools=hosted, stream=stream)
        wire.send(f"responses hosted tools {stream}", "POST", "/v1/responses", json=sent)


def jobs(wire: Recorder) -> None:
    """Lists, inspects, resumes, cancels and deletes jobs; repeats with an idempotency key."""
    listed = wire.fetch("GET", "/v1/jobs", params={"limit": 1}).json()
    wire.send("jobs newest", "GET", "/v1/jobs", params={"limit": 1})
    wire.send("jobs wrong limit", "GET", "/v1/jobs", params={"limit": 0})
    wire.send("jobs wrong state", "GET", "/v1/jobs", params={"state": "lost"})
    wire.send("jobs unknown", "GET", "/v1/jobs/none")
    wire.send("jobs wrong method", "PUT", "/v1/jobs/none")
    wire.send("dead letters", "GET", "/v1/dead-letters")
    name = listed["data"][0]["id"]
    for part in ("", "/events", "/text"):
        wire.send(f"job{part}", "GET", f"/v1/jobs/{name}{part}")
    wire.send("job stream", "GET", f"/v1/jobs/{name}/stream")
    for last in ("0-0", "1-1", "4-4", "nonsense", "99-99"):
        headers = {"Last-Event-ID": last}
        wire.send(f"job stream after {last}", "GET", f"/v1/jobs/{name}/stream", headers=headers)
    wire.send("job requeue ended", "POST", f"/v1/jobs/{name}/requeue")
    wire.send("job token", "POST", f"/v1/jobs/{name}/stream-token")
    wire.send("job cancel ended", "DELETE", f"/v1/jobs/{name}")
    path = "/v1/chat/completions"
    for number in range(3):
        headers = {"Idempotency-Key": "key-1"}
        sent = chat(stream=number == 2)
        wire.send(f"idempotent {number}", "POST", path, json=sent, headers=headers)
    headers = {"Idempotency-Key": "key-1"}
    wire.send("idempotent other", "POST", path, json=chat(text="other"), headers=headers)
    wire.send("request id", "POST", path, json=chat(), headers={"x-request-id": "mine-1"})
    running = wire.send(
        "background", "POST", "/v1/responses", json=response(background=True, max_output_tokens=500)
    ).json()["id"]
    wire.send("background cancel", "POST", f"/v1/responses/{running}/cancel")
    _ended(wire, running)
    cancelled = wire.fetch("GET", f"/v1/responses/{running}").json()
    wire.keep("background status", 200, [], json.dumps([cancelled["status"], cancelled["error"]]))
    quick = wire.fetch("POST", "/v1/responses", json=response(background=True)).json()["id"]
    _ended(wire, quick)
    wire.send("background ended", "GET", f"/v1/responses/{quick}")
    for after in (None, 0, 3, 100):
        params = {"stream": "true", **({} if after is None else {"starting_after": after})}
        wire.send(f"background after {after}", "GET", f"/v1/responses/{quick}", params=params)
    wire.send("input items", "GET", f"/v1/responses/{quick}/input_items")
    wire.send("cancel ended", "POST", f"/v1/responses/{quick}/cancel")
    sent = response(text="And then?", previous_response_id=quick)
    wire.send("continued", "POST", "/v1/responses", json=sent)
    wire.send("input tokens", "POST", "/v1/responses/input_tokens", json=response())
    wire.send("compact", "POST", "/v1/responses/compact", json=response())
    wire.send("deleted", "DELETE", f"/v1/responses/{quick}")
    wire.send("deleted again", "DELETE", f"/v1/responses/{quick}")
    wire.send("gone", "GET", f"/v1/responses/{quick}")
    ends = {"response.completed", "response.incomplete", "response.failed", "error"}
    turn = {"type": "response.create", **response()}
    wire.socket("socket", [turn, {**turn, "model": "nobody"}, {"type": "strange"}], ends)


def _ended(wire: Recorder, name: str) -> None:
    deadline_s = time.monotonic() + 60
    while wire.fetch("GET", f"/v1/jobs/{name}").json()["status"] in ACTIVE:
        assert time.monotonic() < deadline_s, name
        time.sleep(0.05)


def system(wire: Recorder) -> None:
    """Asks for models, tokens, pages, documents, and for what is not there."""
    for path in ("/v1/models", "/v1/models/plain", "/v1/models/nobody", "/version", "/ready"):
        wire.send(f"GET {path}", "GET", path)
        wire.send(f"HEAD {path}", "HEAD", path)
        wire.send(f"anthropic {path}", "GET", path, headers={"anthropic-version": "2023-06-01"})
    for path in ("/openapi.json", "/", "/dashboard", "/docs", "/redoc", "/nowhere", "/v1/nowhere"):
        wire.send(f"GET {path}", "GET", path)
    wire.send("tokenizer info", "GET", "/tokenizer_info", params={"model": "plain"})
    for number, sent in enumerate(
        [
            {"model": "plain", "prompt": HELLO},
            {"model": "plain", "prompt": HELLO, "return_token_strs": True},
            {"model": "plain", "messages": [{"role": "user", "content": HELLO}]},
            {"model": "plain"},
            {"model": "nobody", "prompt": HELLO},
            {"model": "plain", "prompt": 5},
        ]
    ):
        wire.send(f"tokenize {number}", "POST", "/tokenize", json=sent)
    for number, tokens in enumerate([[5, 6, 7], [], ["x"], [99999999]]):
        sent = {"model": "plain", "tokens": tokens}
        wire.send(f"detokenize {number}", "POST", "/detokenize", json=sent)
    counted = {"model": "plain", "messages": message()["messages"]}
    wire.send("count tokens", "POST", "/v1/messages/count_tokens", json=counted)
    wire.send("not json", "POST", "/v1/chat/completions", content=b"{")
    wire.send("no object", "POST", "/v1/chat/completions", json=[1])
    wire.send("no body", "POST", "/v1/messages")
    wire.send("nested", "POST", "/v1/completions", content=b"[" * 100_000)
    wire.send("not utf-8", "POST", "/generate", content=b'{"prompt": "\xff"}')
    headers = {"content-type": "text/plain"}
    wire.send("media type", "POST", "/v1/messages", content=b"{}", headers=headers)
    for path, _ in PATHS.values():
        wire.send(f"wrong method {path}", "PUT", path)
    headers = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    wire.send("preflight", "OPTIONS", "/v1/chat/completions", headers=headers)
    headers = {"origin": "https://evil.example"}
    wire.send("foreign origin", "POST", "/v1/chat/completions", json=chat(), headers=headers)
    wire.send("foreign host", "GET", "/v1/models", headers={"host": "evil.example"})
    families = sorted(
        line for line in wire.fetch("GET", "/metrics").text.splitlines() if line.startswith("# ")
    )
    kinds = [line for line in families if line.startswith("# TYPE")]
    wire.keep("metrics", 200, [], "\n".join(kinds))
    health = wire.fetch("GET", "/health").json()
    wire.keep("health", 200, [], "\n".join(sorted(_names(health))))


def _names(value: Any, prefix: str = "") -> set[str]:
    """Returns the paths of all members, with those of lists' items as one."""
    if isinstance(value, dict):
        return {name for key in value for name in _names(value[key], f"{prefix}.{key}")}
    if isinstance(value, list):
        return {name for item in value for name in _names(item, f"{prefix}[]")} or {f"{prefix}[]"}
    return {prefix}


def files(wire: Recorder) -> None:
    """Uploads files, runs a batch of three rows, and asks for what is wrong."""
    rows = [
        {"custom_id": f"row-{i}", "method": "POST", "url": PATHS["chat"][0], "body": body}
        for i, body in enumerate([chat(), chat(n=2, truncation="x"), chat(user="me")])
    ]
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()

    def upload(name: str, data: bytes, **form: str) -> Any:
        sent = {"file": ("rows.jsonl", data)}
        return wire.send(name, "POST", "/v1/files", files=sent, data={"purpose": "batch"} | form)

    name = upload("upload", content).json()["id"]
    upload("upload purpose", content, purpose="assistants")
    upload("upload large", b"x" * 70_000)
    upload("upload field", content, colour="red")
    wire.send("files", "GET", "/v1/files")
    wire.send("file", "GET", f"/v1/files/{name}")
    wire.send("file content", "GET", f"/v1/files/{name}/content")
    wire.send("file unknown", "GET", "/v1/files/file-none")
    endpoint = {"endpoint": PATHS["chat"][0], "completion_window": "24h"}
    made = wire.send("batch", "POST", "/v1/batches", json={"input_file_id": name, **endpoint})
    batch = made.json()["id"]
    deadline_s = time.monotonic() + 60
    while wire.fetch("GET", f"/v1/batches/{batch}").json()["status"] not in (
        "completed",
        "failed",
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    ended = wire.send("batch ended", "GET", f"/v1/batches/{batch}").json()
    for kind in ("output_file_id", "error_file_id"):
        text = wire.fetch("GET", f"/v1/files/{ended[kind]}/content").text
        lines = sorted(text.splitlines(), key=lambda line: json.loads(line)["custom_id"])
        wire.keep(f"batch {kind}", 200, [], "\n".join(lines))
    wire.send("batches", "GET", "/v1/batches")
    wire.send("batch cancel ended", "POST", f"/v1/batches/{batch}/cancel")
    wire.send("batch unknown", "GET", "/v1/batches/batch_none")
    wrong = {"input_file_id": name, "endpoint": "/v1/messages", "completion_window": "24h"}
    wire.send("batch endpoint", "POST", "/v1/batches", json=wrong)
    wrong = {"input_file_id": "file-none", **endpoint}
    wire.send("batch file", "POST", "/v1/batches", json=wrong)
    broken = upload("upload broken rows", b'{"custom_id": 5}\nnot json\n').json()["id"]
    failed = wire.fetch("POST", "/v1/batches", json={"input_file_id": broken, **endpoint}).json()
    while wire.fetch("GET", f"/v1/batches/{failed['id']}").json()["status"] != "failed":
        assert time.monotonic() < deadline_s + 60
        time.sleep(0.1)
    wire.send("batch failed", "GET", f"/v1/batches/{failed['id']}")
    wire.send("file deleted", "DELETE", f"/v1/files/{name}")
    wire.send("file deleted again", "DELETE", f"/v1/files/{name}")


def echo(wire: Recorder) -> None:
    """Sends everything that an echo answers."""
    wire.send("first", "POST", PATHS["chat"][0], json=chat())
    jobs(wire)
    files(wire)
    system(wire)
    dialects(wire)
    calls(wire)


def demo(wire: Recorder) -> None:
    """Sends what needs a model with probabilities and grammars, drawn greedily."""
    greedy = {"temperature": 0, "max_tokens": 24}
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Bonn", "Köln"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    text = "Tell me about rivers."
    forms: list[tuple[str, Body]] = [
        ("plain", {}),
        ("logprobs", {"logprobs": True, "top_logprobs": 3, "max_tokens": 6}),
        ("prompt logprobs", {"prompt_logprobs": 2, "max_tokens": 2}),
        ("choices", {"n": 2, "temperature": 0.8, "seed": 11}),
        ("stop", {"stop": ["the", "."]}),
        (
            "schema",
            {
                "max_tokens": 80,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema, "strict": True},
                },
            },
        ),
        ("regex", {"guided_regex": "[ab]{4}"}),
        ("choice", {"guided_choice": ["north", "south"]}),
        ("grammar", {"guided_grammar": 'root ::= "yes" | "no"'}),
        ("penalties", {"presence_penalty": 1, "repetition_penalty": 1.2}),
    ]
    for name, given in forms:
        for stream in (False, True):
            sent = {**chat("demo", text, **greedy), **given, "stream": stream}
            if stream:
                sent["stream_interval"] = 4096
                sent.pop("prompt_logprobs", None)
            wire.send(f"chat {name} {stream}", "POST", "/v1/chat/completions", json=sent)
    for choice in (
        "auto",
        "required",
        {"type": "function", "function": {"name": "weather"}},
    ):
        for stream in (False, True):
            given = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 80, "stream": stream}
            sent = {**chat("tools", text, **greedy), **given}
            if stream:
                sent["stream_interval"] = 4096
            wire.send(f"chat tools {choice} {stream}", "POST", "/v1/chat/completions", json=sent)
    for stream in (False, True):
        sent = {**response("demo", text, temperature=0), "stream": stream}
        wire.send(f"responses {stream}", "POST", "/v1/responses", json=sent)
        form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        sent = {**sent, "text": {"format": form}, "max_output_tokens": 80}
        wire.send(f"responses schema {stream}", "POST", "/v1/responses", json=sent)
        tool = {"type": "function", **FUNCTION}
        sent = {**response("tools", text, temperature=0), "tools": [tool], "stream": stream}
        sent = {**sent, "tool_choice": "required", "max_output_tokens": 80}
        wire.send(f"responses tools {stream}", "POST", "/v1/responses", json=sent)
        sent = {**message("tools", text, **greedy), "stream": stream, "max_tokens": 80}
        sent["tools"] = [{"name": "weather", "input_schema": WEATHER}]
        sent["tool_choice"] = {"type": "any"}
        sent |= {"stream_interval": 4096} if stream else {}
        wire.send(f"messages tools {stream}", "POST", "/v1/messages", json=sent)
        sent = {**completion("demo", text, **greedy), "stream": stream, "logprobs": 2, "echo": True}
        sent |= {"stream_interval": 4096} if stream else {}
        wire.send(f"completions {stream}", "POST", "/v1/completions", json=sent)
        sent = {**generate("demo", text, **greedy), "stream": stream}
        sent |= {"stream_interval": 4096} if stream else {}
        wire.send(f"generate {stream}", "POST", "/generate", json=sent)
    strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
    wrong: Any = chat("tools", text, tools=[strict])
    wrong["tools"][0]["function"]["parameters"] = {"type": "object", "not": {}}
    wire.send("strict refused", "POST", "/v1/chat/completions", json=wrong)
    guides: list[dict[str, Any]] = [
        {"guided_regex": "("},
        {"guided_json": {"type": "wrong"}},
        {"guided_grammar": "root ::="},
    ]
    for number, given in enumerate(guides):
        sent = chat("demo", text, **given)
        wire.send(f"grammar refused {number}", "POST", "/v1/chat/completions", json=sent)


def keyed(wire: Recorder) -> None:
    """Sends requests without a key, with a wrong one, with one of each tenant, beyond limits."""
    path = "/v1/chat/completions"
    keys = {
        "none": {},
        "wrong": {"authorization": "Bearer sk-wrong"},
        "basic": {"authorization": "Basic eDp5"},
        "first": {"authorization": f"Bearer {KEY}"},
        "x-api-key": {"x-api-key": KEY},
    }
    for name, headers in keys.items():
        for route in ("/v1/models", "/health", "/ready", "/metrics", "/v1/jobs", "/openapi.json"):
            if route in FIGURES and name in ("first", "x-api-key"):
                continue
            if route == "/openapi.json" and name != "none":
                continue  # it is long, and the same for all
            wire.send(f"{name} {route}", "GET", route, headers=headers)
        wire.send(f"{name} chat", "POST", path, json=chat(), headers=headers)
        wire.send(f"{name} messages", "POST", "/v1/messages", json=message(), headers=headers)
    first, second = keys["first"], {"authorization": f"Bearer {OTHER_KEY}"}
    job = wire.fetch("GET", "/v1/jobs", headers=first).json()["data"][0]["id"]
    wire.send("another tenant's job", "GET", f"/v1/jobs/{job}", headers=second)
    wire.send("no metrics for a tenant", "GET", "/metrics", headers=second)
    wire.send("unused refused", "POST", path, json=chat(user="me"), headers=first)
    wire.send("body too large", "POST", path, json=chat(text="x" * 30_000), headers=first)
    for number in range(4):
        wire.send(f"limited {number}", "POST", path, json=chat(), headers=second)
    wire.send("limited message", "POST", "/v1/messages", json=message(), headers=second)


SERVICES: list[tuple[str, Callable[[Path, Path], dict[str, str]], Callable[[Recorder], None]]] = [
    ("echo", echo_settings, echo),
    ("demo", demo_settings, demo),
    ("keys", keyed_settings, keyed),
]
