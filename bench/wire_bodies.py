"""The services and bodies of bench.wire_requests: what each dialect takes, and what it refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Body = dict[str, Any]

HELLO = "The quick brown fox jumps over the lazy dog."
ECHO = "echo"  # the model with hermes calls and reasoning
KEY = "sk-wire-operator-0000000000000000"
OTHER_KEY = "sk-wire-second-00000000000000000"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}
ARGUMENTS = '{"city": "Köln", "days": 2}'
# What a model of each format writes; the echo engine repeats the user's message.
CALLS = {
    ECHO: '<think>It asks.</think>Let me see. <tool_call>\n{"name": "weather", "arguments": '
    + ARGUMENTS
    + "}\n</tool_call>",
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "pythonic": '[weather(city="Köln", days=2), weather(city="Bonn")]',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "openai": "<|channel|>analysis<|message|>It asks.<|end|><|start|>assistant<|channel|>commentary"
    f" to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter '
    'name="city" string="true">Köln</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
}
REASONING = {ECHO: "think", "mistral": "mistral", "openai": "openai"}
LAST_MESSAGE = (
    "{{ messages[-1].content }}{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}"
)
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}{% for call in "
    "message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
FIGURES = ("/health", "/metrics", "/v1/jobs")  # they change
ACTIVE = ("queued", "running")
COMMON = {"FRONTENDS": "1", "KEEPALIVE_S": "15", "LOG_FORMAT": "text"}


def echo_settings(tree: Path, directory: Path) -> dict[str, str]:
    """Returns the settings of a service that has an echo for each format of calls."""
    template = directory / "last_message.jinja"
    template.write_text(LAST_MESSAGE)
    tables = [
        "[[models]]",
        'served_model_name = "plain"',
        'runner = "echo"',
        "echo_step_ms = 20",
    ]
    for name in CALLS:
        tables += [
            "[[models]]",
            f'served_model_name = "{name}"',
            'runner = "echo"',
            "echo_step_ms = 10",
            f'chat_template = "{template}"',
            f'tool_format = "{"hermes" if name == ECHO else name}"',
            f'reasoning_format = "{REASONING.get(name, "none")}"',
        ]
    models = directory / "models.toml"
    models.write_text("\n".join(tables))
    return {**COMMON, "MODELS_FILE": str(models), "MAX_FILE_BYTES": "65536"}


def demo_settings(tree: Path, directory: Path) -> dict[str, str]:
    """Returns the settings of a service with the demo model, once with a template for tools."""
    template = directory / "with_tools.jinja"
    template.write_text(WITH_TOOLS)
    models = directory / "models.toml"
    models.write_text(
        '[[models]]\nserved_model_name = "demo"\ncpu_tier = "reference"\n'
        '[[models]]\nserved_model_name = "tools"\ncpu_tier = "reference"\n'
        f'chat_template = "{template}"\ntool_format = "hermes"\n'
    )
    return {**COMMON, "MODELS_FILE": str(models)}


def keyed_settings(tree: Path, directory: Path) -> dict[str, str]:
    """Returns the settings of an echo with two tenants, one of them limited."""
    keys = directory / "keys.txt"
    keys.write_text(
        f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} tenant=first operator\n"
        f"sha256:{hashlib.sha256(OTHER_KEY.encode()).hexdigest()} tenant=second "
        "requests_per_minute=3 tokens_per_minute=500\n"
    )
    return {
        **COMMON,
        "RUNNER": "echo",
        "SERVED_MODEL_NAME": "plain",
        "API_KEYS_FILE": str(keys),
        "REFUSE_UNUSED_PARAMETERS": "true",
        "MAX_BODY_BYTES": "20000",
    }


def chat(model: str = "plain", text: str = HELLO, **given: Any) -> Body:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 10,
        **given,
    }


def completion(model: str = "plain", prompt: Any = HELLO, **given: Any) -> Body:
    return {"model": model, "prompt": prompt, "max_tokens": 10, **given}


def generate(model: str = "plain", prompt: Any = HELLO, **given: Any) -> Body:
    return {"model": model, "prompt": prompt, "max_tokens": 10, **given}


def response(model: str = "plain", text: Any = HELLO, **given: Any) -> Body:
    return {"model": model, "input": text, "max_output_tokens": 10, **given}


def message(model: str = "plain", text: Any = HELLO, **given: Any) -> Body:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 10,
        **given,
    }


PATHS: dict[str, tuple[str, Callable[..., Body]]] = {
    "chat": ("/v1/chat/completions", chat),
    "completions": ("/v1/completions", completion),
    "generate": ("/generate", generate),
    "responses": ("/v1/responses", response),
    "messages": ("/v1/messages", message),
}
# Parameters of each dialect, streamed and whole.
VARIED: dict[str, list[Body]] = {
    "chat": [
        {},
        {"n": 3},
        {"stop": ["fox"]},
        {"stop": ["brown f", "lazy"], "stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "n": 2, "max_tokens": 4},
        {"seed": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
        {"return_token_ids": True},
        {"return_metrics": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_interval": 4},
        {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5]},
        {"priority": 3, "on_disconnect": "continue", "queue_timeout": 60, "durability": "none"},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "verbosity": "low"},
        {"reasoning_effort": "low", "service_tier": "flex"},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"7": 1}},
        {"max_completion_tokens": 100000, "stop": ["dog"]},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    "completions": [
        {},
        {"n": 2, "best_of": 2},
        {"echo": True},
        {"echo": True, "logprobs": 2, "max_tokens": 3},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"logprobs": 3},
        {"stop": "fox"},
        {"prompt": ["one two", "three four"]},
        {"prompt": [5, 6, 7, 8]},
        {"prompt": [[5, 6], [7, 8]], "n": 2},
        {"return_token_ids": True, "stream_options": {"include_usage": True}},
        {"suffix": "", "user": "me"},
        {"stream_interval": 3},
    ],
    "generate": [
        {},
        {"n": 2},
        {"stop": ["fox"]},
        {"logprobs": 2},
        {"prompt": [9, 10, 11]},
        {"return_metrics": True},
        {"stream_interval": 5},
        {"temperature": 0.3, "seed": 1},
    ],
    "responses": [
        {},
        {"instructions": "Be short."},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": HELLO}]}]},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3},
        {"store": False},
        {"stop": ["fox"]},
        {"metadata": {"k": "v"}, "user": "me", "truncation": "auto", "text": {"verbosity": "low"}},
        {"reasoning": {"effort": "high", "summary": "auto"}},
        {"temperature": 0.5, "top_p": 0.8, "seed": 3, "service_tier": "flex"},
        {"max_output_tokens": 1},
    ],
    "messages": [
        {},
        {"system": "Be short."},
        {"system": [{"type": "text", "text": "Short.", "cache_control": {"type": "ephemeral"}}]},
        {"stop_sequences": ["fox"]},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5},
        {"metadata": {"user_id": "u"}, "service_tier": "auto"},
        {"stream_interval": 4},
        {"thinking": {"type": "disabled"}},
        {"max_tokens": 1},
    ],
}
# Bodies that are refused, by dialect: what is changed in a right one.
REFUSED: dict[str, list[Body]] = {
    "chat": [
        {"model": "nobody"},
        {"messages": []},
        {"messages": "no"},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c1"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"max_tokens": 0},
        {"max_tokens": "ten"},
        {"temperature": 3},
        {"top_p": 0},
        {"n": 129},
        {"stop": [""]},
        {"stop": ["a"] * 65},
        {"logprobs": False, "top_logprobs": 2},
        {"top_logprobs": 21, "logprobs": True},
        {"stream_options": {"include_usage": True}},
        {"stream_interval": 4},
        {"unheard_of": 1},
        {"audio": {"voice": "x"}},
        {"functions": [FUNCTION]},
        {"tools": [TOOL]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "xml"}},
        {"guided_json": {}, "guided_regex": "a"},
        {"chat_template": "other"},
        {"continue_final_message": True},
        {"priority": 7},
        {"on_disconnect": "stay"},
        {"durability": "fsync"},
        {"queue_timeout": 0},
        {"service_tier": "priority"},
        {"logit_bias": {"999999": 1}},
        {"messages": [{"role": "user", "content": "word " * 4000}]},
    ],
    "completions": [
        {"model": "nobody"},
        {"prompt": []},
        {"prompt": None},
        {"prompt": [99999999]},
        {"prompt": ["a"] * 65},
        {"max_tokens": -1},
        {"logprobs": 6},
        {"best_of": 1, "n": 2},
        {"suffix": "x"},
        {"tools": [TOOL]},
        {"echo": "yes"},
        {"prompt_logprobs": 21},
        {"prompt": "word " * 4000},
    ],
    "generate": [
        {"model": "nobody"},
        {"prompt": ""},
        {"prompt": 5},
        {"max_tokens": 0},
        {"messages": []},
        {"logprobs": 50},
        {"guided_regex": "(", "temperature": 0},
    ],
    "responses": [
        {"model": "nobody"},
        {"input": 5},
        {"input": []},
        {"previous_response_id": "resp_none"},
        {"background": True, "store": False},
        {"conversation": "c"},
        {"prompt": {"id": "p"}},
        {"max_output_tokens": 0},
        {"include": ["everything"]},
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        {"input": [{"type": "item_reference", "id": "msg_none"}]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
    ],
    "messages": [
        {"model": "nobody"},
        {"messages": []},
        {"max_tokens": None},
        {"temperature": 1.5},
        {"thread": "t"},
        {"compaction": {}},
        {"tools": [{"name": "weather", "input_schema": WEATHER}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"unheard_of": 1},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"stop_sequences": [5]},
    ],
}
