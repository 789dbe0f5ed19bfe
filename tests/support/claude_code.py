"""A turn of Claude Code: the members, blocks and tools of its requests, with other texts."""

from __future__ import annotations

from typing import Any

BETAS = (
    "claude-code-20250219,context-management-2025-06-27,mid-conversation-tool-changes-2026-07-01"
)
MARKED = {"cache_control": {"type": "ephemeral"}}
PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQK"},
}
PATH = {"type": "object", "properties": {"file_path": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"name": "Read", "description": "Reads a file.", "input_schema": PATH},
    {"name": "ToolSearch", "description": "Finds tools.", "input_schema": PATH},
    {"name": "mcp__x__photo", "description": "", "input_schema": PATH, "defer_loading": True},
]
CALLS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.png"}},
    {"type": "tool_use", "id": "toolu_2", "name": "ToolSearch", "input": {}},
]
FOUND = [{"type": "tool_reference", "tool_name": "mcp__x__photo"}]
RESULTS: list[dict[str, Any]] = [
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [PICTURE, PDF], **MARKED},
    {"type": "tool_result", "tool_use_id": "toolu_2", "content": FOUND},
]
TURN: dict[str, Any] = {
    "tools": TOOLS,
    "system": [{"type": "text", "text": "Be brief.", **MARKED}],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look at a.png."}]},
        {"role": "system", "content": "# Environment", "output_config": {}},
        {"role": "assistant", "content": CALLS},
        {"role": "user", "content": RESULTS},
    ],
}
