"""The GGUF file that MODEL means: a path, or `hub-id:Q4_K_M` as llama.cpp and vLLM write it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from worker.model.config.gguf_header import is_first, is_gguf, models_in

HUB_ID_AND_TYPE = re.compile(r"(?P<id>[^:]+):(?P<type>[A-Za-z0-9][\w.-]*)")
_MAX_LISTED = 12


class GgufNotFound(Exception):
    """No file, or more than one, is meant; the message is one sentence for the operator."""


def is_gguf_path(model: str) -> bool:
    """Returns whether a model's name means a GGUF file, or a directory whose weights are GGUF."""
    path = Path(model).expanduser()
    return model.lower().endswith(".gguf") or (path.is_dir() and is_gguf(path))


def local_file(model: str) -> Path:
    """Returns the file that `is_gguf_path` found. Raises GgufNotFound."""
    path = Path(model).expanduser()
    if not path.is_dir():
        if not path.is_file():
            raise GgufNotFound(f"there is no file {str(path)!r}")
        return path
    return _only([file.relative_to(path) for file in models_in(path)], path, "give one by its path")


def lacks_type(model: str) -> bool:
    """Returns whether a hub id names a repository of GGUF files, and none of them."""
    return model.partition("@")[0].lower().endswith("-gguf")


def hub_patterns(type_name: str) -> list[str]:
    """Returns patterns of the files of a type in a repository, in any case of its letters."""
    return [
        pattern
        for name in dict.fromkeys((type_name, type_name.upper(), type_name.lower()))
        for pattern in (
            f"{name}.gguf",
            f"*[-./]{name}.gguf",
            f"*[-./]{name}-*-of-*.gguf",
            f"*{name}/*.gguf",
        )
    ]


def hub_file(snapshot: Path, type_name: str) -> Path:
    """Returns the file of a type in a downloaded repository, the first one of several shards.
    Raises GgufNotFound."""
    name = re.escape(type_name)
    pattern = re.compile(
        rf"(.*[-./])?{name}(-\d{{5}}-of-\d{{5}})?\.gguf|(.*[-./])?{name}/[^/]+\.gguf", re.I
    )
    found = [
        path.relative_to(snapshot)
        for path in snapshot.rglob("*.gguf")
        if pattern.fullmatch(path.relative_to(snapshot).as_posix()) and is_first(path.name)
    ]
    found = [path for path in found if not path.name.lower().startswith("mmproj")]
    if not found:
        raise GgufNotFound(f"it has no GGUF file of the type {type_name!r}")
    return _only(found, snapshot, "name one by more of its name, after the colon")


def _only(found: Iterable[Path], folder: Path, advice: str) -> Path:
    names = sorted(path.as_posix() for path in found)
    if len(names) == 1:
        return folder / names[0]
    if not names:
        raise GgufNotFound(f"{str(folder)!r} has no GGUF file of a whole model")
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    raise GgufNotFound(
        f"it has {len(names)} models, {', '.join(names[:_MAX_LISTED])}{more}: {advice}"
    )
