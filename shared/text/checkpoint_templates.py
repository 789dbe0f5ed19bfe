"""The chat templates of a checkpoint: where transformers looks for them, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.text.base import TextInvalid
from shared.text.checkpoint_files import read_json, read_text


def template_file(path: Path) -> dict[str, str]:
    """Returns the template in a file, as the default one. Raises TextInvalid."""
    source = read_text(path)
    if source is None:
        raise TextInvalid(f"the chat template file {str(path)!r} does not exist")
    return {"default": source}


def chat_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates by name; {} without any. Raises TextInvalid.

    They are in separate files, else in tokenizer_config.json, else in a processor's
    chat_template.json.
    """
    found = {}
    alone = read_text(path / "chat_template.jinja")
    if alone is not None:
        found["default"] = alone
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = read_text(file) or ""
    if found:
        return found
    for listed in (
        tokenizer_config.get("chat_template"),
        read_json(path / "chat_template.json").get("chat_template"),
    ):
        if isinstance(listed, str):
            return {"default": listed}
        if isinstance(listed, list):
            return _named_templates(listed)
        if isinstance(listed, dict):
            return {str(name): str(source) for name, source in listed.items()}
    return {}


def _named_templates(listed: list[Any]) -> dict[str, str]:
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in listed}
    except (TypeError, KeyError) as error:
        raise TextInvalid(
            "tokenizer_config.json: chat_template must be text or a list of {name, template}"
        ) from error
