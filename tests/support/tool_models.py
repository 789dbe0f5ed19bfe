"""Tiny checkpoints that know tools and reasoning, with templates written for tests.

A model that repeats its prompt says whatever the first system message says, since these templates
put it first and bare: so a test writes down the answer it wants.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.checkpoints import make_checkpoint
from tests.support.tool_templates import FAMILIES

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MAX_LENGTH = 4096
DEMO_CHECKPOINT = Path(__file__).resolve().parents[2] / "worker/demo/checkpoint"
POISON = 4095  # a token whose embedding is not a number in `poisoned_demo`
DEMO_MAX_LENGTH = 16384  # agents bring prompts of their own

_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ messages[0].content + '<|im_end|>\\n' }}
{%- set messages = messages[1:] %}{% endif %}"""

_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools, one to a line:\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
    {{- 'Call them within tool_call tags.<|im_end|>\\n' }}
{%- endif %}"""

HERMES_TEMPLATE = (
    _SYSTEM
    + _TOOLS
    + """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'assistant' and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif begin_thinking %}{{ '<think>\\n' }}
    {%- endif %}
{%- endif %}"""
)

LLAMA3_TEMPLATE = (
    _SYSTEM
    + _TOOLS.replace(" within tool_call tags", " as JSON")
    + """\
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

_CHATML_WITH_TOOLS = (
    _TOOLS
    + """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)


def make_hermes_checkpoint(path: Path, **options: Any) -> Path:
    """Qwen3's manners: <tool_call> and <think>, each marker a token of its own."""
    return _make(path, HERMES_TEMPLATE, MARKERS, options)


def make_spelled_checkpoint(path: Path, **options: Any) -> Path:
    """The same manners, with markers that are ordinary text."""
    return _make(path, HERMES_TEMPLATE, (), options)


def make_llama3_checkpoint(path: Path, **options: Any) -> Path:
    """Llama 3's manners: the answer is the JSON of a call; no reasoning."""
    return _make(path, LLAMA3_TEMPLATE, (), options)


def make_family_checkpoint(path: Path, family: str, **options: Any) -> Path:
    """The manners of one of `tests.support.tool_templates.FAMILIES`."""
    found = FAMILIES[family]
    special = {"special_markers": found.special_markers}
    return _make(path, found.template, found.markers, {**special, **options})


def _make(path: Path, template: str, markers: tuple[str, ...], options: dict[str, Any]) -> Path:
    return make_checkpoint(
        path,
        chat_template=template,
        markers=markers,
        **{"max_position_embeddings": MAX_LENGTH, **options},
    )


def make_demo_with_tools(path: Path) -> Path:
    """The weights of the demo model under a template with tools and a longer context.

    It was never trained on either: what it calls is right because a grammar keeps it so.
    """
    shutil.copytree(DEMO_CHECKPOINT, path)
    for name, members in (
        ("tokenizer_config.json", {"chat_template": _CHATML_WITH_TOOLS}),
        ("config.json", {"max_position_embeddings": DEMO_MAX_LENGTH}),
    ):
        file = path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **members}))
    return path


def poisoned_demo(folder: Path) -> Path:
    """Returns the demo checkpoint, but for one token whose embedding is not a number."""
    import torch  # few of those who read this file have it
    from safetensors.torch import load_file, save_file

    path = folder / "demo"
    shutil.copytree(DEMO_CHECKPOINT, path)
    weights = load_file(path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    embedding[POISON] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return path
