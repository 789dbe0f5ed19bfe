"""Requests and responses of frontends under test, compared with the OpenAPI document they serve.

`check_bodies` adds the comparison to an app. What differs is kept until `raise_mismatch`, which
tests/conftest.py calls after each test. A frontend in a process of its own writes it to the file
that CHECKED names: see tests/support/faults/sitecustomize.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from jsonschema_rs import Draft202012Validator, ValidationError, ValidationErrorKind
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.openapi import EVENT_SCHEMA, EVENTS

CHECKED = "DOCUMENT_CHECKED"  # names a file, to which frontends in processes write
FAULTS = Path(__file__).resolve().parent / "faults"
JSON = "application/json"
MAX_BYTES = 1 << 18  # larger ones are not compared: it takes milliseconds of the event loop

_mismatches: list[str] = []


def check_bodies(app: FastAPI, report: Callable[[str], object] = _mismatches.append) -> FastAPI:
    """Makes `app`, which it returns, call `report` for what differs. Bodies that are compressed,
    and those sent to a path with a slash at its end, are not compared."""
    if not _documents:  # every app of this process has the same, which takes half a second
        _documents.append(Document(app.openapi()))
    app.add_middleware(BodyCheck, document=_documents[0], report=report)
    return app


def write_mismatch(mismatch: str) -> None:
    """Writes to the file of CHECKED."""
    with open(os.environ[CHECKED], "a", encoding="utf-8") as file:
        file.write(json.dumps(mismatch) + "\n")


def environment() -> dict[str, str]:
    """Returns the variables of a process whose frontends compare, where this process says so."""
    if CHECKED not in os.environ:
        return {}
    return {CHECKED: os.environ[CHECKED], "PYTHONPATH": f"{FAULTS}{os.pathsep}{FAULTS.parents[2]}"}


def collect_written() -> None:
    """Takes over what processes have written."""
    path = Path(os.environ[CHECKED])
    if path.exists():
        _mismatches.extend(map(json.loads, path.read_text().splitlines()))
        path.unlink()


def raise_mismatch() -> None:
    """Raises AssertionError with the first mismatch since the last call."""
    found = _mismatches.copy()
    _mismatches.clear()
    assert not found, f"{found[0]} (and {len(found) - 1} more)"


_NOTHING = {"content": {JSON: {"schema": {"not": {}}}}}  # of a status that is not described


class Document:
    """An OpenAPI document, which compares bodies with their schemas."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._validators: dict[tuple[str, str, str, str], Draft202012Validator | None] = {}

    def mismatch(self, scope: Scope, status: str, body: bytes, media: str = JSON) -> str | None:
        """Returns how the body of a response, or of a request where `status` is empty, differs;
        with `media` EVENTS the data of one of its events."""
        path = getattr(scope.get("route"), "path_format", "")
        key = (scope["method"].lower(), path, status, media)
        if key not in self._validators:
            self._validators[key] = self._validator(*key)
        validator = self._validators[key]
        if validator is None or not 0 < len(body) <= MAX_BYTES:
            return None
        value = json.loads(body)
        errors = (error for error in validator.iter_errors(value) if not _is_of_nulls(error, value))
        error = next(errors, None)
        if error is None:
            return None
        what = f"its response {status}" if status else "a request that it accepts"
        what = f"an event of {what}" if media == EVENTS else what
        at = ".".join(map(str, error.instance_path)) or "the body"
        return (
            f"{scope['method']} {path}: the document does not allow {what}: {at}: {error.message}"
        )

    def _validator(
        self, method: str, path: str, status: str, media: str
    ) -> Draft202012Validator | None:
        operation = self._document["paths"].get(path, {}).get(method, {})
        responses = operation.get("responses", {})
        described = responses.get(status, {}) if status else operation.get("requestBody", {})
        # 405: of a path without this method, which a route with a name of several parts takes.
        if responses and status not in ("", "405", *responses):
            described = _NOTHING
        name = EVENT_SCHEMA if media == EVENTS else "schema"
        schema = described.get("content", {}).get(media, {}).get(name)
        if schema is None:
            return None
        return Draft202012Validator({**schema, "components": self._document["components"]})


_documents: list[Document] = []  # of this process: none, or one


def _is_of_nulls(error: ValidationError, body: Any) -> bool:
    """Returns whether the error is about members that are unknown and null: they count as absent.
    To say that in the document would give every generated type an index of nulls."""
    if error.instance_path or not isinstance(error.kind, ValidationErrorKind.AdditionalProperties):
        return False
    return all(body[name] is None for name in error.kind.unexpected)


class BodyCheck:
    """Pure ASGI. Reports a mismatch before the client gets the message that shows it."""

    def __init__(self, app: ASGIApp, document: Document, report: Callable[[str], object]) -> None:
        self._app = app
        self._document = document
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, response = bytearray(), bytearray()
        status, media = 0, ""

        async def kept_receive() -> Message:
            message = await receive()
            if len(request) <= MAX_BYTES:
                request.extend(message.get("body", b""))
            return message

        async def checked_send(message: Message) -> None:
            nonlocal status, media
            if message["type"] == "http.response.start":
                status = message["status"]
                media = Headers(scope=message).get("content-type", "").partition(";")[0]
                if 200 <= status < 300 and "content-encoding" not in Headers(scope=scope):
                    self._compare(scope, "", bytes(request))
            elif media == EVENTS and message["type"] == "http.response.body":
                response.extend(message.get("body", b""))
                *events, response[:] = response.split(b"\n\n")
                for event in events:
                    _, is_data, data = event.rpartition(b"data: ")
                    if is_data and data != b"[DONE]":
                        self._compare(scope, str(status), bytes(data), media)
            elif media == JSON and message["type"] == "http.response.body":
                if len(response) <= MAX_BYTES:
                    response.extend(message.get("body", b""))
                if not message.get("more_body"):
                    self._compare(scope, str(status), bytes(response))
            await send(message)

        await self._app(scope, kept_receive, checked_send)

    def _compare(self, scope: Scope, status: str, body: bytes, media: str = JSON) -> None:
        mismatch = self._document.mismatch(scope, status, body, media)
        if mismatch is not None:
            self._report(mismatch)
