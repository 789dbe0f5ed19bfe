"""Tools that run at the caller and whose schemas Anthropic publishes: requests name a version.

The model here has not learned them, so the prompt has their schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ClientToolType = Literal[
    "bash_20241022",
    "bash_20250124",
    "text_editor_20241022",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
    "memory_20250818",
]


@dataclass(frozen=True, slots=True)
class ClientToolDefinition:
    """A description and a JSON schema of an object."""

    description: str
    parameters: Mapping[str, Any]


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands), "description": "The command to run."}


_BASH = ClientToolDefinition(
    "Runs a command in a bash session that persists between calls, and returns its output.",
    _object(
        {
            "command": _text("The command. Required, except for a restart."),
            "restart": {"type": "boolean", "description": "Restarts the session."},
        }
    ),
)
_LINES = {
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For view: the first and the last line, from 1; -1 is the last of the file.",
    },
    "insert_line": {
        "type": "integer",
        "description": "For insert: the line after which the text comes; 0 is the beginning.",
    },
}
_TEXTS = {
    "file_text": _text("For create: the content of the file."),
    "old_str": _text("For str_replace: the text to replace; it is in the file exactly once."),
}


def _editor(*commands: str) -> ClientToolDefinition:
    new = "For str_replace: the text that replaces old_str. For insert: the text to insert."
    properties = {
        "command": _commands("view", "create", "str_replace", "insert", *commands),
        "path": _text("The path of a file, or for view of a directory."),
        **_TEXTS,
        "new_str": _text(new),
        **_LINES,
    }
    return ClientToolDefinition(
        "Views, creates and edits text files.", _object(properties, "command", "path")
    )


_MEMORY = ClientToolDefinition(
    "Stores and reads files that outlive the conversation, in the directory /memories.",
    _object(
        {
            "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
            "path": _text("The path of a file or directory. Required, except for rename."),
            **_TEXTS,
            "new_str": _text("For str_replace: the text that replaces old_str."),
            "insert_text": _text("For insert: the text to insert."),
            **_LINES,
            "old_path": _text("For rename: the path before."),
            "new_path": _text("For rename: the path after."),
        },
        "command",
    ),
)
_OLD_EDITOR, _EDITOR = _editor("undo_edit"), _editor()

DEFINITIONS: Mapping[str, ClientToolDefinition] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
