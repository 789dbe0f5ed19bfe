"""Examples of request bodies, by the name of their schema. tests/integration sends each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MODEL = "penstock-demo"
_QUESTION = {"role": "user", "content": "What is Penstock?"}
_WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

# schema -> summary -> body
BODIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ChatRequest": {
        "A question": {"model": _MODEL, "messages": [_QUESTION], "max_tokens": 64},
        "Streamed": {
            "model": _MODEL,
            "messages": [{"role": "system", "content": "Answer briefly."}, _QUESTION],
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "A tool": {
            "model": _MODEL,
            "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
            "max_tokens": 64,
            "tools": [
                {"type": "function", "function": {"name": "weather", "parameters": _WEATHER}}
            ],
        },
        "JSON of a schema": {
            "model": _MODEL,
            "messages": [{"role": "user", "content": "Ada is 36 years old."}],
            "max_tokens": 64,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": _PERSON},
            },
        },
    },
    "CompletionRequest": {
        "A text": {"model": _MODEL, "prompt": "A penstock is", "max_tokens": 32},
        "Scored": {
            "model": _MODEL,
            "prompt": "A penstock is a pipe.",
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
        },
    },
    "ResponseRequest": {
        "A question": {"model": _MODEL, "input": "What is Penstock?", "max_output_tokens": 64},
        "In the background": {
            "model": _MODEL,
            "input": "What is Penstock?",
            "background": True,
            "metadata": {"purpose": "a test"},
        },
    },
    "CompactRequest": {
        "A conversation": {
            "model": _MODEL,
            "input": [_QUESTION, {"role": "assistant", "content": "A durable queue."}],
        }
    },
    "InputTokensRequest": {"A question": {"model": _MODEL, "input": "What is Penstock?"}},
    "EmbeddingRequest": {
        "A text": {"model": "all-MiniLM-L6-v2", "input": "What is Penstock?"},
    },
    "GenerateRequest": {
        "Streamed": {"prompt": "A penstock is", "max_tokens": 32},
        "Token ids, whole": {"prompt": [1, 2, 3], "max_tokens": 8, "stream": False},
    },
    "MessageRequest": {
        "A question": {"model": _MODEL, "max_tokens": 64, "messages": [_QUESTION]},
        "A tool": {
            "model": _MODEL,
            "max_tokens": 64,
            "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
            "tools": [{"name": "weather", "input_schema": _WEATHER}],
        },
    },
    "CountTokensRequest": {"A question": {"model": _MODEL, "messages": [_QUESTION]}},
    "BatchRequest": {
        "Chat completions": {
            "input_file_id": "file-0123",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
    },
    "CancelRequest": {"All queued jobs, counted": {"filter": {"state": "queued"}, "dry_run": True}},
    "RequeueRequest": {"All dead letters, counted": {"filter": {}, "dry_run": True}},
    "TokenizeRequest": {
        "A text": {"prompt": "A penstock is"},
        "A conversation": {"messages": [_QUESTION]},
    },
    "DetokenizeRequest": {"Token ids": {"tokens": [1, 2, 3]}},
    "Form": {
        "Rows of a batch": {
            "purpose": "batch",
            "file": (
                '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": '
                '{"model": "penstock-demo", "messages": [{"role": "user", "content": "Hi"}]}}'
            ),
        }
    },
}

# Values of parameters whose shape a type does not show.
VALUES: Mapping[str, Any] = {
    "stop": ["\n\n"],
    "stop_sequences": ["\n\n"],
    "logit_bias": {"42": -100},
    "tool_choice": "auto",
    "guided_json": _PERSON,
    "guided_regex": "[0-9]{4}-[0-9]{2}",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "yes" | "no"',
    "structured_outputs": {"choice": ["yes", "no"]},
    "response_format": {"type": "json_object"},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
    "queue_timeout": 30,
    "metadata": {"purpose": "a test"},
    "include": ["message.output_text.logprobs"],
    "stop_token_ids": [2],
}
