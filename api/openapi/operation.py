"""Operation: what the document says of one route beyond its method, path and docstring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from api.openapi.answers import Error

STREAM = "text/event-stream"
JSON = "application/json"
FORM = "multipart/form-data"

# Statuses by what a route does. Some come from before any route: a head that is too large or no
# HTTP (400, 431), an origin or a host that is not allowed (403, 421), a body over the limit (413),
# a key that is missing (401, 403) or used too often (429).
FREE = frozenset({400, 403, 413, 421, 431, 500})  # needs no key
KEYED = FREE | {401}
ANY = KEYED | {429}
STORE = ANY | {503}  # looks into the store
FINDS = STORE | {404}  # something with a name
BODY = FINDS | {408, 415}  # reads a body, which names a model
JOB = BODY | {409, 502, 504}  # makes a job and waits for its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A member of the query string, or a header, that a route honours."""

    name: str
    schema: Mapping[str, Any]
    where: str = "query"
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One line of the table in `operations`.

    `body`, `answer` and `error` are msgspec structs; `kind` names the members that are accepted
    without effect. `others` are further statuses that are no errors, with what they mean.
    """

    tag: str
    answer: type | None = None
    body: type | None = None
    body_media: str = JSON
    kind: str = ""
    media: tuple[str, ...] = (JSON,)  # of the answer
    errors: frozenset[int] = STORE
    error: type = Error
    parameters: tuple[Parameter, ...] = ()
    others: Mapping[int, str] = field(default_factory=dict)


_IDEMPOTENCY_KEY = Parameter(
    name="idempotency-key",
    schema={"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
    where="header",
    why="The same request under the same key is the same job, running or finished.",
)


def generates(tag: str, body: type, answer: type, kind: str = "", error: type = Error) -> Operation:
    """A route that makes a job and says what it gives, whole or as a stream."""
    return Operation(
        tag=tag,
        body=body,
        answer=answer,
        kind=kind,
        media=(JSON, STREAM),
        errors=JOB,
        error=error,
        parameters=(_IDEMPOTENCY_KEY,),
    )


def reads(tag: str, body: type, answer: type, kind: str = "", error: type = Error) -> Operation:
    """A route that answers its body at once."""
    return Operation(tag=tag, body=body, answer=answer, kind=kind, errors=BODY, error=error)


def finds(tag: str, answer: type) -> Operation:
    """A route that answers with something that its path names."""
    return Operation(tag=tag, answer=answer, errors=FINDS)


def free(answer: type | None = None) -> Operation:
    """A route of the service itself; without an answer it is a HEAD's."""
    medias = () if answer is None else (JSON,)
    return Operation(tag="Service", answer=answer, media=medias, errors=FREE)
