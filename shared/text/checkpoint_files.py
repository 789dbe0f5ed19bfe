"""Reads files of a checkpoint with bounds: their content is untrusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.text.base import TextInvalid

MAX_CONFIG_BYTES = 32 * 2**20  # added tokens are listed in tokenizer_config.json
MAX_TEMPLATE_BYTES = 2**20


def read_bytes(path: Path, max_bytes: int) -> bytes | None:
    """Returns the file's content; None if there is no file. Raises TextInvalid."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TextInvalid(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise TextInvalid(f"{path} is larger than {max_bytes} bytes")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} where there is no file. Raises TextInvalid."""
    data = read_bytes(path, MAX_CONFIG_BYTES)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TextInvalid(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TextInvalid(f"{path} is not a JSON object")
    return value


def read_text(path: Path) -> str | None:
    """Returns a chat template's text; None if there is no file. Raises TextInvalid."""
    data = read_bytes(path, MAX_TEMPLATE_BYTES)
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TextInvalid(f"{path} is not UTF-8: {error}") from error
