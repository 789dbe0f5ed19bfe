"""What the product says: error codes of the API and sentences of its start, read from the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shared.messages import ErrorCode

REPOSITORY = Path(__file__).resolve().parents[2]
_WORD = re.compile(r"[a-z]+(_[a-z]+)+")
# Which positional argument of a call is a code.
_PLACES = {
    "InvalidParameter": 2,
    "unavailable": 2,
    "BatchError": 0,
    "_refuse": 3,
    "_invalid": 3,
    "ServerError": 1,
}
_CONSTANTS = re.compile(r"\w*CODE|MISSING|NOT_SERVED")
# Modules whose tables of codes are tuples.
_TABLES = ("api/request_errors.py", "api/http/middleware.py")
# Made of a parameter's name, or of the kind of an input.
_MADE = {
    "method_not_allowed",
    "not_found",
    "image_not_supported",
    "invalid_custom_id",
    "invalid_body",
    "thread_unsupported_request",
    "batch_expired",
}
# Who cannot start says so with one of these.
_REFUSALS = frozenset(
    {
        "CheckpointNotFound",
        "EngineGaveUp",
        "GaveUp",
        "NotMade",
        "NotConverted",
        "ServerError",
        "UnsafeServer",
    }
)
_HTTP = REPOSITORY / "worker/engines/http"  # whose upstreams cannot serve the model
_ROOMS_OF_START = ("penstock/launcher", "shared/redis", "shared/transport", "worker")


def error_codes() -> set[str]:
    """Returns every code that an error of the API may have."""
    found = {code.value for code in ErrorCode} | _MADE
    for path in (*_sources("api"), *_sources("shared/text")):
        name = str(path.relative_to(REPOSITORY))
        for node in ast.walk(ast.parse(path.read_text())):
            for value in _values(node, has_tables=name in _TABLES):
                found |= {text for text in _texts(value) if _WORD.fullmatch(text)}
    return found


def start_sentences() -> dict[str, str]:
    """Returns the place of each sentence of a start that fails, by a part of the sentence that
    names no value."""
    found = {}
    for room in _ROOMS_OF_START:
        for path in _sources(room):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    call = node.exc
                    name = getattr(call.func, "id", "")
                    is_refusal = name in _REFUSALS or (
                        path.parent == _HTTP and name == "ModelError"
                    )
                    if is_refusal and (part := max(_parts(call), key=len, default="")):
                        found[part] = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
    return {part: place for part, place in found.items() if len(part) > 8}


def _parts(call: ast.Call) -> Iterator[str]:
    """Yields the constant parts of the sentences of a call, without their ends."""
    for argument in call.args:
        texts: list[ast.expr] = [argument]
        if isinstance(argument, ast.JoinedStr):
            texts = argument.values
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.value.strip(" .,:;'()=")


def _sources(room: str) -> list[Path]:
    return sorted((REPOSITORY / room).rglob("*.py"))


def _values(node: ast.AST, *, has_tables: bool) -> Iterator[ast.AST]:
    """Yields the expressions of a node that are codes, or hold some."""
    if isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "code")
        place = _PLACES.get(getattr(node.func, "id", getattr(node.func, "attr", "")))
        if place is not None and len(node.args) > place:
            yield node.args[place]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        named = [*given.args, *given.kwonlyargs]
        defaults = [*given.defaults, *given.kw_defaults]
        for argument, default in zip(reversed(named), reversed(defaults), strict=False):
            if argument.arg == "code" and default is not None:
                yield default
    elif isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if any(_CONSTANTS.fullmatch(name) for name in names):
            yield node.value
    elif isinstance(node, ast.Tuple) and has_tables:
        yield from node.elts


def _texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
